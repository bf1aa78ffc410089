"""Installing stand-ins in a model: `apply_` in place, `patched` for the length of a `with`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ffncompress.errors import ModelError, PlanError
from ffncompress.models import Block, find_blocks, install_, installed
from ffncompress.modules import build
from ffncompress.plans import BlockPlan, Plan


def apply_(model: nn.Module, plan_directory: str | Path) -> nn.Module:
    """Replace the plan's blocks in a loaded model, in place; returns the model.

    Raises:
        PlanError: the plan is missing or corrupted.
        ModelError: the model is not the one that the plan was made for.
    """
    plan = Plan.load(plan_directory)
    return install_(model, stand_ins(model, plan, plan.load_tensors(plan_directory)))


@contextmanager
def patched(model: nn.Module, plan_directory: str | Path) -> Iterator[nn.Module]:
    """`apply_` within a `with`; afterwards the model's own modules are back."""
    plan = Plan.load(plan_directory)
    with installed(model, stand_ins(model, plan, plan.load_tensors(plan_directory))):
        yield model


def stand_ins(model: nn.Module, plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """The plan's replacement modules, by path, checked against the model they are for."""
    by_path = {block.path: block for block in find_blocks(model)}
    modules = {}
    for planned in plan.replaced:
        block = by_path.get(planned.path)
        if block is None or (block.d_in, block.d_inner, block.d_out) != (planned.d_in, planned.d_inner, planned.d_out):
            raise ModelError(
                f"block {planned.index} ({planned.path}) of the plan is not in this model with that shape; "
                f"the plan is for {plan.base.name}"
            )
        modules[planned.path] = _stand_in(block, planned, tensors)
    return modules


def _stand_in(block: Block, planned: BlockPlan, tensors: Mapping[str, Tensor]) -> nn.Module:
    swap = planned.swap
    prefix = f"{planned.index}."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    with torch.device("meta"):
        module = build(swap.kind, block.layout, block.d_in, block.d_out, swap.rank)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise PlanError(f"block {planned.index}: its tensors do not fit the plan; make the plan again") from error
    return module.requires_grad_(False)
