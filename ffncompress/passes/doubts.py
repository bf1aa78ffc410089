"""Whether a measurement can be believed at all: a check that watches its own base.

A limit on a rise means something only where the base reads the text. A base that is lost (near the size of its
vocabulary, or far worse with more to read) lets any change pass, and a slimmed model that beats its base shows the
same from the other side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ffncompress.errors import DoubtError
from ffncompress.passes.losses import mean_and_error

WORSE = 1.5  # times the perplexity at the scoring context
SURE = 3.0  # standard errors
OF_VOCABULARY = 0.25
BETTER = 0.01  # of the base's perplexity: a gain below it is far from what a lost base shows

NEXT = (
    "give text of the kind that the model was trained on with --data (short documents as a .jsonl, a row each), "
    "or lower --context"
)


@dataclass(frozen=True)
class MeanLoss:
    """A model's mean loss on some text."""

    context: int
    loss: float
    error: float

    @classmethod
    def of(cls, losses: Tensor, tokens: Tensor, context: int) -> MeanLoss:
        """From the loss of each sequence and the tokens that it is of."""
        return cls(context, *mean_and_error(losses, tokens))

    @property
    def perplexity(self) -> float:
        """Its exponential; capped, so that a ruined model has one too."""
        return math.exp(min(self.loss, 700.0))


def doubt_of_base(scoring: MeanLoss, check: MeanLoss, vocabulary: int) -> str | None:
    """Why the base's own perplexity cannot be what a change is judged by, or none.

    Args:
        scoring: the base at the context that blocks are scored at.
        check: the base at the context of the check.
        vocabulary: how many tokens it knows.
    """
    rise = check.loss - scoring.loss
    if not math.isfinite(check.loss) or check.perplexity > OF_VOCABULARY * vocabulary:
        return (
            f"the base model's perplexity, {check.perplexity:,.1f} at context {check.context}, is more than a quarter "
            f"of its vocabulary of {vocabulary:,}: it does not read this text"
        )
    if rise > math.log(WORSE) and rise > SURE * math.hypot(scoring.error, check.error):
        return (
            f"the base model's perplexity is {scoring.perplexity:,.1f} at context {scoring.context} but "
            f"{check.perplexity:,.1f} at context {check.context}: it does not read this text at that length"
        )
    return None


def doubt_of_slimmed(base: float, delta: float, error: float) -> str | None:
    """Why a fall in perplexity cannot be taken for quality kept, or none.

    Args:
        base: the base model's perplexity.
        delta: what replacing blocks added to it.
        error: the standard error of that.
    """
    if delta < -SURE * error and delta < -BETTER * base:
        return (
            f"the slimmed model beats its base ({delta:+,.2f} ±{error:,.2f} perplexity of {base:,.2f}), "
            "which does not read this text as it was trained to"
        )
    return None


def refuse(doubt: str) -> DoubtError:
    """What stops a plan that is chosen by a limit."""
    return DoubtError(f"{doubt}, and a limit on its change would let anything pass; {NEXT}, or choose with --blocks")
