"""One width for all blocks: what a budget leaves of it, for a native checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import nn

from ffncompress.budgets import Budget, parse_speed
from ffncompress.errors import BudgetError
from ffncompress.models import Block, count_parameters
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.search import Choice, SearchSpace
from ffncompress.planning.spending import size_cap
from ffncompress.records.plan import JointCheck, Option, Shape
from ffncompress.replacement.modules import parameters
from ffncompress.settings import PlanSettings
from ffncompress.type_aliases import Model

SPAN = 3 / 16  # of the width: how much further down a refit may let it go
PROBES = 3  # refits of other widths that a limit is searched by


def width_within_size(model: Model, blocks: list[Block], settings: PlanSettings) -> int | None:
    """The greatest common width of at most the size asked for, and the factor; none: no size was asked for.

    Raises:
        BudgetError: not even the least width is so small.
    """
    whole = count_parameters(model)
    size, align = size_cap(settings, whole), settings.alignment
    if size is None:
        return None
    if size >= whole:
        return blocks[0].d_inner
    rest = whole - sum(block.parameters for block in blocks)
    widths = [
        width for width in range(align, _widest(blocks, settings) + 1, align) if rest + _size(blocks, width) <= size
    ]
    if not widths:
        least = rest + _size(blocks, align)
        raise BudgetError(f"{size:,} parameters cannot be reached: with {align} neurons a block it is {least:,}")
    return widths[-1]


def choose_common(
    measured: MeasuredModel, space: SearchSpace, settings: PlanSettings
) -> tuple[Choice, list[JointCheck]]:
    """The common width that the budget asks for, with replacements as fitted on the original model."""
    inner = space.blocks[0].d_inner
    width = width_within_size(measured.model, measured.blocks, settings)
    widths = [w for w in _on_menu(space) if w <= _widest(measured.blocks, settings)]
    if settings.target_speed:
        seconds = space.seconds_within(parse_speed(settings.target_speed).factor)
        fast = [w for w in widths if sum(o.seconds or 0.0 for o in common_choice(space, w) if o) <= seconds]
        width = min(width or inner, fast[0] if fast else widths[-1])
    if width is not None:
        return common_choice(space, width), []
    fits, fails, checks = -1, len(widths), []
    while fails - fits > 1:
        middle = (fits + fails) // 2
        checks.append(measured.check(common_choice(space, widths[middle]), settings))
        fits, fails = (middle, fails) if checks[-1].within_limit else (fits, middle)
    return common_choice(space, inner if fits < 0 else widths[fits]), checks


def narrow_further(
    measured: MeasuredModel,
    space: SearchSpace,
    settings: PlanSettings,
    choice: Choice,
    refitted: Callable[[Choice], dict[int, nn.Module]],
) -> tuple[Choice, dict[int, nn.Module] | None, list[JointCheck]]:
    """The least width that is within the limit when refitted, from a width that is; no modules: none is narrower."""
    first = choice[0].width if choice[0] is not None else space.blocks[0].d_inner
    start, align = min(first, _widest(measured.blocks, settings) + 1), settings.alignment
    least = max(align, start - round(SPAN * space.blocks[0].d_inner))
    widths = [width for width in range(align, start, align) if width >= least][::-1]
    best, modules, checks = choice, None, []
    fits, fails = -1, len(widths)
    for _ in range(PROBES):
        if fails - fits <= 1:
            break
        middle = (fits + fails) // 2
        tried = common_choice(space, widths[middle])
        made = refitted(tried)
        checks.append(measured.check(tried, settings, made))
        if checks[-1].within_limit:
            fits, best, modules = middle, tried, made
        else:
            fails = middle
    kept_last = sorted(checks, key=lambda check: -check.parameters if check.within_limit else -math.inf)
    return best, modules, kept_last


def common_choice(space: SearchSpace, width: int) -> Choice:
    """Every block with so many neurons; none of them replaced where that is all it has."""
    if width >= space.blocks[0].d_inner:
        return [None] * len(space.blocks)
    return [_option(block, menu, width) for block, menu in zip(space.blocks, space.menus, strict=True)]


def _option(block: Block, menu: list[Option], width: int) -> Option:
    """So many neurons, as the menu has them, or with a predicted loss between its neighbours'."""
    neurons = sorted((o for o in menu if o.kind == "neurons"), key=lambda o: o.width)
    found = next((option for option in neurons if option.width == width), None)
    if found is not None:
        return found
    widths, losses = [o.width for o in neurons], [math.log(max(o.predicted_loss, 1e-12)) for o in neurons]
    loss = math.exp(float(np.interp(width, widths, losses)))
    size = parameters(Shape("neurons", width), block)
    return Option(kind="neurons", width=width, rank=0, weighting="stream", parameters=size, predicted_loss=loss)


def _on_menu(space: SearchSpace) -> list[int]:
    """The widths that every block has on its menu, greatest first."""
    return sorted(set.intersection(*({o.width for o in menu} for menu in space.menus)), reverse=True)


def _widest(blocks: list[Block], settings: PlanSettings) -> int:
    """The greatest width that the budget's factor allows."""
    ratio = Budget.parse(settings.budget).ratio
    return blocks[0].d_inner - 1 if ratio is None else int(blocks[0].d_inner / ratio)


def _size(blocks: list[Block], width: int) -> int:
    return sum(parameters(Shape("neurons", width), block) for block in blocks)
