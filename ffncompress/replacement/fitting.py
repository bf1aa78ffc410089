"""What a block could become: every fit of its menu, from its moments alone, and its scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.budgets import KINDS, LINEAR_KINDS
from ffncompress.models import Block, oriented
from ffncompress.records.plan import Replacement, Shape
from ffncompress.recovery import HybridFit, LinearFit, Metric, NeuronFit
from ffncompress.recovery.neurons import Fit
from ffncompress.replacement.moments import BlockMoments, Pair

PLAIN, STREAM = "plain", "stream"
WIDTHS = 16  # neurons are kept by sixteenths
HYBRIDS = (1, 2, 3, 4, 6, 8)  # sixteenths that are also fitted with a bypass
PROBES = (2, 6)  # of these, the ones that say whether the others are worth a fit
WORTH = 1.1  # times the error of neurons alone at the same size: a bypass that errs more is not going to win


@dataclass(frozen=True)
class Offer:
    """What may take a block's place: which kinds, and what their numbers of neurons are multiples of."""

    kinds: frozenset[str] = frozenset(KINDS)
    align: int = 1
    width: int | None = None  # one more than the sixteenths

    def kinds_for(self, block: Block) -> frozenset[str]:
        """Those that a block can become: one whose neurons are tied together keeps none of them."""
        return self.kinds & frozenset(LINEAR_KINDS) if block.tied else self.kinds


EVERYTHING = Offer()


@dataclass(frozen=True)
class Fitted:
    """A block's fits and all that its moments have to say, so that the moments can go."""

    maps: dict[str, Fit]
    r2_by_rank: Tensor  # of the plain map on held-out rows, as R2_lin is defined
    scores: dict[str, float]  # of `Scores`, all but the error bar of R2_lin

    @property
    def plain(self) -> LinearFit:
        """The map that R2_lin is defined by."""
        return linear_map(self.maps, PLAIN)


def fit_block(block: Block, moments: BlockMoments, ffn: nn.Module, offer: Offer = EVERYTHING) -> Fitted:
    """Every fit of a block's menu, each with its ridge chosen on held-out rows of its own weighting, and its scores.

    A bypass needs products of h and x: where neurons are divided into runs there is none.
    """
    names = [name for name in fit_names(block, offer) if not (moments.runs and name.startswith("hybrid"))]
    probes = {f"hybrid {width}" for width in menu_widths(block, PROBES, offer)}
    fits = _Fits(block, moments, ffn, offer)
    maps = {name: fits[name] for name in names if not name.startswith("hybrid") or name in probes}
    rest = [name for name in names if name not in maps]
    if rest and bypass_pays(block, moments, maps):
        maps |= {name: fits[name] for name in rest}
    return Fitted(maps, *linear_scores(block, moments, linear_map(maps, PLAIN), linear_map(maps, STREAM)))


def bypass_pays(block: Block, moments: BlockMoments, maps: Mapping[str, Fit]) -> bool:
    """Whether a bypass comes near to what as many weights in neurons alone explain of held-out rows, at any rank."""
    alone = sorted((fit for fit in maps.values() if isinstance(fit, NeuronFit)), key=lambda fit: len(fit.kept))
    if not alone:  # nothing to compare with
        return True
    sizes = [len(fit.kept) * block.weights_per_neuron for fit in alone]
    errors = [fit.error(moments.held_out_inner).item() for fit in alone]
    for fit in (fit for fit in maps.values() if isinstance(fit, HybridFit)):
        ranks = np.arange(1, len(fit.errors))
        size = len(fit.kept) * block.weights_per_neuron + ranks * (block.d_in + block.d_out)
        if (fit.errors[1:].numpy() < WORTH * np.interp(size, sizes, errors)).any():
            return True
    return False


def linear_map(maps: Mapping[str, Fit], name: str) -> LinearFit:
    """One of the two linear maps among a block's fits."""
    found = maps[name]
    assert isinstance(found, LinearFit)
    return found


def fit_names(block: Block, offer: Offer = EVERYTHING) -> list[str]:
    """The fits of a block: two linear maps, neurons at each width, neurons with a bypass at some."""
    kinds = offer.kinds_for(block)
    widths = menu_widths(block, range(1, WIDTHS), offer) if "neurons" in kinds else []
    hybrids = menu_widths(block, HYBRIDS, offer) if "hybrid" in kinds else []
    return [PLAIN, STREAM, *(f"neurons {w}" for w in widths), *(f"hybrid {w}" for w in hybrids)]


def menu_widths(block: Block, sixteenths: Iterable[int], offer: Offer = EVERYTHING) -> list[int]:
    """The numbers of neurons that so many sixteenths of a block's are, to the nearest that may be, and one more."""
    found = {offer.align * round(block.d_inner * i / WIDTHS / offer.align) for i in sixteenths}
    found |= {offer.width} if offer.width else set()
    return sorted(width for width in found if 0 < width < block.d_inner)


def fit_name(option: Replacement) -> str:
    """The fit that an option is read off."""
    return f"{option.kind} {option.width}" if option.width else option.weighting


def fit_some(
    block: Block, moments: BlockMoments, ffn: nn.Module, names: Sequence[str], offer: Offer = EVERYTHING
) -> dict[str, Fit]:
    """Some of a block's fits, by name."""
    fits = _Fits(block, moments, ffn, offer, names)
    return {name: fits[name] for name in names}


def exact_map(moments: BlockMoments) -> LinearFit:
    """The map that R2_lin is of: least squares on the fit rows, minimum-norm where they are singular to round-off.

    Nothing about it is chosen on held-out rows, so what it explains of them is what it would of any.
    """
    return recovery.fit_linear(moments.fit, moments.held_out, recovery.EXACT)


class _Fits:
    """A block's fits, made as they are asked for; neurons are ordered once for all of them."""

    def __init__(
        self, block: Block, moments: BlockMoments, ffn: nn.Module, offer: Offer, names: Sequence[str] = ()
    ) -> None:
        self._block, self._moments = block, moments
        self._metric = None if moments.metric is None else Metric.of(moments.metric)
        out = ffn.get_submodule(block.layout.out)
        self._weight = oriented(out).detach().T.to(moments.fit_inner.xx)
        self._bias = out.get_parameter("bias").detach() if block.out_bias else None
        # the run stops at every width of the menu, whichever are asked for: so it takes the same path each time
        self._stops = {*menu_widths(block, range(1, WIDTHS), offer), *(_width(name) for name in names)} - {0}

    def __getitem__(self, name: str) -> Fit:
        moments = self._moments
        if name == PLAIN:
            return exact_map(moments).cpu()
        if name == STREAM:
            return recovery.fit_linear(*moments.weighted(), metric=self._metric).cpu()
        own = self._thinned[_width(name)]
        if not name.startswith("hybrid"):
            return own.cpu()
        inner = moments.fit_inner, moments.held_out_inner
        return recovery.fit_hybrid(*inner, own.kept, self._weight, (own.ridge,), metric=self._metric).cpu()

    @cached_property
    def _thinned(self) -> dict[int, NeuronFit]:
        parts = self._moments.of_neurons(self._weight, self._bias)
        return prune_neurons(self._block, parts, self._weight, self._metric, self._stops)


def _width(name: str) -> int:
    """How many neurons a fit keeps."""
    return 0 if name in (PLAIN, STREAM) else int(name.split()[1])


def prune_neurons(
    block: Block, parts: Iterable[Pair], weight: Tensor, metric: Metric | None, widths: Collection[int]
) -> dict[int, NeuronFit]:
    """The neurons to keep at each width, with their output matrix; one ridge, the best on held-out rows, for all.

    Args:
        block: the block.
        parts: moments of (h, y), or of each run of h and its share of y.
        weight: the output matrix, [d_inner, d_out].
        metric: what an error costs by direction.
        widths: how many are to be left.
    """
    grams, means, ridges = [], [], []
    start = 0
    for fit, held_out in parts:
        own = weight[start : start + fit.d_in]
        start += fit.d_in
        h0, y0 = fit.means if block.out_bias else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
        gram, _, _ = fit.centred_on(h0, y0)
        loud = (gram.diagonal() * own.square().sum(1)).topk(fit.d_in // 2).indices  # any half says how rows suffice
        ridges.append(recovery.fit_neurons(fit, held_out, loud, own, biased=block.out_bias).ridge)
        grams.append(gram / fit.weight)
        means.append((h0, y0))
    ridge = sorted(ridges)[len(ridges) // 2]
    h0, y0 = torch.cat([h for h, _ in means]), torch.stack([y for _, y in means]).sum(0)

    def fitted(kept: Tensor, out: Tensor) -> NeuronFit:
        bias = (y0 - out.T @ h0[kept]).float() if block.out_bias else None
        return NeuronFit(kept, out.float(), bias, ridge)  # in single precision, for there is one of each width

    return {width: fitted(*left) for width, left in recovery.remove_neurons(grams, weight, widths, metric, ridge)}


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
        "ridge": stream.ridge,
        "share_of_stream": block.scale**2 * (weighted.y_energy.sum() / weighted.rows).item(),
        "unrecovered_share": block.scale**2 * (recovery.feature_errors(stream, weighted).sum() / weighted.rows).item(),
    }
    r2_by_rank = 1 - recovery.errors_by_rank(plain, held_out) / held_out.total_squares().sum()
    return r2_by_rank.cpu(), scores


def whole_map(block: Block) -> Shape:
    """A linear map of full rank; dense under the output projection's name must differ from it in shape (modules.py)."""
    full = min(block.d_in, block.d_out)
    return Shape("dense" if block.d_in != block.d_inner else "low-rank", rank=full)
