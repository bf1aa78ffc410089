"""The page of a study: one file with everything in it, which asks nothing of a network."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from ffncompress.profiling.records import Study
from ffncompress.type_aliases import Json

POINTS = 48  # of a curve over ranks: more than a screen shows


def render(study: Study) -> str:
    """The whole page as HTML."""
    assets = files(__package__)
    names = dict.fromkeys(Path(profile.model).name for profile in study.trained)
    # "<" cannot end the script element, whatever a file is called
    data = json.dumps(_slim(study), allow_nan=False).replace("<", "\\u003c")
    return Template(assets.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{', '.join(names)}: linear recoverability"),
        version=escape(study.ffncompress_version),
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
        study=data,
    )


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
    return _fit_to_show(content)


def _fit_to_show(value: Json) -> Json:
    """Names without anybody's folders; and JSON has no infinity, so what is not finite is absent."""
    if isinstance(value, dict):
        return {k: Path(v).name if k in ("model", "text") else _fit_to_show(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_fit_to_show(item) for item in value]
    missing = (isinstance(value, float) and not math.isfinite(value)) or value in ("NaN", "Infinity", "-Infinity")
    return None if missing else value
