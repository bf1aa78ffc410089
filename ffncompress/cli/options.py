"""What several commands share: their options, and what is said when one of them is interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ffncompress.budgets import BASELINE_MARGIN
from ffncompress.cli.lines import LOUDNESS
from ffncompress.errors import ProcessError

INTERRUPTED = 130
TARGETS = click.Choice(["native", "gguf", "vllm"])
HEALED = click.Choice(["replaced", "all", "lora"])
DTYPES = click.Choice(["auto", "float32", "bfloat16", "float16"])


def options(*chosen: Callable[..., Any]) -> Callable[..., Any]:
    """Several options as one decorator, in the order written."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(chosen):
            function = option(function)
        return function

    return decorate


def _can_be_written(_context: click.Context, _option: click.Parameter, file: str | None) -> str | None:
    """Said before the work, not after it."""
    target = Path(file or ".")
    if (
        file
        and file != "-"
        and (target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK))
    ):
        raise click.BadParameter(f"{file}: cannot be written there; give a file in a folder that exists")
    return file


def _set_loudness(context: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        context.meta[LOUDNESS] = option.name


loudness_options = options(
    click.option(
        "--quiet", is_flag=True, expose_value=False, callback=_set_loudness,
        help="No progress; errors and results stay.",
    ),
    click.option(
        "--verbose", is_flag=True, expose_value=False, callback=_set_loudness,
        help="A line on standard error for every stage.",
    ),
)  # fmt: skip
device_options = options(
    click.option("--dtype", type=DTYPES, default="auto", help="Compute dtype; auto is float32 on a CPU."),
    click.option("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; auto finds one."),
)
memory_options = options(
    click.option("--memory", metavar="SIZE", help="What the run may take: 4G, 500MB.  [default: most of what is free]"),
    click.option(
        "--stream/--no-stream", default=None,
        help="Read the weights from disk, layer by layer.  [default: where they do not fit]",
    ),
)  # fmt: skip
heal_options = options(
    click.option(
        "--heal", type=float, metavar="MINUTES", help="Then distil it from its original for so long.  [default: do not]"
    ),
    click.option(
        "--heal-what", type=HEALED,
        help="What is trained: the replacements, all but embeddings and head, or adapters too.  [default: replaced]",
    ),
    click.option(
        "--data", multiple=True, metavar="TEXT", help="Text to heal on; several in turns.  [default: the plan's]"
    ),
    click.option("--device", default="auto", metavar="DEVICE", help="Where to heal: cpu, cuda, ...; auto finds one."),
)  # fmt: skip
target_options = options(
    click.option("--native", is_flag=True, help="A stock checkpoint that loads anywhere: neurons, one common width."),
    click.option("--for", "target", type=TARGETS, help="Only what runs there, at what it costs there."),
    click.option("--kinds", metavar="LIST", help="Only these: linear (constant, low-rank, dense), neurons, hybrid."),
    click.option("--align", type=int, metavar="N", help="Widths are multiples of it.  [default: 32 with --for, or 1]"),
)
trust_option = click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what an earlier run left there.")
json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_can_be_written,
    help="Write the result as JSON; - is standard output.",
)
summary_option = click.option(
    "--summary",
    metavar="FILE",
    callback=_can_be_written,
    help="Append the result as Markdown: $GITHUB_STEP_SUMMARY, a comment.",
)
task_options = options(
    click.option(
        "--tasks", multiple=True, metavar="LIST", help="Accuracy too: arc_easy,hellaswag,... of lm-eval, or my.yaml."
    ),
    click.option("--limit", type=int, metavar="N", help="Examples of each task.  [default: all]"),
    click.option("--max-drop", type=float, metavar="POINTS", help="Accuracy may fall by so many points, on average."),
)
baseline_options = options(
    click.option("--baseline", metavar="FILE", help="Compare with a result that --json wrote, and hold it to that."),
    click.option(
        "--baseline-margin", default=BASELINE_MARGIN, metavar="LIMIT", show_default=True,
        help="By how much perplexity may be above the baseline's.",
    ),
)  # fmt: skip
junit_option = click.option("--junit", metavar="FILE", callback=_can_be_written, help="Write the verdict as JUnit XML.")


@contextmanager
def resumable(*outputs: str) -> Iterator[None]:
    """Interrupted work that can be gone on with says so, and where what is finished lies."""
    try:
        yield
    except (KeyboardInterrupt, ProcessError) as error:
        from ffncompress.cli import console
        from ffncompress.storage.working import working_folder

        found = [str(folder) for folder in map(working_folder, filter(None, outputs)) if folder.is_dir()]
        if not found:
            raise
        where = " and ".join(found)
        if str(error):  # another process ended, not this one
            raise ProcessError(f"{error}; run it again to go on: finished stages are in {where}") from error
        told = f"ffncompress: interrupted; run it again to go on: finished stages are in {where}"
        console.say(told, to_stderr=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
