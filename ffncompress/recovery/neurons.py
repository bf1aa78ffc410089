"""Which inner neurons of an FFN to keep, and what the output matrix becomes without the others.

An FFN is y = W'h + b over its inner activations h. From the moments of rows (z, y), z = [h, x], with every row
weighted, follow in closed form:

- the order of removal. Without neuron j, and W refitted, the squared error grows by |w_j|^2 / (G^-1)_jj, where G is the
  Gram matrix of h: the optimal brain surgeon's saliency (Hassibi & Stork, 1993). The least is taken out, a few at a
  time, G^-1 and W are downdated, and so on; the order is nested, so one run serves every width. An error counts as the
  loss feels it: |w_j| is taken in the metric M = E[g g'], g the gradient of the loss with respect to y.
- for kept neurons K, the exact refit A = W_K + (G_KK + ridge)^-1 G_KR W_R, R the removed: a ridge that pulls towards
  the weights as they were, not towards zero, so where rows are few it is the correction that shrinks. The metric drops
  out of it. With the same ridge, the downdated W of the run above is this refit at every width it passes.
- where there are too many neurons for one G, it is known in blocks along its diagonal, of runs of neurons: the order
  hardly suffers, the refit does, and is mended from rows (see by_rows.py).
- for kept neurons and a linear bypass of x, the joint fit. What h_K explains of x and of y is taken out of both
  (Frisch & Waugh, 1933); the best bypass of rank r is the reduced-rank regression of the remainders, and A follows.
  With no neuron kept this is the linear map itself; at rank 0 it is neurons alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ffncompress.recovery.linear import LinearFit, Metric, errors_by_rank, fit_linear
from ffncompress.recovery.moments import Moments

RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # relative to each neuron's own energy
BYPASS_RIDGES = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STEPS = 96  # removals in a run: taking out one hundredth at a time is as good as one by one
CARRIED = 0.9  # the share of rows that are still of use, below which the others are dropped
SKETCH = 64  # directions of the output that a ridge is chosen by


@dataclass(frozen=True)
class NeuronFit:
    """y ~ A'h_K + b over the kept neurons K."""

    kept: Tensor  # [width], rising
    out: Tensor  # [width, d_out]
    bias: Tensor | None  # [d_out]; None where the FFN's output has no bias
    ridge: float

    def error(self, rows: Moments) -> Tensor:
        """Its squared error over all features on rows (z, y); `kept` indexes into z."""
        own = rows.of_inputs(self.kept.to(rows.x.device))
        out = self.out.to(own.xx)
        bias = torch.zeros_like(own.y) if self.bias is None else self.bias.to(own.y)
        xx, xy, yy = own.centred_on(torch.zeros_like(own.x), bias)
        return (yy.sum() - (out * (2 * xy - xx @ out)).sum()).clamp_min(0)

    def cpu(self) -> NeuronFit:
        """The same fit in main memory; single precision, for a menu holds many of these."""
        single = NeuronFit(self.kept, self.out.float(), None if self.bias is None else self.bias.float(), self.ridge)
        return single.to(torch.device("cpu"))

    def to(self, device: torch.device) -> NeuronFit:
        """The same fit on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return NeuronFit(self.kept.to(device), self.out.to(device), bias, self.ridge)


@dataclass(frozen=True)
class HybridFit:
    """y ~ A_r'h_K + (rank r map of x) + b, for every r."""

    kept: Tensor  # [width]
    h0: Tensor  # [width], mean of the fit rows
    x0: Tensor  # [d_in]
    y0: Tensor  # [d_out]
    from_h: Tensor  # [width, d_in]: what h_K explains of x
    out: Tensor  # [width, d_out]: what h_K explains of y
    bypass: LinearFit  # of the remainders
    ridge: float
    errors: Tensor  # of each rank, squared, on the held-out rows that its ridges were chosen on

    def cpu(self) -> HybridFit:
        """The same fit in main memory; single precision, for a menu holds many of these."""
        h0, x0, y0, from_h, out = (t.float().cpu() for t in (self.h0, self.x0, self.y0, self.from_h, self.out))
        bypass = self.bypass.to(torch.float32).cpu()
        return HybridFit(self.kept.cpu(), h0, x0, y0, from_h, out, bypass, self.ridge, self.errors.float().cpu())

    def at_rank(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out [width, d_out], down [rank, d_in], up [d_out, rank], bias) of the best fit of that rank."""
        down, up, _ = self.bypass.at_rank(rank)
        out = self.out - self.from_h @ down.T @ up.T
        return out, down, up, self.y0 - out.T @ self.h0 - up @ (down @ self.x0)

    def remainders(self, h: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The rows (x, y) less what h explains of them: what the bypass sees."""
        h = h[:, self.kept] - self.h0
        return x - self.x0 - h @ self.from_h, y - self.y0 - h @ self.out


Fit = LinearFit | NeuronFit | HybridFit  # what a replacement is made from


def remove_neurons(
    grams: Tensor | Sequence[Tensor],
    weight: Tensor,
    widths: Iterable[int],
    metric: Metric | None = None,
    ridge: float = 1e-3,
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Of each width, widest first: which neurons are left when the least needed have gone, and their refitted weights.

    Args:
        grams: Gram matrix of the inner activations (centred where the output has a bias to take up a mean), [k, k]; or
            one of each run of them, where those of different runs are taken for unrelated.
        weight: the output matrix, [k, d_out].
        widths: how many are to be left.
        metric: what an error costs by direction; none: all directions alike.
        ridge: relative to each neuron's own energy.
    """
    grams = [grams] if isinstance(grams, Tensor) else grams
    sizes = [len(gram) for gram in grams]
    runs = [_Thinning(*own, metric, ridge) for own in zip(grams, weight.split(sizes), strict=True)]
    left, step = len(weight), max(1, len(weight) // STEPS)
    for width in sorted(widths, reverse=True):
        while left > width:
            count = min(step, left - width)
            out = torch.cat([run.saliency() for run in runs]).argsort(stable=True)[:count]
            left -= count
            for run, start in zip(runs, _starts(sizes), strict=True):
                run.take_out_(out[(out >= start) & (out < start + len(run.gone))] - start)
        kept = [run.kept + start for run, start in zip(runs, _starts(sizes), strict=True)]
        yield width, (torch.cat(kept), torch.cat([run.weight for run in runs]))


class _Thinning:
    """Neurons that become fewer and fewer, and the output matrix of those that are left."""

    def __init__(self, gram: Tensor, weight: Tensor, metric: Metric | None, ridge: float) -> None:
        self._inverse = _inverse(with_ridge(gram, ridge))
        # a neuron that never speaks explains nothing, whatever its output weights
        w = torch.where(gram.diagonal()[:, None] > 0, weight.to(gram), 0)
        self._felt, self._d_out = w.shape[1], w.shape[1]
        if metric is not None:
            w = torch.cat([w @ metric.root, w], 1)
        self._w = w
        self._here = torch.arange(len(gram), device=gram.device)  # whose rows are still carried along
        self.gone = torch.zeros(len(gram), dtype=torch.bool, device=gram.device)

    def saliency(self) -> Tensor:
        """By how much the error grows without each neuron; without end where it is gone."""
        saliency = torch.full(self.gone.shape, torch.inf, dtype=self._w.dtype, device=self._w.device)
        saliency[self._here] = self._w[:, : self._felt].square().sum(1) / self._inverse.diagonal()
        return saliency.masked_fill_(self.gone, torch.inf)

    def take_out_(self, out: Tensor) -> None:
        """Without these, and the others refitted."""
        if not len(out):
            return
        self.gone[out] = True
        out = torch.searchsorted(self._here, out)
        cross, size = self._inverse[:, out], len(self._here)
        shift, failed = torch.linalg.solve_ex(cross[out], torch.cat([cross.T, self._w[out]], 1))
        if failed:  # singular to round-off: neurons that say the same, or next to nothing
            shift = torch.linalg.pinv(cross[out], hermitian=True) @ torch.cat([cross.T, self._w[out]], 1)
        self._inverse.addmm_(cross, shift[:, :size], alpha=-1)  # rows and columns of what is gone become zero
        self._w.addmm_(cross, shift[:, size:], alpha=-1)
        left = ~self.gone[self._here]
        if left.sum() < CARRIED * len(left):
            self._here, self._w = self._here[left], self._w[left]
            self._inverse = self._inverse[left][:, left]

    @property
    def kept(self) -> Tensor:
        """Which are left."""
        return (~self.gone).nonzero().flatten()

    @property
    def weight(self) -> Tensor:
        """The output matrix of those."""
        return self._w[~self.gone[self._here]][:, -self._d_out :]


def _inverse(matrix: Tensor) -> Tensor:
    """Of a matrix that is positive definite, at least on paper."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    found: Tensor = torch.linalg.inv(matrix) if failed else torch.cholesky_inverse(factor)
    return found


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def fit_neurons(
    fit: Moments, held_out: Moments, kept: Tensor, weight: Tensor, *, biased: bool, ridges: tuple[float, ...] = RIDGES
) -> NeuronFit:
    """The exact output matrix of the kept neurons, its ridge the best on the held-out rows.

    Args:
        fit: moments of (z, y) rows; `kept` indexes into z.
        held_out: the same of other rows.
        kept: the neurons.
        weight: the output matrix as it was, [k, d_out]: what the ridge pulls towards.
        biased: whether the output has a bias.
        ridges: strengths to try, each relative to a neuron's own energy.
    """
    fit, held_out = fit.of_inputs(kept), held_out.of_inputs(kept)
    h0, y0 = fit.means if biased else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
    hh, hy, _ = fit.centred_on(h0, y0)
    held_hh, held_hy, _ = held_out.centred_on(h0, y0)
    before = weight[kept].to(hh)
    step, ridge = solve_ridged(hh, hy - hh @ before, held_hh, held_hy - held_hh @ before, ridges)
    out = before + step
    return NeuronFit(kept, out, y0 - out.T @ h0 if biased else None, ridge)


def solve_ridged(
    gram: Tensor, cross: Tensor, held_gram: Tensor, held_cross: Tensor, ridges: tuple[float, ...] = RIDGES
) -> tuple[Tensor, float]:
    """The ridge solution that errs least on held-out rows, and its ridge.

    The error falls and then rises along the ridges, so it is walked down from the middle: half of them are not tried.
    Of many outputs a few random mixtures are tried, for the mean square of an error along random directions is its own.
    """
    mixed = cross.shape[1] > 2 * SKETCH and len(ridges) > 1
    some, held_some = (_sketch(each) if mixed else each for each in (cross, held_cross))

    def tried(at: int) -> tuple[float, int, Tensor]:
        if not 0 <= at < len(ridges):
            return math.inf, at, gram
        w = _solve(gram, ridges[at], some)
        return ((w * (held_gram @ w)).sum() - 2 * (w * held_some).sum()).item(), at, w  # up to the target's energy

    best, up = tried(len(ridges) // 2), tried(len(ridges) // 2 + 1)
    best, step = (up, 1) if up[0] < best[0] else (best, -1)
    while (following := tried(best[1] + step))[0] < best[0]:
        best = following
    ridge = ridges[best[1]]
    return _solve(gram, ridge, cross) if mixed else best[2], ridge


def _sketch(cross: Tensor) -> Tensor:
    """Random mixtures of the outputs, always the same ones, [d_in, SKETCH]."""
    mixtures = torch.randn(cross.shape[1], SKETCH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return cross @ mixtures.to(cross)


def fit_hybrid(
    fit: Moments,
    held_out: Moments,
    kept: Tensor,
    weight: Tensor,
    ridges: tuple[float, ...] = RIDGES,
    *,
    metric: Metric | None = None,
) -> HybridFit:
    """Kept neurons and a linear bypass, fitted jointly, at every rank of the bypass.

    Args:
        fit: moments of (z, y) rows, z = [h, x].
        held_out: the same of other rows.
        kept: the neurons to keep, maybe none.
        weight: the output matrix as it was, [k, d_out]: what the neurons' ridge pulls towards.
        ridges: strengths to try for the neurons; the bypass has its own.
        metric: what an error costs by direction, for the choice of the bypass's directions.
    """
    xs = torch.arange(len(weight), fit.d_in, device=kept.device)
    fit, held_out = (m.of_inputs(torch.cat([kept, xs])) for m in (fit, held_out))
    width = len(kept)
    h, x = slice(width), slice(width, None)
    z0, y0 = fit.means
    before = weight[kept].to(fit.xx)
    # what the kept neurons give with their weights as they were is set aside: the rest is fitted, and shrinks to zero
    zz, zy, yy = _less(*fit.centred_on(z0, y0), before)
    held_zz, held_zy, held_yy = _less(*held_out.centred_on(z0, y0), before)
    ridge = 0.0
    from_h, out = zz[h, x], zy[h]  # without neurons, empty
    if width:
        ridge = ridges[0]
        if len(ridges) > 1:
            _, ridge = solve_ridged(zz[h, h], zy[h], held_zz[h, h], held_zy[h], ridges)
        from_h, out = _solve(zz[h, h], ridge, torch.cat([zz[h, x], zy[h]], 1)).split([len(xs), len(y0)], 1)
    # On the fit rows and the ridge's own rows, the remainders' moments are Schur complements: the fit is joint.
    residual = _centred(fit, zz[x, x] - zz[x, h] @ from_h, zy[x] - zz[x, h] @ out, yy - (zy[h] * out).sum(0))
    cross = held_zz[h, x] - held_zz[h, h] @ from_h
    held_xx = held_zz[x, x] - held_zz[x, h] @ from_h - from_h.T @ cross
    held_xy = held_zy[x] - from_h.T @ held_zy[h] - cross.T @ out
    held_yy = held_yy - 2 * (out * held_zy[h]).sum(0) + (out * (held_zz[h, h] @ out)).sum(0)
    held_residual = _centred(held_out, held_xx, held_xy, held_yy)
    bypass = fit_linear(residual, held_residual, BYPASS_RIDGES, metric=metric)
    errors = errors_by_rank(bypass, held_residual)
    return HybridFit(kept, z0[h], z0[x], y0, from_h, before + out, bypass, ridge, errors)


def _less(zz: Tensor, zy: Tensor, yy: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The moments of rows (z, y - before' h), h the first features of z."""
    given = zz[:, : len(before)] @ before
    return zz, zy - given, yy - 2 * (before * zy[: len(before)]).sum(0) + (before * given[: len(before)]).sum(0)


def around(ridge: float, ridges: tuple[float, ...]) -> tuple[float, ...]:
    """A ridge of a ladder and its neighbours: where one that served nearly the same fit is known."""
    at = ridges.index(ridge)
    return ridges[max(0, at - 1) : at + 2]


def _solve(gram: Tensor, ridge: float, cross: Tensor) -> Tensor:
    ridged = with_ridge(gram, ridge)
    factor, failed = torch.linalg.cholesky_ex(ridged)
    solution: Tensor = torch.cholesky_solve(cross, factor)
    if failed:  # semidefinite to round-off
        solution = torch.linalg.lstsq(ridged, cross, driver="gelsd").solution
    return solution


def with_ridge(gram: Tensor, ridge: float) -> Tensor:
    """gram + ridge x its diagonal, and a floor under what never varies."""
    energy = gram.diagonal()
    return gram + torch.diag(ridge * energy + 1e-12 * energy.max().clamp_min(1e-300))


def _centred(like: Moments, xx: Tensor, xy: Tensor, yy: Tensor) -> Moments:
    """Moments of rows whose means are taken to be zero."""
    return Moments(like.rows, like.weight, xx.new_zeros(len(xx)), xy.new_zeros(xy.shape[1]), xx, xy, yy)
