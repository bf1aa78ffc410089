"""The text of the embedded model's own kind: short stories, none of which it was trained on, packed in the package."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

from ffncompress.sanitize import parse_json


@cache
def stories() -> list[tuple[str, str]]:
    """(name, text) of each story."""
    packed = files("ffncompress") / "demo" / "stories.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).decode("utf-8").splitlines()
    return [(f"story {number}", parse_json(line)["text"]) for number, line in enumerate(lines, 1)]
