"""The loss of a model on token windows, its mean and error, and what a rise of it means in perplexity."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ffncompress.passes.activations import own_batches
from ffncompress.passes.objective import objective_of
from ffncompress.runtime.memory import Halving
from ffncompress.runtime.run import Run
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Model


def mean_and_error(values: Tensor, tokens: Tensor | None = None) -> tuple[float, float]:
    """The mean over tokens of what each sequence has on average, and its standard error over sequences.

    Args:
        values: the mean of each sequence, [n].
        tokens: how many tokens it is of, [n]; none: the same number in each.
    """
    n = len(values)
    if tokens is None or bool((tokens == tokens[0]).all()):
        return values.mean().item(), (values.std() / n**0.5).item() if n > 1 else 0.0
    weights = tokens / tokens.sum()
    mean = (weights * values).sum()
    error = (n / (n - 1) * (weights * (values - mean)).square().sum()).sqrt()  # of a ratio of two sums
    return mean.item(), error.item()


def perplexity(losses: Tensor, tokens: Tensor | None = None) -> float:
    """exp of the mean loss over tokens; infinite rather than an overflow."""
    mean, _ = mean_and_error(losses, tokens)
    return math.exp(mean) if mean < 700 else math.inf


@torch.inference_mode()
def sequence_losses(model: Model, windows: TokenWindows, run: Run, label: str = "measuring perplexity") -> Tensor:
    """Mean negative log-likelihood of each window, [n], over all processes."""
    losses, halving = torch.zeros(len(windows), dtype=torch.float64), Halving()
    for at, batch in run.progress(own_batches(windows, run.workers), label):
        losses[at] = batch_losses(model, batch, halving)
    run.workers.sum_([losses])
    return losses


def known_losses(windows: Windows, others: Windows, losses: Tensor) -> Tensor | None:
    """The losses of windows that are all among others, whose losses are known; none where one is not."""
    known = {tuple(row.tolist()): loss for row, loss in zip(others, losses, strict=True)}
    found = [known.get(tuple(row.tolist())) for row in windows]
    return None if any(loss is None for loss in found) else torch.stack([loss for loss in found if loss is not None])


def batch_losses(model: Model, batch: Tensor, halving: Halving | None = None) -> Tensor:
    """The mean loss of each sequence, [batch], float64 on the CPU; in halves where memory runs out."""
    return torch.cat((halving or Halving())(partial(objective_of(model).losses, model), batch))


def delta_perplexity(base: float, rise: float) -> float:
    """A rise in loss as the perplexity that it adds to a base; what is not finite is as bad as can be."""
    return base * math.expm1(min(rise, 50.0) if math.isfinite(rise) else 50.0)
