"""How far a long loop is: told to whoever asked, never printed here."""

from __future__ import annotations

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


@contextmanager
def step(progress: Progress, description: str) -> Iterator[None]:
    """A loop of one: for work whose length is not known beforehand."""
    for _ in progress((None,), description):
        yield
