"""The page of a study: one file with everything in it, which asks nothing of a network."""

from __future__ import annotations

from pathlib import Path

from ffncompress.pages.page import Words, asset, render_page
from ffncompress.profiling.records import Study
from ffncompress.type_aliases import Json

POINTS = 48  # of a curve over ranks: more than a screen shows


def render(study: Study) -> str:
    """The whole page as HTML."""
    names = dict.fromkeys(Path(profile.model).name for profile in study.trained)
    words = Words(
        title=f"{', '.join(names)}: linear recoverability",
        heading="How linear are its FFNs?",
        without_script="The tables and plots of this page need JavaScript; profile.csv and the figures do not.",
        footer=f"Made by ffncompress {study.ffncompress_version}. "
        'After S. Whipp, "How Linear Is a Transformer Feed-Forward Block?", arXiv 2606.19379.',
    )
    return render_page(words, _slim(study), asset("report.js", __package__))


def _slim(study: Study) -> Json:
    """The study without what the page does not draw: curves over ranks are thinned."""
    content: Json = study.model_dump(mode="json", exclude={"settings"})
    for profile in content["profiles"]:
        del profile["fit_text"], profile["held_out_text"]
        for block in profile["blocks"]:
            curve = block["scores"].pop("r2_by_rank")
            last = len(curve) - 1
            at = sorted({round(last ** (i / (POINTS - 1))) for i in range(POINTS)})
            block["curve"] = [[rank, curve[rank]] for rank in at]
            block["rank_for_99"] = next(i for i, value in enumerate(curve) if value >= 0.99 * curve[-1] or i == last)
    return content
