"""The gate: lm-eval's rolling perplexity of the base and the slimmed model in one run, a limit, and a verdict.

Token perplexity is per token of this tokenizer, as papers give it, and what the verdict is on; word and byte perplexity
are lm-eval's, and can be compared between tokenizers.
"""

from __future__ import annotations

import math
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from ffncompress import __version__
from ffncompress.budgets import Limit
from ffncompress.checkpoint.card import write_card
from ffncompress.checkpoint.loading import load
from ffncompress.checkpoint.origin import GATE_FILE, META, read_origin, read_plan, verify_files
from ffncompress.errors import FfncompressError, TextError
from ffncompress.gate.perplexity import (
    STOCK_TASK,
    Answer,
    cached,
    cut_pieces,
    digest,
    facts_of,
    lm_eval_perplexity,
    remember,
)
from ffncompress.models import ModelSource, context_of, count_parameters, find_model, load_model, load_tokenizer
from ffncompress.models.base import find_base
from ffncompress.passes.doubts import MeanLoss, doubt_of_base, doubt_of_slimmed
from ffncompress.passes.losses import sequence_losses
from ffncompress.passes.proof import prove
from ffncompress.passes.reading import READING_TOKENS, better_reading, check_ids, embedding_rows
from ffncompress.records.gate import GateResult, Perplexities, Sizes, Speed, TextResult
from ffncompress.records.origin import Origin
from ffncompress.records.plan import Plan
from ffncompress.records.tolerance import Tolerance, paired_rise
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import EvalSettings
from ffncompress.storage.files import write_file
from ffncompress.text.corpus import recorded_source
from ffncompress.text.parts import HALVES, REPORT, SHARES, read_parts
from ffncompress.text.sources import PYTHON_DOCS, Reading, Text, public_name, read
from ffncompress.text.windows import Windows, document_windows
from ffncompress.type_aliases import Model, Tokenizer

NEW_TOKENS = 24


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
    if find_spec("lm_eval") is None:
        raise FfncompressError("evaluating needs lm-eval; install it with: pip install 'ffncompress[eval]'")
    directory = Path(directory)
    origin, plan = read_origin(directory), read_plan(directory)
    manifest = verify_files(directory)
    base_at = find_base(plan.base, model_name, trust_remote_code=trust_remote_code)
    slim_at = find_model(str(directory), trust_remote_code=trust_remote_code)
    run = Run(Workers(settings.device), progress)
    dtype, device_map = run.workers.dtype(settings.dtype), {"": run.workers.device}
    with step(progress, "loading both models and the text"):
        tokenizer = load_tokenizer(slim_at)
        slimmed = load(directory, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
        prove(slimmed, origin.proof)
        context = context_of(slimmed, settings.context)
        inputs = [_gate_text(plan, settings.data), *(_gate_text(plan, name) for name in settings.also)]
        base = load_model(base_at, dtype=dtype, device_map=device_map)

    tolerance = Tolerance(Limit.parse(settings.max_delta)) if settings.max_delta else plan.tolerance
    limit = tolerance.limit
    results: list[TextResult] = []
    doubt = None  # of the first text, which the verdict is on
    for text in inputs:
        reading = _reading(plan, text, base, tokenizer, context, run) if text else "joined"
        pieces = cut_pieces(text, tokenizer, context, settings.tokens, reading) if text else None
        if pieces:
            check_ids(base, tokenizer(pieces, verbose=False)["input_ids"])
        facts = facts_of(base_at.fingerprint(), pieces, context, str(base.device), dtype, settings)
        name = public_name(text.source) if text else STOCK_TASK
        before = cached(facts)
        if before is None:
            before = lm_eval_perplexity(
                base, tokenizer, pieces, context, settings, progress, f"lm-eval: base on {name}"
            )
            remember(facts, before)
        after = lm_eval_perplexity(
            slimmed, tokenizer, pieces, context, settings, progress, f"lm-eval: slimmed on {name}"
        )
        if not results:
            few = document_windows(
                Text(name, "", tuple(pieces or ())), tokenizer, length=plan.settings.seq_len,
                tokens=READING_TOKENS,
            )  # fmt: skip
            doubt = _doubt(before, after, context, base, few, run)
        results.append(_text_result(text, pieces, context, before, after, reading))

    prompt = settings.prompt or _prompt(inputs[0])
    main = results[0]
    with step(progress, "continuing a prompt"):
        continuations = [_continue(model, tokenizer, prompt) for model in (base, slimmed)]
    result = GateResult(
        ffncompress_version=__version__,
        base_model=plan.base.name,
        weights_sha256=slim_at.fingerprint(),
        dtype=dtype,
        limit=str(limit),
        limit_warning=tolerance.warning,
        passed=doubt is None and limit.allows(*main.headline),
        doubt=doubt,
        main=main,
        also=results[1:],
        sizes=_sizes(plan, origin, slimmed, slim_at),
        speed=_measure_speed(base, slimmed, context, settings, progress),
        prompt=prompt,
        continuation_base=continuations[0],
        continuation_slimmed=continuations[1],
    )
    write_file(directory / META / GATE_FILE, result.model_dump_json(indent=1) + "\n")
    written = [f"{META}/{GATE_FILE}", *write_card(directory, plan, origin, result, manifest=manifest)]
    if manifest is not None:
        manifest.record(directory, written)
    return result


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
        if recorded and name == PYTHON_DOCS:  # another Python's: its parts go by name, so they are the plan's
            return parts[REPORT]
    if recorded:
        raise TextError(f"{public_name(name)}: no longer the text that the plan was made on; give one with --data")
    text = read(name)
    if text.sha256 in used:
        raise TextError(f"{name}: the plan was fitted on this text; report on another with --data")
    return text


def _text_result(
    text: Text | None,
    pieces: list[str] | None,
    context: int,
    before: Answer,
    after: Answer,
    reading: Reading,
) -> TextResult:
    def perplexities(answer: Answer) -> Perplexities:
        token = math.exp(min(-answer.log_likelihood / answer.tokens, 700.0))
        return Perplexities(token=token, word=answer.word, byte=answer.byte)

    return TextResult(
        text=public_name(text.source) if text else f"lm-eval {STOCK_TASK}",
        part=text.part if text else "test",
        sha256=digest(pieces) if pieces else "",
        tokens=before.tokens,
        context=context,
        base=perplexities(before),
        slimmed=perplexities(after),
        reading=reading,
        rise_error=_rise_error(before, after),
    )


def _rise_error(before: Answer, after: Answer) -> float | None:
    """The error of the relative rise of perplexity; none of a single piece."""
    tokens = before.piece_tokens
    if len(tokens) < 2 or tokens != after.piece_tokens:
        return None
    rise = paired_rise(before.piece_log_likelihoods, after.piece_log_likelihoods, tokens)
    return rise.error * (1 + rise.relative)


def _reading(plan: Plan, text: Text, base: Model, tokenizer: Tokenizer, context: int, run: Run) -> Reading:
    """How a text is read: as the plan read its other parts, or as the base reads it better."""
    recorded = plan.reading_of(text.source) if text.part == REPORT else None
    return recorded or better_reading(base, tokenizer, text, context, run)


def _doubt(before: Answer, after: Answer, context: int, base: Model, short: Windows, run: Run) -> str | None:
    """Why the figures of a text cannot be believed, or none; the base also reads some of it in short windows."""
    (own, tokens), (other, _) = before.losses, after.losses
    at_scoring = at_check = MeanLoss.of(own, tokens, context)
    if len(short) and short.longest < context:
        at_scoring = MeanLoss.of(sequence_losses(base, short, run), short.scored, short.longest)
    if doubt := doubt_of_base(at_scoring, at_check, embedding_rows(base)):
        return doubt
    slimmed = MeanLoss.of(other, tokens, context).perplexity
    error = slimmed * MeanLoss.of(other - own, tokens, context).error
    return doubt_of_slimmed(at_check.perplexity, slimmed - at_check.perplexity, error)


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


@torch.inference_mode()
def _measure_speed(base: Model, slimmed: Model, context: int, settings: EvalSettings, progress: Progress) -> Speed:
    """Forward passes over the same batch, interleaved so that a noisy machine hits both alike."""
    ids = torch.randint(0, base.config.vocab_size, (settings.batch_size, context), generator=torch.manual_seed(0))
    ids = ids.to(base.device)
    times: dict[int, list[float]] = {id(base): [], id(slimmed): []}
    for round_ in progress(range(settings.repeats + 1), "measuring speed"):
        for model in (base, slimmed):
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            if ids.is_cuda:
                torch.cuda.synchronize()
            if round_:  # the first round warms up
                times[id(model)].append(time.perf_counter() - start)
    slow, fast = statistics.median(times[id(base)]), statistics.median(times[id(slimmed)])
    return Speed(
        base=ids.numel() / slow,
        slimmed=ids.numel() / fast,
        ratio=slow / fast,
        batch=(settings.batch_size, context),
        repeats=settings.repeats,
        device=str(ids.device.type),
    )


def _prompt(text: Text | None) -> str:
    """The first words of the text's first paragraph of prose."""
    if text is None:
        return "The history of the city began"
    paragraphs = [" ".join(p.split()) for document in text.documents[:20] for p in document.split("\n\n") if p.strip()]
    prose = (p for p in paragraphs if len(p) > 120 and sum(c.isalpha() or c == " " for c in p) > 0.9 * len(p))
    return " ".join(next(prose, paragraphs[0]).split()[:10])


@torch.inference_mode()
def _continue(model: Model, tokenizer: Tokenizer, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
