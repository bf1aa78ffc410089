"""Finished stages lie on disk, a file each, named by all that they depend on: a killed run goes on from them.

A result is JSON where it is small, or tensors and plain records of them. What is large is written only now and then, so
that saving stays a few percent of the work; a kill costs what was done since. Nothing here is a pickle that could run
code: a working folder may come from a stranger.

Under several processes the first one alone reads and writes, and the others are given what it has read; a loop that was
interrupted is then begun again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ffncompress import __version__
from ffncompress.errors import ArtifactError
from ffncompress.runtime.progress import Progress
from ffncompress.runtime.workers import Workers
from ffncompress.storage.files import write_file
from ffncompress.storage.working import open_working, remove_working
from ffncompress.type_aliases import TypeForm

T = TypeVar("T")
Facts = Mapping[str, object]  # all that a result depends on, by name
PAUSE = 30.0  # seconds between two savings at least
WORTH = 33.0  # and so many times what saving takes: three percent
_SECONDS_PER_BYTE = 2e-9  # of saving, until it was measured


class StageKey(NamedTuple):
    """By what a stage's result is found again."""

    name: str
    facts: Facts


class Stages:
    """The stages of a run in its working folder; without a folder, all work is simply done."""

    def __init__(self, folder: Path | None = None, workers: Workers | None = None) -> None:
        self.folder = folder
        self.facts: Facts = {}  # what every result depends on
        self.records: list[Any] = []  # dataclasses of tensors that results may be made of
        self.mapped = False  # whether tensors stay in their files, where memory is for other things
        self.seconds = 0.0  # that the last stage took, whenever it was
        self._workers = workers
        self._pending: dict[Path, Any] = {}
        self._saved_at, self._pace = time.monotonic(), _SECONDS_PER_BYTE

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        """What is finished is kept when the work ends early, and removed when it is done."""
        if not self._writes:
            return
        if kind is not None:
            self.flush()
        elif self.folder is not None:
            remove_working(self.folder)

    def do(self, name: str, facts: Facts, kind: TypeForm, make: Callable[[], T]) -> T:
        """What a small stage found: read if it was finished before, made and written down if not.

        Args:
            name: what a person calls it.
            facts: all that the result depends on, beside what all results do.
            kind: the type of the result, for pydantic.
            make: the work.
        """
        if self.folder is None:
            return self._of_main(make())
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        file = self._file(name, facts, "json")
        found = self._shared(lambda: _read_json(file, adapter))
        if found is None:
            start = time.perf_counter()
            result = make()
            found = self._shared(lambda: (result, time.perf_counter() - start))
            assert found is not None
            content = f'"seconds": {found[1]}, "result": {adapter.dump_json(found[0]).decode()}'
            self._write(lambda: write_file(file, f'{{"name": {json.dumps(name)}, {content}}}\n'))
        result, self.seconds = found
        return result

    def keep(self, name: str, facts: Facts, make: Callable[[], T]) -> T:
        """The same for tensors, and for records, lists and mappings of them."""
        found: T | None = self.find(name, facts)
        return self.put(name, facts, make()) if found is None else found

    def find(self, name: str, facts: Facts) -> Any:
        """What a stage with tensors found when it was finished, or none."""
        return (
            None
            if self.folder is None
            else self._shared(lambda: self._load(self._file(name, facts, "pt"), mapped=self.mapped))
        )

    def put(self, name: str, facts: Facts, result: T) -> T:
        """Keep what a stage with tensors found; it is written when that is worth it, or at once to stay there."""
        if self._writes:
            self._pending[self._file(name, facts, "pt")] = result
            if self.mapped or self._due(self._pending):
                self.flush()
        if not self.mapped:
            return result
        found: T | None = self.find(name, facts)
        return result if found is None else found

    def flush(self) -> None:
        """Write what is still to be written."""
        waiting, self._pending = self._pending, {}
        start = time.monotonic()
        for file, result in waiting.items():
            self._write(partial(_save, result, file))
        self._timed(start, waiting)

    def resumed(
        self, key: StageKey, items: Sequence[T], sums: Sequence[Tensor], progress: Progress, description: str
    ) -> Iterator[T]:
        """A loop over items that adds to tensors: they are saved on the way, and a killed run goes on from there."""
        if self.folder is None or (self._workers is not None and self._workers.count > 1):
            yield from progress(items, description)
            return
        file = self._file(*key, "pt")
        done = self._take_up(file, sums, len(items))
        for item in progress(items[done:], description):
            yield item
            done += 1
            if self._due(sums):
                start = time.monotonic()
                self._write(lambda: _save({"done": done, "sums": list(sums)}, file))  # noqa: B023
                self._timed(start, sums)

    def note(self, name: str, facts: Facts, state: Any) -> None:
        """Write down how far something has come, where that is worth it by now; `find` gives the last that was."""
        if self._writes and self._due(state):
            start = time.monotonic()
            self._write(lambda: _save(state, self._file(name, facts, "pt")))
            self._timed(start, state)

    @property
    def _writes(self) -> bool:
        return self.folder is not None and (self._workers is None or self._workers.is_main)

    def _shared(self, read: Callable[[], T | None]) -> T | None:
        """What the first process reads, in all of them."""
        return self._of_main(read() if self._writes else None)

    def _of_main(self, found: T) -> T:
        return found if self._workers is None else self._workers.from_main(found)

    def _due(self, tensors: Any) -> bool:
        waited = time.monotonic() - self._saved_at
        return waited >= PAUSE and waited >= WORTH * self._pace * _bytes(tensors)

    def _timed(self, start: float, tensors: Any) -> None:
        self._saved_at = time.monotonic()
        if (size := _bytes(tensors)) > 2**24:  # of less, opening a file takes longest
            self._pace = (self._saved_at - start) / size

    def _write(self, write: Callable[[], object]) -> None:
        """Going on later is a convenience: a disk that is full for it does not end the work."""
        if self._writes and self.folder is not None:
            with suppress(OSError, RuntimeError, ArtifactError):
                open_working(self.folder)
                write()

    def _load(self, file: Path, *, mapped: bool = False) -> Any:
        try:
            with torch.serialization.safe_globals(self.records):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception:  # missing, cut short, or not what we write: then it is made anew
            return None

    def _take_up(self, file: Path, sums: Sequence[Tensor], count: int) -> int:
        """Fill the sums with those that were saved; returns how many items they are of."""
        found = self._load(file, mapped=True)  # or memory would hold them twice
        try:
            done, saved = int(found["done"]), found["sums"]
            alike = [(s.shape, s.dtype) for s in saved] == [(s.shape, s.dtype) for s in sums]
        except (TypeError, KeyError, AttributeError, ValueError):
            return 0
        if not alike or not 0 <= done <= count:
            return 0
        for own, other in zip(sums, saved, strict=True):
            own.copy_(other)
        return done

    def _file(self, name: str, facts: Facts, kind: str) -> Path:
        assert self.folder is not None
        known = {"name": name, **self.environment(), **self.facts, **facts}
        digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return self.folder / f"{digest}.{kind}"

    def environment(self) -> dict[str, object]:
        """What the last digits of any result depend on."""
        import transformers

        return {
            "ffncompress": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "products": torch.get_float32_matmul_precision(),
            "processes": 1 if self._workers is None else self._workers.count,
            "device": None if self._workers is None else str(self._workers.device),
            "batch": None if self._workers is None else self._workers.batch_tokens,
        }


def on_disk(value: T, *records: type) -> T:
    """The same value, its tensors mapped from a file without a name: memory holds what is looked at.

    Args:
        value: tensors, or records, lists and mappings of them.
        records: the classes of records in it.
    """
    handle, name = tempfile.mkstemp(suffix=".pt")
    os.close(handle)
    try:
        torch.save(value, name)
        with torch.serialization.safe_globals([*records]):
            found: T = torch.load(name, weights_only=True, mmap=True)
    finally:
        with suppress(OSError):  # where an open file cannot go, it stays until the system clears up
            os.unlink(name)
    return found


def fingerprint(*tensors: Tensor) -> str:
    """A checksum of tensors, for a stage's facts."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_json(file: Path, adapter: TypeAdapter[T]) -> tuple[T, float] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return adapter.validate_python(content["result"]), float(content["seconds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _save(result: Any, file: Path) -> None:
    scratch = file.with_suffix(".partial")
    try:
        torch.save(result, scratch)
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)


def _bytes(value: Any) -> int:
    """How much there is to write, roughly."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
