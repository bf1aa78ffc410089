"""A plan and a gate's result as a notebook shows them, and as flat rows for a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncompress.notebooks import Bar, table_html
from ffncompress.records.task import MEASURES

if TYPE_CHECKING:
    from ffncompress.records.gate import GateResult
    from ffncompress.records.plan import BlockPlan, Plan


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each block: its sizes, its scores, the swap that was tried, and what it becomes."""
    return [
        {
            "block": block.index,
            "path": block.path,
            "parameters": block.parameters,
            "parameters_after": block.parameters_after,
            **block.scores.model_dump(),
            "predicted_delta": block.swap.predicted_delta,
            "swap_delta": block.swap.delta,
            "swap_delta_error": block.swap.delta_error,
            "tried": block.swap.describe(),
            "becomes": _becomes(block),
            "kind": block.choice.kind if block.choice else None,
            "width": block.choice.width if block.choice else None,
            "rank": block.choice.rank if block.choice else None,
            "reason": block.reason,
        }
        for block in plan.blocks
    ]


def plan_html(plan: Plan) -> str:
    """What becomes of every block, and what that costs."""
    measure = MEASURES[plan.base.task]
    rows = [
        (
            str(block.index),
            f"{block.scores.r2_lin:.3f}",
            f"{block.swap.predicted_delta:+.2f}",
            f"{block.swap.delta:+.2f} ±{block.swap.delta_error:.2f}",
            _becomes(block),
            Bar(block.parameters_after / block.parameters),
        )
        for block in plan.blocks
    ]
    size = f"{plan.base.parameters:,} to {plan.parameters_after:,} parameters"
    note = f"{size} ({100 * plan.ratios['whole_model']:.1f} %). Rises are of {measure}, one block at a time."
    columns = ("block", "R2_lin", "predicted rise", "measured rise", "becomes", "kept of it")
    title = f"Plan: {plan.base.name} ({plan.base.family}), {plan.settings.asks()}"
    return table_html(title, columns, rows, (plan.summary, note))


def gate_rows(result: GateResult) -> list[dict[str, Any]]:
    """One row for each measure: both models, and the change."""
    measured: list[tuple[str, str | None, float, float]] = []
    for text in (result.main, *result.also):
        for unit in ("token", "word", "byte"):
            before, after = getattr(text.base, unit), getattr(text.slimmed, unit)
            if before is not None and after is not None:
                measured.append((f"{MEASURES[result.task]} ({unit})", Path(text.text).name, before, after))
    measured += [(f"accuracy ({task.metric})", task.task, task.base, task.slimmed) for task in result.tasks]
    sizes, speed = result.sizes, result.speed
    for name, counts in (
        ("parameters, replaced FFNs", sizes.replaced_ffns),
        ("parameters, all FFNs", sizes.all_ffns),
        ("parameters, whole model", sizes.whole_model),
        ("bytes on disk", sizes.bytes_on_disk),
        ("tokens/s", speed and (speed.base, speed.slimmed)),
    ):
        if counts is not None:
            measured.append((name, None, *counts))
    return [
        {
            "measure": name,
            "text": text,
            "base": before,
            "slimmed": after,
            "change": after - before,
            "relative": after / before - 1 if before else None,
        }
        for name, text, before, after in measured
    ]


def gate_html(result: GateResult) -> str:
    """The verdict, every measure of both models, and how each went on with the prompt."""
    rows = [
        (
            row["measure"] + (f", {row['text']}" if row["text"] else ""),
            _figure(row["base"]),
            _figure(row["slimmed"]),
            "" if row["relative"] is None else f"{100 * row['relative']:+.1f} %",
        )
        for row in gate_rows(result)
    ]
    verdict = "passed" if result.passed else "FAILED"
    rise = f"{100 * result.main.relative:+.2f} %, limit {result.limit}"
    words = (result.prompt, result.continuation_base, result.continuation_slimmed)
    told = () if result.task == "embedding" else zip(("prompt", "base", "slimmed"), words, strict=True)
    notes = [note for note in (result.doubt, result.limit_warning, result.drop_warning) if note]
    if (alike := result.main.agreement) is not None:
        notes.append(f"both hold the same token for the likeliest at {100 * alike.same_top:.1f} %, KL {alike.kl:.4f}")
    notes += [f"{who}: {said}" for who, said in told]
    return table_html(
        f"Gate {verdict}: {result.base_model}, {rise}", ("measure", "base", "slimmed", "change"), rows, notes
    )


def _becomes(block: BlockPlan) -> str:
    return block.choice.describe() if block.choice else "itself"


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"
