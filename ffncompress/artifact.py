"""The emitted checkpoint: an ordinary Hugging Face folder that carries its origin.

    OUT/config.json, *.safetensors, tokenizer files     loads with AutoModelForCausalLM.from_pretrained(OUT)
    OUT/ffncompress/plan.json, profile.png              why each block was treated so
    OUT/ffncompress/origin.json                         base model, revision, fingerprints, versions, parameters
    OUT/ffncompress/recipe.yaml                         the recipe, where there was one
    OUT/ffncompress/gate.json                           the gate's result, once `ffncompress eval` has run
    OUT/README.md                                       the model card

It is written beside its place, reloaded from there, compared with the model in memory, and only then renamed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ffncompress import __version__
from ffncompress.errors import ArtifactError, PlanError
from ffncompress.models import (
    ModelSource,
    context_of,
    count_parameters,
    find_blocks,
    install_,
    load_model,
    load_tokenizer,
    quiet_bars,
)
from ffncompress.patcher import base_source, shape_of, stand_ins
from ffncompress.plans import FIGURE_FILE, PLAN_FILE, Plan
from ffncompress.plugin import FfncompressConfig, register, spec_of
from ffncompress.settings import ApplySettings
from ffncompress.staging import check_free, staged_directory
from ffncompress.workers import Track, silent, stage

META = "ffncompress"
ORIGIN_FILE, RECIPE_FILE, GATE_FILE, CARD_FILE = "origin.json", "recipe.yaml", "gate.json", "README.md"


def save_compressed(
    plan_directory: str | Path,
    output: str | Path,
    settings: ApplySettings | None = None,
    *,
    model_name: str | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
    track: Track = silent,
) -> Path:
    """Install a plan's replacements in its base model and save the slimmed checkpoint.

    Needs no calibration data, unless healing is asked for.

    Raises:
        PlanError: the plan is corrupted, or replaces nothing.
        ModelError: the base model is missing, or not the one that the plan was made for.
        ArtifactError: the output exists, the disk is full, or the reloaded model differs.
    """
    settings = settings or ApplySettings()
    check_free(output, overwrite=overwrite)
    plan = Plan.load(plan_directory)
    tensors = plan.load_tensors(plan_directory)
    if not plan.replaced and not settings.allow_empty:
        raise PlanError(
            f"{plan_directory}: the plan replaces nothing ({plan.summary}); "
            "plan again with another limit, or pass --allow-empty for a plain copy"
        )
    source = base_source(plan, model_name)
    with stage(track, f"loading {source.name}"):
        model, tokenizer = load_model(source, dtype=settings.dtype), load_tokenizer(source)
    layouts = {block.path: block.layout for block in find_blocks(model)}
    install_(model, stand_ins(model, plan, tensors))
    healing = _heal_(model, plan, source, tokenizer, settings.heal, track) if settings.heal and plan.replaced else None
    if plan.replaced:
        model.config.quantization_config = FfncompressConfig(
            {b.path: spec_of(shape_of(b), layouts[b.path], model.get_submodule(b.path)) for b in plan.replaced}
        )
    with staged_directory(output, overwrite=overwrite) as folder:
        with stage(track, f"writing {output}"), quiet_bars():
            model.save_pretrained(folder, max_shard_size=settings.max_shard_size)
        tokenizer.save_pretrained(folder)
        _write_meta(folder, plan, Path(plan_directory), source, model, recipe, healing)
        with stage(track, "reloading and comparing"):
            _prove_parity(model, folder)
    return Path(output)


def _heal_(model: Any, plan: Plan, source: ModelSource, tokenizer: Any, minutes: float, track: Track) -> dict[str, Any]:
    """Distil the stand-ins on the plan's own fit text, in float32; returns what that did."""
    from ffncompress.corpus import gather_text
    from ffncompress.heal import heal_

    dtype = model.dtype
    with stage(track, "reading text"):
        context = context_of(model, plan.settings.context)
        corpus = gather_text(
            source, plan.settings, tokenizer, context, lambda text: plan.reading_of(text.source) or "joined"
        )
    original = load_model(source, dtype="float32")
    model.float()
    modules = [model.get_submodule(block.path) for block in plan.replaced]
    done = heal_(model, original, modules, corpus.refit, corpus.verify, minutes, track)
    model.to(dtype)
    return asdict(done)


def load(directory: str | Path, **options: Any) -> Any:
    """Load an emitted checkpoint; the same as `AutoModelForCausalLM.from_pretrained`, with a clear error.

    Raises:
        ArtifactError: it is not there, or its weights are not what its config says.
    """
    from transformers import AutoModelForCausalLM

    register()
    if not (Path(directory) / "config.json").is_file():
        raise ArtifactError(f"{directory}: no checkpoint there; make one with: ffncompress apply PLAN -o {directory}")
    with quiet_bars():
        return AutoModelForCausalLM.from_pretrained(directory, use_safetensors=True, **options).eval()


def read_origin(directory: str | Path) -> dict[str, Any]:
    """What `apply` recorded of an emitted checkpoint.

    Raises:
        ArtifactError: the folder is not an emitted checkpoint.
    """
    if (Path(directory) / PLAN_FILE).is_file():
        raise ArtifactError(f"{directory}: a plan, not a checkpoint; first: ffncompress apply {directory} -o OUT")
    if not Path(directory).is_dir():
        raise ArtifactError(f"{directory}: no such folder; make one with: ffncompress apply PLAN -o {directory}")
    return _read_json(directory, ORIGIN_FILE, "it was not made by ffncompress apply")


def read_gate(directory: str | Path) -> dict[str, Any]:
    """The gate's last result for an emitted checkpoint.

    Raises:
        ArtifactError: it was never evaluated.
    """
    return _read_json(directory, GATE_FILE, f"it was not evaluated; run: ffncompress eval {directory}")


def read_plan(directory: str | Path) -> Plan:
    """The plan that an emitted checkpoint was made from."""
    return Plan.load(Path(directory) / META)


def is_artifact(directory: str | Path) -> bool:
    return (Path(directory) / META / ORIGIN_FILE).is_file()


def _read_json(directory: str | Path, name: str, otherwise: str) -> dict[str, Any]:
    file = Path(directory) / META / name
    if not file.is_file():
        raise ArtifactError(f"{directory}: there is no {META}/{name} in it: {otherwise}")
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    except ValueError as error:
        raise ArtifactError(f"{file}: corrupted, not JSON; make the folder again") from error


def _write_meta(
    folder: Path,
    plan: Plan,
    plan_directory: Path,
    source: ModelSource,
    model: Any,
    recipe: str | None,
    healing: dict[str, Any] | None,
) -> None:
    from ffncompress.card import write_card

    meta = folder / META
    meta.mkdir()
    for name in (PLAN_FILE, FIGURE_FILE):
        if (plan_directory / name).is_file():
            shutil.copyfile(plan_directory / name, meta / name)
    if recipe is not None:
        (meta / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    origin = {
        "ffncompress_version": __version__,
        "base_model": plan.base.name,
        "base_revision": plan.base.revision,
        "base_fingerprint": plan.base.fingerprint,
        "base_licence": _licence(source),
        "base_is_hub": source.is_hub,
        "base_bytes": source.bytes_on_disk(),
        "parameters_before": plan.base.parameters,
        "parameters_after": count_parameters(model),
        "fit_text": [text.model_dump() for text in plan.fit_text],
        "choose_text": [text.model_dump() for text in plan.choose_text],
        "healing": healing,
    }
    (meta / ORIGIN_FILE).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    for extra in source.directory.glob("LICENSE*"):
        shutil.copyfile(extra, folder / extra.name)
    write_card(folder, plan, origin)


def _licence(source: ModelSource) -> str | None:
    """The base model's licence, as its own card names it."""
    card = source.directory / CARD_FILE
    if not card.is_file():
        return None
    from huggingface_hub import ModelCard

    try:
        licence = ModelCard.load(card).data.get("license")
    except Exception:  # a card without valid front matter names no licence
        return None
    return licence if isinstance(licence, str) else None


@torch.inference_mode()
def _prove_parity(model: Any, folder: Path) -> None:
    """The folder, loaded as a stranger would, must give the logits of the model in memory, bit for bit."""
    ids = torch.arange(3, 19)[None] % model.config.vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    again = load(folder, dtype=model.dtype)
    if not torch.equal(again(input_ids=ids, use_cache=False).logits, expected):
        raise ArtifactError("the reloaded checkpoint does not give the logits of the model in memory; nothing was kept")
