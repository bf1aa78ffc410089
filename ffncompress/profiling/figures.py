"""The figures of a study, each as PNG and SVG: what the paper's Figures 2 to 5 show, and a few more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncompress.profiling.records import Profile, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1971c2", "#f08c00", "#495057")
REGIME_COLOURS = {"broadly linear": "#0b7285", "outlier-dominated": "#e8590c", "nonlinear": "#868e96"}


def draw_all(study: Study, folder: Path) -> list[str]:
    """Draw every figure that the study has data for; returns their names, without ending."""
    figures: dict[str, Callable[[Study], Figure | None]] = {
        "profile": draw_profile, "regimes": draw_regimes, "ranks": draw_ranks, "texts": draw_texts,
        "probe": draw_probe, "pitfall": draw_pitfall, "training": draw_training, "cross-feed": draw_cross_feed,
    }  # fmt: skip
    drawn = []
    for name, draw in figures.items():
        figure = draw(study)
        if figure is not None:
            for ending in ("png", "svg"):
                figure.savefig(folder / f"{name}.{ending}", dpi=150)
            drawn.append(name)
    return drawn


def first_text(study: Study) -> list[Profile]:
    """Of each model as it is, the profile on its first text."""
    return list({profile.model: profile for profile in reversed(study.trained)}.values())[::-1]


def draw_profile(study: Study) -> Figure:
    """R2_lin by block with its interval and the median feature; below, what a swap costs."""
    from matplotlib.ticker import FuncFormatter

    shown = first_text(study)
    swapped = all(block.swap for profile in shown for block in profile.blocks)
    longest = max(len(profile.blocks) for profile in shown)
    figure = _figure(max(7.0, 0.34 * longest + 2), 6.4 if swapped else 3.8)
    panels = figure.subplots(2 if swapped else 1, 1, sharex=True, squeeze=False)[:, 0]
    for profile, colour in zip(shown, COLOURS, strict=False):
        at = [block.index for block in profile.blocks]
        errors = [1.96 * block.scores.r2_lin_error for block in profile.blocks]
        panels[0].errorbar(at, profile.r2, errors, fmt="o-", ms=4, lw=1.4, capsize=2, color=colour, label=profile.name)
        medians = [block.scores.r2_median_feature for block in profile.blocks]
        panels[0].plot(at, medians, "D", ms=3.5, mfc="none", color=colour, label="median feature")
        if swapped:
            deltas = [100 * block.swap.delta / profile.base_perplexity for block in profile.blocks if block.swap]
            bars = [100 * block.swap.error / profile.base_perplexity for block in profile.blocks if block.swap]
            panels[1].errorbar(at, deltas, bars, fmt="o-", ms=4, lw=1.4, capsize=2, color=colour)
    panels[0].set_ylabel("R2_lin, held out (95 %)")
    panels[0].set_ylim(min(0.0, max(-0.5, min(min(p.r2) for p in shown) - 0.05)), 1.03)
    if swapped:
        panels[1].set_yscale("symlog", linthresh=1)
        panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[1].axhline(0, color="#343a40", lw=0.6)
        panels[1].set_ylabel("swap delta-PPL, % of base")
    panels[-1].set_xlabel("block")
    panels[0].legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    return _titled(figure, "Linear recoverability by block", shown)


def draw_regimes(study: Study) -> Figure:
    """Pooled R2_lin against the median feature's; a point is as large as its output's effective rank."""
    shown = first_text(study)
    figure = _figure(4.2 * len(shown) + 1, 4.4)
    for axes, profile in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.plot([0, 1], [0, 1], color="#ced4da", lw=1, zorder=0)
        for regime, colour in REGIME_COLOURS.items():
            own = [block for block in profile.blocks if block.regime == regime]
            sizes = [12 + 220 * block.scores.effective_rank_output / block.d_out for block in own]
            x, y = [b.scores.r2_lin for b in own], [b.scores.r2_median_feature for b in own]
            axes.scatter(x, y, sizes, color=colour, alpha=0.75, label=f"{regime} ({len(own)})")
        for block in profile.blocks:
            at = (block.scores.r2_lin, block.scores.r2_median_feature)
            axes.annotate(str(block.index), at, fontsize=6, ha="center", va="center")
        axes.set_xlabel("R2_lin, pooled")
        axes.set_ylabel("R2 of the median feature")
        axes.set_title(profile.name, fontsize=9)
        axes.legend(frameon=False, fontsize=7)
    return _titled(figure, "Regimes (area: effective rank of the output)", shown)


def draw_ranks(study: Study) -> Figure:
    """R2 against rank, a line for each block."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    shown = first_text(study)
    figure = _figure(4.4 * len(shown) + 1.4, 4.2)
    for axes, profile in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        colour = ScalarMappable(Normalize(0, max(1, len(profile.blocks) - 1)), colormaps["viridis"])
        for block in profile.blocks:
            curve = block.scores.r2_by_rank[1:]
            axes.plot(
                range(1, len(curve) + 1),
                curve,
                lw=1,
                color=colormaps["viridis"](block.index / max(1, len(profile.blocks) - 1)),
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(min(0.0, max(-0.2, min(profile.r2) - 0.05)), 1.03)
        axes.set_xlabel("rank of the linear map")
        axes.set_ylabel("R2, held out")
        axes.set_title(profile.name, fontsize=9)
        figure.colorbar(colour, ax=axes, label="block")
    return _titled(figure, "R2 against rank", shown)


def draw_texts(study: Study) -> Figure | None:
    """A line for each text, a panel for each model."""
    models = [agreement.model for agreement in study.agreements]
    if not models:
        return None
    figure = _figure(7.0, 2.6 * len(models) + 1)
    for axes, model in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        own = [profile for profile in study.trained if profile.model == model]
        for profile, colour in zip(own, COLOURS, strict=False):
            at = [block.index for block in profile.blocks]
            axes.plot(at, profile.r2, "o-", ms=3.5, lw=1.3, color=colour, label=Path(profile.text).name)
        axes.set_ylabel(f"R2_lin\n{own[0].name}")
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_xlabel("block")
    return _titled(figure, "One profile, several texts", [])


def draw_probe(study: Study) -> Figure | None:
    """The probe's gain against 1 - R2_lin, a point for each block."""
    shown = [profile for profile in first_text(study) if profile.probe]
    if not shown:
        return None
    figure = _figure(5.4, 4.2)
    axes = figure.subplots()
    for profile, colour in zip(shown, COLOURS, strict=False):
        probes = [block.probe for block in profile.blocks if block.probe]
        x = [1 - value for value in profile.r2]
        bars = [1.96 * probe.gain_error for probe in probes]
        r = profile.probe.correlation if profile.probe else None
        label = profile.name + (f", r = {r:+.2f}" if r is not None else "")
        axes.errorbar(x, [probe.gain for probe in probes], bars, fmt="o", ms=4, capsize=2, color=colour, label=label)
    axes.axhline(0, color="#343a40", lw=0.6)
    axes.set_xlabel("1 - R2_lin")
    axes.set_ylabel("gain of the rank-16 bilinear probe")
    axes.legend(frameon=False, fontsize=8)
    return _titled(figure, "What sixteen products could recover", shown)


def draw_pitfall(study: Study) -> Figure | None:
    """Held-out R2 over training steps, and the closed form as a line."""
    if not study.pitfalls:
        return None
    figure = _figure(4.4 * len(study.pitfalls) + 1, 4.0)
    for axes, found in zip(figure.subplots(1, len(study.pitfalls), squeeze=False)[0], study.pitfalls, strict=True):
        axes.axhline(found.closed_form, color=COLOURS[0], lw=1.6, label=f"closed form {found.closed_form:.3f}")
        for trained, colour in zip(found.trained, COLOURS[1:], strict=False):
            label = f"{trained.optimiser}, rate {trained.rate:.1e}: {trained.r2[-1]:.3f}"
            axes.plot(trained.steps, trained.r2, "o-", ms=3, lw=1.2, color=colour, label=label)
        axes.set_xscale("log")
        axes.set_ylim(max(-0.5, min(min(t.r2) for t in found.trained) - 0.05), 1.03)
        axes.set_xlabel("training steps")
        axes.set_ylabel("R2, held out")
        axes.set_title(
            f"{Path(found.model).name}, block {found.block}: condition number {found.condition_number:.1e}", fontsize=9
        )
        axes.legend(frameon=False, fontsize=7)
    return _titled(figure, "A linear layer, trained and solved", [])


def draw_training(study: Study) -> Figure | None:
    """Linearity over training: a row for each checkpoint, random twin first."""
    others = [profile for profile in study.profiles if profile.variant]
    if not others:
        return None
    text = others[0].text
    shown = [p for p in study.profiles if p.text == text and p.model == others[0].model]
    shown.sort(key=lambda p: (p.variant != "random", p.variant == ""))  # stable: revisions stay as they were given
    figure = _figure(max(6.0, 0.3 * len(shown[0].blocks) + 2.5), 0.45 * len(shown) + 2.2)
    axes = figure.subplots()
    image = axes.imshow([p.r2 for p in shown], aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axes.set_yticks(range(len(shown)), [p.variant or "as it is" for p in shown])
    axes.set_xlabel("block")
    figure.colorbar(image, ax=axes, label="R2_lin")
    return _titled(figure, f"Learned, not architectural: {Path(shown[0].model).name}", shown[:1])


def draw_cross_feed(study: Study) -> Figure | None:
    """A panel for each pair: own inputs, the other's raw, the other's matched."""
    feeds = study.cross_feeds
    if not feeds:
        return None
    figure = _figure(7.0, 2.6 * len(feeds) + 0.8)
    for axes, feed in zip(figure.subplots(len(feeds), 1, squeeze=False)[:, 0], feeds, strict=True):
        at = [block.block for block in feed.blocks]
        lines = {"own inputs": "own", "raw": "raw", "matched": "matched", f"{feed.giver}'s own FFN": "giver"}
        for (label, what), colour in zip(lines.items(), COLOURS, strict=False):
            style = ":" if what == "giver" else "-"
            axes.plot(at, [getattr(b, what) for b in feed.blocks], f"o{style}", ms=3, lw=1.3, color=colour, label=label)
        axes.set_ylabel("R2_lin")
        axes.set_title(f"{feed.model} fed {feed.giver}'s activations", fontsize=9, loc="left")
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_xlabel("block")
    return _titled(figure, "The map or its inputs", [])


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _titled(figure: Figure, title: str, shown: list[Profile]) -> Figure:
    """A title, what the numbers are of, and no frames."""
    lines = [f"{profile.name}: {profile.provenance}" for profile in shown]
    figure.suptitle("\n".join([title, *lines]), fontsize=9)
    axes: Any
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure
