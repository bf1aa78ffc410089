"""Installing stand-ins in a model: `apply_` in place, `patched` for the length of a `with`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from ffncompress.errors import ModelError, PlanError
from ffncompress.models import Block, ModelSource, find_blocks, find_model, install_, installed
from ffncompress.modules import Shape, empty
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
        modules[planned.path] = _stand_in(model.get_submodule(block.path), block, planned, tensors)
    return modules


def base_source(plan: Plan, model_name: str | None = None) -> ModelSource:
    """The plan's base model on this disk, checked by its fingerprint."""
    base = plan.base
    name = model_name or base.name
    try:
        revision = base.revision if model_name is None else None
        source = find_model(name, revision=revision, trust_remote_code=base.trust_remote_code)
    except ModelError as error:
        if model_name is not None:
            raise
        raise ModelError(f"the plan's base model is not found ({error}); say where it is with --model") from error
    if source.fingerprint() != base.fingerprint:
        at = f" at revision {base.revision}" if base.revision else ""
        raise ModelError(
            f"{name}: these are not the weights that the plan was made for ({base.name}{at}); "
            "give the right model or revision, or make a new plan"
        )
    return source


def shape_of(planned: BlockPlan) -> Shape:
    """What stands in for a replaced block."""
    choice = planned.choice
    assert choice is not None
    return Shape(choice.kind, choice.width, choice.rank)


def _stand_in(ffn: nn.Module, block: Block, planned: BlockPlan, tensors: Mapping[str, Tensor]) -> nn.Module:
    prefix = f"{planned.index}."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    module = empty(shape_of(planned), block.layout, ffn)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise PlanError(f"block {planned.index}: its tensors do not fit the plan; make the plan again") from error
    return module.requires_grad_(False)
