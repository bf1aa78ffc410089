"""Finished stages lie on disk, a file each, named by all that they depend on: a killed run goes on from them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ffncompress import __version__
from ffncompress.profiling.records import StageTime
from ffncompress.staging import write_file
from ffncompress.working import open_working

T = TypeVar("T")


class Stages:
    """The stages of a study in its working folder, and what each of them took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times: list[StageTime] = []
        open_working(folder)

    def do(self, name: str, facts: dict[str, Any], kind: Any, make: Callable[[], T], forward: float | None = None) -> T:
        """What a stage found: read if it was finished before, made and written down if not.

        Args:
            name: what a person calls it.
            facts: everything that the result depends on.
            kind: the type of the result, for pydantic.
            make: the work.
            forward: seconds of a forward pass over the same tokens.
        """
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        file = self._file(name, facts)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            result = adapter.validate_python(content["result"])
            seconds = float(content["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            start = time.perf_counter()
            result = make()
            seconds = time.perf_counter() - start
            dumped = adapter.dump_json(result).decode()
            write_file(file, f'{{"name": {json.dumps(name)}, "seconds": {seconds}, "result": {dumped}}}\n')
        self.times.append(StageTime(name=name, seconds=seconds, forward_seconds=forward))
        return result

    def tensors(self, name: str, facts: dict[str, Any], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors that a later stage needs; kept in the working folder only."""
        from safetensors.torch import load_file, save_file

        file = self._file(name, facts).with_suffix(".safetensors")
        if file.is_file():
            return load_file(file)
        made = make()
        scratch = file.with_suffix(".partial")
        save_file({key: tensor.contiguous() for key, tensor in made.items()}, scratch)
        scratch.replace(file)
        return made

    def forget_tensors(self) -> None:
        """What only later stages needed is no part of a report."""
        for file in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.partial")):
            file.unlink()

    def _file(self, name: str, facts: dict[str, Any]) -> Path:
        known = {"name": name, "ffncompress": __version__, "torch": torch.__version__, **facts}
        digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return self.folder / f"{digest}.json"
