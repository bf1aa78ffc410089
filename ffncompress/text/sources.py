"""Where text comes from: a source is read into documents.

A source is written as one of

    path.txt | path.jsonl | path.parquet      a file ("text" is the field of a row; .txt is one document)
    hub:DATASET:CONFIG:SPLIT:FIELD            a Hub data set, or a folder of one (CONFIG may be empty)
    wikitext                                  short for hub:Salesforce/wikitext:wikitext-2-raw-v1:train:text
    python-docs                               the reference pages and docstrings that every CPython ships
    stories                                   short stories, the embedded model's own kind of text

A new kind of source is a reader here, and a line in `read`; one that comes with Python or with this package, in `OWN`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ffncompress.errors import TextError
from ffncompress.sanitize import parse_json
from ffncompress.schema import Count, Record
from ffncompress.text.python_docs import python_docs
from ffncompress.text.stories import stories
from ffncompress.type_aliases import Json

WIKITEXT = "hub:Salesforce/wikitext:wikitext-2-raw-v1:train:text"
PYTHON_DOCS, STORIES = "python-docs", "stories"
OWN: dict[str, Callable[[], list[tuple[str, str]]]] = {PYTHON_DOCS: python_docs, STORIES: stories}  # named documents
CHUNK = 8192  # characters tokenised at a time: enough for many windows, little to throw away
Reading = Literal["joined", "documents"]  # across documents, or each by itself


@dataclass(frozen=True)
class Text:
    """Some documents and where they came from."""

    source: str
    part: str
    documents: tuple[str, ...]

    @property
    def characters(self) -> int:
        """How long it is."""
        return sum(map(len, self.documents))

    @property
    def joined(self) -> str:
        """All documents in one, each ended."""
        return "".join(map(ended, self.documents))

    @property
    def sha256(self) -> str:
        """What identifies it, whatever it is called."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode() + b"\0")
        return digest.hexdigest()

    def ref(self, tokens: int, reading: Reading) -> TextRef:
        """The record of it, which carries none of its words, and no path."""
        return TextRef(
            source=public_name(self.source), part=self.part, documents=len(self.documents), characters=self.characters,
            sha256=self.sha256, tokens=tokens, reading=reading,
        )  # fmt: skip


class TextRef(Record):
    """A text that was used: enough to know it again."""

    source: str
    part: str
    documents: Count
    characters: Count
    sha256: str
    tokens: Count
    reading: Reading = "joined"


def default_text(*, on_hub: bool, embedded: bool) -> str:
    """The source that a model is measured on where none was given; a model of the Hub needs the network anyway."""
    return "wikitext" if on_hub else STORIES if embedded else PYTHON_DOCS


def public_name(source: str) -> str:
    """What a source is called in files that leave this machine: never a path."""
    return _placed(source, lambda path: path.name)


def lasting_name(source: str) -> str:
    """What a source is called from any folder of this machine."""
    return _placed(source, lambda path: str(path.absolute()))


def _placed(source: str, rename: Callable[[Path], str]) -> str:
    """A source whose file or folder, where it has one, is called otherwise."""
    if is_public(source):
        return source
    if source.startswith("hub:"):
        folder, colon, rest = source.removeprefix("hub:").partition(":")
        return f"hub:{rename(Path(folder))}{colon}{rest}"
    return rename(Path(source))


def is_public(source: str) -> bool:
    """Whether a source is the same everywhere, and not somebody's file or folder."""
    dataset = source.removeprefix("hub:").partition(":")[0]
    on_hub = source.startswith("hub:") and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) and not os.path.exists(dataset)
    return source in (*OWN, "wikitext") or bool(on_hub)


def read(source: str) -> Text:
    """All documents of a source.

    Raises:
        TextError: it cannot be read, or it holds no text.
    """
    if source in OWN:
        documents = [text for _, text in OWN[source]()]
    elif source == "wikitext" or source.startswith("hub:"):
        documents = _hub(WIKITEXT if source == "wikitext" else source)
    else:
        documents = _file(Path(source))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise TextError(f"{source}: there is no text in it; give a source with some, or --data {PYTHON_DOCS}")
    return Text(source, "all", tuple(documents))


def ended(document: str) -> str:
    """A row that is a line of a larger text (as WikiText's are) keeps its own end; others get a blank line."""
    return document if document.endswith("\n") else f"{document}\n\n"


def _file(path: Path) -> list[str]:
    readers: dict[str, Callable[[Path], list[str]]] = {".jsonl": _jsonl, ".parquet": _parquet}
    read_file = readers.get(path.suffix, _plain)
    if not path.is_file():
        raise TextError(
            f"{path}: no such text; give a .txt, .jsonl or .parquet file, hub:DATASET:CONFIG:SPLIT:FIELD, "
            f"wikitext, {PYTHON_DOCS}, or {STORIES}"
        )
    try:
        return read_file(path)
    except TextError:
        raise
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 text (byte {error.start}); convert it, or give another file") from error
    except Exception as error:
        raise TextError(f"{path}: cannot be read ({error}); give another file") from error


def _plain(path: Path) -> list[str]:
    return [path.read_text(encoding="utf-8")]


def _jsonl(path: Path) -> list[str]:
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                documents.append(_field(parse_json(line), "text"))
            except (ValueError, KeyError, TypeError) as error:
                raise TextError(f'{path}: line {number} is not an object with a "text" string; mend it') from error
    return documents


def _parquet(path: Path) -> list[str]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    if "text" not in table.column_names:
        raise TextError(f'{path}: no column "text" (it has {", ".join(table.column_names)}); rename one')
    values: list[str | None] = table.column("text").to_pylist()
    return [value or "" for value in values]


def _field(row: Json, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


def _hub(source: str) -> list[str]:
    fields = source.removeprefix("hub:").split(":")
    if len(fields) != 4 or not all((fields[0], fields[2], fields[3])):
        raise TextError(f"{source}: write a Hub data set as hub:DATASET:CONFIG:SPLIT:FIELD, for example {WIKITEXT}")
    name, config, split, field = fields
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split)
        return [value or "" for value in rows[field]]
    except Exception as error:  # datasets raises a dozen kinds, most of them long
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise TextError(
            f"{source}: the data set cannot be read ({reason}); check the name and the network, "
            f"or use --data {PYTHON_DOCS} or a file"
        ) from error
