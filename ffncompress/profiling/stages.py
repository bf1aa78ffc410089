"""The stages of a study, and what each of them took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ffncompress.profiling.records import StageTime
from ffncompress.runtime.stages import Facts, Stages
from ffncompress.runtime.workers import Workers
from ffncompress.type_aliases import TypeForm

T = TypeVar("T")


class StudyStages(Stages):
    """Stages that are timed, for the report."""

    def __init__(self, folder: Path, workers: Workers | None = None) -> None:
        super().__init__(folder, workers)
        self.times: list[StageTime] = []

    def timed(self, name: str, facts: Facts, kind: TypeForm, make: Callable[[], T], forward: float | None = None) -> T:
        """As `do`; `forward`: seconds of a forward pass over the same tokens."""
        result = self.do(name, facts, kind, make)
        self.times.append(StageTime(name=name, seconds=self.seconds, forward_seconds=forward))
        return result
