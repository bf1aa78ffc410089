"""Healing: it moves only the replacements, reports what it added, and is taken back where it adds nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ffncompress import api, load
from ffncompress.cli import run
from ffncompress.models import find_model, load_model
from ffncompress.passes import heal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def harsh_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks of the embedded model cut down to almost nothing: there is something to heal."""
    directory = tmp_path_factory.mktemp("plans") / "harsh"
    api.plan("demo", directory, tokens=4096, seq_len=64, blocks="1,3,5", budget="60x", refit=False)
    return directory


def test_it_helps_and_leaves_the_rest_alone(harsh_plan: Path, tmp_path: Path, capsys) -> None:
    assert run(["apply", str(harsh_plan), "-o", str(tmp_path / "healed"), "--heal", "0.15"]) == 0
    assert "healed in 0.15 min" in capsys.readouterr().out
    report = json.loads((tmp_path / "healed" / "ffncompress" / "origin.json").read_text())["healing"]
    assert report["original"] < report["healed"] < report["closed_form"]
    assert report["kept"]
    assert report["steps"] > 3
    assert "were distilled for 0.15 minutes" in (tmp_path / "healed" / "README.md").read_text()
    base, healed = load_model(find_model("demo")), load(tmp_path / "healed")
    plain = load(api.compress(harsh_plan, tmp_path / "plain"))
    for name, value in healed.state_dict().items():
        if ".h.1.mlp" in name or ".h.3.mlp" in name or ".h.5.mlp" in name:
            assert not value.numel() or not torch.equal(value, plain.state_dict()[name])
        else:
            assert torch.equal(value, base.state_dict()[name])


def test_what_does_not_help_is_taken_back(harsh_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "RATE", 10.0)
    healed = load(api.compress(harsh_plan, tmp_path / "healed", heal=0.05))
    plain = load(api.compress(harsh_plan, tmp_path / "plain"))
    report = json.loads((tmp_path / "healed" / "ffncompress" / "origin.json").read_text())["healing"]
    assert report["kept"] is False
    for name, value in healed.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert "nothing was trained" in (tmp_path / "healed" / "README.md").read_text()
