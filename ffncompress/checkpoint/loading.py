"""A checkpoint read back: by `from_pretrained` with a clear error, or proven whole, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ffncompress.checkpoint.origin import read_origin, verify_files
from ffncompress.checkpoint.plugin import register
from ffncompress.errors import ArtifactError, FfncompressError
from ffncompress.models import Footprint, find_model, load_tokenizer, load_whole
from ffncompress.passes.proof import prove
from ffncompress.records.origin import Origin
from ffncompress.runtime.workers import Workers
from ffncompress.sanitize import in_short
from ffncompress.type_aliases import Model


def load(directory: str | Path, **options: Any) -> Model:
    """Load an emitted checkpoint; the same as `AutoModelForCausalLM.from_pretrained`, with a clear error.

        model = ffncompress.load("gpt2-slim", dtype="bfloat16")

    Raises:
        ArtifactError: it is not there, or its weights are not what its config says.
    """
    register()
    if not (Path(directory) / "config.json").is_file():
        raise ArtifactError(
            f"{directory}: no slimmed checkpoint is there; make one with: ffncompress apply PLAN -o OUT"
        )
    options = {"trust_remote_code": False, "use_safetensors": True} | options
    try:
        return load_whole(directory, str(directory), **options).eval()
    except FfncompressError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors each have a dozen kinds
        raise ArtifactError(
            f"{directory}: not loadable ({in_short(error)}); emit it again with ffncompress apply"
        ) from error


def verify(directory: str | Path, *, trust_remote_code: bool = False) -> Origin:
    """Prove a checkpoint whole: every file by its checksum, every tensor by loading it, and the answers it gives.

    Raises:
        ArtifactError: it is not as it was written; says what differs.
    """
    origin = read_origin(directory)
    if verify_files(directory) is None:
        raise ArtifactError(
            f"{directory}: made by ffncompress {origin.ffncompress_version}, which recorded no checksums; "
            "emit it again with ffncompress apply"
        )
    source = find_model(str(directory), trust_remote_code=trust_remote_code)
    stream = Workers("cpu").streams(*Footprint.of(source, "auto"))
    model = load(directory, dtype="auto", trust_remote_code=trust_remote_code, stream=stream)
    prove(model, origin.proof)
    load_tokenizer(source)
    return origin
