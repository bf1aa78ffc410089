"""Scores and a budget in, a plan out.

Two steps: the *survey* passes over the model and gives every block a menu with predicted losses; to *settle* is to
spend a budget on it. No block is replaced on its score alone: what is chosen is verified together, on text that
nothing was fitted on, at the context that the gate will use. Perplexity rises more at a longer context, where the base
has more to lose: what passes at 128 tokens may fail at 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ffncompress import __version__
from ffncompress.calibration import BlockMoments, check_enough_rows, collect_moments, in_passes
from ffncompress.corpus import Corpus, gather_text
from ffncompress.errors import BudgetError
from ffncompress.forecast import loss_metrics, predict_losses
from ffncompress.latency import time_blocks
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
from ffncompress.patcher import base_source
from ffncompress.plans import BaseRef, BlockPlan, FrontierPoint, JointCheck, Option, Plan, Scores, Swap
from ffncompress.refit import refit
from ffncompress.scoring import (
    PLAIN,
    Fitted,
    fit_block,
    fit_name,
    fit_some,
    menu,
    replacement,
    score_block,
    score_swap,
    shape_of,
    tensors_of,
)
from ffncompress.selection import (
    Choice,
    Market,
    draw_line,
    explain,
    joint_check,
    smallest_within,
    summarise,
    surprise,
    within_factor,
)
from ffncompress.settings import Budget, PlanSettings, parse_blocks, parse_speed
from ffncompress.swaps import measure_base, measure_swaps, perplexity, sequence_losses
from ffncompress.workers import Track, Workers, silent, stage

GRADIENT_TOKENS = 4096  # of either text, for a backward pass
SWAP_TOKENS = 2048  # of the choose text, for what is tried block by block; the joint check takes all of it
SWAP_RATIO = 8.0  # the paper's factor: what is tried alone where the budget names none


@dataclass
class Survey:
    """A model, its text, and what the passes over it gave, block by block."""

    source: ModelSource
    model: Any
    blocks: list[Block]
    corpus: Corpus
    workers: Workers
    track: Track
    base: float  # perplexity on the choose windows
    base_losses: Tensor  # of each verify window
    scores: list[Scores]
    menus: list[list[Option]]
    swaps: list[Swap]
    fitted: list[Fitted]
    metrics: list[Tensor]  # what the loss feels of each block's errors, by direction
    moments: dict[str, Tensor] | None

    def market(self) -> Market:
        return Market(self.blocks, self.menus, [surprise(swap, self.base) for swap in self.swaps])

    def modules(self, choice: Choice) -> dict[int, nn.Module]:
        """The stand-ins of a choice, as fitted on the original model's activations."""
        return {
            i: replacement(block, self.model.get_submodule(block.path), shape_of(option), fitted.maps[fit_name(option)])
            for i, (block, option, fitted) in enumerate(zip(self.blocks, choice, self.fitted, strict=True))
            if option is not None
        }

    def check(self, choice: Choice, settings: PlanSettings, modules: dict[int, nn.Module] | None = None) -> JointCheck:
        """Replace some blocks together and measure."""
        windows = self.corpus.verify
        at = {self.blocks[i].path: module for i, module in (modules or self.modules(choice)).items()}
        with installed(self.model, at):
            size = count_parameters(self.model)
            together = sequence_losses(self.model, windows, self.workers, self.track, f"verifying {len(at)} together")
        limit = settings.limit
        return joint_check(choice, size, self.base_losses, together, windows.shape[1], limit, modules is not None)


def make_plan(
    model_name: str,
    settings: PlanSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    workers: Workers | None = None,
    track: Track = silent,
) -> tuple[Plan, dict[str, Tensor], dict[str, Tensor] | None]:
    """Measure a model and choose what to replace; returns the plan, its fitted tensors, and the moments if asked.

    Raises:
        FfncompressError: the model, the text or the budget does not serve; the message says what would.
    """
    source = find_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
    found = survey(source, settings, workers or Workers(settings.device), track)
    return (*settle(found, settings), found.moments)


def survey(source: ModelSource, settings: PlanSettings, workers: Workers, track: Track = silent) -> Survey:
    """Every pass over the model that looks at blocks one by one: moments, base, forecast, swaps."""
    with stage(track, f"loading {source.name}"):
        dtype = workers.dtype(settings.dtype)
        model, tokenizer = load_model(source, dtype=dtype, device_map=workers.device_map), load_tokenizer(source)
    blocks = find_blocks(model)
    check_budget(model, blocks, settings)
    with stage(track, "reading text"):
        corpus = gather_text(source, settings, tokenizer, context_of(model, settings.context))
    check_enough_rows(blocks, corpus.fit.numel())

    few = max(1, GRADIENT_TOKENS // settings.seq_len)
    metrics = loss_metrics(model, blocks, corpus.fit[:few], workers, settings.seed, track)
    fitted: list[Fitted] = []
    kept: dict[str, Tensor] = {}
    for group in in_passes(blocks):
        moments = collect_moments(model, group, corpus.fit, corpus.choose, workers, track)
        for block in track(group, "fitting stand-ins"):
            own = moments.pop(0)  # fits come as moments go: memory holds about one set of either
            own.metric = metrics[block.index].to(own.fit.x.device)
            fitted.append(fit_block(block, own, model.get_submodule(block.path)))
            if settings.keep_moments:
                kept |= {f"{block.index}.{name}": tensor for name, tensor in own.named_tensors().items()}
    plain = [each.maps[PLAIN] for each in fitted]
    losses, errors = measure_base(model, blocks, plain, corpus.choose, workers, track)  # type: ignore[arg-type]
    base = perplexity(losses)
    maps = [each.maps for each in fitted]
    predicted = predict_losses(model, blocks, maps, corpus.choose[:few], workers, settings.seed, track)
    menus = [menu(*each) for each in zip(blocks, fitted, predicted, strict=True)]
    ratio = Budget.parse(settings.budget).ratio or SWAP_RATIO
    tried = [
        min((o for o in options if within_factor(b, o, ratio)), key=lambda o: o.predicted_loss)
        for b, options in zip(blocks, menus, strict=True)
    ]
    variants = [
        replacement(b, model.get_submodule(b.path), shape_of(o), f.maps[fit_name(o)])
        for b, f, o in zip(blocks, fitted, tried, strict=True)
    ]
    rises = measure_swaps(
        model, blocks, variants, corpus.choose[: max(2, SWAP_TOKENS // settings.seq_len)], workers, track
    )
    return Survey(
        source=source,
        model=model,
        blocks=blocks,
        corpus=corpus,
        workers=workers,
        track=track,
        base=base,
        base_losses=sequence_losses(model, corpus.verify, workers, track, "measuring the base at the gate's context"),
        scores=[score_block(*each) for each in zip(fitted, errors, strict=True)],
        menus=menus,
        swaps=[score_swap(b, t, r, base) for b, t, r in zip(blocks, tried, rises, strict=True)],
        fitted=fitted,
        metrics=metrics,
        moments=kept if settings.keep_moments else None,
    )


def check_budget(model: Any, blocks: list[Block], settings: PlanSettings) -> None:
    """Whether a budget can be met at all, before anything is measured.

    Raises:
        BudgetError: it cannot; says what can.
    """
    if settings.blocks:
        parse_blocks(settings.blocks, len(blocks))
    whole = count_parameters(model)
    size = size_cap(settings, whole)
    rest = whole - sum(block.parameters for block in blocks)
    if size is not None and size < rest + sum(block.d_out for block in blocks):
        raise BudgetError(
            f"{size:,} parameters cannot be reached: {rest:,} of the model's {whole:,} are outside its FFNs; "
            f"ask for more than that"
        )


def size_cap(settings: PlanSettings, whole: int) -> int | None:
    """The most parameters that the settings allow the whole model, or none."""
    caps = [cap for cap in (Budget.parse(settings.budget).size(whole), settings.at and int(settings.at * whole)) if cap]
    return min(caps) if caps else None


def settle(survey: Survey, settings: PlanSettings) -> tuple[Plan, dict[str, Tensor]]:
    """Spend a budget on what was surveyed; returns the plan and its fitted tensors."""
    market = survey.market()
    joint: list[JointCheck] = []
    if settings.target_speed:
        market = time_blocks(survey.model, market, survey.track)
    frontier: list[FrontierPoint] = []
    if settings.frontier:
        rest = count_parameters(survey.model) - market.full
        base = perplexity(survey.base_losses)
        within = market.restricted(Budget.parse(settings.budget).ratio)
        frontier, joint = draw_line(within, rest, base, lambda choice: survey.check(choice, settings))
    forced = parse_blocks(settings.blocks, len(survey.blocks)) if settings.blocks else None
    choice, checks = _choose(survey, market, settings, forced)
    joint += checks
    modules = survey.modules(choice)
    if any(choice):
        joint.append(survey.check(choice, settings))
        if settings.refit:
            choice, modules, checks = _refitted(survey, market, settings, choice, modules, joint[-1])
            joint += checks
    plan = describe(survey, settings, market, choice, joint, frontier, forced)
    return plan, tensors_of(modules)


def _choose(
    survey: Survey, market: Market, settings: PlanSettings, forced: list[int] | None
) -> tuple[Choice, list[JointCheck]]:
    """The choice that the budget asks for, with stand-ins as fitted on the original model."""
    budget, whole = Budget.parse(settings.budget), count_parameters(survey.model)
    size = size_cap(settings, whole)
    market = market.restricted(budget.ratio, forced)
    if size is not None or settings.target_speed:
        seconds = None
        if settings.target_speed:
            seconds = market.seconds_within(parse_speed(settings.target_speed))
        parameters = None if size is None else size - (whole - market.full)
        return market.choose(parameters=parameters, seconds=seconds), []
    if forced is not None:  # safe or not, and as small as the factor says
        ratio = budget.ratio or SWAP_RATIO
        menus = market.restricted(ratio, forced).menus
        best: Choice = [min(m, key=lambda o: o.predicted_loss) if m else None for m in menus]
        return best, []
    return smallest_within(market, lambda choice: survey.check(choice, settings))


def _refitted(
    survey: Survey,
    market: Market,
    settings: PlanSettings,
    choice: Choice,
    modules: dict[int, nn.Module],
    check: JointCheck,
) -> tuple[Choice, dict[int, nn.Module], list[JointCheck]]:
    """The stand-ins refitted in order, where that helps; under a limit, also what the gain can still pay for."""
    again = _refit(survey, choice)
    checks = [check, survey.check(choice, settings, again)]
    if checks[1].perplexity > check.perplexity:
        return choice, modules, [checks[1], check]  # what is kept stands last
    limit, whole = settings.limit, count_parameters(survey.model)
    by_quality = size_cap(settings, whole) is None and not settings.target_speed and not settings.blocks
    if limit and by_quality and checks[1].within_limit:
        room = limit.allowance(check.base_perplexity) / max(checks[1].delta, 1e-6)
        smaller = _spend(market.restricted(Budget.parse(settings.budget).ratio), choice, min(room, 2.0))
        if smaller is not None:
            more = _refit(survey, smaller)
            checks.append(survey.check(smaller, settings, more))
            if checks[-1].within_limit:
                return smaller, more, checks[1:]
            checks[1], checks[2] = checks[2], checks[1]
    return choice, again, checks[1:]


def _refit(survey: Survey, choice: Choice) -> dict[int, nn.Module]:
    shapes = {i: shape_of(option) for i, option in enumerate(choice) if option is not None}
    corpus = survey.corpus
    return refit(
        survey.model, survey.blocks, shapes, corpus.refit, corpus.choose, survey.workers, survey.track,
        metrics=survey.metrics,
    )  # fmt: skip


def _spend(market: Market, choice: Choice, room: float) -> Choice | None:
    """The smallest choice that is predicted to lose `room` times as much, less a tenth for what does not add."""
    allowed = market.loss(choice) * (1 + 0.9 * (room - 1))
    size, best = market.size(choice), None
    for step in range(1, 33):
        try:
            smaller = market.choose(parameters=size * (1 - step / 64))
        except BudgetError:
            break
        if market.loss(smaller) > allowed:
            break
        best = smaller
    return best if best is not None and market.size(best) < size else None


def describe(
    survey: Survey,
    settings: PlanSettings,
    market: Market,
    choice: Choice,
    joint: list[JointCheck],
    frontier: list[FrontierPoint],
    forced: list[int] | None,
) -> Plan:
    """All of it on paper."""
    reasons = explain(market.restricted(Budget.parse(settings.budget).ratio), choice, survey.base, forced)
    blocks = [
        BlockPlan(
            index=i,
            path=block.path,
            parameters=block.parameters,
            d_in=block.d_in,
            d_inner=block.d_inner,
            d_out=block.d_out,
            scores=survey.scores[i],
            options=market.menus[i],
            swap=survey.swaps[i],
            choice=choice[i],
            reason=reasons[i],
        )
        for i, block in enumerate(survey.blocks)
    ]
    return Plan(
        ffncompress_version=__version__,
        base=_base_ref(survey.source, survey.model, survey.blocks),
        settings=settings,
        fit_text=survey.corpus.fit_text,
        choose_text=survey.corpus.choose_text,
        base_perplexity=survey.base,
        blocks=blocks,
        joint=joint,
        frontier=frontier,
        summary=summarise(blocks, settings.limit, joint),
        tensors_sha256="",
    )


def replan(directory: str | Path, settings: PlanSettings, track: Track = silent) -> tuple[Plan, dict[str, Tensor]]:
    """Spend another budget on a plan whose moments were kept: no text is read and no model is run.

    Raises:
        PlanError: the plan's moments were not kept.
        BudgetError: the budget needs a measurement.
    """
    old = Plan.load(directory)
    size = size_cap(settings, old.base.parameters)
    if size is None or settings.target_speed or settings.max_delta or settings.blocks or settings.frontier:
        raise BudgetError(
            "a plan can be made anew from its moments for a size only: give --at or --budget, such as -15%"
        )
    with stage(track, f"loading {old.base.name}"):
        model = load_model(base_source(old))
    blocks = find_blocks(model)
    market = Market(
        blocks, [block.options for block in old.blocks], [surprise(b.swap, old.base_perplexity) for b in old.blocks]
    )
    market = market.restricted(Budget.parse(settings.budget).ratio)
    choice = market.choose(parameters=size - (old.base.parameters - market.full))
    modules = {}
    chosen = [(block, option) for block, option in zip(blocks, choice, strict=True) if option is not None]
    for block, option in track(chosen, "fitting stand-ins"):
        ffn, moments = model.get_submodule(block.path), BlockMoments.named(old.load_moments(directory, block.index))
        fits = fit_some(block, moments, ffn, [name := fit_name(option)])
        modules[block.index] = replacement(block, ffn, shape_of(option), fits[name])
    reasons = explain(market, choice, old.base_perplexity, None)
    planned = [
        block.model_copy(update={"choice": option, "reason": reason})
        for block, option, reason in zip(old.blocks, choice, reasons, strict=True)
    ]
    wanted = old.settings.model_copy(update={"budget": settings.budget, "at": settings.at, "max_delta": None})
    summary = summarise(planned, None, [])
    plan = old.model_copy(update={"blocks": planned, "settings": wanted, "joint": [], "summary": summary})
    return plan, tensors_of(modules)


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
