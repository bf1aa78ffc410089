"""One run at a time on one output: a lock that ends with its process, and leaves no file behind."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.files import SCRATCH, explained

PATIENCE = 0.2  # seconds: somebody may only be looking whether a lock is free
_own = threading.local()  # the locks of this thread: what holds one may call what takes it


def beside(directory: str | Path, what: str) -> Path:
    """A hidden name beside an output, which is short however long the output's own is."""
    place = Path(os.path.realpath(directory))
    return place.parent / f"{SCRATCH}{short(place.name)}.{what}"


def short(name: str) -> str:
    """A few characters that stand for a name."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


@contextmanager
def locked(directory: str | Path) -> Iterator[None]:
    """Nobody else writes to a folder within; nested, the inner one does nothing.

    Raises:
        ArtifactError: another run is writing to it.
    """
    file = beside(directory, "lock")
    held: set[Path] = _own.__dict__.setdefault("files", set())
    if file in held or not file.parent.is_dir():
        yield
        return
    lock = _take(file, Path(directory))
    held.add(file)
    try:
        yield
    finally:
        held.discard(file)
        lock.release()


class Lock:
    """A lock that was taken."""

    def __init__(self, descriptor: int, file: Path | None) -> None:
        self._descriptor, self._file = descriptor, file

    def release(self) -> None:
        """Let it go, and its file with it."""
        if self._file is not None and os.name == "posix":
            self._file.unlink(missing_ok=True)  # while it is held, so that nobody's new one is taken away
        os.close(self._descriptor)
        if self._file is not None and os.name != "posix":
            with suppress(OSError):  # an open file stays
                self._file.unlink(missing_ok=True)


def try_lock(file: Path) -> Lock | None:
    """The lock that a file stands for, or none if a living process has it."""
    flags = os.O_CREAT | (os.O_RDONLY | os.O_NOFOLLOW if os.name == "posix" else os.O_RDWR)
    while True:
        descriptor = os.open(file, flags, 0o644)
        if not _flock(descriptor):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file, follow_symlinks=False)):
                return Lock(descriptor, file)
        os.close(descriptor)  # its last holder has removed it meanwhile: take the new one


def _take(file: Path, directory: Path) -> Lock:
    given_up = time.monotonic() + PATIENCE
    while True:
        try:
            lock = try_lock(file)
        except OSError as error:
            lock = _lock_folder(directory, error)
        if lock is not None:
            return lock
        if time.monotonic() > given_up:
            raise ArtifactError(f"{directory}: another run is writing to it; wait for it, or choose another folder")
        time.sleep(PATIENCE / 10)


def _lock_folder(directory: Path, error: OSError) -> Lock | None:
    """Where nothing can be put beside a folder, it cannot be replaced either: then the folder itself is locked."""
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not directory.is_dir() or os.name != "posix":
        raise explained(error, directory) from error
    descriptor = os.open(directory, os.O_RDONLY)
    if _flock(descriptor):
        return Lock(descriptor, None)
    os.close(descriptor)
    return None


def _flock(descriptor: int) -> bool:
    """Whether the lock was free; the system lets it go when the process ends, however it ends."""
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except (BlockingIOError, PermissionError):
        return False
    return True
