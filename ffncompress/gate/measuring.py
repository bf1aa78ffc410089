"""Two models on the same texts: perplexities by lm-eval, speed, and how each continues a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ffncompress import __version__
from ffncompress.budgets import Limit
from ffncompress.errors import ModelError, TextError
from ffncompress.gate.accuracy import load_tasks, measure_tasks
from ffncompress.gate.agreement import agreement
from ffncompress.gate.baseline import check_base, check_text, compare, read_baseline
from ffncompress.gate.beside import first_words, go_on, measure_speed
from ffncompress.gate.perplexity import (
    STOCK_TASK,
    Answer,
    cached,
    cut_pieces,
    digest,
    facts_of,
    lm_eval_perplexity,
    opened_pairs,
    own_loss,
    remember,
)
from ffncompress.models import ModelSource, embedding_rows, is_streamed
from ffncompress.passes.doubts import MeanLoss, doubt_of_base, doubt_of_slimmed
from ffncompress.passes.losses import sequence_losses
from ffncompress.passes.objective import objective_of, set_objective_
from ffncompress.passes.reading import READING_TOKENS, check_ids
from ffncompress.records.gate import Agreement, Failure, GateResult, Perplexities, Sizes, TextResult
from ffncompress.records.task import MEASURES, Task
from ffncompress.records.tolerance import Tolerance, paired_rise
from ffncompress.runtime.progress import Progress, step
from ffncompress.runtime.run import Run
from ffncompress.settings import EvalSettings
from ffncompress.text.sources import Reading, Text, public_name
from ffncompress.text.windows import Windows, document_windows
from ffncompress.type_aliases import Model, Tokenizer


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

    @property
    def streamed(self) -> bool:
        """Whether weights are read from disk while they run: then their speed is the disk's."""
        return is_streamed(self.base) or is_streamed(self.slimmed)


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
    base, slimmed, tokenizer, progress = pair.base, pair.slimmed, pair.tokenizer, run.progress
    task = objective_of(set_objective_(base, tokenizer)).task
    set_objective_(slimmed, tokenizer, base)
    if settings.tasks and task != "causal":
        raise ModelError("tasks are for models that go on with a text, which an encoder does not; leave --tasks out")
    baseline = read_baseline(settings.baseline) if settings.baseline else None
    if baseline:
        check_base(baseline, base_name, pair.base_at.fingerprint())
    tasks = load_tasks(settings.tasks)  # said before the work, not after it
    results: list[TextResult] = []
    doubt = None  # of the first text, which the verdict is on
    for text in texts:
        reading = reading_of(text) if text else "joined"
        pieces = cut_pieces(text, tokenizer, pair.context, settings.tokens, reading) if text else None
        before, after = _measure_text(pair, text, pieces, task, settings, run)
        if not results:
            name = public_name(text.source) if text else STOCK_TASK
            few = document_windows(Text(name, "", tuple(pieces or ())), tokenizer, length=short, tokens=READING_TOKENS)
            doubt = _doubt(before, after, pair.context, base, few, run)
        alike = _agreement(pair, after, settings, progress) if task == "causal" else None
        results.append(_text_result(text, pieces, pair.context, before, after, reading, alike))
        if baseline:
            check_text(baseline, results[0])
    prompt = settings.prompt or first_words(texts[0])
    with step(progress, "continuing a prompt"):
        continuations = [go_on(model, tokenizer, prompt, task) for model in (base, slimmed)]
    result = GateResult(
        ffncompress_version=__version__,
        base_model=base_name,
        base_sha256=pair.base_at.fingerprint(),
        weights_sha256=pair.slimmed_at.fingerprint(),
        dtype=pair.dtype,
        limit=str(tolerance.limit),
        limit_warning=tolerance.warning,
        task=task,
        passed=False,  # until it is judged
        doubt=doubt,
        main=results[0],
        also=results[1:],
        sizes=sizes,
        speed=None if pair.streamed else measure_speed(base, slimmed, pair.context, settings, progress),
        prompt=prompt,
        continuation_base=continuations[0],
        continuation_slimmed=continuations[1],
        tasks=measure_tasks(base, slimmed, tokenizer, tasks, settings, progress),
        max_drop=settings.max_drop,
    )
    return with_verdict(result, tolerance.limit, baseline, settings.baseline_margin)


def with_verdict(result: GateResult, limit: Limit, baseline: GateResult | None, margin: str) -> GateResult:
    """The result with what it was held to: limits are on the figures as measured, errors are shown beside them."""
    change = compare(result, baseline, margin) if baseline else None
    failures: list[Failure] = []
    if result.doubt is not None or not limit.allows(*result.main.headline):
        failures.append("perplexity")
    if result.max_drop is not None and result.mean_drop[0] > result.max_drop + 1e-9:  # a share is not exact
        failures.append("accuracy")
    if change and not Limit.parse(margin).allows(*change.perplexity):
        failures.append("baseline")
    return result.model_copy(update={"passed": not failures, "failures": failures, "baseline": change})


def _measure_text(
    pair: Pair, text: Text | None, pieces: list[str] | None, task: Task, settings: EvalSettings, run: Run
) -> tuple[Answer, Answer]:
    """What both models say of one text; the base's answers are remembered."""
    base, slimmed, tokenizer, context, progress = pair.base, pair.slimmed, pair.tokenizer, pair.context, run.progress
    name = public_name(text.source) if text else STOCK_TASK
    if pieces:
        check_ids(base, tokenizer(pieces, verbose=False)["input_ids"])
    if task != "causal":
        if pieces is None:
            raise TextError("lm-eval's task is for models that go on with a text; give a text with --data")
        label = f"{MEASURES[task]} on {name}"
        return own_loss(base, tokenizer, pieces, context, run, label), own_loss(
            slimmed, tokenizer, pieces, context, run, label
        )
    facts = facts_of(pair.base_at.fingerprint(), pieces, context, str(base.device), pair.dtype, settings)
    before = cached(facts)
    if before is None:
        before = lm_eval_perplexity(base, tokenizer, pieces, context, settings, progress, f"lm-eval: base on {name}")
        remember(facts, before)
    label = f"lm-eval: slimmed on {name}"
    return before, lm_eval_perplexity(slimmed, tokenizer, pieces, context, settings, progress, label)


def _agreement(pair: Pair, read: Answer, settings: EvalSettings, progress: Progress) -> Agreement | None:
    """Of both models on what the slimmed one has just read."""
    windows = (window for page in read.pages for window in opened_pairs(page, pair.tokenizer, pair.context))
    tokens = settings.batch_size * pair.context
    return agreement(pair.base, pair.slimmed, windows, tokens, progress, "comparing predictions")


def _text_result(
    text: Text | None,
    pieces: list[str] | None,
    context: int,
    before: Answer,
    after: Answer,
    reading: Reading,
    alike: Agreement | None,
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
        agreement=alike,
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
