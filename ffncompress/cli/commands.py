"""The commands: one function each, its docstring the help."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from ffncompress import __version__
from ffncompress.cli.eval_command import evaluate
from ffncompress.cli.export_command import export
from ffncompress.cli.options import (
    DTYPES,
    device_options,
    heal_options,
    json_option,
    junit_option,
    loudness_options,
    memory_options,
    overwrite_option,
    resumable,
    summary_option,
    target_options,
    trust_option,
)
from ffncompress.cli.running import run_recipe
from ffncompress.runtime.launch import alone, note_if_alone


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ffncompress")
@click.pass_context
def cli(context: click.Context) -> None:
    """Slim Hugging Face language models: FFN blocks that are nearly linear become small closed-form modules.

    Nothing is trained. Start with: ffncompress demo
    """
    if context.invoked_subcommand not in ("plan", "profile"):
        alone(str(context.invoked_subcommand))
    elif note := note_if_alone():
        click.echo(f"ffncompress: {note}", err=True)


cli.add_command(evaluate)
cli.add_command(export)


@cli.command()
@click.argument("model")
@click.option("-o", "--output", metavar="FOLDER", help="The plan folder.  [default: MODEL's name + -plan]")
@click.option("--budget", metavar="BUDGET", help="8x: a replaced FFN keeps at most 1/8; -20%, 100M: the whole model.")
@click.option("--max-delta", metavar="LIMIT", help="Perplexity may rise by so much, all together.  [default: 5%]")
@click.option(
    "--target-speed",
    metavar="FACTOR",
    help="As much faster here, as measured: 1.3x reads a prompt; decode:1.2x goes on.",
)
@click.option("--at", type=float, metavar="SHARE", help="A point of the frontier: 0.85 keeps 85 % of the parameters.")
@target_options
@click.option("--frontier", is_flag=True, help="Print and plot size against perplexity, to pick a point from.")
@click.option("--keep-moments", is_flag=True, help="Keep what --at needs to plan again without the text; large.")
@click.option("--refit/--no-refit", default=True, help="Fit again, in order, on the slimmed model.  [default: refit]")
@click.option("--refit-tokens", type=int, help="Tokens to refit on: more rows, a better fit.  [default: --tokens]")
@click.option("--thorough", is_flag=True, help="Refit what leads into kept neurons too: better, at twice the time.")
@click.option("--blocks", metavar="LIST", help="Replace just these, safe or not: 0,3,7-9.")
@click.option("--data", multiple=True, metavar="TEXT", help="Calibration text; may be repeated; see above.")
@click.option("--choose-data", multiple=True, metavar="TEXT", help="Choose on this; all of --data is fitted on.")
@click.option("--tokens", type=int, default=30_720, show_default=True, help="Tokens in all; a quarter is held out.")
@click.option("--seq-len", type=int, default=128, show_default=True, help="Tokens in a window.")
@click.option("--context", type=int, help="Window of the joint check.  [default: as in eval, 512 or the model's own]")
@click.option("--seed", type=int, default=0, show_default=True, help="Which windows are drawn.")
@click.option("--timings", is_flag=True, help="Print how long each stage took; plan.html has it too.")
@click.option("--revision", metavar="NAME", help="The Hub revision of MODEL.")
@trust_option
@device_options
@memory_options
@overwrite_option
@json_option
@loudness_options
def plan(
    model: str, output: str | None, overwrite: bool, json_file: str | None, revision: str | None,
    trust_remote_code: bool, data: tuple[str, ...], choose_data: tuple[str, ...], timings: bool, **settings: Any,
) -> None:  # fmt: skip
    """Score every FFN of MODEL and choose what becomes of it.

    MODEL is a Hub id, a model folder, a .gguf file, or "demo" for the embedded model. A plan folder with moments kept
    in it may stand in its place: then --at or --budget plan again, with no text and no pass over the model.

    BUDGET: 8x, -20%, 100M, or several: 8x,-20%. With a size or a speed alone, the best model of that size or speed;
    with a limit, the smallest model within it.

    --native makes a checkpoint that needs no ffncompress where it is loaded: every block keeps the same number of
    neurons, and config.json says how many. --for gguf and --for vllm keep a width for each block, and count what a
    linear bypass costs when it is folded into neurons there. --kinds linear --budget 8x is the paper's own method.

    TEXT is a .txt, .jsonl or .parquet file, hub:DATASET:CONFIG:SPLIT:FIELD, wikitext (the default for a Hub model),
    stories (the default for the embedded one), or python-docs (the default otherwise: the reference pages and
    docstrings that Python ships). What is fitted on, chosen on and reported on is disjoint.
    """
    from ffncompress import api
    from ffncompress.cli import console, plan_tables

    output, start = f"{Path(model).name.removesuffix('.gguf')}-plan" if output is None else output, time.monotonic()
    with resumable(output), console.progress_shown() as progress:
        made = api.plan(
            model, output, revision=revision, trust_remote_code=trust_remote_code, overwrite=overwrite,
            progress=progress, data=list(data), choose_data=list(choose_data), **settings,
        )  # fmt: skip
    to_stderr = json_file == "-"
    plan_tables.print_plan(made, to_stderr=to_stderr)
    if timings:
        plan_tables.print_timings(output, to_stderr=to_stderr)
    plan_tables.print_written(made, output, time.monotonic() - start, to_stderr=to_stderr)
    plan_tables.print_frontier(made, output, model=model, data=data, choose_data=choose_data, to_stderr=to_stderr)
    console.write_json(json_file, made.model_dump_json(indent=1))


@cli.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("-o", "--output", required=True, metavar="FOLDER", help="The report folder.")
@click.option("--data", multiple=True, metavar="TEXT", help="A text to profile on; repeat it to compare texts.")
@click.option("--probe", is_flag=True, help="Fit the rank-16 bilinear probe to every block, on the first text.")
@click.option(
    "--pitfall", metavar="BLOCK", help="Train this block's linear map by SGD and Adam; worst: worst-conditioned."
)
@click.option("--cross-feed", is_flag=True, help="Feed each model's FFNs the activations of the others.")
@click.option("--against-random", is_flag=True, help="Profile the same architecture with fresh weights.")
@click.option("--revisions", metavar="LIST", help="Checkpoints of training: Hub revisions or folders, by commas.")
@click.option(
    "--swaps/--no-swaps", default=True, help="Measure linear maps in place, on the first text.  [default: swaps]"
)
@click.option("--tokens", type=int, default=30_720, show_default=True, help="Of each text; a quarter is held out.")
@click.option("--seq-len", type=int, default=128, show_default=True, help="Tokens in a window.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of windows, fresh weights and the probe.")
@click.option("--revision", metavar="NAME", help="The Hub revision of every MODEL.")
@trust_option
@device_options
@memory_options
@click.option("--overwrite", is_flag=True, help="Write a finished report anew; stages that it has are not run again.")
@json_option
@loudness_options
def profile(
    models: tuple[str, ...], output: str, overwrite: bool, json_file: str | None, revision: str | None,
    trust_remote_code: bool, data: tuple[str, ...], revisions: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Measure how linear every FFN is, and write a report.

    FOLDER/report.html is the report, one file that needs no network; beside it lie profile.json, .csv and .parquet, and
    figures as PNG and SVG. A run that was killed goes on from its finished stages when it is started again; with
    --overwrite, a finished report is extended by what is asked for now.

    MODEL and TEXT are as in `ffncompress plan`.
    """
    from ffncompress import api
    from ffncompress.cli import console, tables

    with resumable(output), console.progress_shown() as progress:
        study = api.profile(
            list(models), output, revision=revision, trust_remote_code=trust_remote_code, overwrite=overwrite,
            progress=progress, data=list(data), revisions=revisions.split(",") if revisions else [], **settings,
        )  # fmt: skip
    tables.print_study(study, to_stderr=json_file == "-")
    console.say(f"Report: {Path(output) / 'report.html'}", to_stderr=json_file == "-")
    console.write_json(json_file, study.model_dump_json(indent=1))


@cli.command()
@click.argument("plan_folder", metavar="PLAN")
@click.option("-o", "--output", required=True, metavar="FOLDER", help="The checkpoint folder.")
@click.option("--model", metavar="MODEL", help="Where the base model is now, if it moved.")
@click.option("--dtype", type=DTYPES, default="auto", help="Storage dtype; auto keeps the base's.")
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Split the weights above this size."
)
@heal_options
@click.option("--allow-empty", is_flag=True, help="Copy the base even when the plan replaces nothing.")
@trust_option
@memory_options
@overwrite_option
@loudness_options
def apply(
    plan_folder: str, output: str, model: str | None, overwrite: bool, trust_remote_code: bool, data: tuple[str, ...],
    **settings: Any,
) -> None:  # fmt: skip
    """Install PLAN's replacements and save the slimmed model.

    Needs no calibration data, unless --heal asks for training on the plan's, or on several texts in turns. Healing that
    was killed goes on when it is started again. The folder is reloaded and compared before it is put in place, and
    loads with plain AutoModelForCausalLM.from_pretrained wherever ffncompress is installed.
    """
    from ffncompress import api
    from ffncompress.cli import console, tables

    with resumable(output), console.progress_shown() as progress:
        api.compress(
            plan_folder, output, model=model, overwrite=overwrite, trust_remote_code=trust_remote_code,
            progress=progress, data=list(data), **settings,
        )  # fmt: skip
    tables.print_checkpoint(output)
    console.say(f"Reloaded from disk: its answers are equal. Next: ffncompress eval {output}")


@cli.command()
@click.argument("folder", metavar="OUT")
@click.argument("repo", metavar="USER/REPO")
@click.option("--private", is_flag=True, help="Create the repository private.")
@click.option("--force", is_flag=True, help="Push without a passing gate.")
@click.option("--message", metavar="WORDS", default="Upload a model slimmed by ffncompress", help="The commit message.")
def push(folder: str, repo: str, **settings: Any) -> None:
    """Write the model card of OUT and upload it to the Hub.

    Refuses unless the gate passed on these weights. The token is huggingface_hub's own: hf auth login, or HF_TOKEN.
    """
    from ffncompress import api
    from ffncompress.cli import console

    with console.status(f"uploading to {repo}"):
        address = api.push(folder, repo, **settings)
    console.say(f"Pushed: {address}")


@cli.command()
@click.argument("folder", metavar="OUT")
@trust_option
@json_option
def verify(folder: str, trust_remote_code: bool, json_file: str | None) -> None:
    """Prove that OUT is whole and as it was written.

    Every file is compared with the checksum that apply recorded, every tensor is loaded, and the model must answer a
    fixed sequence as it did then. Exit code 2: it is not; what differs is named.
    """
    from ffncompress import api
    from ffncompress.cli import console

    with console.status(f"verifying {folder}"):
        origin = api.verify(folder, trust_remote_code=trust_remote_code)
    maker = f"ffncompress {origin.ffncompress_version}"
    console.say(f"{folder}: whole, and as {maker} wrote it from {origin.base_model}", to_stderr=json_file == "-")
    console.write_json(json_file, origin.model_dump_json(indent=1))


@cli.command()
@click.argument("recipe", metavar="RECIPE.yaml")
@click.option("-o", "--output", metavar="FOLDER", help="In place of the recipe's output.")
@trust_option
@overwrite_option
@json_option
@junit_option
@summary_option
@loudness_options
def run(recipe: str, trust_remote_code: bool, **options: Any) -> int:
    """Plan, apply, eval and push, all from one file."""
    return run_recipe(Path(recipe), trust_remote_code=trust_remote_code, **options)


@cli.command()
@click.option("-o", "--output", metavar="FOLDER", help="The checkpoint folder.  [default: ffncompress-demo]")
@overwrite_option
@json_option
@junit_option
@loudness_options
def demo(output: str | None, overwrite: bool, json_file: str | None, junit: str | None) -> int:
    """All of it on the embedded model, offline.

    Without -o, an earlier demo in its place is replaced.
    """
    recipe = Path(str(files("ffncompress") / "demo" / "recipe.yaml"))
    return run_recipe(recipe, output, overwrite or output is None, json_file, junit)


@cli.command()
@click.argument("folder", metavar="FOLDER")
@json_option
def show(folder: str, json_file: str | None) -> None:
    """What a plan, a slimmed model or a report is, and why."""
    from ffncompress.checkpoint import origin
    from ffncompress.cli import console, plan_tables, tables
    from ffncompress.profiling.records import STUDY_FILE, Study
    from ffncompress.records.plan import Plan

    if (Path(folder) / STUDY_FILE).is_file():
        study = Study.load(folder)
        if json_file != "-":
            tables.print_study(study)
        console.write_json(json_file, study.model_dump_json(indent=1))
        return
    is_checkpoint = origin.is_checkpoint(folder)
    if is_checkpoint:
        origin.verify_files(folder)
    made = origin.read_plan(folder) if is_checkpoint else Plan.load(folder)
    if json_file != "-":
        plan_tables.print_plan(made, reasons=True)
        plan_tables.print_frontier(made, None if is_checkpoint else folder)
        if is_checkpoint:
            tables.print_checkpoint(folder)
    console.write_json(json_file, made.model_dump_json(indent=1))
