"""Two models on the same texts: perplexities by lm-eval, speed, and how each continues a prompt."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ffncompress import __version__
from ffncompress.errors import TextError
from ffncompress.gate.perplexity import (
    STOCK_TASK,
    Answer,
    cached,
    cut_pieces,
    digest,
    facts_of,
    lm_eval_perplexity,
    own_loss,
    remember,
)
from ffncompress.models import ModelSource, forward
from ffncompress.passes.doubts import MeanLoss, doubt_of_base, doubt_of_slimmed
from ffncompress.passes.losses import sequence_losses
from ffncompress.passes.objective import objective_of, set_objective_
from ffncompress.passes.reading import READING_TOKENS, check_ids, embedding_rows
from ffncompress.records.gate import GateResult, Perplexities, Sizes, Speed, TextResult
from ffncompress.records.task import MEASURES, Task
from ffncompress.records.tolerance import Tolerance, paired_rise
from ffncompress.runtime.progress import Progress, step
from ffncompress.runtime.run import Run
from ffncompress.settings import EvalSettings
from ffncompress.text.sources import Reading, Text, public_name
from ffncompress.text.windows import Windows, document_windows
from ffncompress.type_aliases import Model, Tokenizer

NEW_TOKENS = 48


@dataclass(frozen=True)
class Pair:
    """The base and the slimmed model, loaded alike, and what both read with."""

    base: Model
    slimmed: Model
    base_at: ModelSource
    slimmed_at: ModelSource
    tokenizer: Tokenizer
    dtype: str
    context: int


def judge(
    pair: Pair,
    texts: list[Text | None],
    tolerance: Tolerance,
    sizes: Sizes,
    settings: EvalSettings,
    run: Run,
    *,
    base_name: str,
    reading_of: Callable[[Text], Reading],
    short: int,
) -> GateResult:
    """Measure both models on each text; the verdict is on the first.

    Args:
        pair: the models.
        texts: what they read; none stands for lm-eval's stock task.
        tolerance: how much perplexity may rise.
        sizes: of both.
        settings: how much is read, and how often the clock is.
        run: where it runs, and how progress is shown.
        base_name: what the base is called in the result.
        reading_of: how a text is read.
        short: the length of the windows in which the base also reads, to see whether longer ones harm it.
    """
    base, slimmed, tokenizer, context, progress = pair.base, pair.slimmed, pair.tokenizer, pair.context, run.progress
    task = objective_of(set_objective_(base, tokenizer)).task
    set_objective_(slimmed, tokenizer, base)
    results: list[TextResult] = []
    doubt = None  # of the first text, which the verdict is on
    for text in texts:
        reading = reading_of(text) if text else "joined"
        pieces = cut_pieces(text, tokenizer, context, settings.tokens, reading) if text else None
        if pieces:
            check_ids(base, tokenizer(pieces, verbose=False)["input_ids"])
        facts = facts_of(pair.base_at.fingerprint(), pieces, context, str(base.device), pair.dtype, settings)
        name = public_name(text.source) if text else STOCK_TASK
        if task == "causal":
            before = cached(facts)
            if before is None:
                before = lm_eval_perplexity(
                    base, tokenizer, pieces, context, settings, progress, f"lm-eval: base on {name}"
                )
                remember(facts, before)
            after = lm_eval_perplexity(
                slimmed, tokenizer, pieces, context, settings, progress, f"lm-eval: slimmed on {name}"
            )
        else:
            if pieces is None:
                raise TextError("lm-eval's task is for models that go on with a text; give a text with --data")
            before, after = (
                own_loss(model, tokenizer, pieces, context, run, f"{MEASURES[task]} on {name}")
                for model in (base, slimmed)
            )
        if not results:
            few = document_windows(Text(name, "", tuple(pieces or ())), tokenizer, length=short, tokens=READING_TOKENS)
            doubt = _doubt(before, after, context, base, few, run)
        results.append(_text_result(text, pieces, context, before, after, reading))
    prompt = settings.prompt or _prompt(texts[0])
    with step(progress, "continuing a prompt"):
        continuations = [_continue(model, tokenizer, prompt, task) for model in (base, slimmed)]
    return GateResult(
        ffncompress_version=__version__,
        base_model=base_name,
        weights_sha256=pair.slimmed_at.fingerprint(),
        dtype=pair.dtype,
        limit=str(tolerance.limit),
        limit_warning=tolerance.warning,
        task=task,
        passed=doubt is None and tolerance.limit.allows(*results[0].headline),
        doubt=doubt,
        main=results[0],
        also=results[1:],
        sizes=sizes,
        speed=_measure_speed(base, slimmed, context, settings, progress),
        prompt=prompt,
        continuation_base=continuations[0],
        continuation_slimmed=continuations[1],
    )


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


@torch.inference_mode()
def _measure_speed(base: Model, slimmed: Model, context: int, settings: EvalSettings, progress: Progress) -> Speed:
    """Forward passes over the same batch, interleaved so that a noisy machine hits both alike."""
    ids = torch.randint(0, embedding_rows(base), (settings.batch_size, context), generator=torch.manual_seed(0))
    ids = ids.to(base.device)
    times: dict[int, list[float]] = {id(base): [], id(slimmed): []}
    for round_ in progress(range(settings.repeats + 1), "measuring speed"):
        for model in (base, slimmed):
            start = time.perf_counter()
            forward(model, ids)
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
def _continue(model: Model, tokenizer: Tokenizer, prompt: str, task: Task) -> str:
    """What a model makes of a prompt: how it goes on, or what it puts in the place of its last word."""
    if task == "embedding":
        return ""
    if task == "masked":
        hidden = tokenizer(f"{prompt} {tokenizer.mask_token}.", return_tensors="pt").to(model.device)["input_ids"]
        logits = forward(model, hidden).logits[0, (hidden[0] == tokenizer.mask_token_id).nonzero()[-1, 0]]
        return ", ".join(tokenizer.decode(each).strip() for each in logits.topk(5).indices)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
