"""Why each block is treated as it is, and the plan in a sentence: what a person reads first."""

from __future__ import annotations

from ffncompress.budgets import Limit
from ffncompress.passes.losses import delta_perplexity
from ffncompress.planning.search import Choice, SearchSpace
from ffncompress.records.plan import BlockPlan, JointCheck
from ffncompress.records.task import MEASURES, Task


def explain(space: SearchSpace, choice: Choice, base: float, forced: list[int] | None) -> list[str]:
    """Why each block is treated as it is, in a few words."""
    reasons = []
    for i, option in enumerate(choice):
        menu, factor = space.menus[i], space.factors[i]
        raised = f" (raised {factor:.1f}x by its measured swap)" if factor >= 1.05 else ""
        if option is not None:
            cost = delta_perplexity(base, factor * option.predicted_loss)
            why = "forced by --blocks" if forced is not None else f"predicted {cost:+.2f} ppl alone{raised}"
            reasons.append(f"replaced by {option.describe()}: {why}")
        elif forced is not None and i not in forced:
            reasons.append("kept: not among --blocks")
        elif menu:
            cheapest = min(menu, key=lambda o: o.predicted_loss / max(space.blocks[i].parameters - o.parameters, 1))
            cost = delta_perplexity(base, factor * cheapest.predicted_loss)
            reasons.append(f"kept: {cheapest.describe()} would cost {cost:+.2f} ppl{raised}; others give more for less")
        else:
            reasons.append("kept: no replacement is small enough")
    return reasons


def summarise(
    blocks: list[BlockPlan],
    limit: Limit | None,
    joint: list[JointCheck],
    doubt: str | None = None,
    task: Task = "causal",
) -> str:
    """The plan in a sentence; where nothing is safe, the nearest miss; where a doubt stands, that and no verdict."""
    replaced = [b for b in blocks if b.replace]
    if replaced:
        head = f"{len(replaced)} of {len(blocks)} blocks replaced"
        if not joint:
            return f"{head}: not measured; ffncompress eval will tell"
        final = joint[-1]
        verdict = f", {'within' if final.within_limit else 'OVER'} {limit}" if limit else ""
        verdict = f"; not to be believed: {doubt}" if doubt else verdict
        return f"{head}: {_costs(final, task)}{verdict}"
    advice = "raise --max-delta, give a size with --budget, or force it with --blocks"
    if joint:
        nearest = min(joint, key=lambda check: check.delta)
        count = len(nearest.blocks)
        miss = f"{count} block{'s' * (count > 1)} at {nearest.parameters:,} parameters: {_costs(nearest, task)}"
        miss += ", which a margin of 95 % does not let pass" if limit and limit.allows(
            nearest.base_perplexity, nearest.perplexity
        ) else ""  # fmt: skip
    else:
        block = min(blocks, key=lambda b: b.swap.delta)
        miss = f"block {block.index}: {block.swap.delta:+.2f} ±{block.swap.delta_error:.2f} {MEASURES[task]}"
    within = f" within {limit}" if limit else ""
    return f"nothing is safe to replace{within}; the nearest miss is {miss}; {advice}"


def _costs(check: JointCheck, task: Task) -> str:
    relative = 100 * check.delta / check.base_perplexity
    return (
        f"{check.delta:+.2f} ±{check.delta_error:.2f} {MEASURES[task]} "
        f"({relative:+.1f} % of {check.base_perplexity:.2f}, context {check.context})"
    )
