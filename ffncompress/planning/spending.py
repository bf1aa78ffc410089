"""What a budget means: the caps that it sets, whether they can be met, and the choice that it asks for."""

from __future__ import annotations

from ffncompress.budgets import Budget, parse_blocks, parse_speed
from ffncompress.errors import BudgetError
from ffncompress.models import Block, count_parameters
from ffncompress.passes.pace import keeps_cache
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.search import Choice, SearchSpace, smallest_within, within_factor
from ffncompress.records.plan import JointCheck, Option
from ffncompress.settings import PlanSettings
from ffncompress.type_aliases import Model

SWAP_RATIO = 8.0  # the paper's factor: what is tried alone where the budget names none


def check_budget(model: Model, blocks: list[Block], settings: PlanSettings) -> None:
    """Whether a budget can be met at all, before anything is measured.

    Raises:
        BudgetError: it cannot; says what can.
    """
    if settings.blocks:
        parse_blocks(settings.blocks, len(blocks))
    if settings.target_speed and parse_speed(settings.target_speed).of == "decode" and not keeps_cache(model):
        raise BudgetError(
            "this model does not go on from a cache, token by token; ask for the speed at which it reads, such as 1.2x"
        )
    whole = count_parameters(model)
    size = size_cap(settings, whole)
    rest = whole - sum(block.parameters for block in blocks)
    if size is not None and size >= whole and settings.limit is None and not settings.target_speed:
        raise BudgetError(f"the model has {whole:,} parameters as it is; ask for fewer than that")
    if size is not None and size < rest + sum(block.d_out for block in blocks):
        raise BudgetError(
            f"{size:,} parameters cannot be reached: {rest:,} of the model's {whole:,} are outside its FFNs; "
            f"ask for more than that"
        )


def check_menus(blocks: list[Block], menus: list[list[Option]], settings: PlanSettings) -> None:
    """Whether what is on offer leaves every block something that the budget's factor allows.

    Raises:
        BudgetError: it does not; says how to ask for more.
    """
    ratio = Budget.parse(settings.budget).ratio
    narrowed = settings.kinds or settings.target
    for block, menu in zip(blocks, menus, strict=True):
        if not menu and block.tied:
            raise BudgetError(
                f"block {block.index}: its neurons are tied together, so that none can be kept without the others; "
                "name linear with --kinds too"
            )
        if not menu or (narrowed and ratio and not any(within_factor(block, o, ratio) for o in menu)):
            small = f" that keeps at most 1/{ratio:g}" if menu and ratio else ""
            raise BudgetError(
                f"block {block.index}: there is no replacement of the kinds on offer{small}; "
                "name more kinds with --kinds, a smaller factor, or a smaller --align"
            )


def size_cap(settings: PlanSettings, whole: int) -> int | None:
    """The most parameters that the settings allow the whole model, or none."""
    caps = [cap for cap in (Budget.parse(settings.budget).size(whole), settings.at and int(settings.at * whole)) if cap]
    return min(caps) if caps else None


def choose(
    measured: MeasuredModel, space: SearchSpace, settings: PlanSettings, forced: list[int] | None
) -> tuple[Choice, list[JointCheck]]:
    """The choice that the budget asks for, with replacements as fitted on the original model."""
    budget, whole = Budget.parse(settings.budget), count_parameters(measured.model)
    size = size_cap(settings, whole)
    space = space.restricted(budget.ratio, forced)
    if size is not None or settings.target_speed:
        seconds = None
        if settings.target_speed:
            seconds = space.seconds_within(parse_speed(settings.target_speed).factor)
        parameters = None if size is None else size - (whole - space.full)
        return space.choose(parameters=parameters, seconds=seconds), []
    if forced is not None:  # safe or not, and as small as the factor says
        ratio = budget.ratio or SWAP_RATIO
        menus = space.restricted(ratio, forced).menus
        best: Choice = [min(m, key=lambda o: o.predicted_loss) if m else None for m in menus]
        return best, []
    return smallest_within(space, lambda choice: measured.check(choice, settings))


def spend_gain(space: SearchSpace, choice: Choice, room: float) -> Choice | None:
    """The smallest choice that is predicted to lose `room` times as much, less a tenth for what does not add."""
    allowed = space.loss(choice) * (1 + 0.9 * (room - 1))
    size, best = space.size(choice), None
    for step in range(1, 33):
        try:
            smaller = space.choose(parameters=size * (1 - step / 64))
        except BudgetError:
            break
        if space.loss(smaller) > allowed:
            break
        best = smaller
    return best if best is not None and space.size(best) < size else None
