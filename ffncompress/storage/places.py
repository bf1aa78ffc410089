"""Where an output may be put: nowhere that would cost anybody anything but an earlier output of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.files import explained
from ffncompress.storage.manifest import MANIFEST_FILE, ArtifactKind, Manifest

LONGEST_NAME = 255  # bytes, of most file systems
HASHED_UP_TO = 64 * 2**20  # bytes: of larger files the size must do, or asking would take as long as writing


def check_place(directory: str | Path, inputs: Iterable[str | Path | None] = ()) -> Path:
    """A name that an output may have, whatever is there now.

    Args:
        directory: the output.
        inputs: what the work reads; those that are no paths here count for nothing.

    Raises:
        ArtifactError: it may not; the message says why.
    """
    target = Path(directory)
    if not os.fspath(directory) or target.name in ("", ".."):
        raise ArtifactError(f"{os.fspath(directory)!r} is not a name for an output; choose one with -o")
    if len(os.fsencode(target.name)) > LONGEST_NAME:
        raise ArtifactError(f"{target.name[:40]}...: a name of over {LONGEST_NAME} bytes; choose a shorter one with -o")
    try:
        why = _why_not(target, inputs)
    except OSError as error:
        raise explained(error, target) from error
    if why:
        raise ArtifactError(f"{target}: {why}; choose another with -o")
    return target


def _why_not(target: Path, inputs: Iterable[str | Path | None]) -> str | None:
    if target.is_symlink():
        return "a link, which an output does not replace"
    if not target.exists():
        return None
    for place, name in ((Path.cwd(), "the current folder"), (_home(), "the home folder")):
        if place is not None and _holds(target, place):
            return f"it is, or holds, {name}"
    for given in inputs:
        if given and _holds(target, Path(given).expanduser()):
            return f"it is, or holds, the input {given}"
    if not target.is_dir():
        return "a file, which an output does not replace"
    if os.path.ismount(target):
        return "a mount point, which an output does not replace"
    if os.path.lexists(target / ".git"):
        return "it holds .git, so it is somebody's work"
    return None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _holds(folder: Path, place: Path) -> bool:
    """Whether a place is a folder or lies in it, by whatever name."""
    if not place.exists():
        return False
    real = Path(os.path.realpath(place))
    return any(os.path.samefile(folder, each) for each in (real, *real.parents))


def check_content(target: Path, kind: ArtifactKind, *, overwrite: bool) -> None:
    """What lies at an allowed place must be nothing, or ours, just as we left it, and meant to be replaced.

    Raises:
        ArtifactError: it is not; the message says what was found.
    """
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ArtifactError(f"{target}: already exists; remove it, choose another with -o, or pass --overwrite")
    try:
        found = None if is_empty(target) else _what_is_not_ours(target, kind)
    except OSError as error:
        raise explained(error, target) from error
    if found:
        raise ArtifactError(f"{target}: not overwritten, for {found}; remove it yourself, or choose another with -o")


def is_empty(folder: Path) -> bool:
    """Whether a folder is there, with nothing in it."""
    return folder.is_dir() and not any(folder.iterdir())


def _what_is_not_ours(target: Path, kind: ArtifactKind) -> str | None:
    if not os.path.lexists(target / MANIFEST_FILE):
        return f"it has no {MANIFEST_FILE}, by which ffncompress knows its own"
    manifest = Manifest.read(target)
    if manifest.kind != kind:
        return f"it is a {manifest.kind}, and a {kind} is to be written"
    changes = manifest.changes(target, hashed_up_to=HASHED_UP_TO)
    more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return changes[0].encode(errors="replace").decode() + more if changes else None
