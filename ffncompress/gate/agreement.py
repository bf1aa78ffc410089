"""How alike two models predict a text: KL(base || slimmed) for each token, and how often both favour the same one.

    KL = sum over v of p(v) (log p(v) - log q(v)),    p the base's prediction, q the slimmed model's

Both read each window once. What is kept is a sum for each window, so memory does not grow with the text; and the
distributions are taken a few rows at a time, so it hardly grows with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ffncompress.models import embedding_rows
from ffncompress.passes.heads import each_part
from ffncompress.passes.losses import mean_and_error
from ffncompress.records.gate import Agreement
from ffncompress.runtime.memory import Halving
from ffncompress.runtime.progress import Progress
from ffncompress.text.windows import Windows
from ffncompress.type_aliases import Model

NUMBERS = 2**24  # logits that are looked at together


@torch.inference_mode()
def agreement(
    base: Model,
    slimmed: Model,
    pairs: Iterable[tuple[list[int], list[int]]],
    batch_tokens: int,
    progress: Progress,
    label: str,
) -> Agreement | None:
    """Compare two models' predictions.

    Args:
        base: the model as it was.
        slimmed: the other.
        pairs: (what is given, what is scored) of each window, as lm-eval scores them.
        batch_tokens: tokens that are read together.
        progress: shows it.
        label: what it is called meanwhile.
    """
    listed = list(pairs)
    windows = Windows(torch.tensor([*given, *scored][:-1]) for given, scored in listed)
    if not len(windows):
        return None
    first = torch.tensor([len(given) - 1 for given, _ in listed])  # the place that predicts the first scored token
    rows = max(embedding_rows(model) for model in (base, slimmed))
    divergence, same, halving = torch.zeros(len(windows), dtype=torch.float64), 0, Halving()

    def sums_of(at: Tensor, batch: Tensor) -> list[tuple[int, float, int]]:
        both = (each_part(model, batch.to(model.device), vocabulary=rows) for model in (base, slimmed))
        found = []
        for ((windows_at, tokens_at), p), (_, q) in zip(*both, strict=True):
            for window, own, other in zip(at[windows_at].tolist(), p, q, strict=True):
                start = max(0, int(first[window]) - tokens_at.start)
                found.append((window, *compare_rows(own[start:], other[start:])))
        return found

    for at, batch in progress(windows.batches(batch_tokens), label):
        for window, apart, alike in (each for part in halving(sums_of, at, batch) for each in part):
            divergence[window] += apart
            same += alike
    scored = windows.lengths.double() - first.double()
    mean, error = mean_and_error(divergence / scored, scored)
    tokens = int(scored.sum())
    return Agreement(kl=mean, kl_error=error if len(windows) > 1 else None, same_top=same / tokens, tokens=tokens)


def compare_rows(own: Tensor, other: Tensor) -> tuple[float, int]:
    """(the sum of KL(own || other), rows with the same largest) of two matrices of logits, [rows, vocabulary]."""
    vocabulary = min(own.shape[1], other.shape[1])  # embeddings that are padded differently read the same tokens
    total, same = 0.0, 0
    size = max(1, NUMBERS // vocabulary)
    for rows, others in zip(own.split(size), other.split(size), strict=True):
        x, y = rows[:, :vocabulary].float(), others[:, :vocabulary].float()
        log_p, log_q = x.log_softmax(1), y.log_softmax(1)
        terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
        total += float(terms.sum(1).double().sum())
        same += int((x.argmax(1) == y.argmax(1)).sum())
    return total, same
