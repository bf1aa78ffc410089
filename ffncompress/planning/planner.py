"""Scores and a budget in, a plan out.

Two steps: the *survey* passes over the model and gives every block a menu with predicted losses; to *settle* is to
spend a budget on it. No block is replaced on its score alone: what is chosen is verified together, on text that
nothing was fitted on, at the context that the gate will use. Perplexity rises more at a longer context, where the base
has more to lose: what passes at 128 tokens may fail at 512.
"""

from __future__ import annotations

from torch import Tensor, nn

from ffncompress import __version__
from ffncompress.errors import BudgetError
from ffncompress.models import Block, ModelSource, count_parameters, find_model, installed
from ffncompress.notebook import note_place
from ffncompress.patcher import proof_of
from ffncompress.plans import BaseRef, BlockPlan, FrontierPoint, JointCheck, Plan
from ffncompress.refit import refit
from ffncompress.scoring import shape_of, tensors_of
from ffncompress.selection import Choice, Market, draw_line, explain, smallest_within, summarise
from ffncompress.settings import Budget, PlanSettings, parse_blocks, parse_speed
from ffncompress.stages import Stages
from ffncompress.survey import SWAP_RATIO, Survey, size_cap, survey
from ffncompress.swaps import perplexity
from ffncompress.workers import Track, Workers, silent


def make_plan(
    model_name: str,
    settings: PlanSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    workers: Workers | None = None,
    track: Track = silent,
    stages: Stages | None = None,
) -> tuple[Plan, dict[str, Tensor], dict[str, Tensor] | None]:
    """Measure a model and choose what to replace; returns the plan, its fitted tensors, and the moments if asked.

    Raises:
        FfncompressError: the model, the text or the budget does not serve; the message says what would.
    """
    source = find_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
    found = survey(source, settings, workers or Workers(settings.device), track, stages)
    return (*settle(found, settings), found.moments)


def settle(survey: Survey, settings: PlanSettings) -> tuple[Plan, dict[str, Tensor]]:
    """Spend a budget on what was surveyed; returns the plan and its fitted tensors."""
    market = survey.market()
    joint: list[JointCheck] = []
    if settings.target_speed:
        market = survey.timed(market)
    frontier: list[FrontierPoint] = []
    if settings.frontier:
        rest = count_parameters(survey.model) - market.full
        base = perplexity(survey.base_losses, survey.corpus.verify.scored)
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
        # what is promised is not measured where ridges, weightings and the refit were chosen
        if settings.limit is None and (afresh := survey.check_afresh(choice, modules, joint[-1])):
            joint.append(afresh)
    plan = describe(survey, settings, market, choice, joint, frontier, forced)
    with installed(survey.model, {survey.blocks[i].path: module for i, module in modules.items()}):
        plan = plan.model_copy(update={"proof": proof_of(survey.model)})
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
    limit = settings.limit
    if limit and settings.by_limit and checks[1].within_limit:
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
        metrics=survey.metrics, stages=survey.stages,
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
    doubt = survey.doubt_of(joint[-1]) if joint else survey.doubt
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
        summary=summarise(blocks, settings.limit, joint, doubt),
        doubt=doubt,
        tensors_sha256="",
    ).public()


def _base_ref(source: ModelSource, model: nn.Module, blocks: list[Block]) -> BaseRef:
    fingerprint = source.fingerprint()
    if not source.is_hub:
        note_place(fingerprint, source.place)
    return BaseRef(
        name=source.label,
        revision=source.revision,
        fingerprint=fingerprint,
        fingerprint_of="model",
        is_hub=source.is_hub,
        family=model.config.model_type,  # type: ignore[union-attr, arg-type]
        parameters=count_parameters(model),
        ffn_parameters=sum(block.parameters for block in blocks),
        trust_remote_code=source.trust_remote_code,
    )
