"""What a block could become: its maps, its scores, the option that a budget allows, and what each would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.calibration import BlockMoments
from ffncompress.errors import BudgetError
from ffncompress.forecast import delta_perplexity
from ffncompress.models import Block
from ffncompress.modules import build, matrix_weights
from ffncompress.plans import Option, Scores, Swap
from ffncompress.recovery import LinearFit
from ffncompress.settings import Budget
from ffncompress.swaps import SequenceErrors

PLAIN, STREAM = "plain", "stream"
SAME, WORSE = 1.01, 1.5  # predicted losses this close need no second swap; this far apart, no second opinion


@dataclass(frozen=True)
class Fitted:
    """A block's two maps and all that its moments have to say, so that the moments can go."""

    maps: dict[str, LinearFit]
    r2_by_rank: Tensor  # of the plain map on held-out rows, as R2_lin is defined
    scores: dict[str, float]  # of `Scores`, all but the error bar of R2_lin


def option_within(block: Block, budget: Budget) -> tuple[str, int]:
    """(kind, rank) of the largest linear stand-in that the budget allows.

    Dense where it fits, for it is then the better and, above rank d/2, also the smaller.

    Raises:
        BudgetError: not even rank 1 fits.
    """
    allowed = block.matrix_weights / budget.ratio
    # a dense map under the output projection's name must differ from it in shape (see modules.py)
    if block.d_in * block.d_out <= allowed and block.d_in != block.d_inner:
        return "dense", min(block.d_in, block.d_out)
    rank = min(int(allowed // (block.d_in + block.d_out)), block.d_in, block.d_out)
    if rank < 1:
        most = block.matrix_weights / (block.d_in + block.d_out)
        raise BudgetError(
            f"a budget of {budget.ratio:g}x leaves block {block.index} less than rank 1; up to {most:.0f}x is possible"
        )
    return "low-rank", rank


def fit_block(moments: BlockMoments) -> Fitted:
    """Both maps of a block, each with its ridge chosen on held-out rows of its own weighting, and its scores."""
    maps = {
        PLAIN: recovery.fit_linear(moments.fit, moments.held_out),
        STREAM: recovery.fit_linear(moments.fit_weighted, moments.held_out_weighted),
    }
    plain, held_out, weighted = maps[PLAIN], moments.held_out, moments.held_out_weighted
    inputs = recovery.spectrum_of(moments.fit.covariance_x())
    scores = {
        "r2_lin": recovery.r2(plain, held_out),
        "r2_median_feature": recovery.median_feature_r2(plain, held_out),
        "effective_rank_input": recovery.effective_rank(inputs),
        "effective_rank_output": recovery.effective_rank(recovery.spectrum_of(held_out.covariance_y())),
        "effective_rank_map": recovery.effective_rank(plain.energies),
        "condition_number": recovery.condition_number(inputs),
        "ridge": plain.ridge,
        "share_of_stream": (weighted.y_energy.sum() / weighted.rows).item(),
        "unrecovered_share": (recovery.feature_errors(maps[STREAM], weighted).sum() / weighted.rows).item(),
    }
    r2_by_rank = 1 - recovery.errors_by_rank(plain, held_out) / held_out.total_squares().sum()
    return Fitted({name: fit.cpu() for name, fit in maps.items()}, r2_by_rank.cpu(), scores)


def score_block(fitted: Fitted, errors: SequenceErrors) -> Scores:
    """What is reported of a block."""
    error = recovery.r2_interval(errors.squared_errors, errors.rows, errors.sums, errors.squares)
    return Scores(**fitted.scores, r2_lin_error=error)


def worth_trying(losses: dict[str, Tensor], rank: int) -> list[str]:
    """The weightings to measure: the better by prediction, and the other unless it is the same or clearly worse."""
    best, other = sorted(losses, key=lambda name: losses[name][rank].item())
    ratio = losses[other][rank].item() / max(losses[best][rank].item(), 1e-30)
    return [best] if ratio < SAME or ratio > WORSE else [best, other]


def replacement(block: Block, size: tuple[str, int], fit: LinearFit) -> nn.Module:
    """The stand-in module with the fitted weights in it, float32."""
    kind, rank = size
    module = build(kind, block.layout, block.d_in, block.d_out, rank)
    out = module.get_submodule(block.layout.out)
    if kind == "dense":
        values = {"weight": fit.weight.T, "bias": fit.bias}
    else:
        down, up, bias = fit.at_rank(rank)
        module.get_submodule(block.layout.inner[-1]).load_state_dict({"weight": down.contiguous()})
        values = {"weight": up, "bias": bias}
    out.load_state_dict({name: value.contiguous() for name, value in values.items()})
    return module.requires_grad_(False)


def tensors_of(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.float().cpu().contiguous()
        for index, module in modules.items()
        for name, value in module.state_dict().items()
    }


def score_swap(
    block: Block, size: tuple[str, int], losses: dict[str, Tensor], rises: dict[str, Tensor], base: float
) -> Swap:
    """The best of the tried weightings by held-out loss.

    Args:
        block: the block.
        size: kind and rank of its option.
        losses: predicted loss of each weighting at every rank.
        rises: measured rise in loss of each sequence, of each weighting that was tried.
        base: the perplexity that a rise is carried over to.
    """
    kind, rank = size
    deltas = {name: delta_perplexity(base, rise.mean().item()) for name, rise in rises.items()}
    best = min(deltas, key=deltas.__getitem__)
    spread = (rises[best].std() / len(rises[best]) ** 0.5).item() if len(rises[best]) > 1 else 0.0
    weights = matrix_weights(kind, block.d_in, block.d_out, rank)
    return Swap(
        kind=kind,  # type: ignore[arg-type]
        rank=rank,
        weighting=best,  # type: ignore[arg-type]
        parameters=weights + block.d_out,
        ratio=block.matrix_weights / weights,
        predicted_delta=delta_perplexity(base, losses[best][rank].item()),
        delta=deltas[best],
        delta_error=(base + deltas[best]) * spread,
        deltas=deltas,
    )


def score_options(
    block: Block, size: tuple[str, int], fitted: Fitted, losses: dict[str, Tensor], base: float
) -> list[Option]:
    """Predicted cost at a ladder of ranks up to the budget's, in the better weighting of each."""
    kind, limit = size
    ranks = [2**k for k in range(limit.bit_length()) if 2**k < limit] + [limit]
    options = []
    for rank in ranks:
        this: Any = kind if rank == limit else "low-rank"
        options.append(
            Option(
                kind=this,
                rank=rank,
                parameters=matrix_weights(this, block.d_in, block.d_out, rank) + block.d_out,
                r2=fitted.r2_by_rank[rank].item(),
                predicted_delta=delta_perplexity(base, min(loss[rank].item() for loss in losses.values())),
            )
        )
    return options
