"""A file is written beside its place and renamed into it: whole, or not there. Folders: outputs.py."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from ffncompress.errors import ArtifactError

SCRATCH = ".ffncompress-"  # what every name of ours beside an output begins with


def write_file(file: str | Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    target = Path(file)
    scratch = None
    try:
        handle, scratch = tempfile.mkstemp(prefix=SCRATCH, suffix=".tmp", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except OSError as error:
        raise explained(error, target) from error
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)


def explained(error: OSError, target: Path) -> ArtifactError:
    """Why an output could not be written, as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(target)
    return ArtifactError(f"{target}: cannot be written ({error.strerror or error}); choose another with -o")


def full(target: Path) -> ArtifactError:
    """The error of a disk that is full."""
    return ArtifactError(f"{target}: the disk is full and nothing was kept; free some space, or choose another with -o")
