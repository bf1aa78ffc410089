"""What a block could become: its fits and scores, the menu of stand-ins that they give, and the modules themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.calibration import BlockMoments
from ffncompress.forecast import Fit, delta_perplexity
from ffncompress.models import Block, oriented
from ffncompress.modules import BYPASS, Shape, build, matrix_weights, parameters, set_projection_
from ffncompress.plans import Option, Scores, Swap
from ffncompress.recovery import HybridFit, LinearFit, Metric, Moments, NeuronFit
from ffncompress.swaps import SequenceErrors, mean_and_error

PLAIN, STREAM = "plain", "stream"
WIDTHS = 16  # neurons are kept by sixteenths
HYBRIDS = (1, 2, 3, 4, 6, 8)  # sixteenths that are also fitted with a bypass


@dataclass(frozen=True)
class Fitted:
    """A block's fits and all that its moments have to say, so that the moments can go."""

    maps: dict[str, Fit]
    r2_by_rank: Tensor  # of the plain map on held-out rows, as R2_lin is defined
    scores: dict[str, float]  # of `Scores`, all but the error bar of R2_lin


def fit_block(block: Block, moments: BlockMoments, ffn: nn.Module) -> Fitted:
    """Every fit of a block's menu, each with its ridge chosen on held-out rows of its own weighting, and its scores."""
    maps = fit_some(block, moments, ffn, fit_names(block))
    return Fitted(maps, *linear_scores(block, moments, maps[PLAIN], maps[STREAM]))  # type: ignore[arg-type]


def fit_names(block: Block) -> list[str]:
    """The fits of a block: two linear maps, neurons at each width, neurons with a bypass at some."""
    widths, hybrids = menu_widths(block, range(1, WIDTHS)), menu_widths(block, HYBRIDS)
    return [PLAIN, STREAM, *(f"neurons {w}" for w in widths), *(f"hybrid {w}" for w in hybrids)]


def menu_widths(block: Block, sixteenths: Iterable[int]) -> list[int]:
    return sorted({round(block.d_inner * i / WIDTHS) for i in sixteenths} - {0, block.d_inner})


def fit_name(option: Option | Swap) -> str:
    """The fit that an option is read off."""
    return f"{option.kind} {option.width}" if option.width else option.weighting


def fit_some(block: Block, moments: BlockMoments, ffn: nn.Module, names: Sequence[str]) -> dict[str, Fit]:
    """Some of a block's fits, by name."""
    maps: dict[str, Fit] = {}
    if PLAIN in names:
        maps[PLAIN] = recovery.fit_linear(moments.fit, moments.held_out).cpu()
    metric = None if moments.metric is None else Metric.of(moments.metric)
    if STREAM in names:
        maps[STREAM] = recovery.fit_linear(*moments.weighted(), metric=metric).cpu()
    widths = {name: int(name.split()[1]) for name in names if name not in (PLAIN, STREAM)}
    if not widths:
        return maps
    inner, held_out = moments.fit_inner, moments.held_out_inner
    weight = oriented(ffn.get_submodule(block.layout.out)).detach().T.to(inner.xx)
    # the run stops at every width of the menu, whichever are asked for: so it takes the same path each time
    stops = {*menu_widths(block, range(1, WIDTHS)), *widths.values()}
    thinned = thin_out(block, inner, held_out, weight, metric, stops)
    for name, width in widths.items():
        fit = thinned[width]
        if name.startswith("hybrid"):
            maps[name] = recovery.fit_hybrid(inner, held_out, fit.kept, weight, (fit.ridge,), metric=metric).cpu()
        else:
            maps[name] = fit.cpu()
    return maps


def thin_out(
    block: Block, fit: Moments, held_out: Moments, weight: Tensor, metric: Metric | None, widths: Collection[int]
) -> dict[int, NeuronFit]:
    """The neurons to keep at each width, with their output matrix; one ridge, the best on held-out rows, for all."""
    fit, held_out = (m.of_inputs(slice(block.d_inner)) for m in (fit, held_out))
    h0, y0 = fit.means if block.out_bias else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
    gram, _, _ = fit.centred_on(h0, y0)
    loud = (gram.diagonal() * weight.square().sum(1)).topk(block.d_inner // 2).indices  # any half says how rows suffice
    ridge = recovery.fit_neurons(fit, held_out, loud, weight, biased=block.out_bias).ridge
    found = recovery.remove_neurons(gram / fit.weight, weight, widths, metric, ridge)
    return {
        width: NeuronFit(kept, out, y0 - out.T @ h0[kept] if block.out_bias else None, ridge)
        for width, (kept, out) in found.items()
    }


def linear_scores(
    block: Block, moments: BlockMoments, plain: LinearFit, stream: LinearFit
) -> tuple[Tensor, dict[str, float]]:
    """(R2 at each rank, scores) on held-out rows."""
    held_out, (_, weighted) = moments.held_out, moments.weighted()
    plain, stream = plain.to(held_out.x.device), stream.to(held_out.x.device)
    inputs = recovery.spectrum_of(moments.fit.covariance_x())
    scores = {
        "r2_lin": recovery.r2(plain, held_out),
        "r2_median_feature": recovery.feature_r2(plain, held_out).median().item(),
        "effective_rank_input": recovery.effective_rank(inputs),
        "effective_rank_output": recovery.effective_rank(recovery.spectrum_of(held_out.covariance_y())),
        "effective_rank_map": recovery.effective_rank(plain.energies),
        "condition_number": recovery.condition_number(inputs),
        "ridge": plain.ridge,
        "share_of_stream": block.scale**2 * (weighted.y_energy.sum() / weighted.rows).item(),
        "unrecovered_share": block.scale**2 * (recovery.feature_errors(stream, weighted).sum() / weighted.rows).item(),
    }
    r2_by_rank = 1 - recovery.errors_by_rank(plain, held_out) / held_out.total_squares().sum()
    return r2_by_rank.cpu(), scores


def score_block(fitted: Fitted, errors: SequenceErrors) -> Scores:
    """What is reported of a block."""
    error = recovery.r2_interval(errors.squared_errors, errors.rows, errors.sums, errors.squares)
    return Scores(**fitted.scores, r2_lin_error=error)


def menu(block: Block, fitted: Fitted, losses: Mapping[str, Tensor]) -> list[Option]:
    """Every stand-in that is smaller than the block, with its predicted loss, largest first."""
    options = []
    for shape in shapes(block):
        names = [f"{shape.kind} {shape.width}"] if shape.width else [PLAIN, STREAM]
        name = min(names, key=lambda n: losses[n][shape.rank].item())
        options.append(
            Option(
                kind=shape.kind,
                width=shape.width,
                rank=shape.rank,
                weighting=PLAIN if name == PLAIN else STREAM,
                parameters=parameters(shape, block),
                predicted_loss=losses[name][shape.rank].item(),
                r2=None if shape.width else fitted.r2_by_rank[shape.rank].item(),
            )
        )
    options = [option for option in options if option.parameters < block.parameters]
    return sorted(options, key=lambda option: -option.parameters)


def shapes(block: Block) -> list[Shape]:
    """The menu's stand-ins: constant, linear at a ladder of ranks, dense, neurons, and neurons with a bypass."""
    full = min(block.d_in, block.d_out)
    useful = [2**k for k in range(full.bit_length()) if 2**k <= full // 2]  # above d/2 dense is smaller
    found = [Shape("constant"), *(Shape("low-rank", rank=r) for r in useful)]
    found.append(whole_map(block))
    for name in fit_names(block)[2:]:
        kind, _, width = name.partition(" ")
        if kind == "neurons":
            found.append(Shape("neurons", int(width)))
        else:
            found += [Shape("hybrid", int(width), r) for r in useful if r >= 8]
    return found


def whole_map(block: Block) -> Shape:
    """A linear map of full rank; dense under the output projection's name must differ from it in shape (modules.py)."""
    full = min(block.d_in, block.d_out)
    return Shape("dense" if block.d_in != block.d_inner else "low-rank", rank=full)


def shape_of(option: Option | Swap) -> Shape:
    return Shape(option.kind, option.width, option.rank)


def replacement(block: Block, ffn: nn.Module, shape: Shape, fit: Fit) -> nn.Module:
    """The stand-in module with the fitted weights in it, float32 in main memory."""
    module = build(shape, block.layout, ffn).float()
    out = module.get_submodule(block.layout.out)
    if isinstance(fit, LinearFit):
        if shape.kind == "dense":
            set_projection_(out, fit.weight.T, fit.bias)
        else:
            down, up, bias = fit.at_rank(shape.rank)
            set_projection_(out, up, bias)
            if shape.rank:
                set_projection_(module.get_submodule(block.layout.inner[-1]), down)
        return module.requires_grad_(False)
    for name in block.layout.inner:
        own = ffn.get_submodule(name)
        own_bias: Tensor | None = getattr(own, "bias", None)
        kept = fit.kept.to(own.weight.device)  # type: ignore[arg-type]
        set_projection_(module.get_submodule(name), oriented(own)[kept], None if own_bias is None else own_bias[kept])
    if isinstance(fit, NeuronFit):
        set_projection_(out, fit.out.T, fit.bias)
    else:
        assert isinstance(fit, HybridFit)
        matrix, down, up, bias = fit.at_rank(shape.rank)
        set_projection_(out, matrix.T, torch.zeros_like(bias) if block.out_bias else None)
        set_projection_(module.get_submodule(BYPASS[0]), down)
        set_projection_(module.get_submodule(BYPASS[1]), up, bias)
    return module.requires_grad_(False)


def tensors_of(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.float().cpu().contiguous()
        for index, module in modules.items()
        for name, value in module.state_dict().items()
    }


def score_swap(block: Block, tried: Option, rises: Tensor, base: float, tokens: Tensor | None = None) -> Swap:
    """What an option did alone in the model.

    Args:
        block: the block.
        tried: the option.
        rises: measured rise in loss of each sequence.
        base: the perplexity that a rise is carried over to.
        tokens: that were scored of each sequence; none: the same number of each.
    """
    rise, spread = mean_and_error(rises, tokens)
    delta = delta_perplexity(base, rise)
    return Swap(
        kind=tried.kind,
        width=tried.width,
        rank=tried.rank,
        weighting=tried.weighting,
        parameters=tried.parameters,
        ratio=block.matrix_weights / max(1, matrix_weights(shape_of(tried), block)),
        predicted_delta=delta_perplexity(base, tried.predicted_loss),
        delta=delta,
        delta_error=(base + delta) * spread,
    )
