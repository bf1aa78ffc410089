"""The verbs, as Python functions; the command line is a thin coat over these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ffncompress.errors import FfncompressError, RecipeError
from ffncompress.exporting.record import ExportResult
from ffncompress.gate.verdict import compare_models, run_gate
from ffncompress.journal import Journal
from ffncompress.profiling.records import Study
from ffncompress.recipe import Recipe
from ffncompress.records.gate import GateResult
from ffncompress.records.origin import Origin
from ffncompress.records.plan import Plan
from ffncompress.resumable import local_path, plan_into
from ffncompress.runtime.launch import alone
from ffncompress.runtime.progress import Progress, silent
from ffncompress.runtime.stages import Stages
from ffncompress.schema import first_fault
from ffncompress.settings import (
    ApplySettings,
    EvalSettings,
    ExportSettings,
    PlanSettings,
    ProfileSettings,
    PushSettings,
)
from ffncompress.storage.locks import locked
from ffncompress.storage.manifest import ArtifactKind
from ffncompress.storage.outputs import claimed, remove_scratch
from ffncompress.storage.places import check_place
from ffncompress.storage.working import remove_working, working_folder

S = TypeVar("S", bound=BaseModel)


def plan(
    model: str,
    output: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> Plan:
    """Score every FFN of a model, choose what to replace, and write the plan folder.

        plan = ffncompress.plan("gpt2", "gpt2-plan", budget="8x")
        print(plan.summary, plan.ratios["whole_model"])

    Args:
        model: a Hub id, a model folder, a .gguf file, "demo" for the embedded model, or a plan with its moments kept.
        output: the plan folder to write; a run that was killed goes on from its finished stages.
        revision: a Hub revision.
        trust_remote_code: run code that comes with the model.
        overwrite: replace an existing plan folder.
        progress: wraps each long loop, for a progress bar.
        **settings: fields of `PlanSettings`, such as budget="8x", max_delta="5%", data=["python-docs"].
    """
    checked = _settings(PlanSettings, settings)
    return plan_into(
        model, output, checked, revision=revision, trust_remote_code=trust_remote_code, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip


def profile(
    models: str | list[str],
    output: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> Study:
    """Measure how linear every FFN of some models is, and write the report folder.

        study = ffncompress.profile("gpt2", "report", probe=True)
        print([block.scores.r2_lin for block in study.profiles[0].blocks])

    Args:
        models: a model as in `plan`, or several.
        output: the report folder to write; a run that was killed goes on where it was.
        revision: a Hub revision.
        trust_remote_code: run code that comes with a model.
        overwrite: replace an existing report folder; its finished stages are used again.
        progress: wraps each long loop, for a progress bar.
        **settings: fields of `ProfileSettings`, such as data=["a.txt", "b.txt"], probe=True.
    """
    from ffncompress.profiling.report import write_report

    return write_report(
        [models] if isinstance(models, str) else models, output, _settings(ProfileSettings, settings),
        revision=revision, trust_remote_code=trust_remote_code, overwrite=overwrite, progress=progress,
    )  # fmt: skip


def compress(
    plan_directory: str | Path,
    output: str | Path,
    *,
    model: str | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> Path:
    """Install a plan's replacements in its base model and save the slimmed checkpoint.

        ffncompress.compress("gpt2-plan", "gpt2-slim")
        model = AutoModelForCausalLM.from_pretrained("gpt2-slim")

    Args:
        plan_directory: what `plan` wrote.
        output: the checkpoint folder to write; healing that was killed goes on from where it was.
        model: where the base model is now, if it moved.
        recipe: text to keep beside the weights.
        overwrite: replace an existing folder.
        trust_remote_code: run code that comes with the base model.
        progress: wraps each long loop, for a progress bar.
        **settings: fields of `ApplySettings`, such as heal=10, heal_what="all", data=["a.txt", "b.txt"].
    """
    from ffncompress.checkpoint.saving import save_compressed

    checked = _settings(ApplySettings, settings)
    inputs = [plan_directory, local_path(model)]
    with (
        claimed(output, "checkpoint", overwrite=overwrite, inputs=inputs) as target,
        Stages(working_folder(target) if checked.heal else None) as stages,
    ):
        return save_compressed(
            plan_directory, output, checked, model_name=model, recipe=recipe, overwrite=overwrite,
            trust_remote_code=trust_remote_code, progress=progress, stages=stages,
        )  # fmt: skip


def evaluate(
    directory: str | Path,
    *,
    model: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> GateResult:
    """lm-eval perplexity of a slimmed checkpoint beside its base, sizes, speed, and a verdict.

        result = ffncompress.evaluate("gpt2-slim", max_delta="5%")
        print(result.passed, result.main.base.token, result.main.slimmed.token)

    Args:
        directory: what `compress` wrote; with `base`, any model folder.
        model: where the base model is now, if it moved.
        base: compare with this model, whatever it is; then no plan is needed, and nothing is written.
        trust_remote_code: run code that comes with the base model.
        progress: wraps each long loop, for a progress bar.
        **settings: fields of `EvalSettings`, such as data="text.txt", max_delta="5%".
    """
    alone("eval")
    checked = _settings(EvalSettings, settings)
    if base is not None:
        return compare_models(directory, base, checked, trust_remote_code=trust_remote_code, progress=progress)
    with _amended(directory):
        return run_gate(directory, checked, model_name=model, trust_remote_code=trust_remote_code, progress=progress)


def verify(directory: str | Path, *, trust_remote_code: bool = False) -> Origin:
    """Prove a slimmed checkpoint whole and unchanged: its checksums, its tensors, its answers; returns its origin.

        print(ffncompress.verify("gpt2-slim").base_model)

    Args:
        directory: what `compress` wrote.
        trust_remote_code: run code that comes with the model.
    """
    from ffncompress.checkpoint.loading import verify as verify_checkpoint

    return verify_checkpoint(directory, trust_remote_code=trust_remote_code)


def export(
    directory: str | Path,
    output: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    **settings: Any,
) -> ExportResult:
    """Write a checkpoint for another runtime, load it there, and say by how much the two differ.

        made = ffncompress.export("gpt2-slim", "gpt2-slim.gguf", to="gguf", dtype="q8_0")
        print(made.bytes, made.verified.max_difference)

    Args:
        directory: what `compress` wrote, or any model folder.
        output: the file (gguf) or the folder (hf, onnx, vllm) to write.
        to: "gguf" (llama.cpp, Ollama), "hf" (a stock checkpoint), "onnx", or "vllm".
        overwrite: replace an earlier export.
        trust_remote_code: run code that comes with the model.
        progress: wraps each long loop, for a progress bar.
        **settings: further fields of `ExportSettings`, such as dtype="q8_0", align=256.
    """
    from ffncompress.exporting.exporting import export_model

    alone("export")
    checked = _settings(ExportSettings, {"to": to, **settings})
    return export_model(
        directory, output, checked, overwrite=overwrite, trust_remote_code=trust_remote_code, progress=progress
    )


def push(directory: str | Path, repo: str, *, token: str | None = None, **settings: Any) -> str:
    """Upload a checkpoint that passed its gate, with a model card; returns the commit's address.

        ffncompress.push("gpt2-slim", "you/gpt2-slim", private=True)

    Args:
        directory: what `compress` wrote, and `evaluate` let pass.
        repo: USER/REPO on the Hub.
        token: handed to huggingface_hub and to nobody else; none: the one that you are logged in with.
        **settings: fields of `PushSettings`, such as private=True.
    """
    from ffncompress.hub import push_to_hub

    checked = _settings(PushSettings, {"repo": repo, **settings})
    with _amended(directory):
        return push_to_hub(directory, checked, token=token)


def run(
    recipe_file: str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    report: Callable[[Plan | Path | GateResult | str], None] = lambda _: None,
) -> GateResult:
    """The whole pipeline from a recipe: plan, compress, evaluate, and push where it says so.

    A run that was killed goes on when it is started again: from its plan or checkpoint, or the plan's finished stages.

        assert ffncompress.run("recipes/demo.yaml", output="slim").passed

    Args:
        recipe_file: a YAML recipe.
        output: the checkpoint folder, in place of the recipe's; the plan goes beside it, with "-plan" to its name.
        overwrite: replace what an earlier run left there.
        trust_remote_code: run code that comes with the model; a recipe can say that it needs it, not allow it.
        progress: wraps each long loop, for a progress bar.
        report: called with what each stage made: a plan, a folder, a gate result, an address.
    """
    alone("run")
    recipe, text = Recipe.read(recipe_file)
    if recipe.trust_remote_code and not trust_remote_code:
        raise RecipeError(
            f"{recipe_file}: its model runs code that comes with it, which a recipe cannot allow; look at that code, "
            "and if you trust it pass --trust-remote-code (in Python: trust_remote_code=True)"
        )
    target = Path(recipe.output if output is None else output)
    plan_directory = target.with_name(f"{target.name}-plan") if target.name else target
    inputs = [recipe_file, local_path(recipe.model), *recipe.plan.data, *recipe.plan.choose_data, recipe.eval.data]
    inputs += [*recipe.eval.also, *recipe.eval.tasks, recipe.eval.baseline]
    journal = Journal(working_folder(check_place(target, inputs)), text)
    with ExitStack() as claims:
        places: tuple[tuple[Path, ArtifactKind], ...] = ((target, "checkpoint"), (plan_directory, "plan"))
        for place, kind in places:
            known = partial(journal.has, kind)
            claims.enter_context(claimed(place, kind, overwrite=overwrite, inputs=inputs, known=known))
        if journal.has("plan", plan_directory):  # this recipe's run was killed after that
            remove_working(working_folder(plan_directory))
            made = Plan.load(plan_directory)
        else:
            made = plan_into(
                recipe.model, plan_directory, recipe.plan, revision=recipe.revision,
                trust_remote_code=trust_remote_code, overwrite=overwrite, progress=progress,
                placing=journal.placing("plan"),
            )  # fmt: skip
        report(made)
        report(plan_directory)
        if not journal.has("checkpoint", target):
            from ffncompress.checkpoint.saving import save_compressed

            save_compressed(
                plan_directory, target, recipe.apply, recipe=recipe.public_text(text), overwrite=overwrite,
                trust_remote_code=trust_remote_code, progress=progress, placing=journal.placing("checkpoint"),
                stages=Stages(working_folder(target)),
            )  # fmt: skip
        report(target)
        result = evaluate(target, trust_remote_code=trust_remote_code, progress=progress, **recipe.eval.model_dump())
        report(result)
        if recipe.push and (result.passed or recipe.push.force):
            report(push(target, **recipe.push.model_dump()))
        journal.close()
    return result


@contextmanager
def _amended(directory: str | Path) -> Iterator[None]:
    """A checkpoint that is this run's alone within; what a killed one left in it is gone."""
    with locked(directory):
        remove_scratch(Path(directory))
        yield


def _settings(kind: type[S], values: dict[str, Any]) -> S:
    try:
        return kind(**values)
    except ValidationError as error:
        name, reason = first_fault(error)
        reason = "write a number and a unit such as 500MB or 5GB" if name == "max_shard_size" else reason
        raise FfncompressError(f"{name}: {reason}") from error
