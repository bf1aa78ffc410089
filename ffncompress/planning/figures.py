"""The picture of a plan: the paper's Figure 2 for this model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffncompress.records.plan import Plan

_REPLACED, _KEPT, _INK = "#0b7285", "#adb5bd", "#343a40"


def draw_profile(plan: Plan, file: Path) -> None:
    """R2_lin and swap delta-PPL of each block, one above the other."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    from matplotlib.ticker import FuncFormatter

    blocks = plan.blocks
    at = [b.index for b in blocks]
    colours = [_REPLACED if b.replace else _KEPT for b in blocks]
    figure = Figure(figsize=(max(7.0, 0.34 * len(blocks) + 2), 7.2), layout="constrained")
    top, bottom, share = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.4))

    r2 = [_drawn(b.scores.r2_lin) for b in blocks]
    top.bar(at, r2, yerr=[_drawn(b.scores.r2_lin_error, 0) for b in blocks], color=colours, ecolor=_INK, capsize=2)
    medians = [_drawn(b.scores.r2_median_feature) for b in blocks]
    top.plot(at, medians, "D", ms=4, color="#e8590c", label="median feature")
    top.axhline(0, color=_INK, lw=0.6)
    top.set_ylim(min(0.0, max(-0.5, min(r2) - 0.05)), 1.02)
    top.set_ylabel("R2_lin (held out)")

    swaps = [b.swap for b in blocks]
    deltas, errors = [_drawn(s.delta) for s in swaps], [_drawn(s.delta_error, 0) for s in swaps]
    bottom.bar(at, deltas, yerr=errors, color=colours, ecolor=_INK, capsize=2)
    predicted = [_drawn(s.predicted_delta) for s in swaps]
    bottom.plot(at, predicted, "_", ms=9, mew=2, color="#5f3dc4", label="predicted")
    decade = 10.0 ** math.floor(math.log10(max(_drawn(0.02 * plan.base_perplexity), 1e-6)))
    bottom.set_yscale("symlog", linthresh=decade)  # linear below a decade's tick, so that no tick crowds the zero
    bottom.axhline(0, color=_INK, lw=0.6)
    bottom.set_ylabel(f"swap delta-PPL\n(base {plan.base_perplexity:.2f})")
    share.bar(at, [b.parameters_after / b.parameters for b in blocks], color=colours)
    share.set_ylim(0, 1.05)
    share.set_ylabel("share kept")
    share.set_xlabel("block")
    share.set_xticks(at)
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    limit = plan.settings.limit
    if limit:
        allowed = _drawn(limit.allowance(plan.base_perplexity))
        bottom.axhline(allowed, color="#c92a2a", lw=0.8, ls="--", label=f"limit {limit}, all together")

    for axes in (top, bottom, share):
        axes.set_xlim(at[0] - 0.7, at[-1] + 0.7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (top, bottom):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)  # clear of the bars
    replaced = f"{len(plan.replaced)} of {len(blocks)} FFNs replaced (teal) ({plan.settings.asks()})"
    tokens = sum(text.tokens for text in plan.choose_text)
    figure.suptitle(
        f"{Path(plan.base.name).name}: {replaced}\n"
        f"held out: {tokens:,} tokens of {', '.join(Path(t.source).name for t in plan.choose_text)}, "
        f"context {plan.settings.seq_len}",
        fontsize=10,
    )
    figure.savefig(file, dpi=150)


def _drawn(value: float, least: float = -1e9) -> float:
    """A number that can be drawn: a file may say anything, and axes end somewhere."""
    return 0.0 if math.isnan(value) else min(max(value, least), 1e9)


def draw_frontier(plan: Plan, file: Path) -> None:
    """Size against perplexity: a person picks a point."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    points, whole = plan.frontier, plan.base.parameters
    millions = [point.parameters / 1e6 for point in points]
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    expected = [point.expected_perplexity for point in points]
    axes.plot(millions, expected, "-", color=_REPLACED, label="expected")
    measured = [
        (size, p.measured_perplexity) for size, p in zip(millions, points, strict=True) if p.measured_perplexity
    ]
    axes.plot(*zip(*measured, strict=True), "o", color=_REPLACED, label="measured, before refitting")
    final = plan.final_check
    if final is not None and plan.replaced:
        axes.plot([final.parameters / 1e6], [final.perplexity], "*", ms=13, color="#e8590c", label="this plan")
    if (knee := plan.knee) is not None:
        at = (knee.parameters / 1e6, knee.expected_perplexity)
        axes.plot(*zip(at), "o", ms=14, mfc="none", mew=1.6, color="#5f3dc4", label=f"bends at {knee.share:.3f}")
    axes.set_yscale("log")  # one ruined model must not flatten the choice among the others
    for pick in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        pick(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel("perplexity on the choose text")
    shares = axes.secondary_xaxis("top", functions=(lambda m: m * (1e6 / whole), lambda s: s * (whole / 1e6)))  # type: ignore[operator]
    shares.set_xlabel("share of the whole model (--at)")
    axes.grid(alpha=0.25)
    axes.spines[["right"]].set_visible(False)
    axes.legend(frameon=False)
    bend = "" if plan.knee else ", which has no clear bend"
    figure.suptitle(f"{Path(plan.base.name).name}: size and perplexity{bend}", fontsize=10)
    figure.savefig(file, dpi=150)
