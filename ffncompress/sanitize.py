"""Strings that may come from a stranger, made harmless where they are shown: in a terminal, on a page, in a command."""

from __future__ import annotations

import html
import json
import re
import shlex
import unicodedata

from ffncompress.type_aliases import Json

# Cc: terminals obey them; Cf: text that runs backwards or hides; Cs: cannot be encoded; Co: nobody knows what they show
_OBEYED = {"Cc", "Cf", "Cs", "Co"}


def plain(text: str) -> str:
    """Without what a terminal, an XML reader or the eye would obey instead of show; lines and tabs stay."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in _OBEYED else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def in_markdown(text: str) -> str:
    """One line of a page, as words: no element, link, table cell or emphasis begins in it."""
    line = " ".join(plain(text).split())
    return re.sub(r"([\\`*\[\]|#!])", r"\\\1", html.escape(line, quote=False))


def in_command(word: str) -> str:
    """One word of a command that is shown inside a fence of Markdown."""
    return shlex.quote(" ".join(plain(word).split()).replace("`", "'"))


def parse_json(text: str) -> Json:
    """JSON whose strings are text: Python's parser lets half a surrogate pair pass, which can never be written again.

    Raises:
        ValueError: it is not.
        RecursionError: it is nested too deep.
    """
    content = json.loads(text)
    if "\\ud" in text.lower():  # only an escape can hide one
        json.dumps(content, ensure_ascii=False).encode()
    return content


def in_short(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = plain(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
