"""Tensors of each batch: in memory where there is room, then on disk, so that it does not grow with the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Spool:
    """What was found of each batch, under a name.

    Args:
        folder: where it lies on disk.
        room: bytes that may stay in memory.
    """

    def __init__(self, folder: Path, room: int = 0) -> None:
        self._folder, self._room = folder, room
        self._held: dict[str, tuple[Any, int]] = {}  # a value and its bytes

    def put(self, name: str, at: int, value: Any) -> None:
        """Keep a value under a name for one batch."""
        key = f"{name}-{at}"
        _, before = self._held.pop(key, (None, 0))
        self._room += before
        own, size = _own(value)
        if size <= self._room:
            self._held[key] = own, size
            self._room -= size
        else:
            torch.save(own, self._folder / f"{key}.pt")

    def get(self, name: str, at: int) -> Any:
        """What was kept, or none; nobody else has these tensors."""
        key = f"{name}-{at}"
        if key in self._held:
            return _own(self._held[key][0])[0]
        file = self._folder / f"{key}.pt"
        return torch.load(file, weights_only=True) if file.exists() else None


def _own(value: Any) -> tuple[Any, int]:
    """A copy of tensors, or of lists, tuples and mappings of them, and its bytes."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format), value.nbytes
    if isinstance(value, dict):
        parts = {key: _own(each) for key, each in value.items()}
        return {key: own for key, (own, _) in parts.items()}, sum(size for _, size in parts.values())
    if isinstance(value, list | tuple):
        found = [_own(each) for each in value]
        return type(value)([own for own, _ in found]), sum(size for _, size in found)
    return value, 0
