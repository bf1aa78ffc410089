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
from typing import Any

import torch

from ffncompress import __version__, texts
from ffncompress.artifact import GATE_FILE, META, load, read_origin, read_plan
from ffncompress.card import write_card
from ffncompress.errors import FfncompressError, TextError
from ffncompress.lm import STOCK_TASK, Answer, cache_key, cached, cut_pieces, digest, lm_eval_perplexity, remember
from ffncompress.models import ModelSource, context_of, count_parameters, find_model, load_model, load_tokenizer
from ffncompress.patcher import base_source
from ffncompress.plans import Plan
from ffncompress.promise import Promise, paired_rise
from ffncompress.report import GateResult, Perplexities, Sizes, Speed, TextResult
from ffncompress.settings import EvalSettings, Limit
from ffncompress.staging import write_file
from ffncompress.workers import Track, Workers, silent, stage

NEW_TOKENS = 24


def run_gate(
    directory: str | Path,
    settings: EvalSettings | None = None,
    *,
    model_name: str | None = None,
    track: Track = silent,
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
    base_at, slim_at = base_source(plan, model_name), find_model(str(directory))
    workers = Workers(settings.device)
    dtype = workers.dtype(settings.dtype)
    with stage(track, "loading both models and the text"):
        tokenizer = load_tokenizer(slim_at)
        slimmed = load(directory, dtype=dtype, device_map={"": workers.device})
        context = context_of(slimmed, settings.context)
        inputs = [_gate_text(plan, settings.data), *(_gate_text(plan, name) for name in settings.also)]
        base = load_model(base_at, dtype=dtype, device_map={"": workers.device})

    promise = Promise(Limit.parse(settings.max_delta)) if settings.max_delta else plan.promised
    limit = promise.limit
    results = []
    for text in inputs:
        pieces = cut_pieces(text, tokenizer, context, settings.tokens) if text else None
        key = cache_key(plan.base.fingerprint, pieces, context, dtype, settings)
        name = text.source if text else STOCK_TASK
        before = cached(key)
        if before is None:
            before = lm_eval_perplexity(base, tokenizer, pieces, context, settings, track, f"lm-eval: base on {name}")
            remember(key, before)
        after = lm_eval_perplexity(slimmed, tokenizer, pieces, context, settings, track, f"lm-eval: slimmed on {name}")
        results.append(_text_result(text, pieces, context, before, after))

    prompt = settings.prompt or _prompt(inputs[0])
    main = results[0]
    with stage(track, "continuing a prompt"):
        continuations = [_continue(model, tokenizer, prompt) for model in (base, slimmed)]
    result = GateResult(
        ffncompress_version=__version__,
        base_model=plan.base.name,
        weights_sha256=slim_at.fingerprint(),
        dtype=dtype,
        limit=str(limit),
        limit_warning=promise.warning,
        passed=limit.allows(*main.headline),
        main=main,
        also=results[1:],
        sizes=_sizes(plan, origin, slimmed, slim_at),
        speed=_measure_speed(base, slimmed, context, settings, track),
        prompt=prompt,
        continuation_base=continuations[0],
        continuation_slimmed=continuations[1],
    )
    write_file(directory / META / GATE_FILE, result.model_dump_json(indent=1) + "\n")
    write_card(directory, plan, origin, result)
    return result


def _gate_text(plan: Plan, name: str | None) -> texts.Text | None:
    """The text to report on, free of what the plan was fitted or chosen on; None for lm-eval's stock task.

    Texts are known by their content, so a copy under another name is recognised too.
    """
    used = [ref.sha256 for ref in (*plan.fit_text, *plan.choose_text)]
    if name is None:
        name = (plan.settings.choose_data or [plan.fit_text[0].source])[0]
    if name == STOCK_TASK:
        return None
    text = texts.read(name)
    for shares in (texts.SHARES, texts.HALVES):
        try:
            parts = texts.read_parts(name, shares)
        except TextError:
            continue  # too short to have been divided
        if any(part.fingerprint().sha256 in used for part in parts.values()):
            return parts[texts.REPORT]
    if text.fingerprint().sha256 in used:
        raise TextError(f"{name}: the plan was fitted on this text; report on another with --data")
    return text


def _text_result(
    text: texts.Text | None, pieces: list[str] | None, context: int, before: Answer, after: Answer
) -> TextResult:
    def perplexities(answer: Answer) -> Perplexities:
        token = math.exp(min(-answer.log_likelihood / answer.tokens, 700.0))
        return Perplexities(token=token, word=answer.word, byte=answer.byte)

    return TextResult(
        text=text.source if text else f"lm-eval {STOCK_TASK}",
        part=text.part if text else "test",
        sha256=digest(pieces) if pieces else "",
        tokens=before.tokens,
        context=context,
        base=perplexities(before),
        slimmed=perplexities(after),
        rise_error=_rise_error(before, after),
    )


def _rise_error(before: Answer, after: Answer) -> float | None:
    """The error of the relative rise of perplexity; none where an answer, remembered from before, tells no pieces."""
    tokens = before.piece_tokens
    if len(tokens) < 2 or tokens != after.piece_tokens:
        return None
    rise = paired_rise(before.piece_log_likelihoods, after.piece_log_likelihoods, tokens)
    return rise.error * (1 + rise.relative)


def _sizes(plan: Plan, origin: dict[str, Any], slimmed: Any, source: ModelSource) -> Sizes:
    before = sum(b.parameters for b in plan.replaced)
    after = sum(b.parameters_after for b in plan.replaced)
    ffns = plan.base.ffn_parameters
    return Sizes(
        replaced_ffns=(before, after),
        all_ffns=(ffns, ffns - before + after),
        whole_model=(plan.base.parameters, count_parameters(slimmed)),
        bytes_on_disk=(origin["base_bytes"], source.bytes_on_disk()),
    )


@torch.inference_mode()
def _measure_speed(base: Any, slimmed: Any, context: int, settings: EvalSettings, track: Track) -> Speed:
    """Forward passes over the same batch, interleaved so that a noisy machine hits both alike."""
    ids = torch.randint(0, base.config.vocab_size, (settings.batch_size, context), generator=torch.manual_seed(0))
    ids = ids.to(base.device)
    times: dict[int, list[float]] = {id(base): [], id(slimmed): []}
    for round_ in track(range(settings.repeats + 1), "measuring speed"):
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


def _prompt(text: texts.Text | None) -> str:
    """The first words of the text's first paragraph of prose."""
    if text is None:
        return "The history of the city began"
    paragraphs = [" ".join(p.split()) for document in text.documents[:20] for p in document.split("\n\n")]
    prose = (p for p in paragraphs if len(p) > 120 and sum(c.isalpha() or c == " " for c in p) > 0.9 * len(p))
    return " ".join(next(prose, paragraphs[0]).split()[:10])


@torch.inference_mode()
def _continue(model: Any, tokenizer: Any, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
