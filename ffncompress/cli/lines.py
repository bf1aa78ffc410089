"""Progress where nobody watches, piped or in CI: a line when a stage ends, and now and then how far a long one is.

    loading the model, reading text, measuring the base: 0.9 s
    scoring blocks: 120 of 480 in 30 s, about 1 min 30 s left
    scoring blocks: 480 in 2 min 1 s

Somebody reads this later, from top to bottom. What was too short to matter is told together, in one line; and "too
short" grows with the run, so a run of hours has no more lines than fit a head.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ffncompress.runtime.progress import Progress, silent

T = TypeVar("T")
LOUDNESS = "ffncompress.loudness"  # of a command, in its context: "quiet", "verbose", or nothing
PAUSE = 10.0  # seconds between two lines at least that say how far a stage is
PACE = 0.1  # of the time that the stage has taken: a long one is told of less often
LONGEST_PAUSE = 60.0  # and at most: a CI service ends a job that has said nothing for some minutes
SHORT = 1.0  # seconds that a stage takes at least to have a line of its own
SHARE = 0.01  # and of the run so far


@dataclass(eq=False)
class _Stage:
    """A loop that is under way."""

    description: str
    count: int
    begun: float
    done: int = 0

    def ended(self, now: float) -> str:
        """What there was to do, and how long it took."""
        left = f" of {self.count}" if self.done < self.count else ""
        items = f"{self.done}{left} in " if self.count != 1 else ""
        return f"{self.description}: {items}{lasting(now - self.begun)}"

    def so_far(self, now: float) -> str:
        """How far it is, and what is left if it goes on like that."""
        taken = now - self.begun
        if self.count == 1:
            return f"{self.description}: {lasting(taken)} so far"
        told = f"{self.description}: {self.done} of {self.count} in {lasting(taken)}"
        return f"{told}, about {lasting(taken / self.done * (self.count - self.done))} left" if self.done else told


class Lines:
    """A progress that says lines.

    lines = Lines(print)
    for item in lines(items, "scoring blocks"): ...
    lines.tick()  # now and then, from anywhere: says how far it is, if it is time for that
    lines.close()
    """

    def __init__(
        self, say: Callable[[str], None], *, shown: Progress = silent, everything: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Lines to whoever says them.

        Args:
            say: takes a line.
            shown: another progress, which shows the same loops.
            everything: a line of its own for every stage, and one when it begins.
            clock: the seconds.
        """
        self._say, self._shown, self._everything, self._clock = say, shown, everything, clock
        self._running: list[_Stage] = []
        self._short: Counter[str] = Counter()
        self._short_took = 0.0
        self._begun = self._told = clock()
        self._lock = threading.RLock()
        self._closed = False

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]:
        """The items, one by one, counted."""
        stage = _Stage(description, len(items), self._clock())
        with self._lock:
            self._running.append(stage)
            if self._everything:
                self._tell(f"{description} ..." if stage.count == 1 else f"{description}: {stage.count} to do")
        try:
            for item in self._shown(items, description):
                yield item
                stage.done += 1
        finally:
            self._end(stage)

    def tick(self) -> None:
        """Say how far it is, unless something was said a moment ago."""
        now = self._clock()
        with self._lock:
            if self._closed or now - self._told < PAUSE:
                return
            # what counts several items says more than the step that it is part of
            stage = next((s for s in self._running if s.count > 1), self._running[0] if self._running else None)
            if stage is None or now - stage.begun < PAUSE:
                self._tell_short()
            elif now - self._told >= min(LONGEST_PAUSE, (now - stage.begun) * PACE):
                self._tell(stage.so_far(now))

    def close(self) -> None:
        """Say what is still to be said, also of what an error cut short."""
        with self._lock:
            self._tell_short()
            for stage in [stage for stage in self._running if self._clock() - stage.begun >= SHORT]:
                self._tell(stage.ended(self._clock()))
            self._closed = True

    def _end(self, stage: _Stage) -> None:
        now = self._clock()
        taken = now - stage.begun
        with self._lock:
            self._running.remove(stage)  # loops that are zipped may end in another order
            if self._closed:
                return
            if self._everything or taken >= max(SHORT, SHARE * (now - self._begun)):
                self._tell_short()
                self._tell(stage.ended(now))
            elif not self._running:  # the time of what runs within another is that one's
                self._short[stage.description] += 1
                self._short_took += taken

    def _tell_short(self) -> None:
        if self._short:
            names = (name if n == 1 else f"{name} ({n} times)" for name, n in self._short.items())
            line = f"{', '.join(names)}: {lasting(self._short_took)}"
            self._short, self._short_took = Counter(), 0.0
            self._tell(line)

    def _tell(self, line: str) -> None:
        self._told = self._clock()
        self._say(line)


@contextmanager
def ticking(lines: Lines, every: float = 1.0) -> Iterator[Lines]:
    """Lines with a clock of their own: what takes long within a single item is heard of too."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(every):
            lines.tick()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield lines
    finally:
        over.set()
        ticker.join()
        lines.close()


def lasting(seconds: float) -> str:
    """As a person says it: 0.4 s, 42 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
