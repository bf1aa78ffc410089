"""What a replacement is refitted from: moments of rows of the slimmed model, and what would bring its stream back.

The FFN's own output is fitted first. Drift is what the slimmed stream lacks of the original's; what kept neurons can
undo of it is a fit of its own, with a ridge of its own, on top of the first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.models import Block, out_projection
from ffncompress.passes.activations import Rows
from ffncompress.records.plan import Shape
from ffncompress.recovery import Metric, Moments, NeuronFit
from ffncompress.recovery.neurons import RIDGES, Fit, around
from ffncompress.replacement.fitting import prune_neurons
from ffncompress.runtime.workers import Workers

DRIFT_RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)


class Sums:
    """The moments that a replacement of a shape is fitted from, and the fit.

    With neurons, the inputs are h, or [h, x], and only the drift is summed as an output: the FFN's own is
    linear in h, so its moments follow (see `Moments.mapped`). A linear map of x has both in one.
    """

    def __init__(self, model: nn.Module, block: Block, shape: Shape, metric: Tensor | None) -> None:
        self.block, self.shape = block, shape
        weight, self.bias = out_projection(model, block)
        device = "cpu" if weight.device.type in ("mps", "meta") else weight.device
        self.weight = weight.to(device, torch.float64)
        self.metric = None if metric is None else Metric.of(metric.to(device))
        inputs = {"neurons": block.d_inner, "hybrid": block.d_inner + block.d_in}.get(shape.kind, block.d_in)

        self.fit, self.held_out = (Moments.zeros(inputs, block.d_out, full_yy=False, device=device) for _ in range(2))

    def update_(self, rows: Rows, drift: Tensor, weights: Tensor, *, held_out: bool) -> None:
        """Add the rows of one batch, with what is to be added to their outputs and what errors weigh."""
        device = self.fit.x.device
        h, x, y, drift, weights = (t.to(device) for t in (rows.h, rows.x, rows.y, drift, weights))
        sums = self.held_out if held_out else self.fit
        if self.shape.width:
            z = h if self.shape.kind == "neurons" else torch.cat([h, x], 1)
            sums.update_(z, drift, weights, torch.float32)
        else:
            sums.update_(x, y + drift, weights)

    def fitted(self, workers: Workers) -> Fit:
        """The fit from the rows of all processes, the same in each: they run it, and what comes behind it, together."""
        for moments in (self.fit, self.held_out):
            workers.sum_(moments.tensors())
        return workers.once(self._solve)

    def _solve(self) -> Fit:
        if not self.shape.width:
            return recovery.fit_linear(self.fit, self.held_out, metric=self.metric).cpu()
        fit, held_out = (moments.mapped(self.weight, self.bias) for moments in (self.fit, self.held_out))
        widths = [self.shape.width]
        h = slice(self.block.d_inner)
        parts = [(fit.of_inputs(h), held_out.of_inputs(h))]
        plain = prune_neurons(self.block, parts, self.weight, self.metric, widths)[self.shape.width]
        if self.shape.kind == "hybrid":
            hybrid = recovery.fit_hybrid(
                fit, held_out, plain.kept, self.weight, around(plain.ridge, RIDGES), metric=self.metric
            )
            step, shift = self._undoing(plain.kept, biased=True)
            return replace(hybrid, out=hybrid.out + step, y0=hybrid.y0 + shift + step.T @ hybrid.h0).cpu()
        kept, biased = plain.kept, self.block.out_bias
        plain = recovery.fit_neurons(
            fit, held_out, kept, self.weight, biased=biased, ridges=around(plain.ridge, RIDGES)
        )  # fmt: skip
        h0, y0 = fit.means if biased else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
        missed = self._missed(held_out.of_inputs(kept), plain, h0[kept], y0)
        step, shift = self._undoing(kept, biased=biased, missed=missed)
        bias = None if plain.bias is None else plain.bias + shift
        return NeuronFit(kept, plain.out + step, bias, plain.ridge).cpu()

    def _missed(self, held_out: Moments, plain: NeuronFit, h0: Tensor, y0: Tensor) -> Tensor:
        """What the fit leaves of held-out outputs, by neuron: a step that undoes drift may take it along."""
        gram, cross, _ = held_out.centred_on(h0, y0)
        return cross - gram @ plain.out

    def _undoing(self, kept: Tensor, *, biased: bool, missed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What these neurons can undo of the drift, as far as held-out rows bear it out: weights, and a constant."""
        fit, held_out = self.fit.of_inputs(kept), self.held_out.of_inputs(kept)
        h0, d0 = fit.means if biased else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
        gram, cross, _ = fit.centred_on(h0, d0)
        held_gram, left, _ = held_out.centred_on(h0, d0)
        left = left if missed is None else left + missed
        step, _ = recovery.solve_ridged(gram, cross, held_gram, left, DRIFT_RIDGES)
        if ((step * (held_gram @ step)).sum() >= 2 * (step * left).sum()).item():
            step = torch.zeros_like(step)
        return step, d0 - step.T @ h0
