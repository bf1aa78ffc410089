"""What a person reads: a study, a checkpoint and a verdict as tables within 100 columns; plan_tables has the plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ffncompress.cli.console import bare_table, make_console, say
from ffncompress.cli.plan_tables import delta_in_short, print_frontier, print_plan
from ffncompress.cli.reports import points, verdict_of, with_error

if TYPE_CHECKING:
    from ffncompress.profiling.records import Profile, Study
    from ffncompress.records.gate import GateResult
    from ffncompress.records.plan import Plan
from ffncompress.records.task import MEASURES, UNTIMED


def print_stage(made: Plan | Path | GateResult | str, *, to_stderr: bool = False) -> None:
    """What a stage of `run` made."""
    from ffncompress.records.gate import GateResult
    from ffncompress.records.plan import Plan
    from ffncompress.records.plan_files import PAGE_FILE

    if isinstance(made, Plan):
        print_plan(made, to_stderr=to_stderr)
        print_frontier(made, None, to_stderr=to_stderr)
    elif isinstance(made, GateResult):
        print_gate(made, to_stderr=to_stderr)
    elif isinstance(made, Path):
        page = made / PAGE_FILE
        say(f"Written: {made}{f'   To look at: {page}' if page.is_file() else ''}", to_stderr=to_stderr)
    else:
        say(f"Pushed: {made}", to_stderr=to_stderr)


def print_study(study: Study, *, to_stderr: bool = False) -> None:
    """Every profile as a table, then what they say together, and what each stage took."""
    console = make_console(to_stderr)
    for profile in study.profiles:
        console.print(Text(f"{profile.name} ({profile.family}): {profile.provenance}", style="bold"))
        console.print(Text(f"base {MEASURES[profile.task]} {profile.base_perplexity:.2f}"))
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
    more = ["swap dPPL" if profile.task == "causal" else "swap cost"] * swapped + ["probe"] * probed
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
            *([delta_in_short(block.swap.delta)] if block.swap else []),
            *([f"{block.probe.gain:+.3f}"] if block.probe else []),
            block.regime,
        )
    return table


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
        words = f"healed in {healing.minutes:g} min, {healing.moved}: {healing.steps:,} steps, "
        words += f"{healing.tokens:,} tokens"
        words += f", {healing.pace:,.0f} a second, rate {healing.rate:g}: " if healing.pace and healing.rate else ": "
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
        if alike := text.agreement:
            error = "" if alike.kl_error is None else f" ±{alike.kl_error:.4f}"
            table.add_row("  KL from the base, nats per token", "", f"{alike.kl:.4f}{error}")
            table.add_row("  same top token", "", f"{100 * alike.same_top:.1f} %")
    for task in result.tasks:
        majority = "-" if task.majority is None else f"{100 * task.majority:.1f} %"
        table.add_row(f"{task.metric}, {_in_room(task.task)} ({task.examples:,} examples)")
        right = (with_error(task.base, task.base_error), with_error(task.slimmed, task.slimmed_error))
        table.add_row(f"  right (majority {majority})", *right, points(-task.drop, task.drop_error))
    sizes = result.sizes
    for label, counts in (("replaced FFNs", sizes.replaced_ffns), ("all FFNs", sizes.all_ffns)):
        if counts is not None:
            table.add_row(*_change(f"parameters, {label}", *counts))
    table.add_row(*_change("parameters, whole model", *sizes.whole_model))
    table.add_row(*_change("bytes of weights on disk", *sizes.bytes_on_disk))
    for pace in result.paces:
        rates = (f"{pace.base:,.0f}", f"{pace.slimmed:,.0f}")
        table.add_row(f"tokens/s, {pace.what}", *rates, pace.measured, pace.expected)
    console.print(table)
    if result.speed is None:
        console.print(Text(UNTIMED))
    if result.task != "embedding":  # which goes on with nothing
        console.print(Text(f"prompt: {result.prompt}"))
        console.print(_side_by_side(result.continuation_base, result.continuation_slimmed, console.width))
    if change := result.baseline:
        (before, after), moved = change.parameters, [f"{change.relative:+.2%} {MEASURES[result.task]}"]
        moved += [f"{after - before:+,} parameters"]
        moved += [f"{points(now - then, None)} points on {name}" for name, (then, now) in change.accuracies.items()]
        console.print(Text(f"since the baseline: {', '.join(moved)}"))
    for held, words in verdict_of(result):
        passed = held not in result.failed
        verdict = f"gate {'passed' if passed else 'FAILED'}: {words}"
        console.print(Text(verdict, style="bold green" if passed else "bold red"))
    for warning in filter(None, (result.limit_warning, result.drop_warning)):
        console.print(Text(warning, style="yellow"))


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
