"""What a replacement costs, measured: perplexity with it in place, re-run only from its layer on.

A batch is run once through the original model, keeping the hidden state that enters each layer. To try a replacement
in layer i, the layers before it are told to hand on that state instead of computing it, so the model's own forward
(masks, positions, final norm, head) runs unchanged, whatever the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ffncompress.models import Block, forward, installed
from ffncompress.passes.activations import Rows, hooked, own_batches, row_hooks
from ffncompress.passes.handing import Handed, handing_on, kept_from
from ffncompress.passes.objective import objective_of
from ffncompress.recovery import LinearFit
from ffncompress.runtime.memory import Halving, shrinking
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import StageKey
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Model


@dataclass
class SequenceErrors:
    """Per held-out sequence, what the jackknife of R2_lin needs."""

    squared_errors: Tensor  # [n]
    rows: Tensor  # [n]
    sums: Tensor  # [n, d_out]
    squares: Tensor  # [n]


def measure_base(
    model: Model, blocks: list[Block], fits: list[LinearFit], windows: TokenWindows, run: Run
) -> tuple[Tensor, list[SequenceErrors]]:
    """The original model's loss on each window, [n], and each block's linear error on it."""
    losses = torch.zeros(len(windows), dtype=torch.float64)

    def read(at: Tensor, batch: Tensor) -> None:
        losses[at] = objective_of(model).losses(model, batch)

    errors = _with_errors(model, blocks, fits, windows, run, read)
    run.workers.sum_([losses])
    return losses, errors


def measure_errors(
    model: Model, blocks: list[Block], fits: list[LinearFit], windows: TokenWindows, run: Run
) -> list[SequenceErrors]:
    """The errors alone, where the losses are known: the head is not run."""
    return _with_errors(model, blocks, fits, windows, run, lambda _, batch: forward(model.base_model, batch))


@torch.inference_mode()
def _with_errors(
    model: Model,
    blocks: list[Block],
    fits: list[LinearFit],
    windows: TokenWindows,
    run: Run,
    read: Callable[[Tensor, Tensor], object],
) -> list[SequenceErrors]:
    """Each block's linear error on each window, while something runs the model over them."""
    errors = [_no_errors(len(windows), block) for block in blocks]
    halving = Halving()

    def measure(at: Tensor, batch: Tensor) -> None:
        feeds = [(b, _error_feed(fit, each, at)) for b, fit, each in zip(blocks, fits, errors, strict=True)]
        with hooked(model, [hook for feed in feeds for hook in row_hooks(*feed)]):
            read(at, batch)

    for at, batch in run.progress(own_batches(windows, run.workers), "measuring errors"):
        halving(measure, at, batch)
    run.workers.sum_([t for e in errors for t in (e.squared_errors, e.rows, e.sums, e.squares)])
    return errors


@torch.inference_mode()
def measure_swaps(
    model: Model,
    blocks: list[Block],
    variants: list[nn.Module],
    windows: TokenWindows,
    run: Run,
    key: StageKey | None = None,
) -> list[Tensor]:
    """How much each block's variant, alone, raises the loss of each window, [n]; with a key, resumable.

    Processes share the blocks: windows are so few that one of them would have all.
    """
    rises = [torch.zeros(len(windows), dtype=torch.float64) for _ in variants]
    prefixes = _Prefixes(model, [model.get_submodule(block.layer_path) for block in blocks])
    batches = Windows.of(windows).batches(run.workers.batch_tokens)
    own = run.workers.share(len(blocks)).tolist()
    for (at, batch), i in run.loop([*product(batches, own)], rises, "trying swaps", key):
        if i == own[0] or not prefixes.begun:
            prefixes.begin(batch.to(run.workers.device))
        rises[i][at] = prefixes.rise(i, blocks[i].path, variants[i])
    run.workers.sum_(rises)
    return rises


class _Prefixes:
    """The original model over a batch, and again from one of its layers on; in parts where the whole does not fit."""

    def __init__(self, model: Model, layers: list[nn.Module]) -> None:
        self._model, self._layers = model, layers
        self._batch = torch.zeros(0)
        self._parts: list[tuple[Tensor, list[Handed], Tensor]] = []  # ids, what each layer hands on, losses
        self._most: int | None = None  # windows that fit together

    @property
    def begun(self) -> bool:
        """Whether there is a batch."""
        return len(self._batch) > 0

    def begin(self, batch: Tensor) -> None:
        """Take up another batch."""
        self._batch, self._parts = batch, []

    def rise(self, layer: int, path: str, variant: nn.Module) -> Tensor:
        """How much a module in a layer raises the loss of each window."""
        count = len(self._batch)
        found, self._most = shrinking(partial(self._rise, layer, path, variant), min(self._most or count, count))
        return found

    def _rise(self, layer: int, path: str, variant: nn.Module, together: int) -> Tensor:
        if not self._parts or len(self._parts[0][0]) > together:
            self._parts = []  # before others are kept
            self._parts = [self._kept(ids) for ids in self._batch.split(together)]
        rises = []
        for ids, states, losses in self._parts:
            before = partial(states.__getitem__, layer - 1)
            with installed(self._model, {path: variant}), handing_on(self._layers[:layer], before):
                rises.append(objective_of(self._model).losses(self._model, ids) - losses)
        return torch.cat(rises)

    def _kept(self, ids: Tensor) -> tuple[Tensor, list[Handed], Tensor]:
        handed: list[Handed] = []
        with kept_from(self._layers, handed.append):
            losses = objective_of(self._model).losses(self._model, ids)
        return ids, handed, losses


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
