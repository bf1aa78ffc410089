"""The terminal: bars while something runs, lines when piped, nothing that a stranger wrote obeyed; and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ffncompress.cli.lines import LOUDNESS, Lines, ticking
from ffncompress.runtime.launch import rank
from ffncompress.runtime.progress import Progress, silent
from ffncompress.sanitize import plain

T = TypeVar("T")
_WIDTH = 100


class _Console(Console):
    """Shows strings that a stranger may have written: as they are, and obeying nothing in them."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, with what a stranger may have written made harmless."""
        shown = [Text(plain(o.plain), style=o.style) if isinstance(o, Text) else o for o in objects]
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        """Nobody reads on (`ffncompress show PLAN | head`): that is no error, and the exit code stays the verdict's."""
        stop_printing()


def stop_printing() -> None:
    """Send the rest of standard output nowhere, also what Python flushes as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        """As rich adds one, with its strings made harmless."""
        super().add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def make_console(to_stderr: bool = False) -> Console:
    """A console for what is read: 100 columns at most, or when piped; only the first process speaks."""
    stream = sys.stderr if to_stderr else sys.stdout
    made = _Console(file=stream, quiet=rank() > 0, highlight=False, soft_wrap=False, markup=False, emoji=False)
    made.width = min(made.width, _WIDTH) if made.is_terminal else _WIDTH
    return made


def _is_watched(console: Console) -> bool:
    """Whether somebody looks on; FORCE_COLOR, which CI services set, makes a terminal of a file for rich."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """A bar on the terminal for each loop, lines when piped; both with --verbose, neither with --quiet."""
    console, command = make_console(to_stderr=True), click.get_current_context(silent=True)
    asked = command and command.meta.get(LOUDNESS)

    def tell(line: str) -> None:
        console.print(Text(line), soft_wrap=True)  # a line stays one, however long a path is in it

    if console.quiet or asked == "quiet":
        yield silent
    elif not _is_watched(console):
        with ticking(Lines(tell, everything=asked == "verbose")) as lines:
            yield lines
    else:
        with _bars(console) as shown:
            yield Lines(tell, shown=shown, everything=True) if asked == "verbose" else shown


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console, transient=True) as shown:

        def progress(items: Sequence[T], description: str, /) -> Iterable[T]:
            task = shown.add_task(description, total=len(items))
            for item in items:
                yield item
                shown.advance(task)
            shown.remove_task(task)

        yield progress


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner for a stage whose length is not known."""
    console = make_console(to_stderr=True)
    if not _is_watched(console):
        yield
        return
    with console.status(description):
        yield


def bare_table(*columns: str) -> Table:
    """A bare table; a column named "x:text" is set left, the others are numbers."""
    table = _Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for column in columns:
        name, _, kind = column.partition(":")
        table.add_column(name, justify="left" if kind else "right", no_wrap=True)
    return table


def say(text: str, *, to_stderr: bool = False) -> None:
    """One line, or a few."""
    make_console(to_stderr).print(Text(text))


def write_json(file: str | None, content: str) -> None:
    """To a file, or to standard output for `-`; of several processes, the first alone."""
    from ffncompress.storage.files import write_file

    if rank() > 0:
        return
    if file == "-":
        try:
            sys.stdout.write(content + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            stop_printing()
    elif file:
        write_file(file, content + "\n")
