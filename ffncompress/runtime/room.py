"""How much memory a run may take, and what of it goes to what.

Half is for weights: a model that needs more is streamed. A quarter is for moments, which are fitted from with as much
again beside them. What passes through a model at once is made as large as an eighth allows where weights are read anew
for every batch, and is small otherwise.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ffncompress.budgets import parse_size

SHARE = 0.8  # of what is free: others live here too
LEAST = 4  # what is asked for is never taken for less than this part of it
BATCH_TOKENS = 1024  # that a model in memory reads at once
STREAMED_TOKENS = (128, 8192)  # the fewest and the most that a streamed one does
IN_MEMORY, STREAMED = 550_000_000, 240_000_000  # bytes of activations and logits, as measured, by how weights are held
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Memory:
    """What a run may take, in bytes, and whether models are streamed: true, false, or as it comes."""

    limit: int
    stream: bool | None = None

    @classmethod
    def of(cls, asked: str | None, stream: bool | None, device: torch.device) -> Memory:
        """As asked for, less what this process has taken already; or most of what is free."""
        if asked is None:
            return cls(int(SHARE * free_memory(device)), stream)
        whole = parse_size(asked)
        return cls(max(whole - (held_already() if device.type == "cpu" else 0), whole // LEAST), stream)

    @property
    def for_moments(self) -> int:
        """What a group of blocks may fill."""
        return self.limit // 4

    def streams(self, weights: int) -> bool:
        """Whether so many bytes of weights are left on disk."""
        return weights > self.limit // 2 if self.stream is None else self.stream

    def least(self, weights: int, streamed: bool) -> int:
        """What a run takes beside its moments, however little it may: of weights, activations and logits."""
        return STREAMED if streamed else IN_MEMORY + weights

    def tokens(self, width: int) -> int:
        """How many tokens a streamed model reads at once, that fill so many bytes each in a layer: a power of two."""
        fewest, most = STREAMED_TOKENS
        fit = self.limit // 8 // max(1, width)
        return min(most, max(fewest, 1 << max(fit, 1).bit_length() - 1))


def free_memory(device: torch.device) -> int:
    """What is free where a model would be: of the device, or of the machine and the group that this process is in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available(), *_left_in_groups(), _UNLIMITED)


def held_already() -> int:
    """What this process has in memory that is not a view of a file: libraries, mostly."""
    try:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:  # not Linux
        return 0
    return int(found[1]) * 1024 if found else 0


def _available() -> int:
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) * 1024 if found else _UNLIMITED
    except OSError:  # not Linux
        return _physical()


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _UNLIMITED


def _left_in_groups() -> list[int]:
    """What the control groups of this process leave it, of either version; of their files, the kernel can drop most."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup", kinds)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        folder = root / path.strip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                found += _left_in(place, *names)
    return found


def _left_in(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / usage_name).read_text())
        files = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # not there, or "max"
        return []
    return [limit - used + (int(files[1]) if files else 0)] if limit < _UNLIMITED else []


def in_words(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
