"""Which blocks are replaced, and why: the measured swaps and a limit in, a choice with its reasons out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ffncompress.plans import JointCheck, Swap
from ffncompress.settings import Limit
from ffncompress.swaps import perplexity

CONFIDENCE = 1.645  # standard errors: one-sided 95 %


def joint_check(indices: list[int], base: Tensor, together: Tensor, context: int, limit: Limit) -> JointCheck:
    """Whether blocks replaced together keep within the limit, with CONFIDENCE and not just on average.

    Args:
        indices: the blocks.
        base: the original model's loss on each sequence.
        together: the patched model's.
        context: the length of a sequence.
        limit: how much perplexity may rise.
    """
    before, after = perplexity(base), perplexity(together)
    rises = together - base
    error = after * (rises.std() / len(rises) ** 0.5).item() if len(rises) > 1 else 0.0
    within = limit.allows(before, after + CONFIDENCE * error)
    return JointCheck(
        blocks=sorted(indices), context=context, base_perplexity=before, perplexity=after, delta=after - before,
        delta_error=error, within_limit=within,
    )  # fmt: skip


def choose_blocks(
    measured: list[Swap],
    base: float,
    limit: Limit,
    forced: list[int] | None,
    check: Callable[[list[int]], JointCheck],
) -> tuple[list[int], list[JointCheck]]:
    """The most blocks, least harmful first, whose joint increase is within the limit.

    Dropping the most harmful one by one visits nested sets, so the last that passes is found by bisection.
    """
    if forced is not None:
        return forced, [check(forced)]
    by_harm = sorted(range(len(measured)), key=lambda i: measured[i].delta)
    candidates = [i for i in by_harm if limit.allows(base, base + measured[i].delta)]
    checks: list[JointCheck] = []
    fits, fails = 0, len(candidates) + 1
    while fails - fits > 1:
        # all of them first: often nothing has to be dropped
        middle = (fits + fails) // 2 if checks else len(candidates)
        checks.append(check(candidates[:middle]))
        fits, fails = (middle, fails) if checks[-1].within_limit else (fits, middle)
    return sorted(candidates[:fits]), checks


def explain(measured: list[Swap], base: float, limit: Limit, chosen: list[int], forced: list[int] | None) -> list[str]:
    """Why each block is treated as it is, in a few words."""
    reasons = []
    for i, swap in enumerate(measured):
        alone = f"alone {swap.delta:+.2f} ppl ({100 * swap.delta / base:+.1f} %)"
        if forced is not None:
            reasons.append("replaced: forced by --blocks" if i in chosen else "kept: not among --blocks")
        elif i in chosen:
            reasons.append(f"replaced: {alone}, and within {limit} together with the others")
        elif limit.allows(base, base + swap.delta):
            reasons.append(f"kept: {alone}, but too much together with the others")
        else:
            reasons.append(f"kept: {alone} is over {limit}")
    return reasons


def summarise(measured: list[Swap], base: float, limit: Limit, chosen: list[int], joint: list[JointCheck]) -> str:
    """The plan in a sentence; where nothing is safe, the nearest miss."""
    if chosen:
        final = next(c for c in reversed(joint) if c.blocks == chosen)
        verdict = "within" if final.within_limit else "OVER"
        return f"{len(chosen)} of {len(measured)} blocks replaced: {_costs(final)}, {verdict} {limit}"
    advice = "raise --max-delta, lower --budget, or force it with --blocks"
    alone = [check for check in joint if len(check.blocks) == 1]
    if alone:  # it passed by itself on average, and failed the check
        miss = f"block {alone[-1].blocks[0]}: {_costs(alone[-1])}, which a margin of 95 % does not let pass"
    else:
        nearest = min(range(len(measured)), key=lambda i: measured[i].delta)
        swap = measured[nearest]
        miss = (
            f"block {nearest}: {swap.delta:+.2f} ±{swap.delta_error:.2f} perplexity ({100 * swap.delta / base:+.1f} %)"
        )
    return f"nothing is safe to replace within {limit}; the nearest miss is {miss}; {advice}"


def _costs(check: JointCheck) -> str:
    relative = 100 * check.delta / check.base_perplexity
    return (
        f"{check.delta:+.2f} ±{check.delta_error:.2f} perplexity "
        f"({relative:+.1f} % of {check.base_perplexity:.2f}, context {check.context})"
    )
