"""`ffncompress export`: a checkpoint for another runtime."""

from __future__ import annotations

from typing import Any

import click

from ffncompress.cli.options import json_option, loudness_options, overwrite_option, trust_option


@click.command()
@click.argument("folder", metavar="OUT")
@click.option(
    "--to", required=True, type=click.Choice(["gguf", "hf", "merged", "onnx", "vllm"]), help="The format; see above."
)
@click.option("-o", "--output", required=True, metavar="FILE", help="The file (gguf) or folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["f32", "f16", "bf16", "q8_0"]),
    help="Of the matrices.  [default: f16 for gguf, or f32]",
)
@click.option(
    "--align", type=int, default=32, show_default=True, help="FFN widths become multiples of it; 256 for K-quants."
)
@click.option("--verify/--no-verify", default=True, help="Ask the runtime, where it is installed.  [default: verify]")
@trust_option
@overwrite_option
@json_option
@loudness_options
def export(folder: str, output: str, json_file: str | None, **options: Any) -> None:
    """Write OUT, a slimmed checkpoint or any model folder, for another runtime.

    \b
    gguf   one file for llama.cpp, Ollama, LM Studio: weights, tokenizer, chat template
    hf     a stock checkpoint that needs no ffncompress (also: merged); for plans made with --native
    onnx   a folder for ONNX Runtime, with a KV cache so that it can generate
    vllm   a folder that vLLM's own model classes load

    What a format cannot say exactly is refused, with the reason and the way out. Where the runtime is installed, the
    file is loaded by it and its log-probabilities are compared with transformers' before it is put in place.
    """
    from ffncompress import api
    from ffncompress.cli import console

    with console.progress_shown() as progress:
        made = api.export(folder, output, progress=progress, **options)
    console.say(made.summary, to_stderr=json_file == "-")
    console.write_json(json_file, made.model_dump_json(indent=1))
