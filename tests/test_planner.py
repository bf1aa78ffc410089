"""Choosing: budgets, limits, joint verification, and what a plan says of itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from ffncompress import Plan, api
from ffncompress.errors import BudgetError, FfncompressError, TextError
from ffncompress.models import find_blocks
from ffncompress.modules import build
from ffncompress.plans import JointCheck, Swap
from ffncompress.scoring import option_within
from ffncompress.selection import choose_blocks, explain, joint_check, summarise
from ffncompress.settings import Budget, Limit, parse_blocks


def swap(delta: float) -> Swap:
    return Swap(
        kind="dense", rank=4, weighting="plain", parameters=1, ratio=8.0, predicted_delta=delta, delta=delta,
        delta_error=0.0, deltas={"plain": delta},
    )  # fmt: skip


def joint(indices: list[int], delta: float, limit: Limit) -> JointCheck:
    within = limit.allows(100, 100 + delta)
    return JointCheck(
        blocks=sorted(indices), context=128, base_perplexity=100.0, perplexity=100 + delta, delta=delta,
        delta_error=0.0, within_limit=within,
    )  # fmt: skip


def test_eight_times_is_the_dense_map_of_a_4x_ffn() -> None:
    """GPT-2's 768 -> 3072 -> 768 becomes 768 x 768 + bias, as in the paper."""
    block = find_blocks(tiny_model("gpt2"))[0]  # 32 -> 128 -> 32
    assert option_within(block, Budget.parse("8x")) == ("dense", 32)
    assert option_within(block, Budget.parse("8.01x")) == ("low-rank", 15)


@given(ratio=st.floats(1.01, 120))
def test_an_option_is_within_its_budget(ratio: float) -> None:
    for family in ("gpt2", "llama"):
        block = find_blocks(tiny_model(family))[0]
        kind, rank = option_within(block, Budget(ratio))
        module = build(kind, block.layout, block.d_in, block.d_out, rank)
        weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
        assert weights <= block.matrix_weights / ratio
        if kind == "low-rank":
            assert weights + block.d_in + block.d_out > min(block.matrix_weights / ratio, 2 * 32 * 32)


def test_an_impossible_budget_says_what_is_possible() -> None:
    block = find_blocks(tiny_model("gpt2"))[0]
    with pytest.raises(BudgetError, match="up to 128x is possible"):
        option_within(block, Budget.parse("129x"))


@pytest.mark.parametrize("text", ["8", "x", "1x", "0.5x", "-8x", "eight"])
def test_what_is_not_a_budget(text: str) -> None:
    with pytest.raises(BudgetError, match="8x"):
        Budget.parse(text)


def test_limits() -> None:
    assert Limit.parse("5%").allows(40, 42)
    assert not Limit.parse("5%").allows(40, 42.1)
    assert Limit.parse("1.0").allows(40, 41)
    assert not Limit.parse("1.0").allows(40, 41.1)
    with pytest.raises(BudgetError):
        Limit.parse("five")


def test_block_lists() -> None:
    assert parse_blocks("0,3,7-9", 12) == [0, 3, 7, 8, 9]
    for text, match in (("12", "0 to 11"), ("a", "0,3,7-9"), ("5-3", "not there")):
        with pytest.raises(BudgetError, match=match):
            parse_blocks(text, 12)


@given(deltas=st.lists(st.floats(0, 10), min_size=1, max_size=12), limit=st.floats(0.5, 20))
def test_the_largest_safe_set_in_order_of_harm(deltas: list[float], limit: float) -> None:
    """With harms that add, bisection ends where dropping one by one would."""
    measured = [swap(d) for d in deltas]

    def check(indices: list[int]) -> JointCheck:
        return joint(indices, sum(deltas[i] for i in indices), Limit(limit, False))

    chosen, checks = choose_blocks(measured, 100.0, Limit(limit, False), None, check)
    keep = sorted(range(len(deltas)), key=lambda i: deltas[i])
    keep = [i for i in keep if deltas[i] <= limit]
    while keep and not Limit(limit, False).allows(100, 100 + sum(deltas[i] for i in keep)):
        keep.pop()
    assert chosen == sorted(keep)
    if chosen:
        assert any(c.blocks == chosen and c.within_limit for c in checks)


def test_the_joint_check_wants_confidence() -> None:
    """A rise that is within the limit only on average does not pass."""
    base = torch.full((16,), 3.0, dtype=torch.float64)
    steady = base + 0.04
    wild = steady + torch.tensor([0.3, -0.3] * 8, dtype=torch.float64)
    limit = Limit.parse("5%")
    assert joint_check([1, 0], base, steady, 512, limit).within_limit
    shaky = joint_check([0, 1], base, wild, 512, limit)
    assert not shaky.within_limit
    assert shaky.blocks == [0, 1]
    assert shaky.delta == pytest.approx(math.exp(3.04) - math.exp(3))
    assert shaky.delta_error == pytest.approx(math.exp(3.04) * wild.std().item() / 4)


def test_a_deadly_block_is_never_a_candidate_and_reasons_are_given() -> None:
    measured = [swap(0.5), swap(80.0), swap(0.7)]
    limit = Limit(1.0, False)
    chosen, checks = choose_blocks(measured, 40.0, limit, None, lambda b: joint(b, 0.6 * len(b), limit))
    assert chosen == [0]
    reasons = explain(measured, 40.0, limit, chosen, None)
    assert reasons[0].startswith("replaced: alone +0.50 ppl (+1.2 %)")
    assert "over 1" in reasons[1]
    assert "too much together" in reasons[2]
    assert "1 of 3 blocks" in summarise(measured, 40.0, limit, chosen, checks)


def test_a_plan_reads_back_as_it_was_and_explains_itself(demo_plan: Path) -> None:
    plan = Plan.load(demo_plan)
    assert json.loads((demo_plan / "plan.json").read_text()) == json.loads(plan.model_dump_json())
    assert [b.index for b in plan.replaced] == [1, 3]
    assert (demo_plan / "profile.png").read_bytes().startswith(b"\x89PNG")
    fit, choose = {t.sha256 for t in plan.fit_text}, {t.sha256 for t in plan.choose_text}
    assert not fit & choose
    for block in plan.blocks:
        assert block.scores.r2_lin <= 1
        assert block.scores.r2_lin_error > 0
        assert block.reason
        ranks = [o.rank for o in block.options]
        assert ranks == sorted(set(ranks))
        assert block.options[-1].kind == block.swap.kind
        assert block.swap.delta == min(block.swap.deltas.values())
    assert plan.final_check is not None
    assert plan.ratios["replaced_ffns"] == pytest.approx(1 / 8, rel=0.01)


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("".join(f"line {i} of a few words\n" for i in range(100)))
    with pytest.raises(TextError, match="are too few for FFNs 128 wide: at least 512"):
        api.plan("demo", tmp_path / "plan", data=[str(file)])
    assert not (tmp_path / "plan").exists()


def test_settings_are_checked() -> None:
    with pytest.raises(FfncompressError, match="budget"):
        api.plan("demo", "x", budget="lots")
    with pytest.raises(FfncompressError, match="colour"):
        api.plan("demo", "x", colour="blue")


def test_two_processes_equal_one(tmp_path: Path, tiny_folder) -> None:
    """torchrun, for real: the same plan to round-off, written by the first process alone."""
    folder = str(tiny_folder("llama"))
    options = ["--tokens", "4096", "--seq-len", "64", "--blocks", "0,1", "--budget", "4x"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for output, launcher in (
        ("one", [sys.executable]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]),
    ):
        command = [*launcher, "-m", "ffncompress", "plan", folder, *options, "-o", str(tmp_path / output)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("blocks replaced") == 1
    one, two = Plan.load(tmp_path / "one"), Plan.load(tmp_path / "two")
    assert one.base_perplexity == pytest.approx(two.base_perplexity, rel=1e-6)
    for a, b in zip(one.blocks, two.blocks, strict=True):
        assert a.scores.r2_lin == pytest.approx(b.scores.r2_lin, abs=1e-6)
        assert a.scores.r2_lin_error == pytest.approx(b.scores.r2_lin_error, rel=1e-4)
        assert a.swap.delta == pytest.approx(b.swap.delta, abs=1e-3 * one.base_perplexity)
