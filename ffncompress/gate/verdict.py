"""The gate: lm-eval's rolling perplexity of the base and the slimmed model in one run, a limit, and a verdict.

Token perplexity is per token of this tokenizer, as papers give it, and what the verdict is on; word and byte perplexity
are lm-eval's, and can be compared between tokenizers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ffncompress.budgets import DEFAULT_LIMIT, Limit
from ffncompress.checkpoint.card import write_card
from ffncompress.checkpoint.loading import load
from ffncompress.checkpoint.origin import (
    GATE_FILE,
    GATE_PAGE,
    META,
    is_checkpoint,
    read_origin,
    read_plan,
    verify_files,
)
from ffncompress.checkpoint.plugin import register
from ffncompress.errors import FfncompressError, ModelError, TextError
from ffncompress.gate.measuring import Pair, judge
from ffncompress.gate.perplexity import STOCK_TASK
from ffncompress.models import (
    Footprint,
    ModelSource,
    context_of,
    count_parameters,
    find_model,
    load_model,
    load_tokenizer,
)
from ffncompress.models.base import find_base
from ffncompress.pages.gate_page import render_gate
from ffncompress.passes.proof import prove
from ffncompress.passes.reading import better_reading
from ffncompress.records.gate import GateResult, Sizes
from ffncompress.records.origin import Origin
from ffncompress.records.plan import Plan
from ffncompress.records.tolerance import Tolerance
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import EvalSettings, PlanSettings
from ffncompress.storage.files import write_file
from ffncompress.text.corpus import recorded_source
from ffncompress.text.parts import HALVES, REPORT, SHARES, read_parts
from ffncompress.text.sources import OWN, Reading, Text, default_text, public_name, read
from ffncompress.type_aliases import Model, Tokenizer


def run_gate(
    directory: str | Path,
    settings: EvalSettings | None = None,
    *,
    model_name: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> GateResult:
    """Evaluate an emitted checkpoint beside its base, and record the result in the folder.

    Raises:
        FfncompressError: the checkpoint, its base or a text is missing, or lm-eval is not installed.
    """
    settings = settings or EvalSettings()
    _check_lm_eval()
    directory = Path(directory)
    origin, plan = read_origin(directory), read_plan(directory)
    manifest = verify_files(directory)
    base_at = find_base(plan.base, model_name, trust_remote_code=trust_remote_code)
    slim_at = find_model(str(directory), trust_remote_code=trust_remote_code)
    run = Run(Workers(settings.device, settings.memory, settings.stream), progress)
    dtype, device_map = run.workers.dtype(settings.dtype), {"": run.workers.device}
    with step(progress, "loading both models and the text"):
        tokenizer = load_tokenizer(slim_at)
        stream = _streams(run, dtype, base_at, slim_at)
        slimmed = load(
            directory, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, stream=stream
        )
        prove(slimmed, origin.proof)
        context = context_of(slimmed, settings.context)
        inputs = [_gate_text(plan, settings.data), *(_gate_text(plan, name) for name in settings.also)]
        base = load_model(base_at, dtype=dtype, device_map=device_map, stream=stream)

    tolerance = Tolerance(Limit.parse(settings.max_delta)) if settings.max_delta else plan.tolerance
    pair = Pair(base, slimmed, base_at, slim_at, tokenizer, dtype, context)
    result = judge(
        pair, inputs, tolerance, _sizes(plan, origin, slimmed, slim_at), settings, run, base_name=plan.base.name,
        reading_of=lambda text: _reading(plan, text, base, tokenizer, context, run), short=plan.settings.seq_len,
    )  # fmt: skip
    write_file(directory / META / GATE_FILE, result.model_dump_json(indent=1) + "\n")
    write_file(directory / META / GATE_PAGE, render_gate(result))
    written = [
        f"{META}/{GATE_FILE}",
        f"{META}/{GATE_PAGE}",
        *write_card(directory, plan, origin, result, manifest=manifest),
    ]
    if manifest is not None:
        manifest.record(directory, written)
    return result


def compare_models(
    directory: str | Path,
    base_name: str,
    settings: EvalSettings | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> GateResult:
    """Judge any model beside any other that reads alike, slimmed or not; nothing is written into its folder.

    A slimmed model that was fine-tuned, or merged with an adapter, and saved has no plan any more: this is for it.

    Raises:
        FfncompressError: a model or a text is missing, the tokenizers differ, or lm-eval is not installed.
    """
    settings = settings or EvalSettings()
    _check_lm_eval()
    register()
    sources = [find_model(str(name), trust_remote_code=trust_remote_code) for name in (base_name, directory)]
    plan = read_plan(directory) if is_checkpoint(directory) else None
    run = Run(Workers(settings.device, settings.memory, settings.stream), progress)
    dtype, device_map = run.workers.dtype(settings.dtype), {"": run.workers.device}
    names = [settings.data or default_text(on_hub=sources[0].is_hub, embedded=sources[0].is_embedded), *settings.also]
    with step(progress, "loading both models and the text"):
        texts = [_gate_text(plan, name) if plan else _any_text(name, settings.data is None) for name in names]
        tokenizers = [load_tokenizer(source) for source in sources]
        _check_tokenizers(tokenizers, texts, str(directory), base_name)
        stream = _streams(run, dtype, *sources)
        base, other = (load_model(source, dtype=dtype, device_map=device_map, stream=stream) for source in sources)
        context = min(context_of(model, settings.context) for model in (base, other))
    sizes = Sizes(
        whole_model=(count_parameters(base), count_parameters(other)),
        bytes_on_disk=(sources[0].bytes_on_disk(), sources[1].bytes_on_disk()),
    )
    tolerance = Tolerance(Limit.parse(settings.max_delta or DEFAULT_LIMIT))
    pair = Pair(base, other, sources[0], sources[1], tokenizers[1], dtype, context)
    return judge(
        pair, texts, tolerance, sizes, settings, run, base_name=sources[0].label,
        reading_of=lambda text: better_reading(base, tokenizers[1], text, context, run),
        short=PlanSettings().seq_len,
    )  # fmt: skip


def _streams(run: Run, dtype: str, *sources: ModelSource) -> bool:
    """Whether the models are streamed: where all of them do not fit together."""
    found = [Footprint.of(source, dtype) for source in sources]
    return run.workers.streams(sum(each.weights for each in found), max(each.token for each in found))


def _check_lm_eval() -> None:
    if find_spec("lm_eval") is None:
        raise FfncompressError("evaluating needs lm-eval; install it with: pip install 'ffncompress[eval]'")


def _any_text(name: str, divided: bool) -> Text | None:
    """A text as it is; of one that nobody asked for, the part that plans leave alone."""
    if name == STOCK_TASK:
        return None
    return read_parts(name)[REPORT] if divided and name in OWN else read(name)


def _check_tokenizers(tokenizers: list[Tokenizer], texts: list[Text | None], name: str, base_name: str) -> None:
    """Perplexity per token compares only where both read the same tokens."""
    for text in texts:
        sample = text.joined[:20_000] if text else "The history of the city began, as histories do, with a river. "
        own, other = (tokenizer(sample, verbose=False)["input_ids"] for tokenizer in tokenizers)
        if own != other:
            raise ModelError(
                f"{name} and {base_name} do not read text as the same tokens, so their perplexities do not compare; "
                "give a base with the same tokenizer"
            )


def _gate_text(plan: Plan, name: str | None) -> Text | None:
    """The text to report on, free of what the plan was fitted or chosen on; None for lm-eval's stock task.

    Texts are known by their content, so a copy under another name is recognised too. A text that only the plan names
    is read where this machine's own runs read it before, and given out only if it still is the plan's.
    """
    used = {ref.sha256 for ref in (*plan.fit_text, *plan.choose_text)}
    recorded = name is None
    if name is None:
        ref = (plan.choose_text if plan.settings.choose_data else plan.fit_text)[0]
        name, used = recorded_source(ref), {ref.sha256}
    if name == STOCK_TASK:
        return None
    for shares in (SHARES, HALVES):
        try:
            parts = read_parts(name, shares)
        except TextError:
            if recorded and shares is HALVES:
                break
            read(name)  # whether it can be read at all
            continue  # too short to have been divided
        if any(part.sha256 in used for part in parts.values()):
            return parts[REPORT]
        if recorded and name in OWN:  # another Python's: its parts go by name, so they are the plan's
            return parts[REPORT]
    if recorded:
        raise TextError(f"{public_name(name)}: no longer the text that the plan was made on; give one with --data")
    text = read(name)
    if text.sha256 in used:
        raise TextError(f"{name}: the plan was fitted on this text; report on another with --data")
    return text


def _reading(plan: Plan, text: Text, base: Model, tokenizer: Tokenizer, context: int, run: Run) -> Reading:
    """How a text is read: as the plan read its other parts, or as the base reads it better."""
    recorded = plan.reading_of(text.source) if text.part == REPORT else None
    return recorded or better_reading(base, tokenizer, text, context, run)


def _sizes(plan: Plan, origin: Origin, slimmed: Model, source: ModelSource) -> Sizes:
    before = sum(b.parameters for b in plan.replaced)
    after = sum(b.parameters_after for b in plan.replaced)
    ffns = plan.base.ffn_parameters
    return Sizes(
        replaced_ffns=(before, after),
        all_ffns=(ffns, ffns - before + after),
        whole_model=(plan.base.parameters, count_parameters(slimmed)),
        bytes_on_disk=(origin.base_bytes, source.bytes_on_disk()),
    )
