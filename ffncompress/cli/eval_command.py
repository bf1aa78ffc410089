"""`ffncompress eval`: both models on the same text and tasks, and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ffncompress.cli.options import (
    baseline_options,
    device_options,
    json_option,
    junit_option,
    loudness_options,
    memory_options,
    summary_option,
    task_options,
    trust_option,
)
from ffncompress.cli.running import write_verdict


@click.command(name="eval")
@click.argument("folder", metavar="OUT")
@click.option("--data", metavar="TEXT", help="Text to report on.  [default: the part that the plan left alone]")
@click.option("--also", multiple=True, metavar="TEXT", help="Out-of-domain text to report too; may be repeated.")
@click.option("--max-delta", metavar="LIMIT", help="The gate: 5% of the base's, or 1.0.  [default: the plan's]")
@click.option("--context", type=int, help="Context length.  [default: 512, or the model's own if shorter]")
@click.option("--tokens", type=int, default=16_384, show_default=True, help="Tokens of each text.")
@click.option("--batch-size", type=int, default=4, show_default=True)
@click.option("--repeats", type=int, default=5, show_default=True, help="Interleaved timings of each model.")
@click.option("--speed-dtypes", metavar="LIST", default="", help="Time both in these dtypes too: float32,bfloat16.")
@click.option("--prompt", metavar="WORDS", help="What both models continue.  [default: the text's beginning]")
@click.option("--model", metavar="MODEL", help="Where the base model is now, if it moved.")
@click.option("--base", metavar="MODEL", help="Compare with this model; then OUT may be any model, slimmed or not.")
@task_options
@baseline_options
@trust_option
@device_options
@memory_options
@json_option
@junit_option
@summary_option
@loudness_options
def evaluate(
    folder: str, also: tuple[str, ...], model: str | None, base: str | None, trust_remote_code: bool,
    tasks: tuple[str, ...], speed_dtypes: str, json_file: str | None, junit: str | None, summary: str | None,
    **settings: Any,
) -> int:  # fmt: skip
    """Perplexity of OUT and of its base, how alike they predict, their accuracy on tasks, and a verdict.

    With --base, any two models that read the same tokens: a slimmed one that was fine-tuned and saved, for one.
    Nothing is written into OUT then.

    The perplexity is lm-eval's. Exit code 0: within the limits. 1: the gate failed. 2: bad input.

    --max-drop is held against the mean drop over tasks as it is measured, as --max-delta is; the error shown beside it
    is that of paired differences, both models having answered the same examples, and it is said where it is too large
    for the limit. A local task is YAML of lm-eval's format over a .jsonl, .txt or .parquet file, without code in it.

    --baseline fails where perplexity is above that of the kept result by more than the margin; one of another base,
    text or context is refused.

    Tokens a second are of prompts that are read at once (prefill), and of going on a token at a time (decode), both
    models in turns; beside the ratio stands what FLOPs, or the bytes of weights that a token reads, predict.

    TEXT is as in `ffncompress plan`; wikitext is lm-eval's stock task, and needs the Hub.
    """
    from ffncompress import api
    from ffncompress.checkpoint.origin import GATE_PAGE, META
    from ffncompress.cli import console, tables

    with console.progress_shown() as progress:
        result = api.evaluate(
            folder, model=model, base=base, trust_remote_code=trust_remote_code, progress=progress, also=list(also),
            tasks=[name.strip() for each in tasks for name in each.split(",")],
            speed_dtypes=[name.strip() for name in speed_dtypes.split(",") if name.strip()], **settings,
        )  # fmt: skip
    to_stderr = json_file == "-"
    tables.print_gate(result, to_stderr=to_stderr)
    if base is None:
        console.say(f"To look at: {Path(folder) / META / GATE_PAGE}", to_stderr=to_stderr)
    return write_verdict(result, json_file, junit, summary)
