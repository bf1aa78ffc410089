"""The picture of a plan: the paper's Figure 2 for this model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ffncompress.settings import Limit

if TYPE_CHECKING:
    from ffncompress.plans import Plan

_REPLACED, _KEPT, _INK = "#0b7285", "#adb5bd", "#343a40"


def draw_profile(plan: Plan, file: Path) -> None:
    """R2_lin and swap delta-PPL of each block, one above the other."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    from matplotlib.ticker import FuncFormatter

    blocks = plan.blocks
    at = [b.index for b in blocks]
    colours = [_REPLACED if b.replace else _KEPT for b in blocks]
    figure = Figure(figsize=(max(7.0, 0.34 * len(blocks) + 2), 6.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)

    r2 = [b.scores.r2_lin for b in blocks]
    top.bar(at, r2, yerr=[b.scores.r2_lin_error for b in blocks], color=colours, ecolor=_INK, capsize=2)
    top.plot(at, [b.scores.r2_median_feature for b in blocks], "D", ms=4, color="#e8590c", label="median feature")
    top.axhline(0, color=_INK, lw=0.6)
    top.set_ylim(min(0.0, max(-0.5, min(r2) - 0.05)), 1.02)
    top.set_ylabel("R2_lin (held out)")

    swaps = [b.swap for b in blocks]
    bottom.bar(at, [s.delta for s in swaps], yerr=[s.delta_error for s in swaps], color=colours, ecolor=_INK, capsize=2)
    predicted = [s.predicted_delta for s in swaps]
    bottom.plot(at, predicted, "_", ms=9, mew=2, color="#5f3dc4", label="predicted")
    decade = 10.0 ** math.floor(math.log10(max(0.02 * plan.base_perplexity, 1e-6)))
    bottom.set_yscale("symlog", linthresh=decade)  # linear below a decade's tick, so that no tick crowds the zero
    bottom.axhline(0, color=_INK, lw=0.6)
    bottom.set_ylabel(f"swap delta-PPL\n(base {plan.base_perplexity:.2f})")
    bottom.set_xlabel("block")
    bottom.set_xticks(at)
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    allowed = Limit.parse(plan.settings.max_delta).allowance(plan.base_perplexity)
    bottom.axhline(allowed, color="#c92a2a", lw=0.8, ls="--", label=f"limit {plan.settings.max_delta}, all together")

    for axes in (top, bottom):
        axes.set_xlim(at[0] - 0.7, at[-1] + 0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)  # clear of the bars
    replaced = f"{len(plan.replaced)} of {len(blocks)} FFNs replaced (teal) at {plan.settings.budget}"
    tokens = sum(text.tokens for text in plan.choose_text)
    figure.suptitle(
        f"{Path(plan.base.name).name}: {replaced}\n"
        f"held out: {tokens:,} tokens of {', '.join(Path(t.source).name for t in plan.choose_text)}, "
        f"context {plan.settings.seq_len}",
        fontsize=10,
    )
    figure.savefig(file, dpi=150)
