"""What is done with each block, and why: the menus and a budget in, a choice with its reasons out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ffncompress.allocation import Entry, allocate
from ffncompress.errors import BudgetError
from ffncompress.forecast import delta_perplexity
from ffncompress.models import Block
from ffncompress.modules import matrix_weights
from ffncompress.plans import BlockPlan, FrontierPoint, JointCheck, Option, Swap
from ffncompress.scoring import shape_of
from ffncompress.settings import Limit
from ffncompress.swaps import mean_and_error, perplexity

CONFIDENCE = 1.645  # standard errors: one-sided 95 %
SURPRISE = 2.0  # standard errors above the prediction before a measured swap is believed instead
WORTH_DRAWING = 0.7  # nats: twice the perplexity, as if losses added
SIZES = 64  # steps of the search for the smallest model within a limit

Choice = list[Option | None]  # of every block; none: it is kept


@dataclass(frozen=True)
class Market:
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
        return sum(
            min([b.parameters, *(o.parameters for o in m)]) for b, m in zip(self.blocks, self.menus, strict=True)
        )

    @property
    def full(self) -> int:
        return sum(block.parameters for block in self.blocks)

    def restricted(self, ratio: float | None, only: Sequence[int] | None = None) -> Market:
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
                f"{speed:g}x cannot be reached: with the fastest stand-ins everywhere it is {most:.2f}x here"
            )
        return left

    def choose(self, *, parameters: float | None = None, seconds: float | None = None) -> Choice:
        """The choice that is predicted to lose least with FFNs of at most that size and time."""
        kept = self.kept_seconds or [0.0] * len(self.blocks)
        entries = [
            [Entry(b.parameters, 0.0, s), *(Entry(o.parameters, f * o.predicted_loss, o.seconds or 0.0) for o in m)]
            for b, m, f, s in zip(self.blocks, self.menus, self.factors, kept, strict=True)
        ]
        picked = self.decide(lambda: allocate(entries, parameters=parameters, seconds=seconds))
        return [None if at == 0 else menu[at - 1] for at, menu in zip(picked, self.menus, strict=True)]

    def loss(self, choice: Choice) -> float:
        """The predicted loss of a choice, as if costs added."""
        return sum(f * o.predicted_loss for f, o in zip(self.factors, choice, strict=True) if o is not None)

    def size(self, choice: Choice) -> int:
        return sum(b.parameters if o is None else o.parameters for b, o in zip(self.blocks, choice, strict=True))


def within_factor(block: Block, option: Option, ratio: float) -> bool:
    return matrix_weights(shape_of(option), block) * ratio <= block.matrix_weights


def surprise(swap: Swap, base: float) -> float:
    """By what factor a block's predictions are to be raised: 1, unless its measured swap is clearly worse."""
    measured = swap.delta - SURPRISE * swap.delta_error
    loss, predicted = math.log1p(max(measured, 0) / base), math.log1p(swap.predicted_delta / base)
    return max(1.0, loss / max(predicted, 1e-9))


def joint_check(
    choice: Choice,
    parameters: int,
    base: Tensor,
    together: Tensor,
    context: int,
    limit: Limit | None,
    refitted: bool,
    tokens: Tensor | None = None,
) -> JointCheck:
    """Whether blocks replaced together keep within the limit, with CONFIDENCE and not just on average.

    Args:
        choice: what is done with each block.
        parameters: of the whole model.
        base: the original model's loss on each sequence.
        together: the patched model's.
        context: the length of the longest sequence.
        limit: how much perplexity may rise.
        refitted: whether the stand-ins were fitted on the slimmed model's own inputs.
        tokens: that were scored of each sequence; none: the same number of each.
    """
    before, after = perplexity(base, tokens), perplexity(together, tokens)
    error = after * mean_and_error(together - base, tokens)[1]
    within = None if limit is None else limit.allows(before, after + CONFIDENCE * error)
    return JointCheck(
        blocks=[i for i, option in enumerate(choice) if option is not None], parameters=parameters, refitted=refitted,
        context=context, base_perplexity=before, perplexity=after, delta=after - before, delta_error=error,
        within_limit=within, windows=len(base),
    )  # fmt: skip


def smallest_within(market: Market, check: Callable[[Choice], JointCheck]) -> tuple[Choice, list[JointCheck]]:
    """The smallest choice whose measured joint rise is within the limit, by bisection over sizes."""
    span = market.full - market.least
    kept: Choice = [None] * len(market.blocks)
    choices: list[Choice] = [kept]
    for step in range(1, SIZES + 1):
        choice = market.choose(parameters=market.full - span * step / SIZES)
        if choice != choices[-1]:
            choices.append(choice)
    fits, fails, checks = 0, len(choices), []
    while fails - fits > 1:
        middle = (fits + fails) // 2
        checks.append(check(choices[middle]))
        fits, fails = (middle, fails) if checks[-1].within_limit else (fits, middle)
    return choices[fits], checks


def draw_line(
    market: Market, rest: int, base: float, check: Callable[[Choice], JointCheck], points: int = 12, measured: int = 5
) -> tuple[list[FrontierPoint], list[JointCheck]]:
    """The size-quality frontier: the least predicted loss at a ladder of sizes, some of them measured jointly.

    Costs do not quite add: each measured point says by what factor the sum was off, and the points between follow it.

    Args:
        market: what can be chosen.
        rest: parameters of the model outside its FFNs.
        base: the original's perplexity at the context of the check.
        check: measures a choice.
        points: how many sizes.
        measured: how many of them to measure.
    """
    import numpy as np

    span = market.full - _smallest_worth_drawing(market)
    choices = [market.choose(parameters=market.full - span * i / points) for i in range(1, points + 1)]
    at = sorted({round(i) for i in np.linspace(0, points - 1, measured)})
    checks = {i: check(choices[i]) for i in at}
    losses = [market.loss(choice) for choice in choices]
    off = [math.log(max(checks[i].perplexity / base, 1 + 1e-6)) / max(losses[i], 1e-9) for i in at]
    factors = np.interp(range(points), at, off)
    found = [FrontierPoint(
        parameters=rest + market.full, share=1.0, predicted_loss=0.0, expected_perplexity=base, measured_perplexity=base
    )]  # fmt: skip
    for i, choice in enumerate(choices):
        size = rest + market.size(choice)
        found.append(
            FrontierPoint(
                parameters=size,
                share=size / (rest + market.full),
                predicted_loss=losses[i],
                expected_perplexity=base + delta_perplexity(base, losses[i] * factors[i]),
                measured_perplexity=checks[i].perplexity if i in checks else None,
            )
        )
    return found, list(checks.values())


def _smallest_worth_drawing(market: Market) -> float:
    """The size where the predicted loss reaches WORTH_DRAWING: beyond it nobody picks a point."""
    small, large = float(market.least), float(market.full)
    for _ in range(8):
        middle = (small + large) / 2
        if market.loss(market.choose(parameters=middle)) > WORTH_DRAWING:
            small = middle
        else:
            large = middle
    return large


def explain(market: Market, choice: Choice, base: float, forced: list[int] | None) -> list[str]:
    """Why each block is treated as it is, in a few words."""
    reasons = []
    for i, option in enumerate(choice):
        menu, factor = market.menus[i], market.factors[i]
        raised = f" (raised {factor:.1f}x by its measured swap)" if factor >= 1.05 else ""
        if option is not None:
            cost = delta_perplexity(base, factor * option.predicted_loss)
            why = "forced by --blocks" if forced is not None else f"predicted {cost:+.2f} ppl alone{raised}"
            reasons.append(f"replaced by {option.describe()}: {why}")
        elif forced is not None and i not in forced:
            reasons.append("kept: not among --blocks")
        elif menu:
            cheapest = min(menu, key=lambda o: o.predicted_loss / max(market.blocks[i].parameters - o.parameters, 1))
            cost = delta_perplexity(base, factor * cheapest.predicted_loss)
            reasons.append(f"kept: {cheapest.describe()} would cost {cost:+.2f} ppl{raised}; others give more for less")
        else:
            reasons.append("kept: no stand-in is small enough")
    return reasons


def summarise(blocks: list[BlockPlan], limit: Limit | None, joint: list[JointCheck], doubt: str | None = None) -> str:
    """The plan in a sentence; where nothing is safe, the nearest miss; where a doubt stands, that and no verdict."""
    replaced = [b for b in blocks if b.replace]
    if replaced:
        head = f"{len(replaced)} of {len(blocks)} blocks replaced"
        if not joint:
            return f"{head}: not measured; ffncompress eval will tell"
        final = joint[-1]
        verdict = f", {'within' if final.within_limit else 'OVER'} {limit}" if limit else ""
        verdict = f"; not to be believed: {doubt}" if doubt else verdict
        return f"{head}: {_costs(final)}{verdict}"
    advice = "raise --max-delta, give a size with --budget, or force it with --blocks"
    if joint:
        nearest = min(joint, key=lambda check: check.delta)
        count = len(nearest.blocks)
        miss = f"{count} block{'s' * (count > 1)} at {nearest.parameters:,} parameters: {_costs(nearest)}"
        miss += ", which a margin of 95 % does not let pass" if limit and limit.allows(
            nearest.base_perplexity, nearest.perplexity
        ) else ""  # fmt: skip
    else:
        block = min(blocks, key=lambda b: b.swap.delta)
        miss = f"block {block.index}: {block.swap.delta:+.2f} ±{block.swap.delta_error:.2f} perplexity"
    return f"nothing is safe to replace within {limit}; the nearest miss is {miss}; {advice}"


def _costs(check: JointCheck) -> str:
    relative = 100 * check.delta / check.base_perplexity
    return (
        f"{check.delta:+.2f} ±{check.delta_error:.2f} perplexity "
        f"({relative:+.1f} % of {check.base_perplexity:.2f}, context {check.context})"
    )
