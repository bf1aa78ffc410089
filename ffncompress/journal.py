"""What a run of a recipe has put in place so far, so that it knows its own when it goes on after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ffncompress import __version__
from ffncompress.checkpoint.origin import CARD_FILE, GATE_FILE, GATE_PAGE, META
from ffncompress.errors import ArtifactError
from ffncompress.storage.files import write_file
from ffncompress.storage.manifest import ArtifactKind, Manifest
from ffncompress.storage.working import check_working, open_working, remove_working

AMENDED = (CARD_FILE, f"{META}/{GATE_FILE}", f"{META}/{GATE_PAGE}")  # files of a checkpoint that later verbs rewrite


class Journal:
    """FOLDER/run.json: which recipe is run, and what its outputs hold."""

    def __init__(self, folder: Path, recipe: str) -> None:
        check_working(folder)
        self._folder, self._file = folder, folder / "run.json"
        self._recipe = hashlib.sha256(f"{__version__}\n{recipe}".encode()).hexdigest()
        self._placed: dict[str, str] = {}
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if content["recipe"] == self._recipe:
                self._placed = {str(kind): str(digest) for kind, digest in dict(content["placed"]).items()}

    def placing(self, kind: ArtifactKind) -> Callable[[Manifest], None]:
        """Notes an output just before it is put in place: after a kill, it is there and known, or it is not there."""

        def note(manifest: Manifest) -> None:
            self._placed[kind] = _digest(manifest)
            open_working(self._folder)
            write_file(self._file, json.dumps({"recipe": self._recipe, "placed": self._placed}) + "\n")

        return note

    def has(self, kind: ArtifactKind, directory: Path) -> bool:
        """Whether a folder is this run's own output, and still whole."""
        with suppress(ArtifactError, OSError):
            manifest = Manifest.read(directory)
            if manifest.kind == kind and self._placed.get(kind) == _digest(manifest):
                return all(change.startswith(AMENDED) for change in manifest.changes(directory))
        return False

    def close(self) -> None:
        """The run is over."""
        remove_working(self._folder)


def _digest(manifest: Manifest) -> str:
    """What a folder holds, apart from what is rewritten in it later."""
    files = {name: record.sha256 for name, record in manifest.files.items() if name not in AMENDED}
    return hashlib.sha256(json.dumps([manifest.kind, files], sort_keys=True).encode()).hexdigest()
