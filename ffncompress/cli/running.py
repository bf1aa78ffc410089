"""A recipe run on the terminal: its stages are shown as they end, and the verdict is the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ffncompress.cli.options import resumable

if TYPE_CHECKING:
    from ffncompress.records.gate import GateResult


def run_recipe(
    recipe: Path, output: str | None, overwrite: bool, json_file: str | None, junit: str | None,
    summary: str | None = None, trust_remote_code: bool = False,
) -> int:  # fmt: skip
    """Run a recipe, print what each stage made, write what was asked for; returns the exit code."""
    from ffncompress import api
    from ffncompress.checkpoint.origin import GATE_PAGE, META
    from ffncompress.cli import console, tables
    from ffncompress.recipe import Recipe

    to_stderr = json_file == "-"
    target = Recipe.read(recipe)[0].output if output is None else output
    with resumable(target, f"{target}-plan"), console.progress_shown() as progress:
        result = api.run(
            recipe, output=output, overwrite=overwrite, trust_remote_code=trust_remote_code, progress=progress,
            report=lambda made: tables.print_stage(made, to_stderr=to_stderr),
        )  # fmt: skip
    page = Path(target) / META / GATE_PAGE
    console.say(f"To look at: {page}", to_stderr=to_stderr)
    return write_verdict(result, json_file, junit, summary)


def write_verdict(result: GateResult, json_file: str | None, junit: str | None, summary: str | None) -> int:
    """Write a gate's result in the forms that were asked for; returns the exit code."""
    from ffncompress.cli import console, reports

    console.write_json(json_file, result.model_dump_json(indent=1))
    if junit:
        reports.write_junit(junit, result)
    if summary:
        reports.append_summary(summary, result)
    return 0 if result.passed else 1
