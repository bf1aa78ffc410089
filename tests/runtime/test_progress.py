"""What is told of long loops while they run."""

import time

from ffncompress.runtime.progress import Timed, silent


def test_time_goes_to_the_innermost_loop_that_runs() -> None:
    timed = Timed(silent)
    for _ in timed(range(2), "outer"):
        time.sleep(0.01)
        for _ in timed(range(3), "inner"):
            time.sleep(0.02)
    assert list(timed.seconds) == ["outer", "inner"]
    assert 0.02 <= timed.seconds["outer"] < 0.06
    assert 0.12 <= timed.seconds["inner"] < 0.3


def test_a_loop_that_is_left_early_is_over() -> None:
    timed = Timed(silent)
    left = iter(timed([1, 2], "left"))
    next(left)
    left.close()
    time.sleep(0.02)
    assert timed.seconds["left"] < 0.02
