"""Where memory runs out: the work is done in halves, and the run goes on.

    halving = Halving()
    for at, batch in batches:
        for part, losses in halving(lambda part, ids: (part, losses_of(ids)), at, batch):
            found[part] = losses

What memory runs out on is thrown away and done again, so **work computes first and adds last**: it returns what it
found, or it adds that to its sums in steps that ask for no memory (`sum_ += part`) after the last step that does.
Work that adds on the way, as forward hooks do, would be counted twice: `AddedOnce` knows what was added, and lets
through what was not.

Processes that share the work may halve each for itself, as long as the work does not meet the others.

What cannot be caught is a kernel that ends a process for the memory that it promised; on Linux, a limit on the process
(a container's is none, `ulimit -v` or -d is) makes it an error, as a GPU does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ffncompress.errors import FfncompressError

R = TypeVar("R")
# CUDA, cuBLAS, MPS; torch's allocator on a CPU, on Linux and on Windows; C++'s own
_WORDS = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory", "bad_alloc", "bad allocation")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch has a kind of its own for GPUs alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def shrinking(work: Callable[[int], R], size: int) -> tuple[R, int]:
    """What work makes of a size, or, where memory runs out, of half of it; and the size.

    Raises:
        FfncompressError: a single one does not fit.
    """
    while True:
        try:
            return work(size), size
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            if size <= 1:
                raise _too_little() from error
        # only behind the `except`, for till then the error holds all that the work had made
        _free()
        size = (size + 1) // 2


class Halving:
    """Does work on a batch, and where memory runs out, on its halves, down to single windows.

    It remembers what fitted, so one for a whole loop fails a few times and not in every batch.
    """

    def __init__(self) -> None:
        self.most: int | None = None  # windows that are tried together; none: whatever comes

    def __call__(self, work: Callable[..., R], *batch: Tensor | Sequence[Any]) -> list[R]:
        """What work makes of each part of a batch, in order; of the whole, if it fits.

        Args:
            work: is given the same rows of everything in the batch; it computes first and adds last, see above.
            batch: tensors and lists with a row for each window.

        Raises:
            FfncompressError: a single window does not fit.
        """
        found, at, count = [], 0, len(batch[0])
        while at < count:
            size = min(count - at, self.most or count)
            made, fitted = shrinking(lambda n: work(*(rows[at : at + n] for rows in batch)), size)  # noqa: B023
            if fitted < size:
                self.most = fitted
            found.append(made)
            at += fitted
        return found


class AddedOnce:
    """What has been added of the batch under way, place by place, by work that may be broken off and done in halves.

    once.begin()                                  # a batch
    with once.part(first, count):                 # some of its windows, in order
        with once.adding(place, rows, total) as new:  # the rows of those that this place has not seen yet
            total += ...                          # and then other sums
    """

    def __init__(self, places: int) -> None:
        self._done = [0] * places  # windows of the batch
        self._first = self._count = 0

    def begin(self) -> None:
        """A batch of which nothing was added."""
        self._done = [0] * len(self._done)

    @contextmanager
    def part(self, first: int, count: int) -> Iterator[None]:
        """Within, windows from `first` on pass by."""
        self._first, self._count = first, count
        yield

    @contextmanager
    def adding(self, place: int, rows: int, total: Tensor) -> Iterator[slice]:
        """Within, these rows of the part are added, to `total` before all other sums.

        Raises:
            FfncompressError: memory ran out after that, and what was added cannot be told.
        """
        each = rows // self._count
        seen = min(max(self._done[place] - self._first, 0), self._count)
        before = total.clone()
        try:
            yield slice(seen * each, None)
        except (RuntimeError, MemoryError) as error:
            if ran_out(error) and not torch.equal(before, total):
                raise _too_little("while sums were added to") from error
            raise
        self._done[place] = max(self._done[place], self._first + self._count)


def _free() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _too_little(when: str = "on a single window") -> FfncompressError:
    return FfncompressError(
        f"memory ran out {when}; shorten it with --seq-len or --context, halve the weights with "
        "--dtype bfloat16, or take another --device"
    )
