"""A plan on the terminal, within 80 columns: its blocks, its frontier, and what each column means."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from ffncompress.cli.console import bare_table, make_console, say
from ffncompress.cli.lines import lasting
from ffncompress.records.commands import point_words, share_to_ask
from ffncompress.records.plan_files import PAGE_FILE, TIMINGS_FILE
from ffncompress.records.task import MEASURES

if TYPE_CHECKING:
    from ffncompress.records.plan import Plan, Replacement


def print_plan(plan: Plan, *, reasons: bool = False, to_stderr: bool = False) -> None:
    """The blocks of a plan at a glance; with reasons, why each was treated so."""
    console, measure = make_console(to_stderr), MEASURES[plan.base.task]
    table = bare_table("block", "R2_lin", "tried:text", "predicted", "measured", "becomes:text")
    for block in plan.blocks:
        scores, swap = block.scores, block.swap
        table.add_row(
            str(block.index),
            f"{scores.r2_lin:.3f} ±{scores.r2_lin_error:.3f}",
            _short(swap),
            delta_in_short(swap.predicted_delta),
            f"{delta_in_short(swap.delta)} ±{swap.delta_error:.2f}",
            Text(_short(block.choice) if block.choice else "-", style="bold cyan" if block.replace else "dim"),
        )
    texts = ", ".join(Path(text.source).name for text in plan.choose_text)
    tokens = sum(text.tokens for text in plan.choose_text)
    console.print(Text(f"{plan.base.name} ({plan.base.family}), {plan.settings.asks()}", style="bold"))
    console.print(
        Text(
            f"base {measure} {plan.base_perplexity:.2f} on {tokens:,} held-out tokens of {texts}, "
            f"context {plan.settings.seq_len}"
        )
    )
    console.print(table)
    _explain(
        {
            "R2_lin": "how linear it is: the share of its output that a linear map explains",
            "tried": "put in its place alone: 64n is 64 of its neurons, r32 a map of rank 32",
            "predicted": f"{measure} that this was predicted to add",
            "measured": f"{measure} that it did add on held-out text, ± standard error",
            "becomes": "what the plan makes of it, all blocks together; - is kept as it is",
        },
        to_stderr=to_stderr,
    )
    if reasons:
        for block in plan.blocks:
            console.print(Text(f"block {block.index}: {block.reason}"))
    for reason in dict.fromkeys(plan.kept_layers.values()):
        layers = [str(layer) for layer, why in plan.kept_layers.items() if why == reason]
        console.print(Text(f"layer{'s' * (len(layers) > 1)} {', '.join(layers)} kept as they are: {reason}"))
    console.print(Text(plan.summary, style="bold"))
    if plan.replaced:
        console.print(Text(_kept(plan)))
        if plan.settings.limit is None and plan.final_check is not None:
            console.print(Text(f"ffncompress eval will hold it to {plan.tolerance.limit}: {plan.tolerance.reason}"))
            if plan.tolerance.warning:
                console.print(Text(plan.tolerance.warning, style="yellow"))


def print_written(plan: Plan, folder: str, seconds: float, *, to_stderr: bool = False) -> None:
    """Where a plan lies, how long it took, and what comes next."""
    say(f"Plan: {folder}, in {lasting(seconds)}. To look at: {Path(folder) / PAGE_FILE}", to_stderr=to_stderr)
    if plan.replaced:
        say(f"Next: {shlex.join(['ffncompress', 'apply', folder, '-o', 'slim'])}", to_stderr=to_stderr)


def print_timings(folder: str, *, to_stderr: bool = False) -> None:
    """How long each stage of a plan that was just made took."""
    table = bare_table("stage:text", "seconds", "share")
    seconds: dict[str, float] = json.loads((Path(folder) / TIMINGS_FILE).read_text(encoding="utf-8"))
    whole = sum(seconds.values())
    for stage, taken in seconds.items():
        table.add_row(stage, f"{taken:.1f}", f"{100 * taken / whole:.0f} %")
    make_console(to_stderr).print(table)


def print_frontier(
    plan: Plan,
    folder: str | None,
    *,
    model: str | None = None,
    data: Sequence[str] | None = None,
    choose_data: Sequence[str] | None = None,
    to_stderr: bool = False,
) -> None:
    """The points of a plan's frontier, and the command that takes each; nothing where there is none.

    Args:
        plan: the plan.
        folder: where it lies, as a person calls it; none: no plan's folder, and so no commands.
        model: the same of its model.
        data: the same of its texts.
        choose_data: the same of the texts to choose on.
        to_stderr: print there.
    """
    if not plan.frontier:
        return
    console, measure, knee = make_console(to_stderr), MEASURES[plan.base.task], plan.knee
    table = bare_table("share", "parameters", "expected", "measured", "rise", ":text")
    base, commands = plan.frontier[0].expected_perplexity, []
    for point in plan.frontier:
        share = share_to_ask(point)
        measured = "" if point.measured_perplexity is None else f"{point.measured_perplexity:.2f}"
        rise = f"{100 * ((point.measured_perplexity or point.expected_perplexity) / base - 1):+.1f} %"
        mark = Text("< it bends here" if point is knee else "", style="bold cyan")
        table.add_row(share or "1", f"{point.parameters:,}", f"{point.expected_perplexity:.2f}", measured, rise, mark)
        if share is not None and folder is not None:
            commands.append(point_words(plan, share, folder, model=model, data=data, choose_data=choose_data))
    console.print(Text(f"size against {measure}, before replacements are fitted again", style="bold"))
    console.print(table)
    _explain(
        {
            "share": "of all parameters, kept; what --at takes",
            "expected": f"{measure} there, by the measured points beside it",
            "measured": f"{measure} with all blocks replaced together",
            "rise": f"of {measure}, from the first line's",
        },
        to_stderr=to_stderr,
    )
    bend = "it bends at the point farthest below the straight line between its ends"
    console.print(Text(bend if knee else "the curve has no clear bend: smaller costs steadily more", style="dim"))
    if commands:
        console.print(Text("take a point with its command:"))
    for words in commands:
        console.print(Text("  " + shlex.join(words)), soft_wrap=True)  # a broken line could not be copied


def delta_in_short(value: float) -> str:
    """A change of perplexity: a cell of a table."""
    return f"{value:+.2f}" if abs(value) < 1000 else f"{value:+.0e}"


def _explain(columns: dict[str, str], *, to_stderr: bool) -> None:
    """A line for each column that is not plain."""
    console, room = make_console(to_stderr), max(map(len, columns))
    for name, words in columns.items():
        console.print(Text(f"{name:{room}}  {words}", style="dim"))


def _short(option: Replacement) -> str:
    """480n for so many neurons, r16 for a rank: a cell of a table."""
    if option.kind in ("dense", "constant"):
        return option.kind
    return "+".join([f"{option.width}n"] * bool(option.width) + [f"r{option.rank}"] * bool(option.rank))


def _kept(plan: Plan) -> str:
    ratios = plan.ratios
    fewer = f"{1 / ratios['replaced_ffns']:.1f}x fewer" if ratios["replaced_ffns"] else "none left"
    there = f", {size:,} as {plan.settings.target}" if (size := plan.parameters_at_target) else ""
    return (
        f"{plan.base.parameters:,} to {plan.parameters_after:,} parameters{there}\n"
        f"kept: {100 * ratios['replaced_ffns']:.1f} % of the replaced FFNs ({fewer}), "
        f"{100 * ratios['all_ffns']:.1f} % of all FFNs, {100 * ratios['whole_model']:.1f} % of the whole model"
    )
