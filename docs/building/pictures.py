"""Pictures of the docs that are drawn from the log of measurements.

python docs/building/pictures.py     writes docs/pictures/r2-against-cost.svg and frontier.svg
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]
LOG = (DOCS.parent / "benchmarks" / "LOG.md").read_text()
COLOURS = {"broadly linear": "#2b7a78", "outlier-dominated": "#d1495b", "nonlinear": "#6c757d"}
PEERS = {"ours": "#0b7285", "FLAP": "#d1495b", "ReplaceMe": "#e08e45", "ShortGPT": "#7b5ea7", "SVD-LLM": "#6c757d"}


def main() -> None:
    """Both pictures, the same bytes from the same log."""
    plt.rcParams.update({"svg.hashsalt": "ffncompress", "font.size": 10, "axes.spines.top": False})
    plt.rcParams["axes.spines.right"] = False
    save(r2_against_cost(), "r2-against-cost")
    save(frontier(), "frontier")


def save(figure: plt.Figure, name: str) -> None:
    """On white, which is read on a dark page too."""
    figure.tight_layout()
    figure.savefig(DOCS / "pictures" / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")


def r2_against_cost() -> plt.Figure:
    """R2_lin of each block of SmolLM2 against the cost of its linear map."""
    table = LOG.partition("### smollm2: wiki.train")[2].partition("### stories15m")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) ± .*\| \+([\d.]+) ± [\d.]+ \|.*\| ([a-z -]+) \|$", table, re.M)
    figure, axes = plt.subplots(figsize=(7, 4))
    for regime, colour in COLOURS.items():
        points = [(float(r2), float(cost)) for _, r2, cost, own in rows if own == regime]
        axes.scatter(*zip(*points, strict=True), label=regime, color=colour, s=36)
    for block, r2, cost, _ in rows:
        if block in ("11", "28", "13", "0"):
            axes.annotate(f"block {block}", (float(r2), float(cost)), (-8, 0), textcoords="offset points", ha="right")
    axes.set(yscale="log", xlabel="R2_lin", ylabel="perplexity rises by", xlim=(0.2, 1.02))
    axes.legend(frameon=False)
    return figure


def frontier() -> plt.Figure:
    """Perplexity against size, SmolLM2 on WikiText-2 test."""
    table = LOG.partition("#### smollm2, WikiText-2")[2].partition("####")[0]
    sizes = [float(size) for size in re.findall(r"([\d.]+) M", table.partition("\n| ---")[0])]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, colour in PEERS.items():
        row = re.search(rf"^\| {name} \|(.*)\|$", table, re.M)
        assert row is not None
        values = [float(cell.split("/")[0].strip(" *")) for cell in row[1].split("|")]
        axes.plot(sizes, values, "o-", color=colour, label=name, lw=2.5 if name == "ours" else 1.2)
    axes.axhline(36.0, color="black", lw=0.8, ls=":")
    axes.annotate(
        "the original, 134.5 M: 36.00", (94.7, 36.0), (0, 4), textcoords="offset points", fontsize=9, ha="right"
    )
    axes.set(yscale="log", ylim=(33, 700), xlabel="million parameters", ylabel="perplexity")
    axes.set_yticks([40, 60, 100, 200, 400], ["40", "60", "100", "200", "400"])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
