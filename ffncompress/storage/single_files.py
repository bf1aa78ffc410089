"""An output that is one file, written by another library: made beside its place, and put in it whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.files import explained
from ffncompress.storage.locks import beside, locked
from ffncompress.storage.places import LONGEST_NAME


@contextmanager
def staged_file(file: str | Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A scratch name that becomes `file` if all goes well, and vanishes if not.

    Args:
        file: the output.
        overwrite: whether an earlier one is replaced.
        is_ours: whether what is there was written by us, by its content; nothing else is ever replaced.

    Raises:
        ArtifactError: the output may not be written, or the disk is full.
    """
    target = Path(file)
    _check(target, overwrite, is_ours)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, target) from error
    with locked(target):
        scratch = beside(target, "tmp")
        try:
            scratch.unlink(missing_ok=True)  # a killed run's; the lock is ours, so it is nobody's now
            yield scratch
            scratch.chmod(0o644)
            _check(target, overwrite, is_ours)  # minutes later
            os.replace(scratch, target)
        except OSError as error:
            raise explained(error, target) from error
        finally:
            scratch.unlink(missing_ok=True)


def _check(target: Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    if not target.name or len(os.fsencode(target.name)) > LONGEST_NAME:
        raise ArtifactError(f"{str(target)[:60]!r} is not a name for a file; choose one with -o")
    try:
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_file():
            raise ArtifactError(f"{target}: a folder or a link, which a file does not replace; choose another with -o")
        if not overwrite:
            raise ArtifactError(f"{target}: already exists; remove it, choose another with -o, or pass --overwrite")
        if not is_ours(target):
            raise ArtifactError(
                f"{target}: not overwritten, for ffncompress did not write it; "
                "remove it yourself, or choose another with -o"
            )
    except OSError as error:
        raise explained(error, target) from error
