"""Scores and a budget in, a plan out.

Two steps: measuring passes over the model and gives every block a menu with predicted losses; solving spends a budget
on it. No block is replaced on its score alone: what is chosen is verified together, on text that
nothing was fitted on, at the context that the gate will use. Perplexity rises more at a longer context, where the base
has more to lose: what passes at 128 tokens may fail at 512.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ffncompress import __version__
from ffncompress.budgets import Budget, parse_blocks, parse_speed
from ffncompress.models import Block, ModelSource, count_parameters, find_model, installed, settled_parameters, task_of
from ffncompress.passes.losses import perplexity
from ffncompress.passes.proof import proof_of
from ffncompress.passes.refit import refit
from ffncompress.planning.common_width import choose_common, narrow_further
from ffncompress.planning.explaining import explain, summarise
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.measuring import measure_model
from ffncompress.planning.search import Choice, SearchSpace, trace_frontier
from ffncompress.planning.spending import choose, spend_gain
from ffncompress.records.plan import BaseRef, BlockPlan, FrontierPoint, JointCheck, Plan
from ffncompress.replacement.building import tensors_of
from ffncompress.runtime.run import Run
from ffncompress.settings import PlanSettings
from ffncompress.storage.registry import record_place
from ffncompress.type_aliases import Model


def make_plan(
    model_name: str,
    settings: PlanSettings,
    run: Run,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Plan, dict[str, Tensor], dict[str, Tensor] | None]:
    """Measure a model and choose what to replace; returns the plan, its fitted tensors, and the moments if asked.

    Raises:
        FfncompressError: the model, the text or the budget does not serve; the message says what would.
    """
    source = find_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
    found = measure_model(source, settings, run)
    return (*solve(found, settings), found.moments)


def solve(measured: MeasuredModel, settings: PlanSettings) -> tuple[Plan, dict[str, Tensor]]:
    """Spend a budget on what was measured; returns the plan and its fitted tensors."""
    space = measured.space()
    joint: list[JointCheck] = []
    if settings.target_speed:
        space = measured.timed(space, parse_speed(settings.target_speed).of)
    frontier: list[FrontierPoint] = []
    if settings.frontier:
        rest = count_parameters(measured.model) - space.full
        base = perplexity(measured.base_losses, measured.corpus.verify.scored)
        within = space.restricted(Budget.parse(settings.budget).ratio)
        frontier, joint = trace_frontier(within, rest, base, lambda choice: measured.check(choice, settings))
    forced = parse_blocks(settings.blocks, len(measured.blocks)) if settings.blocks else None
    native = settings.target == "native"
    choice, checks = choose_common(measured, space, settings) if native else choose(measured, space, settings, forced)
    joint += checks
    modules = measured.modules(choice)
    if any(choice):
        joint.append(measured.check(choice, settings))
        if settings.refit:
            choice, modules, checks = _refitted(measured, space, settings, choice, modules, joint[-1])
            joint += checks
    if native and settings.refit and settings.by_limit:
        choice, narrower, checks = narrow_further(
            measured, space, settings, choice, partial(_refit, measured, settings=settings)
        )
        joint = [*joint, *checks] if narrower is not None else [*checks, *joint]  # what is kept stands last
        modules = modules if narrower is None else narrower
    # what the gate holds it to is not measured where ridges, weightings and the refit were chosen
    if any(choice) and settings.limit is None and (afresh := measured.check_afresh(choice, modules, joint[-1])):
        joint.append(afresh)
    plan = describe(measured, settings, space, choice, joint, frontier, forced)
    with installed(measured.model, {measured.blocks[i].path: module for i, module in modules.items()}):
        plan = plan.model_copy(update={"proof": proof_of(measured.model)})
    return plan, tensors_of(modules)


def _refitted(
    measured: MeasuredModel,
    space: SearchSpace,
    settings: PlanSettings,
    choice: Choice,
    modules: dict[int, nn.Module],
    check: JointCheck,
) -> tuple[Choice, dict[int, nn.Module], list[JointCheck]]:
    """The replacements refitted in order, where that helps; under a limit, also what the gain can still pay for."""
    again = _refit(measured, choice, settings)
    checks = [check, measured.check(choice, settings, again)]
    if checks[1].perplexity > check.perplexity:
        return choice, modules, [checks[1], check]  # what is kept stands last
    limit = settings.limit
    if limit and settings.by_limit and settings.target != "native" and checks[1].within_limit:
        room = limit.allowance(check.base_perplexity) / max(checks[1].delta, 1e-6)
        smaller = spend_gain(space.restricted(Budget.parse(settings.budget).ratio), choice, min(room, 2.0))
        if smaller is not None:
            more = _refit(measured, smaller, settings)
            checks.append(measured.check(smaller, settings, more))
            if checks[-1].within_limit:
                return smaller, more, checks[1:]
            checks[1], checks[2] = checks[2], checks[1]
    return choice, again, checks[1:]


def _refit(measured: MeasuredModel, choice: Choice, settings: PlanSettings) -> dict[int, nn.Module]:
    """The replacements refitted in order; those of one common width always by their inner matrices too."""
    shapes = {i: option.shape for i, option in enumerate(choice) if option is not None}
    corpus = measured.corpus
    return refit(
        measured.model, measured.blocks, shapes, corpus.refit, corpus.choose, measured.run,
        metrics=measured.metrics, inner=settings.thorough or settings.target == "native",
    )  # fmt: skip


def describe(
    measured: MeasuredModel,
    settings: PlanSettings,
    space: SearchSpace,
    choice: Choice,
    joint: list[JointCheck],
    frontier: list[FrontierPoint],
    forced: list[int] | None,
) -> Plan:
    """The plan as a record: what was measured, what is done with each block, and why."""
    reasons = explain(space.restricted(Budget.parse(settings.budget).ratio), choice, measured.base, forced)
    blocks = [
        BlockPlan(
            index=i,
            path=block.path,
            parameters=block.parameters,
            d_in=block.d_in,
            d_inner=block.d_inner,
            d_out=block.d_out,
            scores=measured.scores[i],
            options=space.menus[i],
            swap=measured.swaps[i],
            choice=choice[i],
            reason=reasons[i],
        )
        for i, block in enumerate(measured.blocks)
    ]
    doubt = measured.doubt_of(joint[-1]) if joint else measured.doubt
    base = _base_ref(measured.source, measured.model, measured.blocks)
    return Plan(
        ffncompress_version=__version__,
        base=base,
        settings=settings,
        fit_text=measured.corpus.fit_text,
        choose_text=measured.corpus.choose_text,
        base_perplexity=measured.base,
        blocks=blocks,
        joint_checks=joint,
        frontier=frontier,
        summary=summarise(blocks, settings.limit, joint, doubt, base.task),
        doubt=doubt,
        kept_layers=measured.kept_layers,
        replacements_sha256="",
    ).public()


def _base_ref(source: ModelSource, model: Model, blocks: list[Block]) -> BaseRef:
    fingerprint = source.fingerprint()
    if not source.is_hub:
        record_place(fingerprint, source.place)
    return BaseRef(
        name=source.label,
        revision=source.revision,
        fingerprint=fingerprint,
        fingerprint_of="model",
        is_hub=source.is_hub,
        family=model.config.model_type,
        task=task_of(model),
        parameters=count_parameters(model),
        ffn_parameters=sum(block.parameters for block in blocks) + settled_parameters(model),
        trust_remote_code=source.trust_remote_code,
    )
