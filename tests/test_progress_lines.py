"""Progress where nobody watches: lines by a clock that stands still, and those of real commands."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ffncompress.cli import run
from ffncompress.cli.lines import LONGEST_PAUSE, PAUSE, Lines, lasting, ticking
from ffncompress.runtime.progress import step


class Told:
    """Lines, with when they were said, by a clock that only we move."""

    def __init__(self, **options: bool) -> None:
        self.now, self.said = 0.0, list[tuple[float, str]]()
        self.lines = Lines(lambda line: self.said.append((self.now, line)), clock=lambda: self.now, **options)

    def work(self, count: int, description: str, seconds: float, within: Callable[[], None] | None = None) -> None:
        """A stage whose items each take so long, the clock being looked at every second."""
        for _ in self.lines(range(count), description):
            if within:
                within()
            end = self.now + seconds
            while self.now + 1 <= end:
                self.now += 1
                self.lines.tick()
            self.now = end

    @property
    def words(self) -> list[str]:
        return [line for _, line in self.said]


def test_a_stage_says_what_it_was_and_how_long_it_took() -> None:
    told = Told()
    told.work(1, "loading", 4.25)
    told.work(20, "scoring", 0.25)
    assert told.words == ["loading: 4.2 s", "scoring: 20 in 5.0 s"]


def test_a_long_stage_says_how_far_it_is_at_most_every_ten_seconds() -> None:
    told = Told()
    told.work(1200, "scoring", 2)
    far, end = told.said[:-1], told.said[-1]
    assert end == (2400, "scoring: 1200 in 40 min 0 s")
    assert far[0] == (10, "scoring: 4 of 1200 in 10 s, about 49 min 50 s left")
    pauses = [b - a for (a, _), (b, _) in pairwise(far)]
    assert min(pauses) >= PAUSE
    assert max(pauses) <= LONGEST_PAUSE + 1
    assert len(told.said) < 70  # of forty minutes


def test_ten_seconds_are_those_of_all_stages_together() -> None:
    told = Told()
    told.work(4, "outer", 1, within=lambda: told.work(12, "inner", 1))
    assert told.words[0] == "outer: 0 of 4 in 10 s"
    far = [at for at, line in told.said if " of " in line]
    assert all(b - a >= PAUSE for a, b in pairwise(far))
    assert [line for line in told.words if " of " not in line] == [*["inner: 12 in 12 s"] * 4, "outer: 4 in 52 s"]


def test_what_a_step_counts_is_told_rather_than_the_step() -> None:
    told = Told()
    with step(told.lines, "tasks"):
        told.work(28, "answers", 1)
    assert told.words == [
        "answers: 9 of 28 in 10 s, about 21 s left", "answers: 19 of 28 in 20 s, about 9.5 s left",
        "answers: 28 in 28 s", "tasks: 28 s",
    ]  # fmt: skip


def test_short_stages_share_a_line() -> None:
    told = Told()
    for name in ("loading", "reading", "measuring", "measuring"):
        told.work(3, name, 0.1)
    told.work(1, "scoring", 3)
    told.work(2, "drawing", 0.1)
    told.lines.close()
    assert told.words == ["loading, reading, measuring (2 times): 1.2 s", "scoring: 3.0 s", "drawing: 0.2 s"]


def test_short_is_what_is_short_for_the_run() -> None:
    told = Told()
    told.work(1, "long", 1000)
    told.said.clear()
    for _ in range(4):
        told.work(1, "checking", 5)
    told.lines.close()
    assert told.words == ["checking: 5.0 s", "checking (2 times): 10 s", "checking: 5.0 s"]


def test_a_step_that_stands_still_is_heard_of() -> None:
    told = Told()
    told.work(1, "loading", 25)
    assert told.words == ["loading: 10 s so far", "loading: 20 s so far", "loading: 25 s"]


def test_everything_is_told_where_that_was_asked_for() -> None:
    told = Told(everything=True)
    with step(told.lines, "reading"):
        told.work(2, "measuring", 0.1)
    assert told.words == ["reading ...", "measuring: 2 to do", "measuring: 2 in 0.2 s", "reading: 0.2 s"]


def test_what_an_error_cut_short_says_where_it_was() -> None:
    told = Told()
    loop = iter(told.lines(range(30), "trying"))
    for _ in range(3):
        next(loop)
        told.now += 2
    told.lines.close()
    del loop  # is closed only now, as that of an error is with its traceback
    told.lines.tick()
    assert told.words == ["trying: 2 of 30 in 6.0 s"]


def test_a_clock_of_its_own_ends_with_it() -> None:
    said: list[str] = []
    now = iter(range(0, 10_000, 20))
    with ticking(Lines(said.append, clock=lambda: float(next(now))), every=0.01) as lines, step(lines, "waiting"):
        end = time.monotonic() + 5
        while not said and time.monotonic() < end:
            time.sleep(0.01)
    assert re.fullmatch(r"waiting: .* so far", said[0])
    count = len(said)
    time.sleep(0.05)
    assert len(said) == count


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_time_as_a_person_says_it(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


PLAN = ["plan", "demo", "--tokens", "1024", "--seq-len", "64", "--blocks", "1", "--no-refit", "--json", "-"]


@pytest.mark.slow
def test_a_piped_plan_says_its_stages_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services do
    told: dict[str, list[str]] = {}
    for option in ("", "--quiet", "--verbose"):
        assert run([*PLAN, "-o", f"plan{option}", *filter(None, [option])]) == 0
        out, error = capsys.readouterr()
        json.loads(out)
        told[option] = [line for line in error.splitlines() if re.search(r": (\d+ in )?[\d.]+ s$|\.\.\.$|to do$", line)]
    assert 0 < len(told[""]) < len(told["--verbose"])
    assert {"loading the model", "scoring blocks"} <= set(re.findall(r"[a-z][a-z ]+[a-z]", "\n".join(told[""])))
    assert "\x1b" not in "".join(told[""])
    assert not told["--quiet"]
    assert "loading the model ..." in told["--verbose"]
    assert any(re.fullmatch(r"scoring blocks: \d+ in [\d.]+ s", line) for line in told["--verbose"])


@pytest.mark.parametrize("command", ["plan", "profile", "apply", "eval", "run", "demo", "export"])
def test_what_runs_long_can_be_asked_to_be_quiet(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--quiet" in out
    assert "--verbose" in out


def test_quiet_keeps_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "./no-such-model", "--quiet"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
