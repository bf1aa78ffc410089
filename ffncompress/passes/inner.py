"""Kept neurons' inner matrices, refitted on the rows that they meet in the slimmed model (see recovery/inner.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ffncompress.models import Block, inner_matrices, on_rows, oriented
from ffncompress.recovery import Moments, solve_ridged
from ffncompress.recovery.inner import InnerRows, inner_steps
from ffncompress.replacement.building import set_projection_
from ffncompress.runtime.workers import Workers

RIDGES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)  # of the output matrix's step, relative to a neuron's energy

AimedRows = tuple[Tensor, Tensor, Tensor, bool]  # x, what y should be, weights of rows, whether they are held out


def inner_rows(module: nn.Module, block: Block, aimed: AimedRows) -> InnerRows:
    """What a replacement leaves of its target, and how its neurons move with what they are fed."""
    x, target, weights, held_out = aimed
    with _watched(module, block) as (fed, inner):
        y = on_rows(module, x)
        slopes = torch.autograd.grad(inner[0].sum(), fed)  # neuron by neuron, so the sum's gradient is each one's own
    each = torch.cat([slope[0].unflatten(1, (block.layout.fused, -1)) for slope in slopes], 1).transpose(0, 1)
    return InnerRows(x, each, target - y.detach(), weights, held_out)


def refit_inner(
    module: nn.Module,
    block: Block,
    rows: Callable[[], Iterable[InnerRows]],
    aimed: Callable[[], Iterable[AimedRows]],
    workers: Workers,
) -> dict[str, Tensor] | None:
    """The module's tensors with its inner matrices refitted, and its output matrix after them; none: it does not help.

    Args:
        module: kept neurons.
        block: what they replace.
        rows: as `inner_rows` makes them.
        aimed: the same rows with their targets.
        workers: the processes that share the rows.
    """
    last = module.get_submodule(block.layout.out)
    like = inner_matrices(module, block.layout)
    out = oriented(last).detach().T.double()
    steps = inner_steps(rows, like, out, workers.sum_)
    if steps is None:
        return None
    moved = copy.deepcopy(module)
    for name, matrices in zip(block.layout.inner, (like.double() + steps).split(block.layout.fused), strict=True):
        set_projection_(moved.get_submodule(name), matrices.flatten(0, 1))
    fit, held_out = (Moments.zeros(*out.shape, full_yy=False, device=out.device) for _ in range(2))
    errors = torch.zeros(2, dtype=torch.float64, device=out.device)  # on held-out rows, before and after
    for x, target, weights, is_held_out in aimed():
        with _watched(moved, block) as (_, h), torch.no_grad():
            left = target - on_rows(moved, x)
        (held_out if is_held_out else fit).update_(h[0][0].detach(), left, weights, torch.float32)
        if is_held_out:
            before = target - on_rows(module, x)
            errors += torch.stack([(weights * each.double().square().sum(1)).sum() for each in (before, left)])
    workers.sum_([*fit.tensors(), *held_out.tensors(), errors])
    follows, _ = solve_ridged(fit.xx, fit.xy, held_out.xx, held_out.xy, RIDGES)
    gain = (follows * (2 * held_out.xy - held_out.xx @ follows)).sum()
    if gain > 0:
        set_projection_(moved.get_submodule(block.layout.out), oriented(last).double() + follows.T)
    # the steps are of first order: what they do is measured
    return dict(moved.state_dict()) if (errors[1] - gain.clamp_min(0) < errors[0]).item() else None


@contextmanager
def _watched(module: nn.Module, block: Block) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What the inner projections give, as leaves of a graph, and the inner activations that come of it."""
    fed: list[Tensor] = []
    inner: list[Tensor] = []

    def leaf(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        fed.append(output.detach().requires_grad_())
        return fed[-1]

    def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inner.append(args[0])

    handles = [module.get_submodule(name).register_forward_hook(leaf) for name in block.layout.inner]
    handles.append(module.get_submodule(block.layout.out).register_forward_pre_hook(keep))
    try:
        with torch.enable_grad():
            yield fed, inner
    finally:
        for handle in handles:
            handle.remove()
