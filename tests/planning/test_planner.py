"""Choosing: budgets, limits, joint verification, and what a plan says of itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from library.small_models import small_model

from ffncompress import Plan, api
from ffncompress.budgets import Budget, Limit, TargetSpeed, parse_blocks, parse_speed
from ffncompress.errors import BudgetError, FfncompressError, PlanError, TextError
from ffncompress.models import Block, find_blocks
from ffncompress.models.families import GATED
from ffncompress.planning import latency
from ffncompress.planning.measured_model import joint_check
from ffncompress.planning.menus import menu_shapes
from ffncompress.planning.search import SearchSpace, correction, smallest_within, trace_frontier
from ffncompress.planning.spending import check_budget
from ffncompress.records.commands import plan_words
from ffncompress.records.plan import JointCheck, Option, Shape, Swap
from ffncompress.records.plan_files import load_tensors
from ffncompress.replacement.modules import matrix_weights
from ffncompress.settings import PlanSettings
from ffncompress.text.sources import read


def option(parameters: int, loss: float, seconds: float | None = None) -> Option:
    return Option(
        kind="neurons", width=4, rank=0, weighting="stream", parameters=parameters, predicted_loss=loss, seconds=seconds
    )  # fmt: skip


def swap(delta: float, predicted: float, error: float = 0.0) -> Swap:
    return Swap(
        kind="dense", width=0, rank=4, weighting="plain", parameters=1, ratio=8.0, predicted_delta=predicted,
        delta=delta, delta_error=error,
    )  # fmt: skip


def space(losses: list[float]) -> SearchSpace:
    """Blocks of a hundred parameters, each with one replacement of ten."""
    blocks = [Block(i, f"b{i}", f"l{i}", GATED, 4, 8, 4, 100) for i in range(len(losses))]
    return SearchSpace(blocks, [[option(10, loss)] for loss in losses], [1.0] * len(losses))


def joint(choice: list, delta: float, limit: Limit) -> JointCheck:
    blocks = [i for i, o in enumerate(choice) if o is not None]
    return JointCheck(
        blocks=blocks, parameters=0, refitted=False, context=128, base_perplexity=100.0, perplexity=100 + delta,
        delta=delta, delta_error=0.0, within_limit=limit.allows(100, 100 + delta),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_factor_keeps_only_what_is_within_it(family: str) -> None:
    """GPT-2's 768 -> 3072 -> 768 at 8x may become 768 x 768 + bias, as in the paper."""
    block = find_blocks(tiny_model(family))[0]
    for ratio in (2.0, 8.0, 8.01, 50.0):
        allowed = [s for s in menu_shapes(block) if matrix_weights(s, block) * ratio <= block.matrix_weights]
        assert (Shape("dense", rank=32) in allowed) == (ratio <= (8 if family == "gpt2" else 9))
        assert Shape("constant") in allowed


@pytest.mark.parametrize(
    "text", ["8", "x", "1x", "0.5x", "-8x", "eight", "-0%", "-100%", "20%", "0M", "8x,", "8x,4x", ""]
)
def test_what_is_not_a_budget(text: str) -> None:
    with pytest.raises(BudgetError, match="8x"):
        Budget.parse(text)


def test_budgets_combine() -> None:
    assert Budget.parse("8x") == Budget(ratio=8)
    assert Budget.parse(None) == Budget()
    both = Budget.parse("8x, -20%,100M")
    assert (both.ratio, both.share, both.parameters) == (8, 0.8, 100e6)
    assert both.size(200_000_000) == 100_000_000
    assert both.size(100_000_000) == 80_000_000
    assert Budget.parse("1.2B").size(1) == 1_200_000_000
    assert Budget.parse("8x").size(1) is None


def test_a_limit_is_the_default_unless_a_size_or_a_speed_is_asked_for() -> None:
    assert str(PlanSettings().limit) == "5 %"
    assert str(PlanSettings(budget="8x").limit) == "5 %"
    assert str(PlanSettings(budget="-20%", max_delta="1.0").limit) == "1"
    for sized in ({"budget": "-20%"}, {"budget": "8x,100M"}, {"at": 0.85}, {"target_speed": "1.3x"}):
        assert PlanSettings(**sized).limit is None


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


EIGHTHS = st.integers(1, 80).map(lambda n: n / 8)  # sums of these are exact


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(deltas=st.lists(EIGHTHS, min_size=1, max_size=8), limit=EIGHTHS)
def test_the_smallest_within_a_limit(deltas: list[float], limit: float) -> None:
    """With harms that add, as many blocks go as the limit allows, least harmful first."""

    def check(choice: list) -> JointCheck:
        return joint(choice, sum(d for d, o in zip(deltas, choice, strict=True) if o), Limit(limit, False))

    choice, checks = smallest_within(space(deltas), check)
    total = sum(d for d, o in zip(deltas, choice, strict=True) if o)
    assert total <= limit
    most = sum(sum(sorted(deltas)[: n + 1]) <= limit for n in range(len(deltas)))
    assert sum(o is not None for o in choice) == most
    assert not most or any(c.within_limit for c in checks)


def test_the_joint_check_wants_confidence() -> None:
    """A rise that is within the limit only on average does not pass."""
    base = torch.full((16,), 3.0, dtype=torch.float64)
    steady = base + 0.04
    wild = steady + torch.tensor([0.3, -0.3] * 8, dtype=torch.float64)
    limit, both = Limit.parse("5%"), [option(10, 0.1), None, option(10, 0.1)]
    assert joint_check(both, 5, base, steady, 512, limit, False).within_limit
    shaky = joint_check(both, 5, base, wild, 512, limit, True)
    assert shaky.within_limit is False
    assert shaky.blocks == [0, 2]
    assert shaky.delta == pytest.approx(math.exp(3.04) - math.exp(3))
    assert shaky.delta_error == pytest.approx(math.exp(3.04) * wild.std().item() / 4)
    assert joint_check(both, 5, base, wild, 512, None, True).within_limit is None


def test_a_measured_surprise_raises_the_cost_and_noise_does_not() -> None:
    assert correction(swap(1.0, 1.2), 40.0) == 1.0
    assert correction(swap(1.4, 1.2, error=0.2), 40.0) == 1.0
    assert correction(swap(400.0, 1.2, error=5.0), 40.0) > 50
    deadly = SearchSpace(space([0.1, 0.1, 0.1]).blocks, space([0.1, 0.1, 0.1]).menus, [1.0, 60.0, 1.0])
    assert [o is not None for o in deadly.choose(parameters=120)] == [True, False, True]


def test_a_speed_is_of_reading_or_of_going_on() -> None:
    assert parse_speed("1.3x") == parse_speed(" Prefill:1.3X ") == TargetSpeed(1.3, "prefill")
    assert parse_speed("decode:1.2x") == TargetSpeed(1.2, "decode")
    for text in ("", "1x", "0.5x", "1.3", "decode", "decode:", "decode:1x", "encode:2x", "x", "-2x", "9" * 400 + "x"):
        with pytest.raises(BudgetError, match=r"is not a speed; write .* 1\.3x, or decode:1\.2x"):
            parse_speed(text)
    with pytest.raises(ValueError, match="is not a speed"):
        PlanSettings(target_speed="decode:fast")


def test_speed_is_spent_like_size() -> None:
    base = space([0.1, 0.2, 0.3])
    menus = [[option(10, loss, seconds)] for loss, seconds in ((0.1, 0.9), (0.2, 0.2), (0.3, 0.2))]
    timed = replace(base, menus=menus, kept_seconds=[1.0] * 3, model_seconds=4.0)
    assert timed.seconds_within(1.25) == pytest.approx(2.2)  # 4 s to 3.2 s, and 1 s of it is not the FFNs'
    assert [o is not None for o in timed.choose(seconds=2.2)] == [False, True, False]
    with pytest.raises(BudgetError, match=r"it is 1\.74x here"):
        timed.seconds_within(3)


def test_the_frontier_is_corrected_by_what_is_measured() -> None:
    losses = [0.1 * (i + 1) for i in range(6)]
    there = space(losses)
    double = lambda choice: joint(choice, 100 * math.expm1(2 * there.loss(choice)), Limit(1, False))  # noqa: E731
    points, checks = trace_frontier(there, 1000, 100.0, double)
    assert points[0].expected_perplexity == 100
    assert len(checks) == 5
    sizes = [p.parameters for p in points]
    assert sizes == sorted(sizes, reverse=True)
    for point in points[1:]:
        assert point.expected_perplexity == pytest.approx(100 * math.exp(2 * point.predicted_loss), rel=1e-6)


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
        sizes = [o.parameters for o in block.options]
        assert sizes == sorted(sizes, reverse=True)
        assert {o.kind for o in block.options} == {"neurons", "hybrid", "dense", "low-rank", "constant"}
        assert block.swap.ratio >= 8
    assert plan.final_check is not None
    assert plan.ratios["replaced_ffns"] <= 1 / 8 * 1.01


@pytest.mark.slow
def test_a_size_is_met_and_the_gate_has_something_to_hold_it_to(short_demo: Path, tmp_path: Path) -> None:
    plan = api.plan(str(short_demo), tmp_path / "plan", data=["stories"], tokens=2048, budget="-20%", refit=False)
    assert 0.75 < plan.ratios["whole_model"] <= 0.8
    assert plan.final_check is not None
    assert plan.final_check.within_limit is None
    assert plan.tolerance.limit is not None
    assert plan.tolerance.limit.allows(plan.final_check.base_perplexity, plan.final_check.perplexity)
    assert "OVER" not in plan.summary


@pytest.mark.slow
def test_a_frontier_and_a_point_of_it_without_text(short_demo: Path, tmp_path: Path) -> None:
    """The second plan reads no text: the file is gone by then."""
    file = tmp_path / "text.txt"
    # text that the model reads: of any other, a limit would let anything pass, and the plan is refused
    file.write_text("\n\n".join(read("stories").documents[:150]))
    wanted = {"data": [str(file)], "tokens": 2048, "frontier": True, "keep_moments": True, "refit": False}
    first = api.plan(str(short_demo), tmp_path / "first", **wanted)
    assert (tmp_path / "first" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert len(first.frontier) == 13
    file.unlink()
    second = api.plan(str(tmp_path / "first"), tmp_path / "second", at=0.85)
    assert 0.8 < second.ratios["whole_model"] <= 0.85
    assert str(second.tolerance.limit) == "5 %"
    assert "expected +" in second.summary
    assert "not measured" in second.summary
    assert api.compress(tmp_path / "second", tmp_path / "slim").is_dir()
    with pytest.raises(BudgetError, match="for a size only"):
        api.plan(str(tmp_path / "first"), tmp_path / "third", max_delta="3%")
    with pytest.raises(PlanError, match="--keep-moments"):
        api.plan(str(tmp_path / "second"), tmp_path / "third", at=0.8)


@pytest.mark.slow
def test_a_point_equals_the_plan_of_that_size(short_demo: Path, tmp_path: Path) -> None:
    """What moments give later is what the pass gave then."""
    plan = api.plan(
        str(short_demo), tmp_path / "plan", data=["stories"], tokens=2048, budget="-15%", keep_moments=True, refit=False
    )
    again = api.plan(str(tmp_path / "plan"), tmp_path / "again", at=0.85)
    assert [b.choice for b in again.blocks] == [b.choice for b in plan.blocks]
    for name, value in load_tensors(plan, tmp_path / "plan").items():
        torch.testing.assert_close(load_tensors(again, tmp_path / "again")[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_target_speed_is_planned_with_measured_times(tmp_path: Path) -> None:
    plan = api.plan("demo", tmp_path / "plan", tokens=2048, target_speed="1.1x", refit=False)
    assert plan.replaced
    assert all(o.seconds and o.seconds > 0 for b in plan.blocks for o in b.options)


@pytest.mark.parametrize("use", ["prefill", "decode"])
def test_times_are_of_a_context_or_of_one_row(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    blocks, rows = find_blocks(model), []
    menus = [[Option(kind="neurons", width=40, rank=0, weighting="stream", parameters=1, predicted_loss=0.1)]] * 3
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    monkeypatch.setattr(latency, "REPEATS", {"prefill": 1, "decode": 1})
    timed = latency.time_blocks(model, SearchSpace(blocks, menus, [1.0] * 3), use)
    assert all(option.seconds > 0 for menu in timed.menus for option in menu)
    assert timed.model_seconds > max(timed.kept_seconds) > 0
    # in both rounds: the block, what is on its menu (hooks are copied), the model, which must read before it goes on
    assert rows == ([256, 256, 256] if use == "prefill" else [1, 1, 64, 1]) * 2


@pytest.mark.slow
def test_a_target_speed_of_going_on(tmp_path: Path) -> None:
    plan = api.plan("demo", tmp_path / "plan", tokens=2048, target_speed="decode:1.01x", refit=False)
    assert plan.replaced
    assert plan.settings.target_speed == "decode:1.01x"
    assert "--target-speed decode:1.01x" in " ".join(plan_words(plan))


def test_what_does_not_go_on_has_no_such_speed() -> None:
    with pytest.raises(BudgetError, match=r"does not go on from a cache.* such as 1\.2x"):
        check_budget(small_model("bert"), [], PlanSettings(target_speed="decode:1.2x"))


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("".join(f"line {i} of a few words\n" for i in range(100)))
    with pytest.raises(TextError, match="are too few for FFNs 160 wide: at least 640"):
        api.plan("demo", tmp_path / "plan", data=[str(file)])
    assert not (tmp_path / "plan").exists()


def test_settings_are_checked() -> None:
    with pytest.raises(FfncompressError, match="budget"):
        api.plan("demo", "x", budget="lots")
    with pytest.raises(FfncompressError, match="colour"):
        api.plan("demo", "x", colour="blue")


def test_a_size_that_the_model_has_already_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"has 2,697,760 parameters as it is; ask for fewer"):
        api.plan("demo", tmp_path / "plan", budget="20M")
    assert not (tmp_path / "plan").exists()
