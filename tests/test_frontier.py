"""The benchmark against peers: its tables say what its results hold, and its search stays within the size."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from library import tyr as search
from library.frontier_tables import for_the_log, for_the_readme

from ffncompress.models import count_parameters, find_blocks

RESULTS = {
    "smollm2 | about": {"parameters": 134.5e6, "sizes": {"0.2500": 114.6e6}, "context": 512, "tokens": 8192},
    "smollm2 | dense model | 0.0000": {"parameters": 134.5e6, "in domain": 36.0, "web": 46.5, "kl": 0.0},
    "smollm2 | ours | 0.2500": {"parameters": 114.6e6, "in domain": 44.0, "web": 70.0, "kl": 0.25, "kl error": 0.01},
    "smollm2 | ours, seed 1 | 0.2500": {"parameters": 114.6e6, "in domain": 46.0, "web": 72.0},
    "smollm2 | neurons | 0.2500": {"parameters": 114.6e6, "in domain": 56.0, "web": 99.0},
    "smollm2 | FLAP | 0.2500": {"parameters": 114.6e6, "in domain": 55.0, "web": 69.0},
    "smollm2 | magnitude | 0.2500": {"parameters": 114.6e6, "in domain": 2e6, "web": 1e6},
    "smollm2 | Týr | 0.2500": {"parameters": 114.6e6, "in domain": 50.0, "web": 80.0},
}  # fmt: skip


def test_the_log_shows_all_and_the_readme_ours_and_the_peers() -> None:
    log, readme = for_the_log(RESULTS), for_the_readme(RESULTS)
    assert "| ours | **44.00** / 70.00 |" in log
    assert "| FLAP | 55.00 / **69.00** |" in log
    assert "| neurons | 56.00 / 99.00 |" in log
    assert "- ours at 114.6 M, 2 seeds: 45.00 ± 1.41 / 71.00 ± 1.41" in log
    assert "| ours | **0.250 ± 0.010** |" in log
    assert "neurons" not in readme
    rows = [line.split(" | ")[0] for line in readme.splitlines() if line.startswith("| ")]
    assert rows[:6] == ["| method", "| ---", "| ours", "| Týr", "| FLAP", "| magnitude"]


@pytest.mark.slow
def test_a_search_keeps_the_size_and_is_no_worse_than_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").eval()
    blocks = find_blocks(model)
    size = count_parameters(model) - sum(block.parameters for block in blocks) // 4
    ids = torch.randint(1, 3000, (8, 32), generator=torch.Generator().manual_seed(0))
    found = search.tyr(model, size, ids[:6], ids[6:])
    widths = [block.d_inner for block in find_blocks(found)]
    assert count_parameters(found) == size
    assert sum(widths) == 3 * blocks[0].d_inner * 3 // 4
    monkeypatch.setattr(search, "ROUNDS", 1)
    monkeypatch.setattr(search, "GENERATIONS", 0)
    alike = search._Likeness(model, ids[6:])
    assert alike(model, 64) == pytest.approx(0, abs=1e-6)
    assert alike(found, 64) <= alike(search.tyr(model, size, ids[:6], ids[6:]), 64)
