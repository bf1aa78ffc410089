"""What is spooled comes back as it was put, from memory and from disk, and belongs to nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ffncompress.passes.spool import Spool


@pytest.mark.parametrize("room", [0, 300, 10_000])
def test_what_is_put_comes_back(tmp_path: Path, room: int) -> None:
    states = Spool(tmp_path, room)
    assert states.get("a", 0) is None
    for at in range(4):
        wide = torch.full((4, 16), float(at))
        states.put("a", at, ((wide[:, :8], [{"k": wide[0]}]), at))
        wide.zero_()  # a state that somebody goes on with
    for at in range(4):
        (tensor, shared), number = states.get("a", at)
        assert torch.equal(tensor, torch.full((4, 8), float(at)))
        assert torch.equal(shared[0]["k"], torch.full((16,), float(at)))
        assert number == at
        tensor.zero_()
    assert states.get("a", 1)[0][0].sum() == 32
    states.put("a", 1, torch.ones(1))
    assert torch.equal(states.get("a", 1), torch.ones(1))
    assert bool([*tmp_path.iterdir()]) is (room < 1000)


def test_room_is_given_back(tmp_path: Path) -> None:
    states = Spool(tmp_path, 64)
    for value in range(10):
        states.put("a", 0, torch.full((8,), float(value), dtype=torch.float64))
    assert not [*tmp_path.iterdir()]
    assert states.get("a", 0)[0] == 9
