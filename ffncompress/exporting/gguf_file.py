"""A checkpoint as one GGUF file, for llama.cpp and what is built on it; written, loaded by it, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from ffncompress import __version__
from ffncompress.errors import ArtifactError, ModelError
from ffncompress.exporting import llama_cpp
from ffncompress.exporting.gguf_families import GgufModel, as_gguf
from ffncompress.exporting.gguf_tokenizer import GgufTokenizer, as_gguf_tokenizer
from ffncompress.exporting.page import PAGE
from ffncompress.exporting.record import ExportResult, Verification
from ffncompress.models import count_parameters
from ffncompress.sanitize import plain
from ffncompress.storage.single_files import staged_file
from ffncompress.type_aliases import Model, Tokenizer

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
MARK = "ffncompress.version"  # the key that makes a file ours
EXACT = 1e-3  # largest difference of a log-probability, in 32-bit numbers throughout
LOOKED_UP = 2e-2  # the same where llama.cpp looks the activation up in a table of 16-bit numbers
MOST_POSITIONS = 96
TOLD = 64  # of the likeliest tokens at each position
_TABLED = ("gemma", "gpt2", "gptneox")
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def export_gguf(
    model: Model,
    tokenizer: Tokenizer,
    output: str | Path,
    *,
    name: str,
    dtype: GgufType = "f16",
    align: int = 32,
    verify: bool = True,
    overwrite: bool = False,
) -> ExportResult:
    """Write a GGUF file; where llama.cpp is installed, load it there and compare before it is put in place.

    Args:
        model: slimmed or not, in float32.
        tokenizer: its tokenizer.
        output: the file.
        name: what the model is called in the file.
        dtype: of the matrices; vectors stay in 32 bits.
        align: FFN widths become multiples of it.
        verify: whether llama.cpp, if installed, is asked.
        overwrite: replace an earlier file of ours.

    Raises:
        ModelError: the model or its tokenizer cannot be said exactly in GGUF.
        ArtifactError: the output may not be written, or llama.cpp reads it otherwise than transformers.
    """
    laid_out = as_gguf(model, align=align)
    words = as_gguf_tokenizer(tokenizer, laid_out.tensors["token_embd.weight"].shape[0])
    with staged_file(output, overwrite=overwrite, is_ours=is_ours) as scratch:
        _write(scratch, laid_out, words, name, dtype)
        verified = _verified(scratch, model, tokenizer, laid_out, dtype, words.note) if verify else _unasked()
        size = scratch.stat().st_size
    return ExportResult(
        format="gguf", output=str(output), architecture=laid_out.architecture, dtype=dtype, bytes=size,
        parameters=sum(value.numel() for value in laid_out.tensors.values()), base_parameters=count_parameters(model),
        widths=laid_out.widths, verified=verified,
    )  # fmt: skip


def is_ours(file: Path) -> bool:
    """Whether we wrote a GGUF file: our key is among its first."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    return head.startswith(b"GGUF") and MARK.encode() in head


def _write(file: Path, laid_out: GgufModel, words: GgufTokenizer, name: str, dtype: GgufType) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ModelError("writing GGUF needs the gguf package; install it: pip install 'ffncompress[gguf]'") from error

    writer = gguf.GGUFWriter(file, laid_out.architecture)
    writer.add_string(MARK, __version__)
    writer.add_type("model")
    writer.add_name(plain(name))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in laid_out.keys.items():
        _add(writer, f"{laid_out.architecture}.{key}", value)
    _add_tokenizer(writer, words)
    for key, tensor in laid_out.tensors.items():
        kind = _kind(key, tensor, dtype)
        data = gguf.quants.quantize(tensor.contiguous().numpy(), gguf.GGMLQuantizationType[kind.upper()])
        writer.add_tensor(key, data, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: int | float | bool | str | list[int]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: Any, words: GgufTokenizer) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    for name, number in words.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
    writer.add_add_space_prefix(words.add_space_prefix)
    if words.chat_template:
        writer.add_chat_template(words.chat_template)


def _kind(key: str, tensor: torch.Tensor, dtype: GgufType) -> str:
    """What a tensor is stored as: vectors, and positions that llama.cpp adds, in 32 bits."""
    if tensor.dim() == 1 or key == "position_embd.weight":
        return "f32"
    return "f16" if dtype == "q8_0" and tensor.shape[1] % 32 else dtype


def _unasked() -> Verification:
    return Verification(runtime="none", note="not asked for")


@torch.inference_mode()
def _verified(
    file: Path, model: Model, tokenizer: Tokenizer, laid_out: GgufModel, dtype: GgufType, note: str
) -> Verification:
    """Ask llama.cpp what it makes of the file, and hold that to transformers' answers.

    Raises:
        ArtifactError: they differ.
    """
    if not llama_cpp.available():
        return Verification(runtime="none", note=f"{llama_cpp.MISSING}{'; ' if note else ''}{note}")
    expected: list[int] = tokenizer(PAGE, verbose=False).input_ids
    longest = min(MOST_POSITIONS, model.config.max_position_embeddings - 1)
    ids = expected[:longest]
    answer = llama_cpp.ask(file, texts=[PAGE], sequences=[ids], top=TOLD, context=longest + 8)
    check_tokens(answer.tokens[0], expected, tokenizer)
    reference = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    compared = [(told, row) for told, row in zip(answer.log_probabilities[0], reference, strict=False) if told]
    worst = max(_largest_difference(told, row) for told, row in compared)
    limit = (LOOKED_UP if laid_out.architecture in _TABLED else EXACT) if dtype == "f32" else None
    if not worst < (limit or float("inf")):
        raise ArtifactError(
            f"llama.cpp's log-probabilities differ from transformers' by up to {worst:.1e}, more than {limit:g}; "
            "nothing was kept; please report this"
        )
    return Verification(
        runtime=llama_cpp.version(), tokens=len(compared), max_difference=worst, limit=limit, same_tokens=len(PAGE),
        note=note,
    )  # fmt: skip


def _largest_difference(told: list[tuple[int, float]], reference: torch.Tensor) -> float:
    """Of the log-probabilities at one position, among the tokens that were told.

    Among those, for llama.cpp's server adds up the whole vocabulary in 32 bits, which moves all of them alike by up to
    1e-3 and is no part of the model.
    """
    tokens, said = zip(*told, strict=True)
    ours = torch.tensor(said, dtype=torch.float64).log_softmax(-1)
    theirs = reference[list(tokens)].double().log_softmax(-1)
    return float((ours - theirs).abs().max())


def check_tokens(said: list[int], expected: list[int], tokenizer: Tokenizer) -> None:
    """Both runtimes must split the page alike.

    Raises:
        ArtifactError: they do not; says where first.
    """
    if said == expected:
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(said, expected, strict=False)) if a != b), min(len(said), len(expected))
    )
    shown = tokenizer.decode(expected[max(0, place - 3) : place + 3])
    raise ArtifactError(
        f"llama.cpp tokenises otherwise than this model's tokenizer, first at {shown!r}; nothing was kept; "
        "export it to hf, or use a tokenizer that llama.cpp knows"
    )
