"""Token windows of possibly different lengths: how they are cut from documents, and how they are batched.

A model that was trained on short documents is degenerate on text joined across them. Read as documents, a window
begins where a document begins and ends with it or before; windows of one length are then run together, so nothing is
padded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from ffncompress.text.sources import CHUNK, Reading, Text, ended
from ffncompress.type_aliases import Tokenizer

STEP = 8  # lengths are multiples of it: a few tokens of a short document for larger batches
SHORTEST = 16  # tokens: what is left of a document below it says next to nothing


class Windows:
    """A sequence of token windows, each [length]."""

    def __init__(self, rows: Iterable[Tensor] = ()) -> None:
        self.rows = tuple(rows)
        self.lengths = torch.tensor([len(row) for row in self.rows], dtype=torch.long)

    @classmethod
    def of(cls, rows: TokenWindows) -> Windows:
        """Windows as they are, or the rows of a matrix."""
        return rows if isinstance(rows, Windows) else cls(rows.unbind())

    @classmethod
    def cat(cls, parts: Iterable[Windows]) -> Windows:
        """The windows of several, in order."""
        return cls(row for part in parts for row in part.rows)

    @classmethod
    def mixed(cls, parts: Sequence[Windows]) -> Windows:
        """The windows of several in turns, so that the first few are of all of them."""
        at = [((i + 0.5) / len(part), row) for part in parts for i, row in enumerate(part.rows)]
        return cls(row for _, row in sorted(at, key=lambda each: each[0]))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice | Sequence[int] | Tensor) -> Windows: ...
    def __getitem__(self, at: int | slice | Sequence[int] | Tensor) -> Tensor | Windows:
        if isinstance(at, int):
            return self.rows[at]
        return Windows(self.rows[at] if isinstance(at, slice) else (self.rows[int(i)] for i in at))

    def numel(self) -> int:
        """Tokens in all."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """The length of the longest; 0 where there is none."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def scored(self) -> Tensor:
        """Tokens of each window that a loss is taken of, [n]: all but its first."""
        return self.lengths.double() - 1

    def up_to(self, tokens: int, least: int = 1) -> Windows:
        """The first windows that hold at most so many tokens together, but not fewer than `least`."""
        return self[: max(least, int((self.lengths.cumsum(0) <= tokens).sum()))]

    def by_length(self) -> list[tuple[Tensor, Tensor]]:
        """(the indices, the windows as a matrix) of each length that there is, longest first."""
        found = []
        for length in self.lengths.unique(sorted=True).flip(0).tolist():
            at = (self.lengths == length).nonzero().flatten()
            found.append((at, torch.stack([self.rows[i] for i in at.tolist()])))
        return found

    def batches(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Windows of one length in batches of about so many tokens: (their indices, the batch)."""
        found = []
        for at, same in self.by_length():
            size = max(1, tokens // same.shape[1])
            found += list(zip(at.split(size), same.split(size), strict=True))
        return found

    def grouped(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What every token has, [tokens, ...] in order, by windows of one length: (their indices, [n, length, ...])."""
        begins = self.lengths.cumsum(0) - self.lengths
        for at, same in self.by_length():
            yield at, values[begins[at][:, None] + torch.arange(same.shape[1])]


TokenWindows = Windows | Tensor  # a matrix is windows of one length


def cut(text: Text, tokenizer: Tokenizer, reading: Reading, *, length: int, count: int, seed: int = 0) -> Windows:
    """As many tokens as `count` windows of a length hold, read either way; fewer where the text ends."""
    if reading == "documents":
        return document_windows(text, tokenizer, length=length, tokens=count * length, seed=seed)
    return joined_windows(text, tokenizer, length=length, count=count, seed=seed)


def document_windows(
    text: Text, tokenizer: Tokenizer, *, length: int, tokens: int | None = None, seed: int | None = 0
) -> Windows:
    """Windows of at most a length, none of which runs from one document into the next.

    Each begins as the tokenizer begins a text. With a seed, documents (of a long one, chunks) come in a random order.
    """
    start = opening_tokens(tokenizer)
    rows: list[Tensor] = []
    held = 0
    chunks = [chunk for document in text.documents for chunk in split_chunks(document, length)]
    if seed is not None:
        random.Random(seed).shuffle(chunks)
    for chunk in chunks:
        if tokens is not None and held >= tokens:
            break
        ids = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        own = [torch.tensor(row) for row in _opened(ids, start, length)]
        held += sum(map(len, own))
        rows += own
    found = Windows(rows)
    return found if tokens is None else found.up_to(tokens)


def _opened(ids: list[int], start: list[int], length: int) -> Iterator[list[int]]:
    """A document's tokens in windows; the last is cut to a multiple of STEP, or left out where little remains."""
    body = length - len(start)
    for at in range(0, len(ids), body):
        row = start + ids[at : at + body]
        if len(row) < length:
            row = row[: len(row) // STEP * STEP]
        if len(row) >= min(SHORTEST, length):
            yield row


def joined_windows(
    text: Text, tokenizer: Tokenizer, *, length: int, count: int | None = None, seed: int | None = 0
) -> Windows:
    """Windows of one length, which run from one document into the next; fewer where the text ends.

    Every window begins as the tokenizer begins a text: a model trained with a BOS token is degenerate on
    windows cut without one. With a seed, pieces are drawn in a random order; with None, in the text's own.
    """
    start = opening_tokens(tokenizer)
    body = length - len(start)
    rows: list[list[int]] = []
    for piece in _pieces(text, seed, _chunk_size(length)):
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        rows += [start + ids[i : i + body] for i in range(0, len(ids) - body + 1, body)]
        if count is not None and len(rows) >= count:
            break
    return Windows(torch.tensor(row) for row in rows[:count])


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text of its own accord: usually nothing, or one BOS."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    for at in range(len(dressed) - len(plain) + 1):
        if dressed[at : at + len(plain)] == plain:
            return list(dressed[:at])
    return []


def _pieces(text: Text, seed: int | None, size: int) -> Iterator[str]:
    """The text in chunks of about `size` characters, so that a large corpus is tokenised only as far as it is needed.

    In its own order (seed None) it is one piece, and the windows tile it exactly.
    """
    if seed is None:
        yield text.joined
        return
    split: list[str] = []
    buffer = ""
    for document in text.documents:
        whole, buffer = _split_chunks(buffer + ended(document), size)
        split += whole
    if buffer:
        split.append(buffer)
    random.Random(seed).shuffle(split)
    yield from split


def split_chunks(document: str, length: int) -> list[str]:
    """One document in chunks that are worth many windows of a length; a short one is one chunk."""
    whole, rest = _split_chunks(document, _chunk_size(length))
    return [*whole, rest] if rest else whole


def _chunk_size(length: int) -> int:
    return max(CHUNK, 32 * length)


def _split_chunks(buffer: str, size: int) -> tuple[list[str], str]:
    """(chunks of about `size` characters, each to a line's end where there is one; what is left)."""
    split = []
    while len(buffer) >= size:
        at = buffer.rfind("\n", 1, size) + 1 or size
        split.append(buffer[:at])
        buffer = buffer[at:]
    return split, buffer
