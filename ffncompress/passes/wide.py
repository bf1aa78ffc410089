"""The refit of kept neurons where a Gram matrix of all is too large: which to keep by runs, their weights from rows.

The Gram matrices of runs of neurons give the order of removal, which hardly suffers, and a first output matrix, which
does: it leaves out what neurons of different runs have in common. Rows are kept on disk, and conjugate gradients on
them (see recovery/by_rows.py) put it in: for the FFN's own output, and then for the drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ffncompress.models import Block, out_projection
from ffncompress.passes.activations import Rows
from ffncompress.passes.spool import Spool
from ffncompress.recovery import Metric, NeuronFit
from ffncompress.recovery.by_rows import OutRows, out_steps
from ffncompress.replacement.fitting import prune_neurons
from ffncompress.replacement.moments import add_rows_, no_rows, run_sizes, shares_of
from ffncompress.runtime.workers import Workers

DRIFT_RIDGES = (0.1, 2.0)  # relative to a neuron's energy; each is a few passes over the rows


class WideSums:
    """What kept neurons of a wide FFN are fitted from, and the fit."""

    def __init__(
        self, model: nn.Module, block: Block, width: int, metric: Tensor | None, runs: int, spool: Spool
    ) -> None:
        self.block, self.width, self.spool = block, width, spool
        weight, self.bias = out_projection(model, block)
        device = torch.device("cpu") if weight.device.type in ("mps", "meta") else weight.device
        self.weight = weight.to(device, torch.float64)
        self.metric = None if metric is None else Metric.of(metric.to(device))
        self.runs = no_rows(run_sizes(block.d_inner, runs), device)
        self.held_out: list[bool] = []  # of each batch

    def update_(self, rows: Rows, drift: Tensor, weights: Tensor, *, held_out: bool) -> None:
        """Add the rows of one batch, with what is to be added to their outputs and what errors weigh."""
        h, y, drift, weights = (t.to(self.weight.device) for t in (rows.h, rows.y, drift, weights))
        add_rows_(self.runs, h, weights, held_out)
        self.spool.put("wide", len(self.held_out), (h, y, drift, weights.float()))
        self.held_out.append(held_out)

    def fitted(self, workers: Workers) -> NeuronFit:
        """The fit from the rows of all processes, the same in each."""
        for pair in self.runs:
            for moments in pair:
                workers.sum_(moments.tensors())
        plain = workers.once(self._by_runs).to(self.weight.device)
        return self._undoing(self._joined(plain, workers), workers).cpu()

    def _by_runs(self) -> NeuronFit:
        parts = shares_of(self.runs, self.weight, self.bias)
        return prune_neurons(self.block, parts, self.weight, self.metric, [self.width])[self.width].cpu()

    def _joined(self, fit: NeuronFit, workers: Workers) -> NeuronFit:
        """The same neurons, their output matrix fitted over all runs, on all rows."""
        h0, none = self._mean(fit.kept), self.weight.new_zeros(self.block.d_out)
        found = out_steps(
            lambda: self._rows(fit, h0, none, drift=False), self._grams(fit.kept, h0),
            self.weight[fit.kept] - fit.out, fit.ridge, workers.sum_,
        )  # fmt: skip
        return fit if found is None else _moved(fit, found[0], h0, none)

    def _undoing(self, fit: NeuronFit, workers: Workers) -> NeuronFit:
        """What these neurons can undo of the drift, as far as held-out rows bear it out."""
        h0, d0 = self._mean(fit.kept), self._mean_drift(fit, workers)
        grams = self._grams(fit.kept, h0)
        none = torch.zeros_like(fit.out)
        tried = [
            out_steps(lambda: self._rows(fit, h0, d0, drift=True), grams, none, ridge, workers.sum_)
            for ridge in DRIFT_RIDGES
        ]
        found = min((each for each in tried if each), key=lambda each: each[1], default=None)
        return fit if found is None else _moved(fit, found[0], h0, d0)

    def _mean(self, kept: Tensor) -> Tensor:
        """The mean of these neurons' activations that a bias takes up."""
        sums, weight = torch.cat([own.x for own, _ in self.runs])[kept], self.runs[0][0].weight
        return sums / weight * self.block.out_bias

    def _mean_drift(self, fit: NeuronFit, workers: Workers) -> Tensor:
        """The same of the drift."""
        no_h, no_drift = (fit.out.new_zeros(size) for size in fit.out.shape)
        drift = torch.zeros_like(no_drift, dtype=torch.float64)
        for rows in self._rows(fit, no_h, no_drift, drift=True):
            if not rows.held_out:
                drift += (rows.weights[:, None] * rows.left).sum(0)
        workers.sum_([drift])
        return drift / self.runs[0][0].weight * self.block.out_bias

    def _rows(self, fit: NeuronFit, h0: Tensor, left0: Tensor, *, drift: bool) -> Iterator[OutRows]:
        """The rows less their means, with what the fit leaves of the output, or of the drift.

        A step that undoes drift may take along what is left of held-out outputs.
        """
        for at, held_out in enumerate(self.held_out):
            h, y, away, weights = self.spool.get("wide", at)
            h, left = h[:, fit.kept], away
            if held_out or not drift:
                missed = y - h @ fit.out.to(h) - (0 if fit.bias is None else fit.bias.to(h))
                left = away + missed if drift else missed
            yield OutRows(h - h0.to(h), left - left0.to(left), weights, held_out)

    def _grams(self, kept: Tensor, h0: Tensor) -> list[Tensor]:
        """sum w h h' of the kept neurons of each run, about their means."""
        found, start, used = [], 0, 0
        for fit, _ in self.runs:
            own = kept[(kept >= start) & (kept < start + fit.d_in)] - start
            means = h0[used : used + len(own)]
            about = torch.outer(fit.x[own], means)
            gram = fit.xx[own][:, own] - about - about.T + fit.weight * torch.outer(means, means)
            found.append(gram)
            start, used = start + fit.d_in, used + len(own)
        return [gram for gram in found if len(gram)]


def _moved(fit: NeuronFit, step: Tensor, h0: Tensor, shift: Tensor) -> NeuronFit:
    """A fit after a step of its output matrix that was found on rows about h0, and with a constant more."""
    bias = None if fit.bias is None else fit.bias + shift - step.T @ h0
    return replace(fit, out=fit.out + step, bias=bias)
