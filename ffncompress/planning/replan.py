"""Another budget for a plan whose moments were kept: no text is read and no model is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ffncompress.calibration import BlockMoments
from ffncompress.errors import BudgetError, PlanError
from ffncompress.forecast import delta_perplexity
from ffncompress.models import Block, find_blocks, installed, load_model
from ffncompress.patcher import base_source, proof_of
from ffncompress.plans import Plan
from ffncompress.scoring import fit_name, fit_some, replacement, shape_of, tensors_of
from ffncompress.selection import Market, explain, surprise
from ffncompress.settings import Budget, PlanSettings
from ffncompress.survey import size_cap
from ffncompress.words import in_short
from ffncompress.workers import Track, silent, stage


def replan(
    directory: str | Path, settings: PlanSettings, track: Track = silent, *, trust_remote_code: bool = False
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
    with stage(track, f"loading {old.base.name}"):
        model = load_model(base_source(old, trust_remote_code=trust_remote_code))
    blocks = find_blocks(model)
    with _sound(directory):
        return _replanned(old, directory, settings, size, model, blocks, track)


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
    old: Plan, directory: str | Path, settings: PlanSettings, size: int, model: Any, blocks: list[Block], track: Track
) -> tuple[Plan, dict[str, Tensor]]:
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
    expected = _expected(old, market.size(choice) + old.base.parameters - market.full, market.loss(choice))
    summary = f"{len(chosen)} of {len(blocks)} blocks replaced: {expected}; not measured, ffncompress eval will tell"
    summary += f"; not to be believed: {old.doubt}" if old.doubt else ""
    changed: dict[str, Any] = {"blocks": planned, "settings": wanted, "joint": [], "frontier": [], "summary": summary}
    with installed(model, {blocks[i].path: module for i, module in modules.items()}):
        changed["proof"] = proof_of(model)
    tensors = tensors_of(modules)
    if not all(value.isfinite().all() for value in tensors.values()):
        raise ValueError("its stand-ins are not finite")
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
