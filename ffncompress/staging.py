"""Outputs are written beside their place and renamed into it: whole, or not there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ffncompress.errors import ArtifactError


def check_free(directory: str | Path, *, overwrite: bool = False) -> Path:
    """Fail early, before hours of work, where the output could not be put.

    Raises:
        ArtifactError: it exists already, or its parent cannot be written.
    """
    target = Path(directory)
    if target.exists() and not overwrite:
        raise ArtifactError(f"{target}: already exists; remove it, choose another with -o, or pass --overwrite")
    if target.exists() and not _ours(target):
        raise ArtifactError(f"{target}: not a folder that ffncompress wrote, so it is not overwritten; remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{target.parent}: cannot be made ({error.strerror}); choose another with -o") from error
    if not os.access(target.parent, os.W_OK):
        raise ArtifactError(f"{target.parent}: cannot be written to; choose another with -o")
    return target


def _ours(target: Path) -> bool:
    """Whether overwriting loses nothing but an earlier output."""
    if not target.is_dir():
        return False
    written = any((target / name).is_file() for name in ("plan.json", "profile.json"))
    return written or (target / "ffncompress").is_dir() or not any(target.iterdir())


@contextmanager
def staged_directory(directory: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A scratch folder that becomes `directory` if all goes well, and vanishes if not.

    Raises:
        ArtifactError: the target exists, or the disk is full.
    """
    target = check_free(directory, overwrite=overwrite)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    stage.chmod(0o755)  # mkdtemp's folders are private
    try:
        yield stage
        for file in stage.rglob("*"):  # safetensors writes files that nobody else may read
            file.chmod(0o755 if file.is_dir() else 0o644)
        if target.exists():
            shutil.rmtree(target)
        stage.rename(target)
    except OSError as error:
        raise _explained(error, target) from error
    except Exception as error:
        # safetensors' Rust core reports a full disk as its own kind of error
        if "No space left" in str(error):
            raise _full(target) from error
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_file(file: str | Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    target = Path(file)
    handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent if str(target.parent) else ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except OSError as error:
        raise _explained(error, target) from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def _explained(error: OSError, target: Path) -> ArtifactError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(target)
    return ArtifactError(f"{target}: cannot be written ({error.strerror or error}); choose another with -o")


def _full(target: Path) -> ArtifactError:
    return ArtifactError(f"{target}: the disk is full and nothing was kept; free some space, or choose another with -o")
