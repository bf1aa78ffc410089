"""Kept neurons' inner matrices, refitted on the rows that they meet in the slimmed model (see recovery/inner.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ffncompress.models import Block, inner_matrices, on_rows, oriented
from ffncompress.recovery import Moments, solve_ridged
from ffncompress.recovery.by_rows import OutRows, out_steps
from ffncompress.recovery.inner import InnerRows, inner_steps
from ffncompress.replacement.building import set_projection_
from ffncompress.replacement.moments import add_rows_, no_rows, run_sizes
from ffncompress.runtime.workers import Workers

RIDGES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)  # of the output matrix's step, relative to a neuron's energy
RIDGE_BY_RUNS = 0.1  # where how many steps are taken is chosen, and not the ridge

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
    runs: int = 1,
) -> dict[str, Tensor] | None:
    """The module's tensors with its inner matrices refitted, and its output matrix after them; none: it does not help.

    Args:
        module: kept neurons.
        block: what they replace.
        rows: as `inner_rows` makes them.
        aimed: the same rows with their targets.
        workers: the processes that share the rows.
        runs: into how many neurons are divided, where one Gram matrix of all is too large.
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

    def behind() -> Iterator[OutRows]:
        for x, target, weights, held_out in aimed():
            with _watched(moved, block) as (_, h), torch.no_grad():
                left = target - on_rows(moved, x)
            yield OutRows(h[0][0].detach(), left, weights, held_out)

    follows, gain = _follows(behind, out, workers) if runs == 1 else _follows_by_runs(behind, out, workers, runs)
    errors = torch.zeros(2, dtype=torch.float64, device=out.device)  # on held-out rows, before and after
    for x, target, weights, held_out in aimed():
        if held_out:
            left = [(target - on_rows(each, x)).double().square().sum(1) for each in (module, moved)]
            errors += torch.stack([(weights * each).sum() for each in left])
    workers.sum_([errors])
    if gain > 0:
        set_projection_(moved.get_submodule(block.layout.out), oriented(last).double() + follows.T)
    # the steps are of first order: what they do is measured
    return dict(moved.state_dict()) if (errors[1] - gain.clamp_min(0) < errors[0]).item() else None


def _follows(rows: Callable[[], Iterable[OutRows]], out: Tensor, workers: Workers) -> tuple[Tensor, Tensor]:
    """The step of the output matrix, and by how much it lessens the error of held-out rows."""
    fit, held_out = (Moments.zeros(*out.shape, full_yy=False, device=out.device) for _ in range(2))
    for each in rows():
        (held_out if each.held_out else fit).update_(each.h, each.left, each.weights, torch.float32)
    workers.sum_([*fit.tensors(), *held_out.tensors()])
    follows, _ = solve_ridged(fit.xx, fit.xy, held_out.xx, held_out.xy, RIDGES)
    return follows, (follows * (2 * held_out.xy - held_out.xx @ follows)).sum()


def _follows_by_runs(
    rows: Callable[[], Iterable[OutRows]], out: Tensor, workers: Workers, runs: int
) -> tuple[Tensor, Tensor]:
    """The same where neurons are divided."""
    pairs = no_rows(run_sizes(len(out), runs), out.device)
    for each in rows():
        if not each.held_out:
            add_rows_(pairs, each.h, each.weights, held_out=False)
    workers.sum_([fit.xx for fit, _ in pairs])
    found = out_steps(rows, [fit.xx for fit, _ in pairs], torch.zeros_like(out), RIDGE_BY_RUNS, workers.sum_)
    return (torch.zeros_like(out), out.new_zeros(())) if found is None else (found[0], out.new_tensor(-found[1]))


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
