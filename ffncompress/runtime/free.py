"""How much memory is free."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device, on a CPU with what can be swapped; without end where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.findall(r"^(?:MemAvailable|SwapFree):\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:  # not Linux
        found = []
    return 1024 * sum(map(int, found)) if found else float("inf")
