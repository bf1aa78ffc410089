"""The passes over a model that look at blocks one by one: each gets its scores, a menu, and a swap that was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from ffncompress.budgets import Budget
from ffncompress.errors import BudgetError
from ffncompress.models import (
    Block,
    Ffns,
    Footprint,
    ModelSource,
    context_of,
    embedding_rows,
    ffn_of,
    find_ffns,
    is_streamed,
    load_model,
    load_tokenizer,
    shelved,
)
from ffncompress.passes.calibration import check_enough_rows, check_memory, collect_moments, group_by_memory
from ffncompress.passes.doubts import MeanLoss, doubt_of_base, refuse
from ffncompress.passes.forecast import loss_metrics, predict_losses
from ffncompress.passes.losses import known_losses, perplexity, sequence_losses
from ffncompress.passes.objective import set_objective_
from ffncompress.passes.reading import better_reading, check_ids, check_length
from ffncompress.passes.swaps import SequenceErrors, measure_errors, measure_swaps
from ffncompress.passes.walking import Walk, walk
from ffncompress.planning.common_width import width_within_size
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.menus import make_menu, score_block, score_swap
from ffncompress.planning.search import within_factor
from ffncompress.planning.spending import SWAP_RATIO, check_budget, check_menus
from ffncompress.planning.targets import Terms, terms_of
from ffncompress.records.plan import Option, Swap
from ffncompress.recovery import HybridFit, LinearFit, NeuronFit
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import Fitted, Offer, fit_block, fit_name
from ffncompress.replacement.moments import BlockMoments, runs_within
from ffncompress.runtime.progress import step
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Facts, StageKey, fingerprint
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings
from ffncompress.text.corpus import Corpus, gather_text
from ffncompress.text.sources import default_text
from ffncompress.text.windows import Windows
from ffncompress.type_aliases import Model

GRADIENT_TOKENS = 4096  # of either text, for a backward pass
SWAP_TOKENS = 1024  # of the choose text, for what is tried block by block; the joint check takes all of it


def measure_model(source: ModelSource, settings: PlanSettings, run: Run) -> MeasuredModel:
    """Every pass over the model that looks at blocks one by one: moments, base, forecast, swaps.

    Raises:
        FfncompressError: the model, the text or the budget does not serve; the message says what would.
    """
    model, ffns, corpus, terms = _load(source, settings, run)
    blocks = ffns.blocks
    stages = run.stages
    stages.mapped = is_streamed(model)
    if stages.folder is not None:
        stages.facts = {
            **_facts(source, model, corpus, settings, terms),
            "runs": [runs_within(block, run.moment_bytes) for block in blocks],
        }
    stages.records = [Fitted, LinearFit, NeuronFit, HybridFit, SequenceErrors]
    base_losses = stages.keep(
        "base at the gate's context", {},
        lambda: sequence_losses(model, corpus.verify, run, "measuring the base at the gate's context"),
    )  # fmt: skip
    short_losses = known_losses(corpus.choose, corpus.verify, base_losses)
    if short_losses is None:  # of another length
        short_losses = stages.keep("base", {}, lambda: sequence_losses(model, corpus.choose, run, "measuring the base"))
    doubt = stages.do("doubt", {}, str | None, lambda: _doubt_of_base(model, corpus, base_losses, short_losses))
    if doubt and settings.by_limit:
        raise refuse(doubt)

    few = corpus.fit.up_to(GRADIENT_TOKENS)
    metrics = stages.keep("metrics", {}, lambda: loss_metrics(model, blocks, few, run, settings.seed))
    with walk(model, blocks, kept=is_streamed(model)) as steps:
        fitted, moments = _fit_blocks(model, blocks, corpus, metrics, settings, run, terms.offer, steps)
    errors = stages.keep(
        "errors", {}, lambda: measure_errors(model, blocks, [each.plain for each in fitted], corpus.choose, run)
    )
    base = perplexity(short_losses, corpus.choose.scored)
    some = corpus.choose.up_to(GRADIENT_TOKENS)
    maps = [each.maps for each in fitted]
    predicted = stages.keep(
        "predictions", {},
        lambda: predict_losses(model, blocks, maps, some, run, settings.seed, StageKey("predicting", {})),
    )  # fmt: skip
    menus = run.workers.from_main(
        [make_menu(*each, terms.offer, terms.price) for each in zip(blocks, fitted, predicted, strict=True)]
    )
    check_menus(blocks, menus, settings)
    scores = [score_block(*each) for each in zip(fitted, errors, strict=True)]
    swaps = _try_swaps(model, blocks, fitted, menus, corpus, settings, base, run)
    # what is decided by is the same in all processes
    base, scores, swaps = run.workers.from_main((base, scores, swaps))
    return MeasuredModel(
        source=source,
        model=model,
        blocks=blocks,
        kept_layers=ffns.kept,
        corpus=corpus,
        run=run,
        base=base,
        base_losses=base_losses,
        scores=scores,
        menus=menus,
        swaps=swaps,
        fitted=fitted,
        metrics=metrics,
        moments=moments,
        doubt=doubt,
    )


def _load(source: ModelSource, settings: PlanSettings, run: Run) -> tuple[Model, Ffns, Corpus, Terms]:
    """The model, its blocks, and its text in windows; whatever cannot serve is said before anything is measured."""
    with step(run.progress, "loading the model"):
        dtype, device_map = run.workers.dtype(settings.dtype), run.workers.device_map
        stream = run.workers.streams(*Footprint.of(source, dtype))
        if stream and settings.target_speed:
            raise BudgetError("--target-speed: a model that is read from disk has the disk's speed; give a --budget")
        model = load_model(source, dtype=dtype, device_map=device_map, stream=stream)
        tokenizer = load_tokenizer(source)
    ffns = find_ffns(model)
    blocks = ffns.blocks
    set_objective_(model, tokenizer)
    terms = terms_of(model.config, blocks, settings)
    check_budget(model, blocks, settings)
    if settings.target == "native":
        terms = replace(terms, offer=replace(terms.offer, width=width_within_size(model, blocks, settings)))
    check_length(source.name, model.config, settings.seq_len)
    with step(run.progress, "reading text"):
        context = context_of(model, settings.context)
        reading_of = partial(better_reading, model, tokenizer, context=context, run=run, seed=settings.seed)
        default = default_text(on_hub=source.is_hub, embedded=source.is_embedded)
        corpus = gather_text(settings, default, tokenizer, context, reading_of)
    check_ids(model, Windows.cat([corpus.fit, corpus.refit, corpus.verify]))
    check_enough_rows(blocks, corpus.fit.numel())
    return model, ffns, corpus, terms


def _fit_blocks(
    model: Model,
    blocks: list[Block],
    corpus: Corpus,
    metrics: list[Tensor],
    settings: PlanSettings,
    run: Run,
    offer: Offer,
    steps: Walk,
) -> tuple[list[Fitted], dict[str, Tensor] | None]:
    """The fits of every block from one pass over the text, and the moments by name where they are to be kept.

    Fits come as moments go: one set of either is in memory.
    """
    fitted: list[Fitted] = []
    kept: dict[str, Tensor] = {}
    check_memory(blocks, run)
    for group in group_by_memory(blocks, run.moment_bytes):
        known = [run.stages.find("fits", {"block": block.index}) for block in group]
        if None not in known and not settings.keep_moments:
            fitted += known
            continue
        key = StageKey("moments", {"blocks": [block.index for block in group]})
        moments: list[BlockMoments | None] = [
            *collect_moments(model, group, corpus.fit, corpus.choose, run, key=key, steps=steps)
        ]  # fmt: skip
        for block, own in zip(group, moments, strict=True):
            assert own is not None
            own.metric = metrics[block.index].to(own.fit.x.device)
        made = _fits(model, group, moments, known, run.workers, offer)
        for at, found in zip(run.progress(range(len(group)), "fitting replacements"), made, strict=True):
            index, own = group[at].index, moments[at]
            fitted.append(found if known[at] is not None else run.stages.put("fits", {"block": index}, found))
            if settings.keep_moments and own is not None:
                kept |= {f"{index}.{part}": tensor for part, tensor in own.named_tensors().items()}
            moments[at] = None
    return fitted, kept if settings.keep_moments else None


def _try_swaps(
    model: Model,
    blocks: list[Block],
    fitted: list[Fitted],
    menus: list[list[Option]],
    corpus: Corpus,
    settings: PlanSettings,
    base: float,
    run: Run,
) -> list[Swap]:
    """The best option of each block within the budget's factor, put into the model alone."""
    ratio = Budget.parse(settings.budget).ratio or SWAP_RATIO
    tried = [
        min(
            [o for o in options if within_factor(b, o, ratio)] or [min(options, key=lambda o: o.cost)],
            key=lambda o: o.predicted_loss,
        )
        for b, options in zip(blocks, menus, strict=True)
    ]
    variants = [
        shelved(build_replacement(b, ffn_of(model, b), o.shape, f.maps[fit_name(o)]), model)
        for b, f, o in zip(blocks, fitted, tried, strict=True)
    ]
    windows = corpus.choose.up_to(SWAP_TOKENS, least=2)
    facts = {"ratio": ratio}
    rises = run.stages.keep(
        "swaps", facts, lambda: measure_swaps(model, blocks, variants, windows, run, StageKey("swapping", facts))
    )
    return [score_swap(b, t, r, base, windows.scored) for b, t, r in zip(blocks, tried, rises, strict=True)]


def _fits(
    model: Model,
    group: list[Block],
    moments: list[BlockMoments | None],
    known: list[Fitted | None],
    workers: Workers,
    offer: Offer,
) -> Iterator[Fitted]:
    """The fits of each block, those that are not known made by one process each.

    Between GPUs they would travel through their memory, which moments fill: there every process makes its own.
    """

    def fit(at: int) -> Fitted:
        own = moments[at]
        assert own is not None
        return known[at] or fit_block(group[at], own, ffn_of(model, group[at]), offer)

    places = range(len(group))
    return workers.deal(places, fit) if workers.device.type == "cpu" else map(fit, places)


def _doubt_of_base(model: Model, corpus: Corpus, losses: Tensor, short: Tensor) -> str | None:
    """Whether the base reads its text at the context of the check; known before the long passes."""
    at_check = at_scoring = MeanLoss.of(losses, corpus.verify.scored, corpus.verify.longest)
    if corpus.choose.longest < corpus.verify.longest:
        at_scoring = MeanLoss.of(short, corpus.choose.scored, corpus.choose.longest)
    return doubt_of_base(at_scoring, at_check, embedding_rows(model))


def _facts(source: ModelSource, model: Model, corpus: Corpus, settings: PlanSettings, terms: Terms) -> Facts:
    """All that what is measured depends on: the model and its code, the tokens, and how they are computed with."""
    code = sorted(source.directory.glob("*.py")) if source.trust_remote_code else []
    windows = (corpus.fit, corpus.refit, corpus.choose, corpus.verify, corpus.fresh)
    return {
        "model": source.fingerprint(),
        "code": [file.read_text(encoding="utf-8") for file in code],
        "dtype": str(model.dtype),
        "windows": [fingerprint(*each) for each in windows],
        "seed": settings.seed,
        "offer": [sorted(terms.offer.kinds), terms.offer.align, terms.offer.width, settings.target],
    }
