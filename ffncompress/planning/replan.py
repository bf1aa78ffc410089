"""Another budget for a plan whose moments were kept: no text is read and no model is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from ffncompress.budgets import Budget, parse_kinds
from ffncompress.errors import BudgetError, PlanError
from ffncompress.models import Block, Footprint, ffn_of, find_blocks, installed, load_model, shelved
from ffncompress.models.base import find_base
from ffncompress.passes.losses import delta_perplexity
from ffncompress.passes.proof import proof_of
from ffncompress.planning.explaining import explain
from ffncompress.planning.search import SearchSpace, correction
from ffncompress.planning.spending import size_cap
from ffncompress.records.plan import Plan
from ffncompress.records.plan_files import load_moments
from ffncompress.replacement.building import build_replacement, tensors_of
from ffncompress.replacement.fitting import Offer, fit_name, fit_some
from ffncompress.replacement.moments import BlockMoments
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.runtime.workers import Workers
from ffncompress.sanitize import in_short
from ffncompress.settings import PlanSettings
from ffncompress.type_aliases import Model


def replan(
    directory: str | Path, settings: PlanSettings, progress: Progress = silent, *, trust_remote_code: bool = False
) -> tuple[Plan, dict[str, Tensor]]:
    """A plan for another size, from the menus and the moments of an old one.

    Raises:
        PlanError: the plan's moments were not kept, or they or its options are not what a model ever gave.
        BudgetError: the budget needs a measurement.
    """
    old = Plan.load(directory)
    size = size_cap(settings, old.base.parameters)
    if size is None or settings.target_speed or settings.max_delta or settings.blocks or settings.frontier:
        raise BudgetError(
            "a plan can be made anew from its moments for a size only: give --at or --budget, such as -15%"
        )
    if old.native or settings.kinds or settings.target or settings.align:
        raise BudgetError(
            "--kinds, --for, --native and --align are measured for, not chosen from moments: plan again from the model"
        )
    with step(progress, "loading the model"):
        source = find_base(old.base, trust_remote_code=trust_remote_code)
        stream = Workers("cpu", settings.memory, settings.stream).streams(*Footprint.of(source, "auto"))
        model = load_model(source, stream=stream)
    blocks = find_blocks(model)
    with _sound(directory):
        return _replanned(old, directory, settings, size, model, blocks, progress)


@contextmanager
def _sound(directory: str | Path) -> Iterator[None]:
    """Whatever arithmetic says of numbers that no plan of ours holds, or of moments of other shapes."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise PlanError(
            f"{directory}: its options and moments do not hang together ({in_short(error)}); make the plan again"
        ) from error


def _replanned(
    old: Plan,
    directory: str | Path,
    settings: PlanSettings,
    size: int,
    model: Model,
    blocks: list[Block],
    progress: Progress,
) -> tuple[Plan, dict[str, Tensor]]:
    space = SearchSpace(
        blocks, [block.options for block in old.blocks], [correction(b.swap, old.base_perplexity) for b in old.blocks]
    )
    space = space.restricted(Budget.parse(settings.budget).ratio)
    choice = space.choose(parameters=size - (old.base.parameters - space.full))
    modules, offer = {}, Offer(parse_kinds(old.settings.kinds), old.settings.alignment)
    chosen = [(block, option) for block, option in zip(blocks, choice, strict=True) if option is not None]
    for block, option in progress(chosen, "fitting replacements"):
        ffn, moments = ffn_of(model, block), BlockMoments.named(load_moments(directory, block.index))
        fits = fit_some(block, moments, ffn, [name := fit_name(option)], offer)
        modules[block.index] = shelved(build_replacement(block, ffn, option.shape, fits[name]), model)
    reasons = explain(space, choice, old.base_perplexity, None)
    planned = [
        block.model_copy(update={"choice": option, "reason": reason})
        for block, option, reason in zip(old.blocks, choice, reasons, strict=True)
    ]
    wanted = old.settings.model_copy(update={"budget": settings.budget, "at": settings.at, "max_delta": None})
    expected = _expected(old, space.size(choice) + old.base.parameters - space.full, space.loss(choice))
    summary = f"{len(chosen)} of {len(blocks)} blocks replaced: {expected}; not measured, ffncompress eval will tell"
    summary += f"; not to be believed: {old.doubt}" if old.doubt else ""
    changed: dict[str, object] = {
        "blocks": planned,
        "settings": wanted,
        "joint_checks": [],
        "frontier": [],
        "summary": summary,
    }
    with installed(model, {blocks[i].path: module for i, module in modules.items()}):
        changed["proof"] = proof_of(model)
    tensors = tensors_of(modules)
    if not all(value.isfinite().all() for value in tensors.values()):
        raise ValueError("its replacements are not finite")
    return old.model_copy(update=changed), tensors


def _expected(old: Plan, size: int, loss: float) -> str:
    """What a size should cost: read off the old plan's frontier, or as if predicted losses added."""
    base, rise = old.base_perplexity, delta_perplexity(old.base_perplexity, loss)
    if old.frontier:
        points = sorted(old.frontier, key=lambda point: point.parameters)
        base = points[-1].expected_perplexity
        sizes, expected = [p.parameters for p in points], [p.expected_perplexity for p in points]
        rise = float(np.interp(size, sizes, expected)) - base
    return f"expected {rise:+.2f} perplexity ({100 * rise / base:+.1f} % of {base:.2f})"
