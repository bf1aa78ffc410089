"""One verb for all formats: find the checkpoint, load it in 32 bits, hand it to the format's own module."""

from __future__ import annotations

from pathlib import Path

from ffncompress.checkpoint.origin import is_checkpoint, read_origin, verify_files
from ffncompress.checkpoint.plugin import register
from ffncompress.exporting.record import ExportResult
from ffncompress.models import ModelSource, find_model, load_model, load_tokenizer
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.settings import ExportSettings


def export_model(
    directory: str | Path,
    output: str | Path,
    settings: ExportSettings,
    *,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> ExportResult:
    """Write a checkpoint, slimmed or not, for another runtime, and compare what that makes of it.

    Raises:
        ModelError: the format cannot say this model exactly; names the reason and the way out.
        ArtifactError: the checkpoint is not whole, the output may not be written, or its runtime disagrees.
    """
    register()
    source = find_model(str(directory), trust_remote_code=trust_remote_code)
    if is_checkpoint(source.directory):
        verify_files(source.directory)
    stored = settings.to in ("hf", "merged")  # a copy keeps the precision that it has
    with step(progress, f"loading {source.label}"):
        model, tokenizer = load_model(source, dtype="auto" if stored else "float32"), load_tokenizer(source)
    with step(progress, f"writing {Path(output).name}"):
        if settings.to == "gguf":
            from ffncompress.exporting.gguf_file import export_gguf

            return export_gguf(
                model, tokenizer, output, name=_name(source), dtype=settings.dtype or "f16", align=settings.align,
                verify=settings.verify, overwrite=overwrite,
            )  # fmt: skip
        if settings.to == "onnx":
            from ffncompress.exporting.onnx_folder import export_onnx

            return export_onnx(
                model, tokenizer, output, dtype=settings.dtype, verify=settings.verify, overwrite=overwrite,
                source=source.directory,
            )  # fmt: skip
        if settings.to == "vllm":
            from ffncompress.exporting.vllm import export_vllm

            return export_vllm(
                model, tokenizer, output, dtype=settings.dtype, align=settings.align, overwrite=overwrite,
                source=source.directory,
            )  # fmt: skip
        from ffncompress.exporting.native import export_native

        return export_native(
            model, tokenizer, output, dtype=settings.dtype, overwrite=overwrite, source=source.directory
        )


def _name(source: ModelSource) -> str:
    """What the model is called in what leaves this machine: never a path."""
    if is_checkpoint(source.directory):
        return f"{Path(read_origin(source.directory).base_model).name} slimmed"
    return source.label
