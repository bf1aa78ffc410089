"""Tensors of each batch, on disk, so that memory does not grow with the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Spool:
    """What was found of each batch, under a name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, at: int, value: Any) -> None:
        """Keep a value under a name for one batch."""
        torch.save(value, self._folder / f"{name}-{at}.pt")

    def get(self, name: str, at: int) -> Any:
        """What was kept, or none."""
        file = self._folder / f"{name}-{at}.pt"
        return torch.load(file, weights_only=True) if file.exists() else None
