"""The search space and the search in it: which option each block gets, under a size, a time or a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ffncompress.errors import BudgetError
from ffncompress.models import Block
from ffncompress.passes.losses import delta_perplexity
from ffncompress.planning.allocation import Entry, allocate
from ffncompress.records.plan import FrontierPoint, JointCheck, Option, Swap
from ffncompress.replacement.modules import matrix_weights

CORRECTED_FROM = 2.0  # standard errors above the prediction before a measured swap is believed instead
WORTH_DRAWING = 0.7  # nats: twice the perplexity, as if losses added
SIZES = 64  # steps of the search for the smallest model within a limit
Choice = list[Option | None]  # of every block; none: it is kept


@dataclass(frozen=True)
class SearchSpace:
    """All that can be chosen among: a menu for each block, and the cost of each entry."""

    blocks: list[Block]
    menus: list[list[Option]]
    factors: list[float]  # what measured swaps add to the predictions of a block
    kept_seconds: list[float] | None = None  # of each block as it is, where speed was asked for
    model_seconds: float = 0.0  # of the whole model as it is
    decide: Callable[[Callable[[], list[int]]], list[int]] = lambda work: work()  # of several processes, one does

    @property
    def least(self) -> int:
        """The fewest parameters that the FFNs can have."""
        return sum(min([b.parameters, *(o.cost for o in m)]) for b, m in zip(self.blocks, self.menus, strict=True))

    @property
    def full(self) -> int:
        """The parameters of the FFNs as they are."""
        return sum(block.parameters for block in self.blocks)

    def restricted(self, ratio: float | None, only: Sequence[int] | None = None) -> SearchSpace:
        """With only the options that keep at most 1/ratio of a block's matrix weights, and only some of the blocks."""
        menus = [
            [o for o in menu if ratio is None or within_factor(block, o, ratio)] if only is None or i in only else []
            for i, (block, menu) in enumerate(zip(self.blocks, self.menus, strict=True))
        ]
        return replace(self, menus=menus)

    def seconds_within(self, speed: float) -> float:
        """The time that the FFNs may take for the whole model to be so many times as fast.

        Raises:
            BudgetError: the rest of the model alone takes longer.
        """
        kept = self.kept_seconds or [0.0] * len(self.blocks)
        ffns = sum(kept)
        left = self.model_seconds / speed - (self.model_seconds - ffns)
        fastest = sum(min([k, *(o.seconds or k for o in m)]) for k, m in zip(kept, self.menus, strict=True))
        if left < fastest:
            most = self.model_seconds / (self.model_seconds - ffns + fastest)
            raise BudgetError(
                f"{speed:g}x cannot be reached: with the fastest replacements everywhere it is {most:.2f}x here"
            )
        return left

    def choose(self, *, parameters: float | None = None, seconds: float | None = None) -> Choice:
        """The choice that is predicted to lose least with FFNs of at most that size and time."""
        kept = self.kept_seconds or [0.0] * len(self.blocks)
        entries = [
            [Entry(b.parameters, 0.0, s), *(Entry(o.cost, f * o.predicted_loss, o.seconds or 0.0) for o in m)]
            for b, m, f, s in zip(self.blocks, self.menus, self.factors, kept, strict=True)
        ]
        picked = self.decide(lambda: allocate(entries, parameters=parameters, seconds=seconds))
        return [None if at == 0 else menu[at - 1] for at, menu in zip(picked, self.menus, strict=True)]

    def loss(self, choice: Choice) -> float:
        """The predicted loss of a choice, as if costs added."""
        return sum(f * o.predicted_loss for f, o in zip(self.factors, choice, strict=True) if o is not None)

    def size(self, choice: Choice) -> int:
        """The parameters of the FFNs under a choice, as a budget counts them."""
        return sum(b.parameters if o is None else o.cost for b, o in zip(self.blocks, choice, strict=True))


def within_factor(block: Block, option: Option, ratio: float) -> bool:
    """Whether an option keeps at most 1/ratio of its block's matrix weights."""
    weights = matrix_weights(option.shape, block) if option.price is None else option.price
    return weights * ratio <= block.matrix_weights


def correction(swap: Swap, base: float) -> float:
    """By what factor a block's predictions are to be raised: 1, unless its measured swap is clearly worse."""
    measured = swap.delta - CORRECTED_FROM * swap.delta_error
    loss, predicted = math.log1p(max(measured, 0) / base), math.log1p(swap.predicted_delta / base)
    return max(1.0, loss / max(predicted, 1e-9))


def smallest_within(space: SearchSpace, check: Callable[[Choice], JointCheck]) -> tuple[Choice, list[JointCheck]]:
    """The smallest choice whose measured joint rise is within the limit, by bisection over sizes."""
    span = space.full - space.least
    kept: Choice = [None] * len(space.blocks)
    choices: list[Choice] = [kept]
    for step in range(1, SIZES + 1):
        choice = space.choose(parameters=space.full - span * step / SIZES)
        if choice != choices[-1]:
            choices.append(choice)
    fits, fails, checks = 0, len(choices), []
    while fails - fits > 1:
        middle = (fits + fails) // 2
        checks.append(check(choices[middle]))
        fits, fails = (middle, fails) if checks[-1].within_limit else (fits, middle)
    return choices[fits], checks


def trace_frontier(
    space: SearchSpace,
    rest: int,
    base: float,
    check: Callable[[Choice], JointCheck],
    points: int = 12,
    measured: int = 5,
) -> tuple[list[FrontierPoint], list[JointCheck]]:
    """The size-quality frontier: the least predicted loss at a ladder of sizes, some of them measured jointly.

    Costs do not quite add: each measured point says by what factor the sum was off, and the points between follow it.

    Args:
        space: what can be chosen.
        rest: parameters of the model outside its FFNs.
        base: the original's perplexity at the context of the check.
        check: measures a choice.
        points: how many sizes.
        measured: how many of them to measure.
    """
    import numpy as np

    span = space.full - _smallest_worth_drawing(space)
    choices = [space.choose(parameters=space.full - span * i / points) for i in range(1, points + 1)]
    at = sorted({round(i) for i in np.linspace(0, points - 1, measured)})
    checks = {i: check(choices[i]) for i in at}
    losses = [space.loss(choice) for choice in choices]
    off = [math.log(max(checks[i].perplexity / base, 1 + 1e-6)) / max(losses[i], 1e-9) for i in at]
    factors = np.interp(range(points), at, off)
    found = [FrontierPoint(
        parameters=rest + space.full, share=1.0, predicted_loss=0.0, expected_perplexity=base, measured_perplexity=base
    )]  # fmt: skip
    for i, choice in enumerate(choices):
        size = rest + space.size(choice)
        found.append(
            FrontierPoint(
                parameters=size,
                share=size / (rest + space.full),
                predicted_loss=losses[i],
                expected_perplexity=base + delta_perplexity(base, losses[i] * factors[i]),
                measured_perplexity=checks[i].perplexity if i in checks else None,
            )
        )
    return found, list(checks.values())


def _smallest_worth_drawing(space: SearchSpace) -> float:
    """The size where the predicted loss reaches WORTH_DRAWING: beyond it nobody picks a point."""
    small, large = float(space.least), float(space.full)
    for _ in range(8):
        middle = (small + large) / 2
        if space.loss(space.choose(parameters=middle)) > WORTH_DRAWING:
            small = middle
        else:
            large = middle
    return large
