"""What a folder of ours holds, written by us: the marker that makes it ours, and the checksums that prove it whole.

    FOLDER/ffncompress.json     {"kind": "plan", "files": {"plan.json": {"bytes": 9, "sha256": "..."}, ...}, ...}

It is data like any other that may have been sent by a stranger: it is compared with the folder, and never followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ffncompress import __version__
from ffncompress.errors import ArtifactError
from ffncompress.sanitize import parse_json
from ffncompress.storage.files import write_file

MANIFEST_FILE = "ffncompress.json"
ArtifactKind = Literal[
    "plan", "checkpoint", "report", "export", "working"
]  # working: the unfinished stages of another kind


class FileRecord(BaseModel):
    """A file as it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> FileRecord:
        """The record of a file as it is now."""
        return cls(bytes=file.stat().st_size, sha256=sha256_of(file))


class Manifest(BaseModel):
    """Every file of a folder but the manifest itself, by its path below the folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ffncompress_version: str = __version__
    kind: ArtifactKind
    files: dict[str, FileRecord]

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ArtifactError: there is none, or it cannot be understood.
        """
        file = Path(directory) / MANIFEST_FILE
        try:
            return cls.model_validate(parse_json(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ArtifactError(f"{directory}: there is no {MANIFEST_FILE} in it, so ffncompress knows nothing of it; "
                                "make the folder again") from error  # fmt: skip
        except (ValueError, RecursionError, ValidationError) as error:
            raise ArtifactError(f"{file}: corrupted; make the folder again") from error

    @classmethod
    def write(cls, directory: Path, kind: ArtifactKind) -> Manifest:
        """Record all that lies in a folder that is about to be put in its place."""
        made = cls(kind=kind, files={name: FileRecord.of(directory / name) for name in sorted(_names(directory))})
        made.save(directory)
        return made

    def record(self, directory: Path, names: Collection[str]) -> Manifest:
        """Take over files that we ourselves have just rewritten in place."""
        files = self.files | {name: FileRecord.of(directory / name) for name in names}
        made = self.model_copy(update={"files": dict(sorted(files.items()))})
        made.save(directory)
        return made

    def changes(
        self, directory: str | Path, names: Collection[str] | None = None, *, hashed_up_to: int | None = None
    ) -> list[str]:
        """What differs from the record, a few words each: the empty list means that nothing does.

        Args:
            directory: the folder.
            names: look at these files alone; none: at all, and at what was added.
            hashed_up_to: compare files of more bytes than this by their size alone; none: hash them all.
        """
        folder, found = Path(directory), []
        present = _names(folder)
        for name in sorted(self.files) if names is None else names:
            record = self.files.get(name)
            if record is None:
                found.append(f"{name} is not one of its files")
            elif name not in present:
                found.append(f"{name} is missing")
            elif (folder / name).stat().st_size != record.bytes:
                found.append(f"{name} has another size")
            elif hashed_up_to is not None and record.bytes > hashed_up_to:
                continue
            elif sha256_of(folder / name) != record.sha256:
                found.append(f"{name} has another content")
        if names is None:
            found += [f"{name} was added" for name in sorted(present - self.files.keys())]
        return found

    def save(self, directory: Path) -> None:
        """Write it into a folder."""
        write_file(directory / MANIFEST_FILE, self.model_dump_json(indent=1) + "\n")


def sha256_of(file: Path) -> str:
    """The checksum of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _names(directory: Path) -> set[str]:
    """All that lies below a folder but its manifest; empty folders and links count, for we write neither."""
    found = set()
    for path in directory.rglob("*"):
        is_plain_folder = path.is_dir() and not path.is_symlink()
        if not is_plain_folder or not any(path.iterdir()):
            found.add(path.relative_to(directory).as_posix())
    return found - {MANIFEST_FILE}
