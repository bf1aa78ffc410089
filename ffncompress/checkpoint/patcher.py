"""A plan's replacements in a loaded model: `apply_` puts them in place, `patched` does for the length of a `with`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from ffncompress.errors import ModelError, PlanError
from ffncompress.models import Block, ffn_of, find_blocks, install_, installed
from ffncompress.passes.proof import prove
from ffncompress.records.plan import BlockPlan, Plan
from ffncompress.records.plan_files import load_tensors
from ffncompress.replacement.modules import empty


def apply_(model: nn.Module, plan_directory: str | Path) -> nn.Module:
    """Replace the plan's blocks in a loaded model, in place; returns the model.

        model = AutoModelForCausalLM.from_pretrained("gpt2")
        ffncompress.apply_(model, "gpt2-plan")

    Raises:
        PlanError: the plan is missing or corrupted.
        ModelError: the model is not the one that the plan was made for; it is left as it was.
    """
    plan = Plan.load(plan_directory)
    modules = replacement_modules(model, plan, load_tensors(plan, plan_directory))
    with installed(model, modules):
        prove(model, plan.proof)
    return install_(model, modules)


@contextmanager
def patched(model: nn.Module, plan_directory: str | Path) -> Iterator[nn.Module]:
    """`apply_` within a `with`; afterwards the model's own modules are back.

    with ffncompress.patched(model, "gpt2-plan"):
        slimmed = model(input_ids=ids).logits
    """
    plan = Plan.load(plan_directory)
    with installed(model, replacement_modules(model, plan, load_tensors(plan, plan_directory))):
        prove(model, plan.proof)
        yield model


def replacement_modules(model: nn.Module, plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
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
        modules[planned.path] = _replacement_module(ffn_of(model, block), block, planned, tensors)
    return modules


def _replacement_module(ffn: nn.Module, block: Block, planned: BlockPlan, tensors: Mapping[str, Tensor]) -> nn.Module:
    prefix = f"{planned.index}."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if planned.chosen_shape.kind == "constant":  # plans before 0.5 have a matrix of no columns beside its bias
        state = {name: value for name, value in state.items() if value.numel()}
    try:
        module = empty(planned.chosen_shape, block.layout, ffn)
        module.load_state_dict(state, assign=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PlanError(f"block {planned.index}: its tensors do not fit the plan; make the plan again") from error
    return module.requires_grad_(False)
