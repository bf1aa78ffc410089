"""Output folders: written beside their place, marked as ours, and put in it whole; what was there is whole till then.

Beside an output NAME, with KEY a short hash of NAME:

.ffncompress-KEY.lock   held by the run that writes to it; gone when that ends
.ffncompress-KEY.new    the output in the making; or, for a moment, what it has replaced
.ffncompress-KEY.old    what is being replaced, where a file system cannot exchange two names
NAME.partial            finished stages of an unfinished run, which the next one goes on from

The next run puts right what a dead one left: by these names, by the manifest in each folder, and by the free lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.files import SCRATCH, explained, full
from ffncompress.storage.locks import beside, locked, try_lock
from ffncompress.storage.manifest import MANIFEST_FILE, ArtifactKind, Manifest
from ffncompress.storage.places import check_content, check_place, is_empty

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def claimed(
    directory: str | Path,
    kind: ArtifactKind,
    *,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
    known: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """An output that may be written and is ours alone within: asked before hours of work, not after.

    Args:
        directory: the output.
        kind: what it will be; only an earlier one of the same kind is replaced.
        overwrite: whether one is.
        inputs: what the work reads, and so must not be replaced.
        known: whether what is there is this very work's own, and stays.

    Raises:
        ArtifactError: it may not be written; the message says why.
    """
    target = check_place(directory, inputs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{target.parent}: cannot be made ({error.strerror}); choose another with -o") from error
    if not os.access(target.parent, os.W_OK):
        raise ArtifactError(f"{target.parent}: cannot be written to; choose another with -o")
    with locked(target):
        _put_right(target)
        if not known(target):
            check_content(target, kind, overwrite=overwrite)
        yield target


@contextmanager
def staged_directory(
    directory: str | Path,
    kind: ArtifactKind,
    *,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
    placing: Callable[[Manifest], None] = lambda _: None,
) -> Iterator[Path]:
    """A scratch folder that becomes `directory` if all goes well, and vanishes if not.

    Args:
        directory: the output.
        kind: what it is.
        overwrite: whether an earlier one is replaced.
        inputs: what must not be replaced.
        placing: called with the manifest just before the folder is put in place.

    Raises:
        ArtifactError: the output may not be written, or the disk is full.
    """
    inputs = list(inputs)
    with claimed(directory, kind, overwrite=overwrite, inputs=inputs) as target:
        _sweep(target.parent)
        stage = beside(target, "new")
        try:
            stage.mkdir(mode=0o755)
            Manifest(kind="working", files={}).save(stage)
            yield stage
            for file in stage.rglob("*"):  # safetensors writes files that nobody else may read
                file.chmod(0o755 if file.is_dir() else 0o644)
            manifest = Manifest.write(stage, kind)
            check_place(target, inputs)  # hours later
            check_content(target, kind, overwrite=overwrite)
            placing(manifest)
            _place(stage, target)
        except OSError as error:
            raise explained(error, target) from error
        except Exception as error:
            # safetensors' Rust core reports a full disk as its own kind of error
            if "No space left" in str(error):
                raise full(target) from error
            raise
        finally:
            with suppress(OSError, ArtifactError):  # what cannot be removed now is removed by the next run
                _put_right(target)


def _place(stage: Path, target: Path) -> None:
    """Put a finished folder under its name; what had it stays whole under one of ours till then."""
    if not os.path.lexists(target):
        stage.rename(target)
    elif not exchange(stage, target):
        target.rename(beside(target, "old"))
        stage.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at a stroke, or say that this system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    if not swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # an old kernel, or a file system that cannot
        return False
    raise OSError(number, os.strerror(number))


def _put_right(target: Path) -> None:
    """Restore or remove what a run on this output left when it ended; the lock is ours, so it is nobody's now."""
    old = beside(target, "old")
    if os.path.lexists(old):
        if os.path.lexists(target):
            remove(old)
        else:
            _check_ours(old)
            old.rename(target)
    remove(beside(target, "new"))
    remove_scratch(target)


def remove_scratch(folder: Path) -> None:
    """Remove what a kill left of files that were being rewritten in a folder of ours, which is locked."""
    if (folder / MANIFEST_FILE).is_file() and not folder.is_symlink():
        for file in [*folder.glob(f"{SCRATCH}*.tmp"), *folder.glob(f"*/{SCRATCH}*.tmp")]:
            if re.fullmatch(re.escape(SCRATCH) + r"[a-z0-9_]{8}\.tmp", file.name):
                file.unlink(missing_ok=True)


def _sweep(parent: Path) -> None:
    """Remove what dead runs on other outputs left in a folder: unfinished ones, and their locks."""
    for left in [*parent.glob(f"{SCRATCH}*.new"), *parent.glob(f"{SCRATCH}*.lock")]:
        if not re.fullmatch(re.escape(SCRATCH) + r"[0-9a-f]{16}\.(new|lock)", left.name):
            continue
        with suppress(OSError, ArtifactError):
            lock = try_lock(left.with_suffix(".lock"))
            if lock is not None:
                try:
                    remove(left.with_suffix(".new"))
                finally:
                    lock.release()


def remove(folder: Path) -> None:
    """Remove a folder of ours, its manifest last: after a kill on the way it is still known for ours.

    Raises:
        ArtifactError: it is not ours.
    """
    if not os.path.lexists(folder):
        return
    _check_ours(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MANIFEST_FILE:
            path.unlink()
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    folder.rmdir()


def _check_ours(folder: Path) -> None:
    """A folder by the name that we would give it must also hold our mark, or nothing at all."""
    with suppress(OSError, ArtifactError):
        if not folder.is_symlink() and (is_empty(folder) or Manifest.read(folder)):
            return
    raise ArtifactError(f"{folder}: in the way, and not a folder that ffncompress made; move it away, or remove it")
