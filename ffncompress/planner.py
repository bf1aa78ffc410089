"""Scores and a budget in, a plan out.

No block is replaced on its score alone. Each block's option within the budget is tried alone in the model; what
passes is verified together, on text that no map was fitted on, and the most harmful are dropped until the joint
increase is within the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ffncompress import __version__
from ffncompress.calibration import check_enough_rows, collect_moments, in_passes
from ffncompress.corpus import Corpus, gather_text
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
from ffncompress.plans import BaseRef, BlockPlan, JointCheck, Option, Plan, Scores, Swap
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
from ffncompress.selection import choose_blocks, explain, joint_check, summarise
from ffncompress.settings import Budget, Limit, PlanSettings, parse_blocks
from ffncompress.swaps import measure_base, measure_swaps, perplexity, sequence_losses
from ffncompress.workers import Track, Workers, silent, stage

SWAP_TOKENS = 4096  # of the choose text, for what is done block by block; the joint check takes all of it


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
