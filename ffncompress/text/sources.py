"""Text in: a source is read into documents, divided into disjoint parts, and cut into token windows.

A source is written as one of

    path.txt | path.jsonl | path.parquet      a file ("text" is the field of a row; .txt is one document)
    hub:DATASET:CONFIG:SPLIT:FIELD            a Hub data set, or a folder of one (CONFIG may be empty)
    wikitext                                  short for hub:Salesforce/wikitext:wikitext-2-raw-v1:train:text
    python-docs                               the reference pages and docstrings that every CPython ships

The three parts of a source (fit, choose, report) share no document. A file is divided in its own order,
because neighbouring text is alike and a shuffled split would leak; python-docs by a hash of each document's
name, so that another CPython puts the same document in the same part.
"""

from __future__ import annotations

import ast
import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ffncompress.errors import TextError
from ffncompress.words import parse_json

if TYPE_CHECKING:
    import torch

WIKITEXT = "hub:Salesforce/wikitext:wikitext-2-raw-v1:train:text"
PYTHON_DOCS = "python-docs"
FIT, CHOOSE, REPORT = "fit", "choose", "report"
Reading = Literal["joined", "documents"]  # across documents, or each by itself
SHARES = {FIT: 0.6, CHOOSE: 0.2, REPORT: 0.2}
HALVES = {CHOOSE: 0.5, REPORT: 0.5}  # of a text given for choosing alone
_TELLING = 200  # characters: a longer document that recurs would leak from one part into another
_BITE = 8192  # characters tokenised at a time: enough for many windows, little to throw away


@dataclass(frozen=True)
class Text:
    """Some documents and where they came from."""

    source: str
    part: str
    documents: tuple[str, ...]

    @property
    def characters(self) -> int:
        return sum(map(len, self.documents))

    @property
    def joined(self) -> str:
        return "".join(map(_ended, self.documents))

    def fingerprint(self) -> Fingerprint:
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode() + b"\0")
        name = public_name(self.source)
        return Fingerprint(name, self.part, len(self.documents), self.characters, digest.hexdigest())


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a text without carrying it."""

    source: str
    part: str
    documents: int
    characters: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    return source in (PYTHON_DOCS, "wikitext") or bool(on_hub)


def read(source: str) -> Text:
    """All documents of a source.

    Raises:
        TextError: it cannot be read, or it holds no text.
    """
    if source == PYTHON_DOCS:
        documents = [text for _, text in _python_docs()]
    elif source == "wikitext" or source.startswith("hub:"):
        documents = _hub(WIKITEXT if source == "wikitext" else source)
    else:
        documents = _file(Path(source))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise TextError(f"{source}: there is no text in it; give a source with some, or --data {PYTHON_DOCS}")
    return Text(source, "all", tuple(documents))


def read_parts(source: str, shares: dict[str, float] | None = None) -> dict[str, Text]:
    """Divide a source into disjoint parts, each about its share of the characters.

    A document of some length that stands word for word in an earlier part is left out of the later one; a heading may
    recur.
    """
    shares = shares or SHARES
    if source == PYTHON_DOCS:
        parts = _by_name_hash(_python_docs(), shares)
    else:
        parts = _in_order(read(source).documents, shares)
    seen: set[str] = set()
    texts = {}
    for name, documents in parts.items():
        told = [d for d in documents if d.strip()]
        fresh = tuple(d for d in told if d not in seen)
        seen.update(d for d in fresh if len(d) >= _TELLING)
        if told and not fresh:
            raise TextError(
                f"{source}: the text repeats itself: all of its {name} part stands word for word in an earlier part; "
                "give one with more different documents"
            )
        if not fresh:
            raise TextError(f"{source}: too little text to divide into {', '.join(shares)}; give a longer one")
        texts[name] = Text(source, name, fresh)
    return texts


def windows(text: Text, tokenizer: Any, *, length: int, count: int | None = None, seed: int | None = 0) -> torch.Tensor:
    """Token windows of one length, [count, length]; fewer where the text ends.

    Every window begins as the tokenizer begins a text: a model trained with a BOS token is degenerate on
    windows cut without one. With a seed, pieces are drawn in a random order; with None, in the text's own.
    """
    import torch

    start = opening_tokens(tokenizer)
    body = length - len(start)
    rows: list[list[int]] = []
    for piece in _pieces(text, seed, _bite_size(length)):
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        rows += [start + ids[i : i + body] for i in range(0, len(ids) - body + 1, body)]
        if count is not None and len(rows) >= count:
            break
    return torch.tensor(rows[:count], dtype=torch.long).reshape(-1, length)


def opening_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text of its own accord: usually nothing, or one BOS."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    for at in range(len(dressed) - len(plain) + 1):
        if dressed[at : at + len(plain)] == plain:
            return list(dressed[:at])
    return []


def _pieces(text: Text, seed: int | None, size: int) -> Iterator[str]:
    """The text in bites of about `size` characters, so that a large corpus is tokenised only as far as it is needed.

    In its own order (seed None) it is one piece, and the windows tile it exactly.
    """
    if seed is None:
        yield text.joined
        return
    bitten: list[str] = []
    buffer = ""
    for document in text.documents:
        whole, buffer = _bite_off(buffer + _ended(document), size)
        bitten += whole
    if buffer:
        bitten.append(buffer)
    random.Random(seed).shuffle(bitten)
    yield from bitten


def bites(document: str, length: int) -> list[str]:
    """One document in bites that are worth many windows of a length; a short one is one bite."""
    whole, rest = _bite_off(document, _bite_size(length))
    return [*whole, rest] if rest else whole


def _bite_size(length: int) -> int:
    return max(_BITE, 32 * length)


def _bite_off(buffer: str, size: int) -> tuple[list[str], str]:
    """(bites of about `size` characters, each to a line's end where there is one; what is left)."""
    bitten = []
    while len(buffer) >= size:
        at = buffer.rfind("\n", 1, size) + 1 or size
        bitten.append(buffer[:at])
        buffer = buffer[at:]
    return bitten, buffer


def _ended(document: str) -> str:
    """A row that is a line of a larger text (as WikiText's are) keeps its own end; others get a blank line."""
    return document if document.endswith("\n") else f"{document}\n\n"


def _in_order(documents: Sequence[str], shares: dict[str, float]) -> dict[str, list[str]]:
    """Contiguous parts; a document that straddles a border is cut there at a line's end."""
    total = sum(map(len, documents))
    borders, share = [], 0.0
    for name in shares:
        share += shares[name]
        borders.append((name, round(share * total)))
    parts: dict[str, list[str]] = {name: [] for name in shares}
    at = 0
    queue = list(reversed(documents))
    for name, border in borders:
        while queue and at < border:
            document = queue.pop()
            room = border - at
            if len(document) > room and (len(documents) == 1 or len(document) > _BITE):
                cut = document.rfind("\n", 0, room) + 1 or room
                queue.append(document[cut:])
                document = document[:cut]
                border = at + len(document)  # this part is full
            parts[name].append(document)
            at += len(document)
    return parts


def _by_name_hash(named: Sequence[tuple[str, str]], shares: dict[str, float]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {name: [] for name in shares}
    total = sum(shares.values())
    for name, document in named:
        point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32 * total
        borders = accumulate(shares.values())
        part = next((part for part, border in zip(shares, borders, strict=True) if point < border), REPORT)
        parts[part].append(document)
    return parts


@cache
def _python_docs() -> list[tuple[str, str]]:
    """(name, text) of the language reference pages and of each standard module's docstrings."""
    named = []
    try:
        from pydoc_data.topics import topics

        named = [(f"topic:{name}", text) for name, text in sorted(topics.items())]
    except ImportError:  # some distributions leave it out
        pass
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        text = _docstrings(file)
        if text:
            named.append(("/".join(parts), text))
    if not named:
        raise TextError("python-docs: this Python ships without its reference pages; give --data a text file")
    return named


def _docstrings(file: Path) -> str:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            name = getattr(node, "name", file.stem)
            found.append(f"{name}: {docstring}")
    return "\n\n".join(found)


def _file(path: Path) -> list[str]:
    readers: dict[str, Callable[[Path], list[str]]] = {".jsonl": _jsonl, ".parquet": _parquet}
    read_file = readers.get(path.suffix, _plain)
    if not path.is_file():
        raise TextError(
            f"{path}: no such text; give a .txt, .jsonl or .parquet file, hub:DATASET:CONFIG:SPLIT:FIELD, "
            f"wikitext, or {PYTHON_DOCS}"
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


def _field(row: Any, name: str) -> str:
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
