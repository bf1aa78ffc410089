"""What a replacement costs, measured: perplexity with it in place, re-run only from its layer on.

A batch is run once through the original model, keeping the hidden state that enters each layer. To try a replacement
in layer i, the layers before it are told to hand on that state instead of computing it, so the model's own forward
(masks, positions, final norm, head) runs unchanged, whatever the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffncompress.models import Block, handing_on, installed
from ffncompress.passes.activations import Rows, hooked, own_batches, row_hooks
from ffncompress.passes.losses import batch_losses
from ffncompress.recovery import LinearFit
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import StageKey
from ffncompress.text.windows import TokenWindows
from ffncompress.type_aliases import LayerOutput, Model


@dataclass
class SequenceErrors:
    """Per held-out sequence, what the jackknife of R2_lin needs."""

    squared_errors: Tensor  # [n]
    rows: Tensor  # [n]
    sums: Tensor  # [n, d_out]
    squares: Tensor  # [n]


@torch.inference_mode()
def measure_base(
    model: Model, blocks: list[Block], fits: list[LinearFit], windows: TokenWindows, run: Run
) -> tuple[Tensor, list[SequenceErrors]]:
    """The original model's loss on each window, [n], and each block's linear error on it."""
    losses = torch.zeros(len(windows), dtype=torch.float64)
    errors = [_no_errors(len(windows), block) for block in blocks]
    for at, batch in run.progress(own_batches(windows, run.workers), "measuring the base"):
        feeds = [(b, _error_feed(fit, each, at)) for b, fit, each in zip(blocks, fits, errors, strict=True)]
        hooks = [hook for feed in feeds for hook in row_hooks(*feed)]
        with hooked(model, hooks):
            losses[at] = batch_losses(model, batch)
    run.workers.sum_([losses, *(t for e in errors for t in (e.squared_errors, e.rows, e.sums, e.squares))])
    return losses, errors


@torch.inference_mode()
def measure_swaps(
    model: Model,
    blocks: list[Block],
    variants: list[nn.Module],
    windows: TokenWindows,
    run: Run,
    key: StageKey | None = None,
) -> list[Tensor]:
    """How much each block's variant, alone, raises the loss of each window, [n]; with a key, resumable."""
    rises = [torch.zeros(len(windows), dtype=torch.float64) for _ in variants]
    states: list[LayerOutput] = []
    base = torch.zeros(0)
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    steps = [(at, batch, i) for at, batch in own_batches(windows, run.workers) for i in range(len(blocks))]
    for at, batch, i in run.loop(steps, rises, "trying swaps", key):
        if i == 0 or not states:
            states, base = _run_and_keep(model, blocks, batch)
        with installed(model, {blocks[i].path: variants[i]}), handing_on(layers[:i], lambda: states[i]):  # noqa: B023
            rises[i][at] = batch_losses(model, batch) - base
    run.workers.sum_(rises)
    return rises


def _no_errors(n: int, block: Block) -> SequenceErrors:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return SequenceErrors(zeros(n), zeros(n), zeros(n, block.d_out), zeros(n))


def _error_feed(fit: LinearFit, own: SequenceErrors, at: Tensor) -> Callable[[Rows], None]:
    def feed(rows: Rows) -> None:
        x, y = (t.double().unflatten(0, (len(at), -1)) for t in (rows.x, rows.y))
        error = y - x @ fit.weight.to(x.device) - fit.bias.to(x.device)
        own.squared_errors[at] = error.square().sum((1, 2)).cpu()
        own.rows[at] = y.shape[1]
        own.sums[at] = y.sum(1).cpu()
        own.squares[at] = y.square().sum((1, 2)).cpu()

    return feed


def _run_and_keep(model: Model, blocks: list[Block], batch: Tensor) -> tuple[list[LayerOutput], Tensor]:
    """The original model over a batch: what was handed to each layer, and the losses."""
    handed: list[LayerOutput] = [None]
    with hooked(model, [(b.layer_path, lambda _module, _args, output: handed.append(output)) for b in blocks]):
        losses = batch_losses(model, batch)
    return handed, losses
