"""What every long computation is given: one object instead of four that travel together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from ffncompress.runtime.progress import Progress, silent
from ffncompress.runtime.stages import StageKey, Stages
from ffncompress.runtime.workers import Workers

T = TypeVar("T")


class Run:
    """The processes that share the work, whom to tell how far it is, and where its finished stages lie.

    run = Run(Workers("cpu"))
    moments = collect_moments(model, blocks, fit_windows, held_out_windows, run)
    """

    def __init__(
        self,
        workers: Workers,
        progress: Progress = silent,
        stages: Stages | None = None,
        moment_bytes: int | None = None,
    ) -> None:
        self.workers, self.progress = workers, progress
        self.stages = stages or Stages(workers=workers)  # without a folder: nothing is kept
        self.moment_bytes = moment_bytes or workers.memory.for_moments  # what moments may fill at once

    def loop(
        self, items: Sequence[T], sums: Sequence[Tensor], description: str, key: StageKey | None = None
    ) -> Iterable[T]:
        """The items of a loop that adds to tensors; with a key, those that a killed run had not added yet."""
        if key is None:
            return self.progress(items, description)
        return self.stages.resumed(key, items, sums, self.progress, description)
