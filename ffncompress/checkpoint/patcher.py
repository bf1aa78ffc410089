"""Installing stand-ins in a model: `apply_` in place, `patched` for the length of a `with`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffncompress.errors import ModelError, PlanError
from ffncompress.models import EMBEDDED, Block, ModelSource, find_blocks, find_model, install_, installed
from ffncompress.modules import Shape, empty
from ffncompress.notebook import place_of
from ffncompress.plans import BaseRef, BlockPlan, Plan, Proof

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05  # of a loss: round-off of float32, and of 16 bits


def apply_(model: nn.Module, plan_directory: str | Path) -> nn.Module:
    """Replace the plan's blocks in a loaded model, in place; returns the model.

    Raises:
        PlanError: the plan is missing or corrupted.
        ModelError: the model is not the one that the plan was made for; it is left as it was.
    """
    plan = Plan.load(plan_directory)
    modules = stand_ins(model, plan, plan.load_tensors(plan_directory))
    with installed(model, modules):
        prove(model, plan.proof)
    return install_(model, modules)


@contextmanager
def patched(model: nn.Module, plan_directory: str | Path) -> Iterator[nn.Module]:
    """`apply_` within a `with`; afterwards the model's own modules are back."""
    plan = Plan.load(plan_directory)
    with installed(model, stand_ins(model, plan, plan.load_tensors(plan_directory))):
        prove(model, plan.proof)
        yield model


@torch.inference_mode()
def proof_of(model: Any) -> Proof:
    """The loss of each token of a fixed sequence: what tells a model from any other."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(3, 19, device=model.device) % rows)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    losses = F.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    return Proof(dtype=str(model.dtype).removeprefix("torch."), losses=losses.tolist())


def prove(model: Any, expected: Proof | None) -> None:
    """Whether a model answers as was recorded; where nothing was (before 0.4), there is nothing to prove.

    Raises:
        ModelError: it does not.
    """
    if expected is None:
        return
    found = proof_of(model)
    misses = [abs(a - b) / (1 + abs(b)) for a, b in zip(found.losses, expected.losses, strict=False)]
    in_half = {"float16", "bfloat16"} & {found.dtype, expected.dtype}
    # in 16 bits single tokens stray; a NaN is never within
    near = fmean(misses or [math.inf]) <= HALF_TOLERANCE if in_half else max(misses, default=math.inf) <= TOLERANCE
    if len(found.losses) != len(expected.losses) or not near:
        raise ModelError(
            "the slimmed model does not answer as the plan's did: this is not the model that the plan was made for, or "
            "not as it was; load the base model afresh, or make a new plan"
        )


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


def base_source(plan: Plan, model_name: str | None = None, *, trust_remote_code: bool = False) -> ModelSource:
    """The plan's base model on this disk, checked by its fingerprint.

    Args:
        plan: names the model, and may say that it needs code of its own; it cannot allow it.
        model_name: where the model is, if not where it was.
        trust_remote_code: the person's own word that the model's code may run.

    Raises:
        ModelError: it is not found, it is another one, or it needs code that nobody allowed.
    """
    base = plan.base
    if base.trust_remote_code and not trust_remote_code:
        raise ModelError(
            f"{base.name} runs code that comes with it, which a plan cannot allow; look at that code, and if you trust "
            "it pass --trust-remote-code (in Python: trust_remote_code=True)"
        )
    name = model_name or _recorded_place(base)
    try:
        revision = base.revision if model_name is None else None
        source = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
    except ModelError as error:
        if model_name is not None:
            raise
        raise ModelError(f"the plan's base model is not found ({error}); say where it is with --model") from error
    known = source.fingerprint() if base.fingerprint_of == "model" else source.weights_fingerprint()
    if known != base.fingerprint:
        at = f" at revision {base.revision}" if base.revision else ""
        raise ModelError(
            f"{name}: these are not the weights, config and tokenizer that the plan was made for ({base.name}{at}); "
            "give the right model or revision, or make a new plan"
        )
    return source


def _recorded_place(base: BaseRef) -> str:
    """Where a plan's base is to be looked for: on the Hub, or where this machine saw it last.

    Raises:
        ModelError: this machine never saw it.
    """
    if base.is_hub is not False or base.name == EMBEDDED:  # plans before 0.4 have a path for a name
        return base.name
    place = place_of(base.fingerprint)
    if place is None:
        raise ModelError(
            f"the plan was made for {base.name}, a model that this machine has not seen; say where it is with --model"
        )
    return place


def shape_of(planned: BlockPlan) -> Shape:
    """What stands in for a replaced block."""
    choice = planned.choice
    assert choice is not None
    return Shape(choice.kind, choice.width, choice.rank)


def _stand_in(ffn: nn.Module, block: Block, planned: BlockPlan, tensors: Mapping[str, Tensor]) -> nn.Module:
    prefix = f"{planned.index}."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    try:
        module = empty(shape_of(planned), block.layout, ffn)
        module.load_state_dict(state, assign=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PlanError(f"block {planned.index}: its tensors do not fit the plan; make the plan again") from error
    return module.requires_grad_(False)
