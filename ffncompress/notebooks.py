"""What a notebook shows of a record: a small table as HTML, light or dark, and the same rows as a DataFrame.

Strings of a record may be a stranger's: whatever is shown is escaped, and no style or link is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ffncompress.errors import FfncompressError
from ffncompress.sanitize import plain
from ffncompress.type_aliases import Frame

_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"  # a grey that both a light and a dark page show
_CELL = "padding:.15em .7em;text-align:{side};white-space:nowrap;font-variant-numeric:tabular-nums"
_BAR = (
    '<span style="display:inline-block;vertical-align:middle;width:6em;height:.6em;margin-right:.5em;'
    'background:rgba(128,128,128,.25)"><span style="display:block;height:100%;width:{share:.0f}%;'
    'background:#3a86c8"></span></span>'
)


class Bar:
    """A share from 0 to 1, shown as a bar with its figure."""

    def __init__(self, share: float) -> None:
        self.share = share

    def html(self) -> str:
        """The bar; what is no number, or lies outside, gets an empty or a full one."""
        width = 100 * min(max(self.share, 0.0), 1.0) if self.share == self.share else 0.0
        return f"{_BAR.format(share=width)}{100 * self.share:.0f} %"


def table_html(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Bar]], notes: Iterable[str]) -> str:
    """A heading, a table that scrolls where it is long, and a line for each note; numbers stand to the right."""
    head = "".join(_cell(name, "th", index) for index, name in enumerate(columns))
    body = "".join(f"<tr>{''.join(_cell(cell, 'td', i) for i, cell in enumerate(row))}</tr>" for row in rows)
    lines = "".join(f"<div>{_text(note)}</div>" for note in notes if note)
    return (
        f'<div style="color:inherit;background:transparent"><div><b>{_text(title)}</b></div>'
        f'<div style="max-height:30em;overflow:auto"><table style="border-collapse:collapse;margin:.4em 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{lines}</div>"
    )


def frame_of(rows: list[dict[str, Any]]) -> Frame:
    """Rows as a pandas DataFrame.

    Raises:
        FfncompressError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise FfncompressError(
            "a DataFrame needs pandas, which is not installed; pip install pandas, or take the rows from model_dump()"
        ) from error
    return pandas.DataFrame(rows)


def _cell(content: str | Bar, tag: str, column: int) -> str:
    shown = content.html() if isinstance(content, Bar) else _text(content)
    style = f"{_CELL.format(side='left' if column == 0 else 'right')};{_LINE}"
    return f'<{tag} style="{style}">{shown}</{tag}>'


def _text(words: str) -> str:
    return escape(plain(words))
