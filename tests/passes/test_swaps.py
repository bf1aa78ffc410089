"""Swaps from a cached prefix against running the whole swapped model; per-sequence errors against moments."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model

from ffncompress.models import ffn_of, find_blocks, installed
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.losses import sequence_losses
from ffncompress.passes.swaps import measure_base, measure_swaps
from ffncompress.records.plan import Shape
from ffncompress.recovery import fit_linear, r2, r2_interval
from ffncompress.replacement.modules import build
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers


@pytest.mark.parametrize("family", TINY)
def test_a_cached_prefix_gives_the_whole_models_loss(family: str) -> None:
    model, run = tiny_model(family), Run(Workers("cpu"))
    blocks = find_blocks(model)
    ids = torch.randint(1, 3000, (70, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    variants = [build(Shape("dense"), b.layout, ffn_of(model, b)) for b in blocks]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rises = measure_swaps(model, blocks, variants, ids, run)
    base = sequence_losses(model, ids, run)
    for i, block in enumerate(blocks):
        with installed(model, {block.path: variants[i]}):
            torch.testing.assert_close(rises[i], sequence_losses(model, ids, run) - base)
        assert rises[i].abs().max() > 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_errors_by_sequence_add_up_to_those_of_the_moments() -> None:
    model, run = tiny_model("llama"), Run(Workers("cpu"))
    blocks = find_blocks(model)
    ids = torch.randint(1, 3000, (70, 16), generator=torch.Generator().manual_seed(0))
    moments = collect_moments(model, blocks, ids, ids, run)
    fits = [fit_linear(m.fit, m.held_out) for m in moments]
    losses, errors = measure_base(model, blocks, fits, ids, run)
    torch.testing.assert_close(losses, sequence_losses(model, ids, run))
    for each, fit, own in zip(errors, fits, moments, strict=True):
        total = each.squares.sum() - each.sums.sum(0).square().sum() / ids.numel()
        assert 1 - (each.squared_errors.sum() / total).item() == pytest.approx(r2(fit, own.held_out), abs=1e-5)
        assert 0 < r2_interval(each.squared_errors, each.rows, each.sums, each.squares) < 1


def test_processes_share_the_blocks_of_even_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = tiny_model("llama"), Run(Workers("cpu"))
    blocks = find_blocks(model)
    ids = torch.randint(1, 3000, (4, 16), generator=torch.Generator().manual_seed(0))
    variants = [build(Shape("dense"), b.layout, ffn_of(model, b)) for b in blocks]
    whole = measure_swaps(model, blocks, variants, ids, run)
    for rank in range(2):
        monkeypatch.setattr(run.workers, "share", lambda count, rank=rank: torch.arange(count)[rank::2])
        for i, own in enumerate(measure_swaps(model, blocks, variants, ids, run)):
            assert torch.equal(own, whole[i] if i % 2 == rank else torch.zeros_like(own))
