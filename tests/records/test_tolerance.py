"""What a plan of a given size promises: broken as seldom as it says, called wide where it is, made for old plans."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from ffncompress import api
from ffncompress.budgets import Limit
from ffncompress.cli import tables
from ffncompress.gate import measuring as gate
from ffncompress.gate.perplexity import Answer
from ffncompress.planning.measured_model import joint_check
from ffncompress.records import tolerance as promise
from ffncompress.records.plan import JointCheck, Plan
from ffncompress.records.tolerance import CHANCE, TEXT_TO_TEXT, Rise, Tolerance, paired_rise, tolerance_of
from ffncompress.settings import PlanSettings
from ffncompress.text import corpus
from ffncompress.text.parts import CHOOSE, read_parts
from ffncompress.text.sources import STORIES, Text

CONTEXT = 256
GATE_WINDOWS = 64  # 16,384 tokens


def sampled(plans: int, windows: int, seed: int, *, between: float, lasting: float = 0.0) -> torch.Tensor:
    """Rises of windows of many texts, [plans, windows]: a level of each text; a window may resemble the one before."""
    noise = torch.Generator().manual_seed(seed)
    draw = torch.randn(plans, windows, generator=noise, dtype=torch.float64)
    for i in range(1, windows):
        draw[:, i] = lasting * draw[:, i - 1] + math.sqrt(1 - lasting**2) * draw[:, i]
    level = torch.randn(plans, 1, generator=noise, dtype=torch.float64)
    return 0.2 + 0.1 * (draw + math.sqrt(between) * level)


def broken(planned: torch.Tensor, reported: torch.Tensor) -> float:
    """How often the gate's rise is above the promise."""
    count = planned.shape[1]
    errors = planned.std(1) / math.sqrt(count)
    rises = [Rise(m, e, count) for m, e in zip(planned.mean(1).tolist(), errors.tolist(), strict=True)]
    limits = torch.tensor([tolerance_of(rise, CONTEXT).limit.value for rise in rises])
    return (reported.mean(1).expm1() > limits).double().mean().item()


@pytest.mark.parametrize("windows", [4, 8, 32])
def test_a_promise_is_broken_as_seldom_as_it_says(windows: int) -> None:
    """Both parts of a text have a level of their own: each brings half of the variance that is allowed for."""
    plans, between = 20_000, TEXT_TO_TEXT / 2
    share = broken(sampled(plans, windows, 1, between=between), sampled(plans, GATE_WINDOWS, 2, between=between))
    assert share == pytest.approx(CHANCE, abs=0.003)  # four standard errors of the simulation


def test_neighbouring_windows_that_are_alike_are_allowed_for() -> None:
    planned = sampled(20_000, 32, 1, between=0, lasting=0.3)
    assert broken(planned, sampled(20_000, GATE_WINDOWS, 2, between=0, lasting=0.3)) <= CHANCE


def test_three_standard_errors_of_a_few_windows_were_no_such_promise() -> None:
    """The rule that this one replaces, under the same conditions: three sigma should be 1 in 740."""
    between = TEXT_TO_TEXT / 2
    planned, reported = sampled(20_000, 8, 1, between=between), sampled(20_000, GATE_WINDOWS, 2, between=between)
    limits = planned.mean(1) + 3 * planned.std(1) / math.sqrt(8)
    assert (reported.mean(1) > limits).double().mean() > 0.02


def test_more_windows_make_it_narrower_and_one_says_nothing() -> None:
    margins = [promise.margin(Rise(0.1, 0.3 / math.sqrt(n), n), GATE_WINDOWS) for n in (2, 4, 8, 32, 1000)]
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] > 0.3 * math.sqrt(TEXT_TO_TEXT)  # another text stays another text
    alone = tolerance_of(Rise(0.1, 0.0, 1), CONTEXT)
    assert alone.limit.value == math.inf
    assert alone.wide
    assert tolerance_of(Rise(-0.2, 0.001, 32), CONTEXT).limit.value == 0.001  # a model that got better


def test_the_gates_own_error_is_that_of_the_pieces_differences() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(50, 200, (4000, 12))
    before = -4.0 * tokens + 3 * torch.randn(4000, 12)
    after = before - (0.3 + 0.2 * torch.randn(4000, 12)) * tokens
    rises = [paired_rise(*(each.tolist() for each in row)) for row in zip(before, after, tokens, strict=True)]
    means = torch.tensor([rise.nats for rise in rises])
    assert means.mean().item() == pytest.approx(0.3, abs=0.004)
    assert torch.tensor([rise.error for rise in rises]).square().mean().sqrt().item() == pytest.approx(
        means.std().item(), rel=0.05
    )
    assert paired_rise([-400.0], [-410.0], [100]) == Rise(pytest.approx(0.1), math.inf, 1)


def test_a_single_piece_has_no_error() -> None:
    old = Answer(
        tokens=100, log_likelihood=-400.0, word=1.0, byte=1.0, piece_log_likelihoods=[-400.0], piece_tokens=[100]
    )
    new = old.model_copy(update={"piece_log_likelihoods": [-200.0, -210.0], "piece_tokens": [50, 50]})
    assert gate._rise_error(old, new) is None
    assert gate._rise_error(new, new) == 0.0


def test_a_check_knows_its_rise() -> None:
    base = torch.full((16,), 3.0, dtype=torch.float64)
    together = base + torch.linspace(0.0, 0.2, 16, dtype=torch.float64)
    check = joint_check([None], 100, base, together, CONTEXT, None, refitted=False)
    assert check.rise.nats == pytest.approx(0.1)
    assert check.rise.error == pytest.approx((together - base).std().item() / 4)
    assert check.rise.windows == 16
    broken_model = check.model_copy(update={"perplexity": math.inf, "delta": math.inf, "delta_error": math.nan})
    assert tolerance_of(broken_model.rise, CONTEXT).limit.value == math.inf


def test_a_wide_limit_is_said_to_be_wide() -> None:
    wide = tolerance_of(Rise(0.05, 0.06, 8), CONTEXT)
    assert wide.wide
    assert "this limit is wide: the plan measured +5.1 % on 8 windows" in wide.warning
    # little in itself; less than the rise; it got better, and may not get worse
    for narrow in (Rise(0.001, 0.003, 32), Rise(0.5, 0.02, 32), Rise(-0.1, 0.01, 32)):
        assert not tolerance_of(narrow, CONTEXT).wide
        much = "as planned is not as good: +65 % is much to lose" if narrow.nats == 0.5 else ""
        assert tolerance_of(narrow, CONTEXT).warning.partition(";")[0] == much
    assert not Tolerance(Limit(0.5, relative=True)).wide  # somebody asked for it


def test_fresh_windows_share_nothing_with_what_was_read(demo_source, tokenizer) -> None:
    settings = PlanSettings(data=["stories"], tokens=4096, budget="-15%")
    found = corpus.gather_text(settings, STORIES, tokenizer, CONTEXT)
    assert len(found.fresh) > 20
    assert found.fresh.longest == CONTEXT
    assert len(corpus._unread(found.verify, [found.verify])) == 0
    choose = read_parts("stories")[CHOOSE].joined
    at = [choose.find(tokenizer.decode(row[2:20].tolist())) for row in found.fresh]
    assert max(at) > 0.8 * len(choose)  # to the end of the part
    short = Text("x", CHOOSE, (choose[:3000],))
    few = corpus._spread(short, tokenizer, "joined", CONTEXT, 16)
    assert len(few) < corpus.VERIFY_WINDOWS  # then the plan's own must serve
    rows = Text("x", CHOOSE, tuple(choose[i : i + 400] for i in range(0, 400_000, 400)))
    spread = corpus._spread(rows, tokenizer, "documents", CONTEXT, 16)
    assert len(spread) > 16  # each within a row
    assert spread.longest < CONTEXT
    limited = settings.model_copy(update={"budget": None})
    assert not len(corpus.gather_text(limited, STORIES, tokenizer, CONTEXT).fresh)


@pytest.mark.slow
def test_a_sized_plan_promises_says_so_and_is_held_to_it(
    short_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = api.plan(str(short_demo), tmp_path / "plan", data=["stories"], tokens=4096, budget="-25%", refit=False)
    final = plan.final_check
    assert final is not None
    assert final.fresh
    assert final.windows is not None
    assert final.windows > 20
    tables.print_plan(plan)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"ffncompress eval will hold it to {plan.tolerance.limit}: this rise, and a margin" in printed
    result = api.evaluate(api.compress(tmp_path / "plan", tmp_path / "slim"), tokens=4096, repeats=1)
    assert result.limit == str(plan.tolerance.limit)
    assert result.passed
    assert result.limit_warning == ""
    assert result.main.rise_error is not None
    assert 0 < result.main.rise_error < 0.1
    tables.print_gate(result.model_copy(update={"limit_warning": "this limit is wide"}))
    assert "this limit is wide" in capsys.readouterr().out


def test_an_old_plan_loads_and_promises(tmp_path: Path, demo_plan: Path) -> None:
    """As 0.3.0 wrote it: a joint check without its windows."""
    old = shutil.copytree(demo_plan, tmp_path / "old")
    content = json.loads((old / "plan.json").read_text())
    content["settings"] |= {"budget": "-15%", "blocks": None}
    for check in content["joint_checks"]:
        for name in set(check) - {n for n, field in JointCheck.model_fields.items() if field.is_required()}:
            del check[name]
    (old / "plan.json").write_text(json.dumps(content))
    plan = Plan.load(old)
    assert plan.final_check is not None
    assert plan.final_check.windows is None
    assert plan.final_check.rise.windows == 8
    assert plan.tolerance.limit.allows(plan.final_check.base_perplexity, plan.final_check.perplexity)
