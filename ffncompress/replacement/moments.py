"""The moments of one block: what a pass over the model sums up, and what every fit is made from.

A Gram matrix grows as the square of the inner width. Where that of [h, x] would be too large, neurons are divided into
runs of neighbours (trained neurons have no order, so it is a random division), and products are kept within each run
alone. An FFN is the sum of the FFNs that its runs are, and each is thinned as one by itself; but one order of removal
goes through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ffncompress.models import Block
from ffncompress.recovery import Moments

_PARTS = ("fit", "held_out", "fit_inner", "held_out_inner")
Pair = tuple[Moments, Moments]  # of fit and of held-out rows


def moment_bytes(block: Block, runs: int = 1, *, inner: bool = True) -> int:
    """What the moments of a block fill, its neurons divided into so many runs."""
    plain = block.d_in * (block.d_in + block.d_out)
    if inner and runs > 1:
        return 16 * (2 * plain + block.d_inner**2 // runs)
    wide = block.d_in + block.d_inner * inner
    return 16 * (plain + wide * (wide + block.d_out))


def runs_within(block: Block, limit: int) -> int:
    """The fewest runs of a block's neurons with which its moments fit in `limit` bytes.

    Those of x cannot be divided; the Gram matrices of the neurons may always fill half of the limit.
    """
    if moment_bytes(block) <= limit:
        return 1
    room = max(limit - 32 * block.d_in * (block.d_in + block.d_out), limit // 2, 1)
    return min(max(2, -(-16 * block.d_inner**2 // room)), block.d_inner // 2)


def run_sizes(neurons: int, runs: int) -> list[int]:
    """How many neurons each run has."""
    return [neurons // runs + (at < neurons % runs) for at in range(runs)]


def no_rows(sizes: Sequence[int], device: torch.device) -> list[Pair]:
    """The moments of runs of these sizes, empty."""
    return [(_of_run(size, device), _of_run(size, device)) for size in sizes]


def _of_run(size: int, device: torch.device) -> Moments:
    return Moments.zeros(size, 0, full_yy=False, device=device)


def add_rows_(runs: Sequence[Pair], h: Tensor, weights: Tensor, held_out: bool) -> None:
    """Add rows of inner activations to their runs."""
    for pair, own in zip(runs, h.split([fit.d_in for fit, _ in runs], 1), strict=True):
        pair[held_out].update_(own, own[:, :0], weights, torch.float32)


def shares_of(runs: Sequence[Pair], weight: Tensor, bias: Tensor | None) -> Iterator[Pair]:
    """Moments of the activations of each run, with its share of the output for y; the bias is the first one's."""
    for pair, own in zip(runs, weight.split([fit.d_in for fit, _ in runs]), strict=True):
        fit, held_out = (moments.mapped(own, bias) for moments in pair)
        yield fit, held_out
        bias = None


@dataclass
class BlockMoments:
    """The four sets of one block, those of its runs of neurons, and what the loss feels of its errors."""

    neurons: int  # how many features of z are inner activations; none where they are in `runs`
    fit: Moments
    held_out: Moments
    fit_inner: Moments
    held_out_inner: Moments
    metric: Tensor | None = None  # what an error costs by direction, [d_out, d_out]
    runs: list[Pair] = field(default_factory=list)  # of h without y, where neurons are divided

    @classmethod
    def zeros(cls, block: Block, device: torch.device, *, inner: bool = True, runs: int = 1) -> BlockMoments:
        """Nothing yet.

        Args:
            block: the block.
            device: where sums are kept.
            inner: without, z = x alone, which is all that linear maps need.
            runs: into how many the neurons are divided; from two on z = x too.
        """

        def zeros(d_in: int, d_out: int = block.d_out, full_yy: bool = False) -> Moments:
            return Moments.zeros(d_in, d_out, full_yy=full_yy, device=device)

        divided = inner and runs > 1
        neurons, d_out = (block.d_inner, 0) if inner and not divided else (0, block.d_out)  # y of [h, x] follows from h
        fit, held_out = zeros(block.d_in), zeros(block.d_in, full_yy=True)
        fit_inner, held_out_inner = (zeros(neurons + block.d_in, d_out) for _ in range(2))
        sizes = run_sizes(block.d_inner, runs) if divided else []
        return cls(neurons, fit, held_out, fit_inner, held_out_inner, runs=no_rows(sizes, device))

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

    def of_neurons(self, weight: Tensor, bias: Tensor | None) -> Iterator[Pair]:
        """Moments of (h, y); where neurons are divided, of each run and its share of y, one after the other."""
        if self.runs:
            yield from shares_of(self.runs, weight, bias)
        else:
            h = slice(self.neurons)
            yield self.fit_inner.of_inputs(h), self.held_out_inner.of_inputs(h)

    def all(self) -> tuple[Moments, ...]:
        """All sets."""
        return tuple(self._by_name().values())

    def _by_name(self) -> dict[str, Moments]:
        named = {part: getattr(self, part) for part in _PARTS}
        for at, (fit, held_out) in enumerate(self.runs):
            named |= {f"run {at} fit": fit, f"run {at} held_out": held_out}
        return named

    def named_tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a file."""
        named = {
            f"{part}.{f.name}": getattr(moments, f.name).cpu()
            for part, moments in self._by_name().items()
            for f in fields(Moments)
        }
        return named if self.metric is None else named | {"metric": self.metric.cpu()}

    @classmethod
    def named(cls, tensors: dict[str, Tensor]) -> BlockMoments:
        """From what `named_tensors` gave."""

        def moments(part: str) -> Moments:
            return Moments(*(tensors[f"{part}.{f.name}"] for f in fields(Moments)))

        fit, held_out, fit_inner, held_out_inner = map(moments, _PARTS)
        count = sum(name.startswith("run ") and name.endswith(" fit.x") for name in tensors)
        runs = [(moments(f"run {at} fit"), moments(f"run {at} held_out")) for at in range(count)]
        neurons = fit_inner.d_in - fit.d_in
        return cls(neurons, fit, held_out, fit_inner, held_out_inner, tensors.get("metric"), runs)
