"""What a person reads: a plan, a study, a checkpoint and a verdict as tables within 100 columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ffncompress.cli.console import bare_table, make_console, say

if TYPE_CHECKING:
    from ffncompress.profiling.records import Profile, Study
    from ffncompress.records.gate import GateResult
    from ffncompress.records.plan import Plan, Replacement
from ffncompress.records.task import MEASURES


def print_stage(made: Plan | Path | GateResult | str, *, to_stderr: bool = False) -> None:
    """What a stage of `run` made."""
    from ffncompress.records.gate import GateResult
    from ffncompress.records.plan import Plan

    if isinstance(made, Plan):
        print_plan(made, to_stderr=to_stderr)
    elif isinstance(made, GateResult):
        print_gate(made, to_stderr=to_stderr)
    else:
        say(f"Written: {made}" if isinstance(made, Path) else f"Pushed: {made}", to_stderr=to_stderr)


def print_plan(plan: Plan, *, reasons: bool = False, to_stderr: bool = False) -> None:
    """The blocks of a plan at a glance; with reasons, why each was treated so."""
    console = make_console(to_stderr)
    wide = console.width >= 96  # a narrow terminal gets what decides; plan.json has the rest
    extra = ("median", "ranks i/o/m", "cond") if wide else ()
    table = bare_table(
        "block",
        "R2_lin",
        *extra,
        "predicted",
        "swap dPPL" if plan.base.task == "causal" else "swap cost",
        "tried:text",
        "becomes:text",
    )
    for block in plan.blocks:
        scores, swap = block.scores, block.swap
        ranks = (scores.effective_rank_input, scores.effective_rank_output, scores.effective_rank_map)
        details = (
            f"{scores.r2_median_feature:.2f}",
            "/".join(f"{rank:.0f}" for rank in ranks),
            f"{scores.condition_number:.0e}",
        )
        table.add_row(
            str(block.index),
            f"{scores.r2_lin:.3f} ±{scores.r2_lin_error:.3f}",
            *(details if wide else ()),
            _delta(swap.predicted_delta),
            f"{_delta(swap.delta)} ±{swap.delta_error:.2f}",
            _short(swap),
            Text(_short(block.choice) if block.choice else "-", style="bold cyan" if block.replace else "dim"),
        )
    texts = ", ".join(Path(text.source).name for text in plan.choose_text)
    tokens = sum(text.tokens for text in plan.choose_text)
    console.print(Text(f"{plan.base.name} ({plan.base.family}), {plan.settings.asks()}", style="bold"))
    console.print(
        Text(
            f"base {MEASURES[plan.base.task]} {plan.base_perplexity:.2f} on {tokens:,} held-out tokens of {texts}, "
            f"context {plan.settings.seq_len}"
        )
    )
    console.print(table)
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
    if plan.frontier:
        console.print(_frontier_table(plan))


def print_study(study: Study, *, to_stderr: bool = False) -> None:
    """Every profile as a table, then what they say together, and what each stage took."""
    console = make_console(to_stderr)
    for profile in study.profiles:
        console.print(Text(f"{profile.name} ({profile.family}): {profile.provenance}", style="bold"))
        console.print(Text(f"base perplexity {profile.base_perplexity:.2f}"))
        console.print(_profile_table(profile, wide=console.width >= 96))
        if (found := profile.probe) is not None:
            words = f"probe: median gain {found.median_gain:.3f}, largest {found.largest_gain:.3f}"
            if found.correlation is not None and found.p_value is not None:
                words += f"; correlation with 1 - R2_lin {found.correlation:+.2f} (p = {found.p_value:.2f})"
            console.print(Text(words))
    for pitfall in study.pitfalls:
        ways = ", ".join(f"{t.optimiser} {t.r2[-1]:.3f}" for t in pitfall.trained)
        steps = pitfall.trained[0].steps[-1]
        head = f"{Path(pitfall.model).name}, block {pitfall.block}, condition number {pitfall.condition_number:.0e}"
        console.print(Text(f"{head}: R2 {pitfall.closed_form:.3f} solved; after {steps:,} steps {ways}"))
    for agreement in study.agreements:
        console.print(Text(f"{Path(agreement.model).name}: {agreement.verdict}"))
    for feed in study.cross_feeds:
        console.print(Text(f"{feed.model} on {feed.giver}'s activations: {feed.verdict}"))
    for sentence in study.learned:
        console.print(Text(sentence))
    table = bare_table("stage:text", "seconds", "forward passes")
    for took in study.stages:
        table.add_row(took.name, f"{took.seconds:.1f}", "" if took.ratio is None else f"{took.ratio:.2f}")
    console.print(table)


def _profile_table(profile: Profile, *, wide: bool) -> Table:
    extra = ("ranks i/o/m", "cond", "unrecovered") if wide else ()
    swapped, probed = profile.blocks[0].swap is not None, profile.blocks[0].probe is not None
    more = ["swap dPPL"] * swapped + ["probe"] * probed
    table = bare_table("block", "R2_lin (95 %)", "median", *extra, *more, "regime:text")
    for block in profile.blocks:
        scores = block.scores
        ranks = (scores.effective_rank_input, scores.effective_rank_output, scores.effective_rank_map)
        details = (
            "/".join(f"{rank:.0f}" for rank in ranks), f"{scores.condition_number:.0e}",
            f"{scores.unrecovered_share:.4f}",
        )  # fmt: skip
        table.add_row(
            str(block.index),
            f"{scores.r2_lin:.3f} ±{1.96 * scores.r2_lin_error:.3f}",
            f"{scores.r2_median_feature:.2f}",
            *(details if wide else ()),
            *([_delta(block.swap.delta)] if block.swap else []),
            *([f"{block.probe.gain:+.3f}"] if block.probe else []),
            block.regime,
        )
    return table


def _frontier_table(plan: Plan) -> Table:
    """Sizes, and the least perplexity that is expected there before replacements are refitted."""
    table = bare_table("size", "share", "expected perplexity", "measured before refit", "rise")
    base = plan.frontier[0].expected_perplexity
    for point in plan.frontier:
        measured = "" if point.measured_perplexity is None else f"{point.measured_perplexity:.2f}"
        best = point.measured_perplexity or point.expected_perplexity
        rise = f"{100 * (best / base - 1):+.1f} %"
        table.add_row(f"{point.parameters:,}", f"{point.share:.3f}", f"{point.expected_perplexity:.2f}", measured, rise)
    return table


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


def print_checkpoint(folder: str | Path) -> None:
    """Where a checkpoint came from and how it fared."""
    from ffncompress.checkpoint.origin import GATE_FILE, META, read_gate, read_origin

    origin = read_origin(folder)
    revision = f" at {origin.base_revision}" if origin.base_revision else ""
    say(
        f"{folder}: {origin.base_model}{revision} with {origin.parameters_after:,} of "
        f"{origin.parameters_before:,} parameters"
    )
    if (healing := origin.healing) is not None:
        words = f"healed in {healing.minutes:g} min, {healing.steps:,} steps: "
        words += f"perplexity {healing.closed_form:.2f} to {healing.healed:.2f}, choose text"
        say(words if healing.kept else f"{words}; no better, so not kept")
    if (Path(folder) / META / GATE_FILE).exists():
        print_gate(read_gate(folder))
    else:
        say("not evaluated yet")


def print_gate(result: GateResult, *, to_stderr: bool = False) -> None:
    """Perplexities, sizes, speed, a continuation of both, and the verdict."""
    console = make_console(to_stderr)
    table = bare_table(":text", "base", "slimmed", "change", "")
    for text in (result.main, *result.also):
        table.add_row(f"{MEASURES[result.task]}, {_in_room(Path(text.text).name)} ({text.part})")
        table.add_row(f"{text.tokens:,} tokens, context {text.context}")
        for unit in ("token", "word", "byte"):
            if (before := getattr(text.base, unit)) is not None:
                unit_name = unit if result.task == "causal" else "hidden token" if result.task == "masked" else "window"
                table.add_row(*_change(f"  {unit_name}", before, getattr(text.slimmed, unit), ",.3f"))
        if result.task == "embedding":
            before, after = (1 - math.log(each.token) for each in (text.base, text.slimmed))
            table.add_row(*_change("  mean cosine with the base's", before, after, ",.4f"))
    sizes, speed = result.sizes, result.speed
    for label, counts in (("replaced FFNs", sizes.replaced_ffns), ("all FFNs", sizes.all_ffns)):
        if counts is not None:
            table.add_row(*_change(f"parameters, {label}", *counts))
    table.add_row(*_change("parameters, whole model", *sizes.whole_model))
    table.add_row(*_change("bytes of weights on disk", *sizes.bytes_on_disk))
    shape = f"{speed.batch[0]} x {speed.batch[1]}, {speed.device}"
    table.add_row(*_change(f"tokens/s ({shape})", speed.base, speed.slimmed, ",.0f"))
    console.print(table)
    if result.task != "embedding":  # which goes on with nothing
        console.print(Text(f"prompt: {result.prompt}"))
        console.print(_side_by_side(result.continuation_base, result.continuation_slimmed, console.width))
    verdict = f"gate {'passed' if result.passed else 'FAILED'}: "
    error = "" if result.main.rise_error is None else f" ±{100 * result.main.rise_error:.2f}"
    verdict += f"{result.main.delta:+.3f} {MEASURES[result.task]} "
    verdict += f"({100 * result.main.relative:+.2f}{error} %), limit {result.limit}"
    verdict += f"; not to be believed: {result.doubt}" if result.doubt else ""
    console.print(Text(verdict, style="bold green" if result.passed else "bold red"))
    if result.limit_warning:
        console.print(Text(result.limit_warning, style="yellow"))


def _side_by_side(base: str, slimmed: str, width: int) -> Table:
    """How two models go on, in two columns of running text."""
    table = bare_table("base:text", "slimmed:text")
    for column in table.columns:
        column.no_wrap, column.width = False, (width - 2) // 2
    table.add_row(" ".join(base.split()), " ".join(slimmed.split()))
    return table


def _in_room(name: str, room: int = 24) -> str:
    """A name's end, where it is too long for a table."""
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _change(label: str, before: float, after: float, form: str = ",") -> tuple[str, ...]:
    """A row: what it was, what it is, and the difference, absolute and relative."""
    relative = f"{100 * (after / before - 1):+.1f} %" if before else ""
    return label, f"{before:{form}}", f"{after:{form}}", f"{after - before:+{form}}", relative


def _delta(value: float) -> str:
    return f"{value:+.2f}" if abs(value) < 1000 else f"{value:+.0e}"
