"""Where things lie on this machine: a notebook that only our own runs write, kept with the user's cache.

A plan, a checkpoint or a report names its base model and its texts by name and fingerprint, never by a path: it may be
sent to others, or be received from them. What it names is found again here, by the fingerprint. So a received file
makes us open nothing that this machine's own runs had not opened before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ffncompress.errors import ArtifactError
from ffncompress.storage.files import write_file


def cache_folder() -> Path:
    """What may be forgotten: FFNCOMPRESS_CACHE, or a folder in the home's cache."""
    return Path(os.environ.get("FFNCOMPRESS_CACHE") or Path.home() / ".cache" / "ffncompress")


def record_place(fingerprint: str, place: str | Path) -> None:
    """Remember where something lies; a notebook that cannot be written is no reason to fail."""
    file = _page(fingerprint)
    try:
        if file is not None and _read(file) != str(place):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, str(place))
    except (OSError, ArtifactError):
        pass


def recorded_place(fingerprint: str) -> str | None:
    """Where something with this fingerprint was seen last on this machine."""
    file = _page(fingerprint)
    return None if file is None else _read(file)


def _page(fingerprint: str) -> Path | None:
    """The file of a fingerprint; what is no fingerprint (a received file may say anything) has none."""
    return cache_folder() / "places" / fingerprint if re.fullmatch(r"[0-9a-f]{64}", fingerprint) else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
