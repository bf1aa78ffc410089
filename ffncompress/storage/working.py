"""Folders for work under way: finished stages beside an output, and spools in the system's temporary folder."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.locks import short, try_lock
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest
from ffncompress.storage.outputs import remove
from ffncompress.storage.places import LONGEST_NAME, is_empty

SPOOL = "ffncompress-spool-"


def working_folder(directory: str | Path) -> Path:
    """Where the finished stages of an unfinished output lie."""
    target = Path(directory)
    name = f"{target.name}.partial"
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f"ffncompress-{short(target.name)}.partial"
    return target.parent / name


def check_working(folder: Path) -> None:
    """A working folder that exists must be one of ours.

    Raises:
        ArtifactError: it is not.
    """
    if not os.path.lexists(folder):
        return
    with suppress(OSError, ArtifactError):
        if not folder.is_symlink() and (is_empty(folder) or Manifest.read(folder).kind == "working"):
            return
    raise ArtifactError(
        f"{folder}: not a working folder of ffncompress, which would write there; move it away, or choose another -o"
    )


def open_working(folder: Path) -> None:
    """Make a working folder, or take up the one that is there."""
    check_working(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST_FILE).is_file():
        Manifest(kind="working", files={}).save(folder)


def remove_working(folder: Path) -> None:
    """Remove a working folder and all that we put there; what anybody else did stays, and so does the folder."""
    check_working(folder)
    if not folder.is_dir():
        return
    for file in folder.iterdir():
        if re.fullmatch(r"([0-9a-f]{16}|run)\.(json|pt|safetensors|partial)|\.ffncompress-\w+\.tmp", file.name):
            file.unlink()
    if [file.name for file in folder.iterdir()] in ([], [MANIFEST_FILE]):
        remove(folder)


@contextmanager
def spool() -> Iterator[Path]:
    """A folder for what is too large for memory; those of dead runs are removed on the way."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{SPOOL}*"):
        with suppress(OSError, ArtifactError):
            _remove_spool(left)
    folder = Path(tempfile.mkdtemp(prefix=SPOOL, dir=parent))
    held = try_lock(folder / "lock")
    try:
        Manifest(kind="working", files={}).save(folder)  # after the lock: what is marked and not locked is left over
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            held.release()


def _remove_spool(folder: Path) -> None:
    """Remove a spool whose run is dead; in a folder that all share, only one of our own."""
    own = not folder.is_symlink() and (os.name != "posix" or folder.stat().st_uid == os.getuid())
    if own and (folder / MANIFEST_FILE).is_file() and (lock := try_lock(folder / "lock")) is not None:
        try:
            remove(folder)
        finally:
            lock.release()
