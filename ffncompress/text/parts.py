"""A source divided into parts that share no document: fit on one, choose on another, report on a third.

A file is divided in its own order, because neighbouring text is alike and a shuffled split would leak; python-docs and
stories by a hash of each document's name, so that another CPython puts the same document in the same part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from ffncompress.errors import TextError
from ffncompress.text.sources import CHUNK, OWN, Text, read

FIT, CHOOSE, REPORT = "fit", "choose", "report"
SHARES = {FIT: 0.6, CHOOSE: 0.2, REPORT: 0.2}
HALVES = {CHOOSE: 0.5, REPORT: 0.5}  # of a text given for choosing alone
_TELLING = 200  # characters: a longer document that recurs would leak from one part into another


def read_parts(source: str, shares: dict[str, float] | None = None) -> dict[str, Text]:
    """Divide a source into disjoint parts, each about its share of the characters.

    A document of some length that stands word for word in an earlier part is left out of the later one; a heading may
    recur.
    """
    shares = shares or SHARES
    own = OWN.get(source)
    parts = _by_name_hash(own(), shares) if own else _in_order(read(source).documents, shares)
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
            if len(document) > room and (len(documents) == 1 or len(document) > CHUNK):
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
