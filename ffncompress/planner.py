"""Scores and a budget in, a plan out.

No block is replaced on its score alone. Each block's option within the budget is tried alone in the model; what
passes is verified together, on text that no map was fitted on, and the most harmful are dropped until the joint
increase is within the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress import __version__, texts
from ffncompress.calibration import check_enough_rows, collect_moments, in_passes
from ffncompress.errors import TextError
from ffncompress.forecast import predict_losses
from ffncompress.models import (
    Block,
    ModelSource,
    context_of,
    count_parameters,
    find_blocks,
    find_model,
    installed,
    load_model,
    load_tokenizer,
)
from ffncompress.plans import BaseRef, BlockPlan, JointCheck, Option, Plan, Scores, Swap, TextRef
from ffncompress.scoring import (
    PLAIN,
    Fitted,
    fit_block,
    option_within,
    replacement,
    score_block,
    score_options,
    score_swap,
    tensors_of,
    worth_trying,
)
from ffncompress.settings import Budget, Limit, PlanSettings, parse_blocks
from ffncompress.swaps import measure_base, measure_swaps, perplexity, sequence_losses
from ffncompress.workers import Track, Workers, silent, stage

CONFIDENCE = 1.645  # standard errors: one-sided 95 %
CHOOSE_SHARE = 0.25  # of the tokens: the paper holds out a fifth to a quarter
VERIFY_WINDOWS = 8  # at least: a spread over fewer says little
SWAP_TOKENS = 4096  # of the choose text, for what is done block by block; the joint check takes all of it


@dataclass(frozen=True)
class Corpus:
    """The windows of a plan and the records of the texts they came from."""

    fit: Tensor
    choose: Tensor
    verify: Tensor  # of the choose text too, at the gate's context
    fit_text: list[TextRef]
    choose_text: list[TextRef]


@dataclass(frozen=True)
class Measured:
    """What the passes over the model gave, block by block."""

    base: float  # perplexity
    scores: list[Scores]
    options: list[list[Option]]
    swaps: list[Swap]
    modules: list[nn.Module]  # the better stand-in of each


def make_plan(
    model_name: str,
    settings: PlanSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    workers: Workers | None = None,
    track: Track = silent,
) -> tuple[Plan, dict[str, Tensor]]:
    """Measure a model and choose what to replace; returns the plan and its fitted tensors.

    Raises:
        FfncompressError: the model, the text or the budget does not serve; the message says what would.
    """
    budget, limit = Budget.parse(settings.budget), Limit.parse(settings.max_delta)
    source = find_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
    workers = workers or Workers(settings.device)
    with stage(track, f"loading {source.name}"):
        dtype = workers.dtype(settings.dtype)
        model, tokenizer = load_model(source, dtype=dtype, device_map=workers.device_map), load_tokenizer(source)
    blocks = find_blocks(model)
    forced = parse_blocks(settings.blocks, len(blocks)) if settings.blocks else None
    sizes = [option_within(block, budget) for block in blocks]
    with stage(track, "reading text"):
        corpus = gather_text(source, settings, tokenizer, context_of(model, settings.context))
    check_enough_rows(blocks, corpus.fit.numel())

    found = measure_blocks(model, blocks, sizes, corpus, settings, workers, track)
    check = verifier(model, blocks, found.modules, corpus.verify, limit, workers, track)
    chosen, joint = choose_blocks(found.swaps, found.base, limit, forced, check)
    reasons = explain(found.swaps, found.base, limit, chosen, forced)
    plan = Plan(
        ffncompress_version=__version__,
        base=_base_ref(source, model, blocks),
        settings=settings,
        fit_text=corpus.fit_text,
        choose_text=corpus.choose_text,
        base_perplexity=found.base,
        blocks=[
            BlockPlan(
                index=i,
                path=block.path,
                parameters=block.parameters,
                d_in=block.d_in,
                d_inner=block.d_inner,
                d_out=block.d_out,
                scores=found.scores[i],
                options=found.options[i],
                swap=found.swaps[i],
                replace=i in chosen,
                reason=reasons[i],
            )
            for i, block in enumerate(blocks)
        ],
        joint=joint,
        summary=summarise(found.swaps, found.base, limit, chosen, joint),
        tensors_sha256="",
    )
    return plan, tensors_of({i: found.modules[i] for i in chosen})


def measure_blocks(
    model: Any,
    blocks: list[Block],
    sizes: list[tuple[str, int]],
    corpus: Corpus,
    settings: PlanSettings,
    workers: Workers,
    track: Track,
) -> Measured:
    """Every pass over the model that looks at blocks one by one: moments, base, forecast, swaps."""
    fitted: list[Fitted] = []
    for group in in_passes(blocks):
        moments = collect_moments(model, group, corpus.fit, corpus.choose, workers, track)
        fitted += [fit_block(each) for each in track(moments, "fitting maps")]
    plain = [each.maps[PLAIN] for each in fitted]
    losses, errors = measure_base(model, blocks, plain, corpus.choose, workers, track)
    base = perplexity(losses)
    some = corpus.choose[: max(1, SWAP_TOKENS // settings.seq_len)]
    predicted = predict_losses(model, blocks, [each.maps for each in fitted], some, workers, settings.seed, track)
    variants = [
        {name: replacement(block, size, fit.maps[name]) for name in worth_trying(losses, size[1])}
        for block, size, fit, losses in zip(blocks, sizes, fitted, predicted, strict=True)
    ]
    rises = measure_swaps(model, blocks, variants, some, workers, track)
    all_ = range(len(blocks))
    swaps = [score_swap(blocks[i], sizes[i], predicted[i], rises[i], base) for i in all_]
    return Measured(
        base=base,
        scores=[score_block(fitted[i], errors[i]) for i in all_],
        options=[score_options(blocks[i], sizes[i], fitted[i], predicted[i], base) for i in all_],
        swaps=swaps,
        modules=[variants[i][swaps[i].weighting] for i in all_],
    )


def verifier(
    model: Any,
    blocks: list[Block],
    modules: list[nn.Module],
    windows: Tensor,
    limit: Limit,
    workers: Workers,
    track: Track,
) -> Callable[[list[int]], JointCheck]:
    """A function that replaces some blocks together and checks them, at the context that the gate will use.

    Perplexity rises more at a longer context, where the base has more to lose: what passes at 128 tokens may fail
    at 512.
    """
    base = sequence_losses(model, windows, workers, track, "measuring the base at the gate's context")

    def check(indices: list[int]) -> JointCheck:
        with installed(model, {blocks[i].path: modules[i] for i in indices}):
            together = sequence_losses(model, windows, workers, track, f"verifying {len(indices)} together")
        return joint_check(indices, base, together, windows.shape[1], limit)

    return check


def gather_text(source: ModelSource, settings: PlanSettings, tokenizer: Any, context: int) -> Corpus:
    """Fit and choose windows from disjoint text; the part called report is left for the gate."""
    data = settings.data or ["wikitext" if source.is_hub else texts.PYTHON_DOCS]
    if settings.choose_data:
        fit = [texts.read(name) for name in data]
        choose = [texts.read_parts(name, texts.HALVES)[texts.CHOOSE] for name in settings.choose_data]
    else:
        parts = [texts.read_parts(name) for name in data]
        fit, choose = [p[texts.FIT] for p in parts], [p[texts.CHOOSE] for p in parts]
    choose_windows = max(1, round(settings.tokens * CHOOSE_SHARE / settings.seq_len))
    fit_windows = max(1, settings.tokens // settings.seq_len - choose_windows)
    fit_rows, fit_refs = _cut(fit, fit_windows, settings.seq_len, settings.seed, tokenizer)
    choose_rows, choose_refs = _cut(choose, choose_windows, settings.seq_len, settings.seed, tokenizer)
    share = max(VERIFY_WINDOWS, choose_rows.numel() // context) // len(choose) + 1
    verify_rows = torch.cat(
        [texts.windows(text, tokenizer, length=context, count=share, seed=settings.seed) for text in choose]
    )
    if len(verify_rows) < VERIFY_WINDOWS:  # too little text for long windows: the short ones must serve
        verify_rows = choose_rows
    return Corpus(fit_rows, choose_rows, verify_rows, fit_refs, choose_refs)


def _cut(sources: list[texts.Text], count: int, length: int, seed: int, tokenizer: Any) -> tuple[Tensor, list[TextRef]]:
    """About the same number of windows from each text."""
    rows, refs = [], []
    for i, text in enumerate(sources):
        share = count // len(sources) + (i < count % len(sources))
        own = texts.windows(text, tokenizer, length=length, count=share, seed=seed)
        if not len(own):
            raise TextError(
                f"{text.source}: its {text.part} part is shorter than one window of {length} tokens; "
                "give a longer text, or lower --seq-len"
            )
        rows.append(own)
        refs.append(TextRef(**text.fingerprint().as_dict(), tokens=own.numel()))
    return torch.cat(rows), refs


def joint_check(indices: list[int], base: Tensor, together: Tensor, context: int, limit: Limit) -> JointCheck:
    """Whether blocks replaced together keep within the limit, with CONFIDENCE and not just on average.

    Args:
        indices: the blocks.
        base: the original model's loss on each sequence.
        together: the patched model's.
        context: the length of a sequence.
        limit: how much perplexity may rise.
    """
    before, after = perplexity(base), perplexity(together)
    rises = together - base
    error = after * (rises.std() / len(rises) ** 0.5).item() if len(rises) > 1 else 0.0
    within = limit.allows(before, after + CONFIDENCE * error)
    return JointCheck(
        blocks=sorted(indices), context=context, base_perplexity=before, perplexity=after, delta=after - before,
        delta_error=error, within_limit=within,
    )  # fmt: skip


def choose_blocks(
    measured: list[Swap],
    base: float,
    limit: Limit,
    forced: list[int] | None,
    check: Callable[[list[int]], JointCheck],
) -> tuple[list[int], list[JointCheck]]:
    """The most blocks, least harmful first, whose joint increase is within the limit.

    Dropping the most harmful one by one visits nested sets, so the last that passes is found by bisection.
    """
    if forced is not None:
        return forced, [check(forced)]
    by_harm = sorted(range(len(measured)), key=lambda i: measured[i].delta)
    candidates = [i for i in by_harm if limit.allows(base, base + measured[i].delta)]
    checks: list[JointCheck] = []
    fits, fails = 0, len(candidates) + 1
    while fails - fits > 1:
        # all of them first: often nothing has to be dropped
        middle = (fits + fails) // 2 if checks else len(candidates)
        checks.append(check(candidates[:middle]))
        fits, fails = (middle, fails) if checks[-1].within_limit else (fits, middle)
    return sorted(candidates[:fits]), checks


def explain(measured: list[Swap], base: float, limit: Limit, chosen: list[int], forced: list[int] | None) -> list[str]:
    """Why each block is treated as it is, in a few words."""
    reasons = []
    for i, swap in enumerate(measured):
        alone = f"alone {swap.delta:+.2f} ppl ({100 * swap.delta / base:+.1f} %)"
        if forced is not None:
            reasons.append("replaced: forced by --blocks" if i in chosen else "kept: not among --blocks")
        elif i in chosen:
            reasons.append(f"replaced: {alone}, and within {limit} together with the others")
        elif limit.allows(base, base + swap.delta):
            reasons.append(f"kept: {alone}, but too much together with the others")
        else:
            reasons.append(f"kept: {alone} is over {limit}")
    return reasons


def summarise(measured: list[Swap], base: float, limit: Limit, chosen: list[int], joint: list[JointCheck]) -> str:
    """The plan in a sentence; where nothing is safe, the nearest miss."""
    if chosen:
        final = next(c for c in reversed(joint) if c.blocks == chosen)
        verdict = "within" if final.within_limit else "OVER"
        return (
            f"{len(chosen)} of {len(measured)} blocks replaced: {final.delta:+.2f} ±{final.delta_error:.2f} perplexity "
            f"({100 * final.delta / final.base_perplexity:+.1f} %) together, {verdict} the limit of {limit}"
        )
    nearest = min(range(len(measured)), key=lambda i: measured[i].delta)
    miss = measured[nearest]
    return (
        f"nothing is safe to replace within {limit}: the nearest miss is block {nearest}, alone "
        f"{miss.delta:+.2f} ±{miss.delta_error:.2f} perplexity ({100 * miss.delta / base:+.1f} %); "
        "raise --max-delta, lower --budget, or force it with --blocks"
    )


def _base_ref(source: ModelSource, model: nn.Module, blocks: list[Block]) -> BaseRef:
    return BaseRef(
        name=source.name,
        revision=source.revision,
        fingerprint=source.fingerprint(),
        family=model.config.model_type,  # type: ignore[union-attr, arg-type]
        parameters=count_parameters(model),
        ffn_parameters=sum(block.parameters for block in blocks),
        trust_remote_code=source.trust_remote_code,
    )
