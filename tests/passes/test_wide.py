"""FFNs whose neurons are divided into runs: refitted nearly as whole ones are, planned from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from ffncompress import api
from ffncompress.errors import BudgetError
from ffncompress.models import Block, ffn_of, find_blocks, installed
from ffncompress.models.families import GATED
from ffncompress.passes import calibration
from ffncompress.passes.calibration import check_memory, collect_moments
from ffncompress.passes.refit import refit
from ffncompress.planning.planner import make_plan
from ffncompress.planning.saving import save_plan
from ffncompress.records.plan import Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import fit_some
from ffncompress.replacement.moments import runs_within
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings

MOMENT_BYTES = 8 * 2**30

WHOLE = Run(Workers("cpu"), moment_bytes=MOMENT_BYTES)


def by_runs(block: Block) -> Run:
    run = Run(Workers("cpu"), moment_bytes=16 * block.d_inner**2 // 3 * 2)
    assert runs_within(block, run.moment_bytes) == 3
    return run


def windows(count: int = 80, length: int = 16) -> torch.Tensor:
    return torch.randint(1, 3000, (count, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def distance(model, modules) -> float:
    """Of the last hidden states from the original's."""
    blocks, ids = find_blocks(model), windows()
    original = model.base_model(ids).last_hidden_state
    with installed(model, {blocks[i].path: module for i, module in modules.items()}):
        return (model.base_model(ids).last_hidden_state - original).square().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma3_text"])
def test_the_refit_comes_close_to_that_of_a_whole_gram_matrix(family: str) -> None:
    model = tiny_model(family)
    ids, blocks = windows(), find_blocks(model)
    shapes = {i: Shape("neurons", block.d_inner // 2) for i, block in enumerate(blocks)}
    run = by_runs(blocks[0])
    surveyed = {}
    for block, own in zip(blocks, collect_moments(model, blocks, ids, ids, run), strict=True):
        shape, ffn = shapes[block.index], ffn_of(model, block)
        fit = fit_some(block, own, ffn, [name := f"neurons {shape.width}"])[name]
        surveyed[block.index] = build_replacement(block, ffn, shape, fit)

    whole, ours, plain = (
        refit(model, blocks, shapes, ids, ids, each, undo_drift=undo)
        for each, undo in ((WHOLE, True), (run, True), (run, False))
    )
    far = {name: distance(model, each) for name, each in zip("wops", (whole, ours, plain, surveyed), strict=True)}
    assert far["o"] < 1.15 * far["w"]
    assert far["o"] < far["p"] < far["s"]


@pytest.mark.slow
def test_the_matrices_that_lead_in_are_refitted_too() -> None:
    model = tiny_model("llama")
    blocks = find_blocks(model)
    shapes = {i: Shape("neurons", 48) for i in range(3)}
    out, both = (
        distance(model, refit(model, blocks, shapes, windows(), windows(), by_runs(blocks[0]), inner=inner))
        for inner in (False, True)
    )
    assert both < out


@pytest.mark.slow
def test_a_plan_from_end_to_end(tiny_folder, tmp_path: Path) -> None:
    """And another from its moments, without text."""
    settings = PlanSettings(data=["stories"], tokens=2048, budget="-5%", keep_moments=True)
    plan, tensors, moments = make_plan(str(tiny_folder("llama")), settings, Run(Workers("cpu"), moment_bytes=98_304))
    assert plan.final_check is not None
    kinds = {option.kind for block in plan.blocks for option in block.options}
    assert kinds == {"neurons", "dense", "low-rank", "constant"}  # a bypass needs products of h and x
    save_plan(plan, tmp_path / "plan", tensors, moments)
    again = api.plan(str(tmp_path / "plan"), tmp_path / "again", budget="-8%")
    assert any(block.choice for block in again.blocks)


def test_too_little_memory_is_said_before_it_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = Block(7, "b", "l", GATED, 8192, 28672, 8192, 1)
    blocks = [Block(0, "a", "k", GATED, 64, 256, 64, 1), widest]
    monkeypatch.setattr(calibration, "free_memory", lambda _device: 5e9)
    with pytest.raises(BudgetError, match=r"8192 by 28672 takes about 19\.0 GB, and 5\.0 GB are free; free some"):
        check_memory(blocks, WHOLE)
    check_memory(blocks[:1], WHOLE)
    monkeypatch.setattr(calibration, "free_memory", lambda _device: 10.0 * MOMENT_BYTES)
    check_memory(blocks, WHOLE)
