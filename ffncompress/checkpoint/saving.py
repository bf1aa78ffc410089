"""The emitted checkpoint: an ordinary Hugging Face folder that carries its origin.

    OUT/config.json, *.safetensors, tokenizer files     loads with AutoModelForCausalLM.from_pretrained(OUT)
    OUT/modeling_ffncompress.py                         loads it where ffncompress is missing (trust_remote_code=True)
    OUT/ffncompress/plan.json, profile.png              why each block was treated so
    OUT/ffncompress/origin.json                         base model, revision, fingerprints, versions, parameters
    OUT/ffncompress/recipe.yaml                         the recipe, where there was one
    OUT/ffncompress/gate.json, gate.html                the gate's result, once `ffncompress eval` has run
    OUT/README.md                                       the model card
    OUT/ffncompress.json                                size and checksum of every file

A native plan's is a stock checkpoint of the family beside that: a number in config.json is smaller, nothing is added.
A plan's page stays with the plan: whatever lies in its folder may be a stranger's, and a checkpoint is uploaded.
It is written beside its place, reloaded from there, compared with the model in memory, and only then renamed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ffncompress import __version__
from ffncompress.checkpoint.card import write_card
from ffncompress.checkpoint.loading import load
from ffncompress.checkpoint.origin import CARD_FILE, META, ORIGIN_FILE, RECIPE_FILE
from ffncompress.checkpoint.patcher import replacement_modules
from ffncompress.checkpoint.plugin import describe_in_config, spec_of, write_loader
from ffncompress.checkpoint.shards import has_own_names, shard_bytes, write_shards
from ffncompress.errors import ArtifactError, ModelError, PlanError, TextError
from ffncompress.modeling_ffncompress import of_words
from ffncompress.models import (
    Footprint,
    ModelSource,
    context_of,
    count_parameters,
    embedding_rows,
    find_blocks,
    forward,
    install_,
    load_model,
    load_tokenizer,
    quiet_bars,
    width_key,
)
from ffncompress.models.base import find_base
from ffncompress.passes.heal import heal_
from ffncompress.passes.moving import check_can_move
from ffncompress.passes.objective import set_objective_
from ffncompress.passes.proof import proof_of, prove
from ffncompress.records.origin import Healing, Origin
from ffncompress.records.plan import PLAN_FILE, Plan
from ffncompress.records.plan_files import FIGURE_FILE, load_tensors
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Stages
from ffncompress.runtime.workers import Workers
from ffncompress.settings import ApplySettings, HealWhat
from ffncompress.storage.manifest import Manifest
from ffncompress.storage.outputs import staged_directory
from ffncompress.storage.places import check_place
from ffncompress.storage.registry import record_place
from ffncompress.text.corpus import gather_text, recorded_source
from ffncompress.text.sources import default_text
from ffncompress.type_aliases import Model, Tokenizer

# tokens of the fit text to heal on: more than are read in that time on a CPU, and on a GPU, of a model worth slimming
HEALED_A_MINUTE, HEALED_AT_MOST = (60_000, 600_000), 2**24


def save_compressed(
    plan_directory: str | Path,
    output: str | Path,
    settings: ApplySettings | None = None,
    *,
    model_name: str | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    placing: Callable[[Manifest], None] = lambda _: None,
    stages: Stages | None = None,
) -> Path:
    """Install a plan's replacements in its base model and save the slimmed checkpoint.

    Needs no calibration data, unless healing is asked for; with stages, healing that was killed goes on.

    Raises:
        PlanError: the plan is corrupted, or replaces nothing.
        ModelError: the base model is missing, or not the one that the plan was made for.
        ArtifactError: the output exists, the disk is full, or the reloaded model differs.
    """
    settings = settings or ApplySettings()
    what = settings.heal_what or "replaced"
    check_can_move(what)
    plan = Plan.load(plan_directory)
    tensors = load_tensors(plan, plan_directory)
    if not plan.replaced and not settings.allow_empty:
        raise PlanError(
            f"{plan_directory}: the plan replaces nothing ({plan.summary}); "
            "plan again with another limit, or pass --allow-empty for a plain copy"
        )
    source = find_base(plan.base, model_name, trust_remote_code=trust_remote_code)
    inputs = [plan_directory, source.directory]
    check_place(output, inputs)
    workers = Workers("cpu", settings.memory, settings.stream)
    stream = workers.streams(*Footprint.of(source, settings.dtype))
    with step(progress, f"loading {source.name}"):
        model, tokenizer = load_model(source, dtype=settings.dtype, stream=stream), load_tokenizer(source)
    in_parts = has_own_names(source, model)
    if stream and (settings.heal or not in_parts):
        why = "healing trains" if settings.heal else f"{source.name} is stored in a form that is converted as a whole"
        raise ModelError(f"{why}, which needs the model in memory; raise --memory, or pass --no-stream")
    blocks = find_blocks(model)
    layouts = {block.path: block.layout for block in blocks}
    key = width_key(model.config, blocks) if plan.native else None
    modules = replacement_modules(model, plan, tensors)
    install_(model, modules)
    prove(model, plan.proof)
    healing = None
    if settings.heal and plan.replaced:
        on_gpu = settings.device == "auto" and torch.cuda.is_available()  # accelerate was told above that it is a CPU
        run = Run(Workers("cuda" if on_gpu else settings.device, settings.memory), progress, stages)
        healing = _heal_(model, list(modules.values()), plan, source, tokenizer, settings, what, run)
    if plan.native:
        if key is None or len(blocks) != len(plan.blocks):
            raise PlanError(f"{plan_directory}: no stock model of the family has its widths; plan without --native")
        setattr(of_words(model.config), key, plan.blocks[0].chosen_shape.width)
    elif plan.replaced:
        specs = {b.path: spec_of(b.chosen_shape, layouts[b.path], modules[b.path]) for b in plan.replaced}
        describe_in_config(model.config, specs)
    with staged_directory(output, "checkpoint", overwrite=overwrite, inputs=inputs, placing=placing) as folder:
        with step(progress, f"writing {output}"), quiet_bars():
            if in_parts and not healing:
                _save_in_parts(model, source, modules, folder, settings.max_shard_size)
            else:
                model.save_pretrained(folder, max_shard_size=settings.max_shard_size)
        if plan.replaced and not plan.native:
            write_loader(folder)
        tokenizer.save_pretrained(folder)
        _write_meta(folder, plan, Path(plan_directory), source, model, recipe, healing)
        with step(progress, "reloading and comparing"):
            _prove_parity(model, folder, stream=stream)
    return Path(output)


def _save_in_parts(
    model: Model, source: ModelSource, modules: Mapping[str, torch.nn.Module], folder: Path, largest: str
) -> None:
    """The weights from the base's files; all else as the model's own class writes it."""
    model.save_pretrained(folder, state_dict={})
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    new = {path: module.state_dict() for path, module in modules.items()}
    write_shards(source, dtypes, new, folder, shard_bytes(largest))


def _heal_(
    model: Model,
    modules: list[torch.nn.Module],
    plan: Plan,
    source: ModelSource,
    tokenizer: Tokenizer,
    settings: ApplySettings,
    what: HealWhat,
    run: Run,
) -> Healing:
    """Distil a slimmed model on the plan's own fit text, in float32; returns what that did."""
    dtype, device = model.dtype, run.workers.device
    assert settings.heal is not None
    with step(run.progress, "reading text"):
        wanted = plan.settings.model_copy(update=_known_texts(plan, settings.data))
        enough = int(min(HEALED_AT_MOST, settings.heal * HEALED_A_MINUTE[device.type == "cuda"]))
        wanted = wanted.model_copy(update={"refit_tokens": max(wanted.refit_tokens or wanted.tokens, enough)})
        context = context_of(model, wanted.context)
        default = default_text(on_hub=source.is_hub, embedded=source.is_embedded)
        corpus = gather_text(wanted, default, tokenizer, context, lambda text: plan.reading_of(text.source) or "joined")
    if not settings.data and [t.sha256 for t in corpus.fit_text] != [t.sha256 for t in plan.fit_text]:
        raise TextError("healing: the plan's text is not here as it was; give one with --data")
    original = set_objective_(load_model(source, dtype="float32").to(device), tokenizer)
    set_objective_(model.float().to(device), tokenizer, original)
    run.stages.facts = {**run.stages.facts, "plan": hashlib.sha256(plan.model_dump_json().encode()).hexdigest()}
    done = heal_(model, original, modules, corpus.refit, corpus.verify, settings.heal, run, what, dtype)
    model.to("cpu", dtype)
    return done


def _known_texts(plan: Plan, given: list[str]) -> dict[str, list[str]]:
    """The settings that read a plan's texts again: those given now, or those it names, where this machine has them.

    Raises:
        TextError: it has not seen them.
    """
    if given:
        return {"data": given, "choose_data": []}
    refs = {"data": plan.fit_text, "choose_data": plan.choose_text if plan.settings.choose_data else []}
    return {name: [recorded_source(ref) for ref in texts] for name, texts in refs.items()}


def _write_meta(
    folder: Path,
    plan: Plan,
    plan_directory: Path,
    source: ModelSource,
    model: Model,
    recipe: str | None,
    healing: Healing | None,
) -> None:
    if not source.is_hub:
        record_place(plan.base.fingerprint, source.place)
    plan = plan.public()
    meta = folder / META
    meta.mkdir()
    (meta / PLAN_FILE).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if (plan_directory / FIGURE_FILE).is_file():
        shutil.copyfile(plan_directory / FIGURE_FILE, meta / FIGURE_FILE)
    if recipe is not None:
        (meta / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    origin = Origin(
        ffncompress_version=__version__,
        base_model=plan.base.name,
        base_revision=plan.base.revision,
        base_fingerprint=plan.base.fingerprint,
        base_licence=_licence(source),
        base_is_hub=source.is_hub,
        base_bytes=source.bytes_on_disk(),
        parameters_before=plan.base.parameters,
        parameters_after=count_parameters(model),
        fit_text=plan.fit_text,
        choose_text=plan.choose_text,
        healing=healing,
        proof=proof_of(model),
    )
    (meta / ORIGIN_FILE).write_text(origin.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for extra in source.directory.glob("LICENSE*"):
        shutil.copyfile(extra, folder / extra.name)
    _copy_sentence_parts(source, folder)
    write_card(folder, plan, origin)


def _copy_sentence_parts(source: ModelSource, folder: Path) -> None:
    """What sentence-transformers needs of a sentence encoder: how it pools and norms, and how much it reads."""
    if not (source.directory / "modules.json").is_file():
        return
    names = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    parts = [part for part in source.directory.glob("[0-9]_*/*") if part.suffix in (".json", ".safetensors")]
    for file in (*parts, *(source.directory / name for name in names)):
        if file.is_file() and not file.parent.is_symlink():
            target = folder / file.relative_to(source.directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


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
def _prove_parity(model: Model, folder: Path, *, stream: bool) -> None:
    """The folder, loaded as a stranger would, must give the logits of the model in memory, bit for bit."""
    ids = torch.arange(3, 19)[None] % embedding_rows(model)
    expected = forward(model, ids)[0]  # logits, or the last hidden state
    again = load(folder, dtype=model.dtype, stream=stream)
    if not torch.equal(forward(again, ids)[0], expected):
        raise ArtifactError("the reloaded checkpoint does not give the logits of the model in memory; nothing was kept")
