"""What a replacement costs, measured: perplexity with it in place, re-run only from its layer on.

A batch is run once through the original model, keeping the hidden state that enters each layer. To try a stand-in
in layer i, the layers before it are told to hand on that state instead of computing it, so the model's own forward
(masks, positions, final norm, head) runs unchanged, whatever the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffncompress.calibration import first_tensor, hooked, own_batches
from ffncompress.models import Block, installed
from ffncompress.recovery import LinearFit
from ffncompress.windows import TokenWindows
from ffncompress.workers import Loop, Track, Workers, silent, straight


@dataclass
class SequenceErrors:
    """Per held-out sequence, what the jackknife of R2_lin needs."""

    squared_errors: Tensor  # [n]
    rows: Tensor  # [n]
    sums: Tensor  # [n, d_out]
    squares: Tensor  # [n]


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
def sequence_losses(
    model: Any, windows: TokenWindows, workers: Workers, track: Track = silent, label: str = "measuring perplexity"
) -> Tensor:
    """Mean negative log-likelihood of each window, [n], over all processes."""
    losses = torch.zeros(len(windows), dtype=torch.float64)
    for at, batch in track(own_batches(windows, workers), label):
        losses[at] = _losses(model, batch)
    workers.sum_([losses])
    return losses


@torch.inference_mode()
def measure_base(
    model: Any,
    blocks: list[Block],
    fits: list[LinearFit],
    windows: TokenWindows,
    workers: Workers,
    track: Track = silent,
) -> tuple[Tensor, list[SequenceErrors]]:
    """The original model's loss on each window, [n], and each block's linear error on it."""
    losses = torch.zeros(len(windows), dtype=torch.float64)
    errors = [_no_errors(len(windows), block) for block in blocks]
    for at, batch in track(own_batches(windows, workers), "measuring the base"):
        taps = [(b.path, _error_tap(fit, each, at)) for b, fit, each in zip(blocks, fits, errors, strict=True)]
        with hooked(model, taps):
            losses[at] = _losses(model, batch)
    workers.sum_([losses, *(t for e in errors for t in (e.squared_errors, e.rows, e.sums, e.squares))])
    return losses, errors


@torch.inference_mode()
def measure_swaps(
    model: Any,
    blocks: list[Block],
    variants: list[nn.Module],
    windows: TokenWindows,
    workers: Workers,
    track: Track = silent,
    loop: Loop = straight,
) -> list[Tensor]:
    """How much each block's variant, alone, raises the loss of each window, [n]."""
    rises = [torch.zeros(len(windows), dtype=torch.float64) for _ in variants]
    states: list[Any] = []
    base = torch.zeros(0)
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    steps = [(at, batch, i) for at, batch in own_batches(windows, workers) for i in range(len(blocks))]
    for at, batch, i in loop(steps, rises, track, "trying swaps"):
        if i == 0 or not states:
            states, base = _run_and_keep(model, blocks, batch)
        with installed(model, {blocks[i].path: variants[i]}), handing_on(layers[:i], lambda: states[i]):  # noqa: B023
            rises[i][at] = _losses(model, batch) - base
    workers.sum_(rises)
    return rises


def _losses(model: Any, batch: Tensor) -> Tensor:
    """Mean next-token loss of each sequence, [batch], float64 on the CPU."""
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    targets = batch[:, 1:].to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).double().mean(1).cpu()


def _no_errors(n: int, block: Block) -> SequenceErrors:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return SequenceErrors(zeros(n), zeros(n), zeros(n, block.d_out), zeros(n))


def _error_tap(fit: LinearFit, own: SequenceErrors, at: Tensor) -> Any:
    def tap(_module: nn.Module, args: Any, output: Any) -> None:
        x, y = args[0].double(), first_tensor(output).double()
        error = y - x @ fit.weight.to(x.device) - fit.bias.to(x.device)
        own.squared_errors[at] = error.square().sum((1, 2)).cpu()
        own.rows[at] = y.shape[1]
        own.sums[at] = y.sum(1).cpu()
        own.squares[at] = y.square().sum((1, 2)).cpu()

    return tap


def _run_and_keep(model: Any, blocks: list[Block], batch: Tensor) -> tuple[list[Any], Tensor]:
    """The original model over a batch: what was handed to each layer, and the losses."""
    handed: list[Any] = [None]
    with hooked(model, [(b.layer_path, lambda _module, _args, output: handed.append(output)) for b in blocks]):
        losses = _losses(model, batch)
    return handed, losses


@contextmanager
def handing_on(layers: list[nn.Module], state: Callable[[], Any]) -> Iterator[None]:
    """Within, these layers hand on a state instead of running.

    Only `forward` is set aside, on the instance: the loop over layers may read their other attributes.
    """
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = lambda *_args, **_kwargs: state()
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward
