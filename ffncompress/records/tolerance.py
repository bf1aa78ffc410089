"""The rise of perplexity that a plan answers for: what it measured, and by how much another text may differ by chance.

In nats per token, where a ratio of perplexities is a difference. With v the variance of the rise from window to window,
what the gate finds differs from what the plan found for three reasons, and their variances add:

    the plan read few windows           v / the plan's windows
    the gate reads few windows too      v / the gate's windows
    the gate reads another text         v * TEXT_TO_TEXT: however many windows of one text, they are of one text

v is itself an estimate from the plan's windows, so the margin is Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ffncompress.budgets import Limit
from ffncompress.settings import EvalSettings

CHANCE = 0.01  # that a result is not within it by bad luck alone
TEXT_TO_TEXT = 0.2  # as measured: benchmarks/LOG.md
WIDE = 0.05  # of the perplexity: a margin below it is worth knowing, however small the rise
MUCH = 0.5  # of the perplexity: whoever only asked for a size is told
LEAST = 0.001  # a limit is told in tenths of a per cent


@dataclass(frozen=True)
class Rise:
    """By how much a model's mean loss is above another's, in nats per token."""

    nats: float
    error: float  # standard
    windows: int

    @property
    def relative(self) -> float:
        """Of the perplexity."""
        return _expm1(self.nats)


@dataclass(frozen=True)
class Tolerance:
    """What the gate holds a result to, and whether that says much."""

    limit: Limit
    rise: Rise | None = None  # none: nothing was measured, or the limit was asked for

    @property
    def reason(self) -> str:
        """What the limit is made of, in a few words."""
        return f"this rise, and a margin that text of its kind exceeds by chance 1 time in {round(1 / CHANCE)}"

    @property
    def wide(self) -> bool:
        """Whether it allows more than what was measured again, and more than anybody would call small."""
        if self.rise is None:
            return False
        measured = max(self.rise.relative, 0.0)  # a fall is no gain to count on
        return self.limit.value - measured > max(measured, WIDE)

    @property
    def warning(self) -> str:
        """A sentence where the limit is wide, or what was measured is much, otherwise nothing."""
        if self.rise is None:
            return ""
        if not self.wide:
            return "" if self.rise.relative <= MUCH else (
                f"as planned is not as good: {100 * self.rise.relative:+.0f} % is much to lose; a larger size, more "
                "--tokens or `apply --heal 10` keep more, and a plan without --budget loses at most 5 %"
            )  # fmt: skip
        return (
            f"this limit is wide: the plan measured {100 * self.rise.relative:+.1f} % on {self.rise.windows} windows "
            "that differ much, so it says little; plan with a longer text or more --tokens, or give a limit of your own"
        )


def tolerance_of(rise: Rise, context: int) -> Tolerance:
    """The limit that a result as good as the plan's breaks with a chance of CHANCE."""
    gate_windows = max(1, EvalSettings.model_fields["tokens"].default // context)
    nats = rise.nats + margin(rise, gate_windows)
    return Tolerance(Limit(round(max(_expm1(nats), LEAST), 3), relative=True), rise)


def margin(rise: Rise, gate_windows: int) -> float:
    """How far above the plan's rise the gate's may lie, in nats."""
    from scipy.special import stdtrit

    if rise.windows < 2 or not math.isfinite(rise.error):
        return math.inf
    share = 1 / rise.windows + 1 / gate_windows + TEXT_TO_TEXT
    spread = rise.error * math.sqrt(rise.windows)
    return float(stdtrit(rise.windows - 1, 1 - CHANCE)) * spread * math.sqrt(share)


def paired_rise(before: Sequence[float], after: Sequence[float], tokens: Sequence[int]) -> Rise:
    """The rise per token between two models' log-likelihoods of the same pieces, and its error.

    A ratio of sums: long pieces count for more, and the error is that of their differences from the common rise.
    """
    count, total = len(tokens), sum(tokens)
    falls = [b - a for b, a in zip(before, after, strict=True)]
    nats = sum(falls) / total
    if count < 2 or not math.isfinite(nats):
        return Rise(nats, math.inf, count)
    left = sum((fall - nats * n) ** 2 for fall, n in zip(falls, tokens, strict=True))
    return Rise(nats, math.sqrt(left * count / (count - 1)) / total, count)


def _expm1(nats: float) -> float:
    return math.expm1(nats) if nats < 700 else math.inf
