"""How a model reads a text, measured: joined across its documents, or each document by itself.

Most models read either way; one that was trained on short documents, each from its beginning, does not read what
stands behind the first. Whichever way the base model has the lower perplexity is the way in which everything reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ffncompress.errors import ModelError
from ffncompress.models import embedding_rows, longest_of
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.runtime.run import Run
from ffncompress.text.sources import Reading, Text
from ffncompress.text.windows import Windows, document_windows
from ffncompress.type_aliases import Config, Model, Tokenizer

READING_TOKENS = 4096  # at least, that are read both ways


def better_reading(model: Model, tokenizer: Tokenizer, text: Text, context: int, run: Run, *, seed: int = 0) -> Reading:
    """The way in which a model has the lower perplexity on the same documents; one document is always "joined"."""
    if len(text.documents) < 2:
        return "joined"
    apart, joined = Windows(), Windows()
    tokens = max(READING_TOKENS, 4 * context)
    for stretch in _stretches(text, 16 * context, seed):
        whole = replace(stretch, documents=(stretch.joined,))
        apart, joined = (
            Windows.cat([found, document_windows(each, tokenizer, length=context, tokens=tokens, seed=None)])
            for found, each in ((apart, stretch), (joined, whole))
        )
        if joined.numel() >= tokens:
            break
    if not (len(apart) and len(joined)):
        return "joined"
    check_ids(model, Windows.cat([apart, joined]))
    by_itself, together = (perplexity(sequence_losses(model, w, run), w.scored) for w in (apart, joined))
    return run.workers.from_main("documents" if by_itself < together else "joined")


def _stretches(text: Text, size: int, seed: int) -> Iterator[Text]:
    """Neighbouring documents of about so many characters together, in a random order: rows may be lines of one text."""
    stretches: list[list[str]] = [[]]
    held = 0
    for document in text.documents:
        if held >= size:
            stretches.append([])
            held = 0
        stretches[-1].append(document)
        held += len(document)
    random.Random(seed).shuffle(stretches)
    return (replace(text, documents=tuple(stretch)) for stretch in stretches)


def check_ids(model: Model, windows: Iterable[Sequence[int] | Tensor]) -> None:
    """Whether the model has a row for every token, before an index fails inside it.

    Raises:
        ModelError: it has not.
    """
    largest, rows = (
        max((int(torch.as_tensor(row).max()) for row in windows if len(row)), default=0),
        embedding_rows(model),
    )
    if largest >= rows:
        raise ModelError(
            f"the tokenizer gives token {largest}, and the model's embedding has {rows} rows: they do not belong "
            "together; put the model's own tokenizer beside its weights"
        )


def check_length(name: str, config: Config, length: int) -> None:
    """Whether a model takes windows of a length.

    Raises:
        ModelError: it does not.
    """
    longest = longest_of(config) or length
    if length > longest:
        raise ModelError(f"{name}: a window of {length} tokens is more than its {longest}; lower --seq-len")
