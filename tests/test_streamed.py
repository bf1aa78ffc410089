"""Plan, profile, apply and eval of a model that stays on disk end in the figures of the model in memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from ffncompress import api
from ffncompress.errors import BudgetError, ModelError

STREAMED = {"stream": True, "memory": "300MB"}


@pytest.fixture(scope="module")
def plans(tmp_path_factory, short_demo):
    folder = tmp_path_factory.mktemp("streamed")
    asked = {"tokens": 4096, "budget": "-10%"}
    return folder, [
        api.plan(str(short_demo), folder / name, **asked, **how)
        for name, how in (("whole", {}), ("streamed", STREAMED))
    ]


@pytest.mark.slow
def test_the_plan_is_the_same(plans) -> None:
    folder, (whole, streamed) = plans
    chosen = [[block.choice and block.choice.shape for block in plan.blocks] for plan in (whole, streamed)]
    assert any(chosen[0])
    assert chosen[0] == chosen[1]
    for own, other in zip(whole.blocks, streamed.blocks, strict=True):
        assert other.scores.r2_lin == pytest.approx(own.scores.r2_lin, abs=1e-7)
        assert other.swap.delta == pytest.approx(own.swap.delta, rel=1e-4, abs=1e-3)
    tensors, others = (load_file(folder / name / "replacements.safetensors") for name in ("whole", "streamed"))
    apart = {name: ((tensors[name] - others[name]).norm() / tensors[name].norm()).item() for name in tensors}
    assert max(apart.values()) < 1e-2, apart  # batches are cut otherwise, and float32 adds up otherwise


@pytest.mark.slow
def test_the_checkpoint_and_its_gate_are_the_same(plans) -> None:
    folder, _ = plans
    asked = {"tokens": 1024, "repeats": 1}
    whole, streamed = (api.compress(folder / "whole", folder / f"slim-{i}", stream=bool(i)) for i in range(2))
    tensors, others = (load_file(slim / "model.safetensors") for slim in (whole, streamed))
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    before, after = api.evaluate(whole, **asked), api.evaluate(streamed, **asked, **STREAMED)
    assert after.main.base == before.main.base
    assert after.main.slimmed.token == pytest.approx(before.main.slimmed.token, rel=1e-5)
    assert after.main.agreement.kl == pytest.approx(before.main.agreement.kl, rel=1e-3)
    assert before.speed is not None
    assert after.speed is None


@pytest.mark.slow
def test_the_profile_is_the_same(tmp_path, short_demo) -> None:
    whole, streamed = (
        api.profile(str(short_demo), tmp_path / str(i), tokens=4096, **how) for i, how in enumerate(({}, STREAMED))
    )
    for own, other in zip(whole.profiles[0].blocks, streamed.profiles[0].blocks, strict=True):
        assert other.scores.r2_lin == pytest.approx(own.scores.r2_lin, abs=1e-7)
        assert other.swap.delta == pytest.approx(own.swap.delta, rel=1e-4, abs=1e-3)


def test_what_needs_the_model_in_memory_says_so(short_demo, tmp_path, demo_plan) -> None:
    with pytest.raises(BudgetError, match="--target-speed"):
        api.plan(str(short_demo), tmp_path / "plan", target_speed="1.1x", stream=True)
    with pytest.raises(ModelError, match="--no-stream"):
        api.compress(demo_plan, tmp_path / "slim", heal=1, stream=True)
