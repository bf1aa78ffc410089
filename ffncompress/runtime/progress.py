"""How far a long loop is: told to whoever asked, never printed here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """A progress callback: it wraps a loop, yields the items, and may show how far it is."""

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]:
        """The items, one by one, while it is shown how far it is."""


def silent(items: Sequence[T], _description: str, /) -> Iterable[T]:
    """The progress of a library call: none is shown."""
    return items


class Timed:
    """A progress that also remembers how long the loops of each description took, what runs within them counted there.

    timed = Timed(progress)
    ...
    timed.seconds  # {"reading text": 0.8, ...}, in the order of their first beginning
    """

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._within: list[str] = []  # loops that are under way, the innermost last
        self._since = 0.0

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]:
        """The items, one by one, under the clock."""
        self._count()
        self._within.append(description)
        self.seconds.setdefault(description, 0.0)
        try:
            yield from self._progress(items, description)
        finally:
            self._count()
            self._within.remove(description)  # loops that are zipped may end in another order

    def _count(self) -> None:
        """Give the time since the last change to the innermost loop."""
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now


@contextmanager
def step(progress: Progress, description: str) -> Iterator[None]:
    """A loop of one: for work whose length is not known beforehand."""
    for _ in progress((None,), description):
        yield
