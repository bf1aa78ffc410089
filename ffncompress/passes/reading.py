"""How a model reads a text, measured: joined across its documents, or each document by itself.

Most models read either way; one that was trained on short documents, each from its beginning, does not read what
stands behind the first. Whichever way the base model has the lower perplexity is the way in which everything reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ffncompress.errors import ModelError
from ffncompress.swaps import perplexity, sequence_losses
from ffncompress.texts import Reading, Text
from ffncompress.windows import Windows, document_windows
from ffncompress.workers import Workers

READING_TOKENS = 4096  # at least, that are read both ways


def better_reading(model: Any, tokenizer: Any, text: Text, context: int, workers: Workers, *, seed: int = 0) -> Reading:
    """The way in which a model has the lower perplexity on the same documents; one document is always "joined"."""
    if len(text.documents) < 2:
        return "joined"
    apart, joined = Windows(), Windows()
    tokens = max(READING_TOKENS, 4 * context)
    for run in _runs(text, 16 * context, seed):
        whole = replace(run, documents=(run.joined,))
        apart, joined = (
            Windows.cat([found, document_windows(each, tokenizer, length=context, tokens=tokens, seed=None)])
            for found, each in ((apart, run), (joined, whole))
        )
        if joined.numel() >= tokens:
            break
    if not (len(apart) and len(joined)):
        return "joined"
    check_ids(model, Windows.cat([apart, joined]))
    by_itself, together = (perplexity(sequence_losses(model, w, workers), w.scored) for w in (apart, joined))
    return workers.from_main("documents" if by_itself < together else "joined")


def _runs(text: Text, size: int, seed: int) -> Iterator[Text]:
    """Neighbouring documents of about so many characters together, in a random order: rows may be lines of one text."""
    runs: list[list[str]] = [[]]
    held = 0
    for document in text.documents:
        if held >= size:
            runs.append([])
            held = 0
        runs[-1].append(document)
        held += len(document)
    random.Random(seed).shuffle(runs)
    return (replace(text, documents=tuple(run)) for run in runs)


def check_ids(model: Any, windows: Iterable[Sequence[int] | Tensor]) -> None:
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


def embedding_rows(model: Any) -> int:
    """How many tokens a model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_length(name: str, config: Any, length: int) -> None:
    """Whether a model takes windows of a length.

    Raises:
        ModelError: it does not.
    """
    longest = getattr(config, "max_position_embeddings", None) or length
    if length > longest:
        raise ModelError(f"{name}: a window of {length} tokens is more than its {longest}; lower --seq-len")
