"""The moments of one block: what a pass over the model sums up, and what every fit is made from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ffncompress.models import Block
from ffncompress.recovery import Moments

_PARTS = ("fit", "held_out", "fit_inner", "held_out_inner")


@dataclass
class BlockMoments:
    """The four sets of one block, and what the loss feels of its errors."""

    neurons: int  # how many features of z are inner activations
    fit: Moments
    held_out: Moments
    fit_inner: Moments
    held_out_inner: Moments
    metric: Tensor | None = None  # what an error costs by direction, [d_out, d_out]

    @classmethod
    def zeros(cls, block: Block, device: torch.device, *, inner: bool = True) -> BlockMoments:
        """Nothing yet; without `inner`, z = x alone, which is all that linear maps need."""

        def zeros(d_in: int, d_out: int = block.d_out, full_yy: bool = False) -> Moments:
            return Moments.zeros(d_in, d_out, full_yy=full_yy, device=device)

        neurons, d_out = (block.d_inner, 0) if inner else (0, block.d_out)  # y of [h, x] follows from h
        fit, held_out = zeros(block.d_in), zeros(block.d_in, full_yy=True)
        fit_inner, held_out_inner = (zeros(neurons + block.d_in, d_out) for _ in range(2))
        return cls(neurons, fit, held_out, fit_inner, held_out_inner)

    def pair(self, held_out: bool) -> tuple[Moments, Moments]:
        """The plain and the weighted set of one part."""
        return (self.held_out, self.held_out_inner) if held_out else (self.fit, self.fit_inner)

    def complete_(self, weight: Tensor, bias: Tensor | None) -> None:
        """Give the moments of (z, .) their y, where it was not measured."""
        if not self.neurons:
            return
        self.fit_inner = self.fit_inner.mapped(weight, bias)
        self.held_out_inner = self.held_out_inner.mapped(weight, bias)

    def weighted(self) -> tuple[Moments, Moments]:
        """(fit, held out) of (x, y) with each row weighted: a corner of the inner ones."""
        x = slice(self.neurons, None)
        return self.fit_inner.of_inputs(x), self.held_out_inner.of_inputs(x)

    def all(self) -> tuple[Moments, ...]:
        """All four sets."""
        return self.fit, self.held_out, self.fit_inner, self.held_out_inner

    def named_tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a file."""
        named = {
            f"{part}.{f.name}": getattr(getattr(self, part), f.name).cpu() for part in _PARTS for f in fields(Moments)
        }
        return named if self.metric is None else named | {"metric": self.metric.cpu()}

    @classmethod
    def named(cls, tensors: dict[str, Tensor]) -> BlockMoments:
        """From what `named_tensors` gave."""
        fit, held_out, fit_inner, held_out_inner = (
            Moments(*(tensors[f"{part}.{f.name}"] for f in fields(Moments))) for part in _PARTS
        )
        neurons = fit_inner.d_in - fit.d_in
        return cls(neurons, fit, held_out, fit_inner, held_out_inner, tensors.get("metric"))
