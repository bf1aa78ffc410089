"""What every page is made of: a template, a style, drawing.js and a script of its own, and its data as JSON.

Everything is inside the one file, so it opens from a disk, can be mailed, and fetches nothing. Strings may be a
stranger's: those in the template are escaped, those in the data are only ever set as text by the scripts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from ffncompress.type_aliases import Json

NAMES = ("model", "text")  # fields that an old record may have filled with somebody's paths


@dataclass(frozen=True)
class Words:
    """What a page says outside its drawings."""

    title: str
    heading: str
    without_script: str
    footer: str


def render_page(words: Words, data: Json, script: str) -> str:
    """The whole page as HTML.

    Args:
        words: what it says outside its drawings.
        data: what it shows; `data` in the script.
        script: draws it, with what drawing.js has.
    """
    # "<" cannot end the script element, whatever a file is called
    content = json.dumps(fit_to_show(data), allow_nan=False).replace("<", "\\u003c")
    return Template(asset("page.html")).substitute(
        {name: escape(value) for name, value in vars(words).items()},
        style=asset("page.css"),
        script=asset("drawing.js") + script,
        data=content,
    )


def asset(name: str, package: str = __package__) -> str:
    """A file that lies in a package, as text."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def fit_to_show(value: Json) -> Json:
    """Names without anybody's folders; and JSON has no infinity, so what is not finite is absent."""
    if isinstance(value, dict):
        return {k: Path(v).name if k in NAMES and isinstance(v, str) else fit_to_show(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [fit_to_show(item) for item in value]
    missing = (isinstance(value, float) and not math.isfinite(value)) or value in ("NaN", "Infinity", "-Infinity")
    return None if missing else value
