"""Where a curve of size against perplexity bends: before it parameters go almost for nothing, behind it they cost.

The straight line from one end of the curve to the other is what a model would pay for whose every parameter is worth
the same. The knee is the point that lies farthest below that line, in log perplexity, where equal factors are equal
steps. Which point that is does not depend on the units of either axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BENDS = 0.2  # of the whole rise: a parabola leaves its chord by 0.25; what bends less has no point to speak of


def knee_of(sizes: Sequence[float], perplexities: Sequence[float]) -> int | None:
    """The place of the knee in a curve; none where there is none to see.

    Args:
        sizes: of each point, in any unit.
        perplexities: of each point, above zero.
    """
    points = [
        (i, size, math.log(perplexity))
        for i, (size, perplexity) in enumerate(zip(sizes, perplexities, strict=True))
        if math.isfinite(size) and 0 < perplexity < math.inf
    ]
    if len(points) < 3:
        return None
    (_, small, high), (_, large, low) = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    if large == small or high <= low:
        return None
    below = {i: high + (low - high) * (size - small) / (large - small) - loss for i, size, loss in points}
    farthest = max(below, key=lambda i: below[i])
    return farthest if below[farthest] >= BENDS * (high - low) else None
