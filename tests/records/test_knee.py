"""Where a curve bends: known curves, and those that do not."""

from __future__ import annotations

import math

import pytest

from ffncompress.records.knee import knee_of

SIZES = [100 - 10 * i for i in range(8)]


def test_a_corner_is_found_whatever_the_units() -> None:
    logs = [0.0, 0.02, 0.04, 0.06, 0.08, 0.5, 1.0, 1.5]  # flat down to 60, steep beyond
    curve = [20 * math.exp(loss) for loss in logs]
    assert knee_of(SIZES, curve) == 4
    assert knee_of([1e6 * size + 7 for size in SIZES], [3 * perplexity for perplexity in curve]) == 4
    assert knee_of(SIZES[::-1], curve[::-1]) == 3


def test_a_smooth_curve_bends_where_its_slope_is_the_chords() -> None:
    """Of y = x squared on [0, 1] that is at a half."""
    places = [i / 10 for i in range(11)]
    assert knee_of([1 - x for x in places], [math.exp(x * x) for x in places]) == 5


@pytest.mark.parametrize(
    "perplexities",
    [
        [20 * math.exp(0.1 * i) for i in range(8)],  # a straight line
        [20 * math.exp(math.sqrt(i)) for i in range(8)],  # it bends the other way
        [20 * math.exp((i / 7) ** 1.4) for i in range(8)],  # too little to speak of
        [20.0] * 8,
        [20.0 - i for i in range(8)],  # it falls
        [20.0, 30.0] + [math.nan] * 6,
    ],
)
def test_what_does_not_bend_has_no_knee(perplexities: list[float]) -> None:
    assert knee_of(SIZES, perplexities) is None


def test_no_points_no_knee() -> None:
    assert knee_of([], []) is None
    assert knee_of([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
