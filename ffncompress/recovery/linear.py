"""The exact linear map of a block, at every rank, from moments.

With rows centred on the means of the fit rows, and S the diagonal of the inputs' standard deviations, the ridge
fit of strength k is

    W(k) = S^-1 (C + k I)^-1 S^-1 xy,      C = S^-1 xx S^-1  (a correlation matrix; scale-free, so k is too)

One eigendecomposition of C gives W for every k; k = 0 is ordinary least squares (minimum-norm where C is
singular). The error of any W on *other* rows follows from their moments:

    SSE(W) = yy - 2 tr(W' xy) + tr(W' xx W)

so k is chosen by the error on held-out moments. R2_lin is that of k = 0, on rows that nothing was chosen on. Among maps
of rank r, the best on the (ridge-augmented) fit rows keeps the r leading eigenvectors V of the fitted outputs' Gram
matrix, W_r = W V_r V_r' (reduced-rank regression). V is orthonormal, so the held-out error of every rank is one
cumulative sum:

    SSE(W_r) = yy - sum_{j <= r} [2 (V' W' xy V)_jj - (V' W' xx W V)_jj]

Where errors cost e'Me instead of |e|^2, the same holds of y in the coordinates of a root of M: the directions that
the loss feels come first. The map of full rank does not depend on M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffncompress.recovery.moments import Moments

METRIC_FLOOR = 1e-2  # of the mean: an error that the gradient did not see still is one
EXACT = (0.0,)
RIDGES = (0.0, *(10.0 ** (k / 2) for k in range(-18, 3)))  # 0, then 1e-9 to 10 by half decades


@dataclass(frozen=True)
class Metric:
    """What an error costs by direction, e'Me, as a root of M = root root' and its inverse, both [d_out, d_out]."""

    root: Tensor
    unroot: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Metric:
        """The roots of M, which is lifted a little where the loss feels next to nothing."""
        values, vectors = torch.linalg.eigh(matrix)
        values = (values.clamp_min(0) + METRIC_FLOOR * values.mean()).clamp_min(1e-300).sqrt()
        return cls(vectors * values, (vectors / values).T)


@dataclass(frozen=True)
class LinearFit:
    """A fitted map y ~ y0 + W'(x - x0), and the order in which its output directions matter.

    At rank r the output is y0 + sum_{j <= r} directions_j (readings_j' W'(x - x0)); without a metric both are the same
    orthonormal columns.
    """

    weight: Tensor  # [d_in, d_out]
    x0: Tensor  # [d_in], mean of the fit rows
    y0: Tensor  # [d_out]
    directions: Tensor  # [d_out, d_out], columns by falling energy of the fitted output
    readings: Tensor  # [d_out, d_out], columns dual to them
    energies: Tensor  # [d_out], of the fitted output along each direction
    ridge: float

    @property
    def bias(self) -> Tensor:
        """b of y ~ W'x + b."""
        return self.y0 - self.weight.T @ self.x0

    @property
    def max_rank(self) -> int:
        """The highest rank that there is."""
        return min(self.weight.shape)

    def to(self, where: torch.device | torch.dtype | str) -> LinearFit:
        """The same map on another device, or in another precision."""
        weight, x0, y0 = self.weight.to(where), self.x0.to(where), self.y0.to(where)
        directions, readings, energies = (t.to(where) for t in (self.directions, self.readings, self.energies))
        return LinearFit(weight, x0, y0, directions, readings, energies, self.ridge)

    def cpu(self) -> LinearFit:
        """The same map in main memory."""
        return self.to("cpu")

    def at_rank(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """(down [rank, d_in], up [d_out, rank], bias) of the best map of that rank; it keeps to the means."""
        up = self.directions[:, :rank]
        down = (self.weight @ self.readings[:, :rank]).T
        return down, up, self.y0 - up @ (down @ self.x0)


def fit_linear(
    fit: Moments, held_out: Moments, ridges: tuple[float, ...] = RIDGES, *, metric: Metric | None = None
) -> LinearFit:
    """The least-squares map of the fit rows, its ridge, where there is a choice, the best on the held-out rows.

    Args:
        fit: moments of (x, y) rows.
        held_out: the same of other rows.
        ridges: strengths to try.
        metric: what an error costs by direction; none: all directions alike.
    """
    x0, y0 = fit.means
    xx, xy, _ = fit.centred_on(x0, y0)
    scale = (xx.diagonal() / fit.weight).clamp_min(0).sqrt()
    alive = scale > 1e-12 * scale.max().clamp_min(1e-300)
    inverse = torch.where(alive, 1 / scale.clamp_min(1e-300), torch.zeros_like(scale))
    values, vectors = torch.linalg.eigh(xx * torch.outer(inverse, inverse) / fit.weight)
    values = values.clamp_min(0)
    basis = inverse[:, None] * vectors  # columns: eigenvectors in units of x
    target = basis.T @ xy / fit.weight  # [d_in, d_out]

    best = ridges[0]
    if len(ridges) > 1:
        held_xx, held_xy, _ = held_out.centred_on(x0, y0)
        # W(k) = basis diag(shrink) target, so its error is quadratic in shrink: a ridge costs a vector's product
        square = (basis.T @ held_xx @ basis) * (target @ target.T)
        slope = ((basis.T @ held_xy) * target).sum(1)

        def held_out_error(ridge: float) -> float:  # up to the outputs' energy
            shrink = _shrink(values, ridge)
            return float(shrink @ square @ shrink - 2 * shrink @ slope)

        best = min(ridges, key=held_out_error)
    shrink = _shrink(values, best)
    weight = basis @ (shrink[:, None] * target)
    seen = target if metric is None else target @ metric.root
    # root' W'(xx + ridge) W root in the eigenbasis, where xx is diagonal
    fitted = seen.T @ ((shrink * shrink * (values + best))[:, None] * seen)
    energies, directions = torch.linalg.eigh(fitted)
    energies, directions = energies.flip(0).clamp_min(0), directions.flip(1)
    dual = (directions, directions) if metric is None else (metric.unroot.T @ directions, metric.root @ directions)
    return LinearFit(weight, x0, y0, *dual, energies, best)


def _shrink(values: Tensor, ridge: float) -> Tensor:
    """1 / (value + ridge), and 0 for a direction that the inputs never take."""
    floor = values.max() * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > floor, 1 / (values + ridge).clamp_min(1e-300), torch.zeros_like(values))


def _squared_error(w: Tensor, xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Squared error of each output feature of the centred map w, [d_out]."""
    return yy - 2 * (w * xy).sum(0) + (w * (xx @ w)).sum(0)


def feature_errors(fit: LinearFit, rows: Moments) -> Tensor:
    """Squared error of each output feature on these rows, full rank, [d_out]."""
    return _squared_error(fit.weight, *rows.centred_on(fit.x0, fit.y0)).clamp_min(0)


def errors_by_rank(fit: LinearFit, rows: Moments) -> Tensor:
    """Squared error over all features at rank 0, 1, ..., max_rank on these rows, [max_rank + 1]."""
    xx, xy, yy = rows.centred_on(fit.x0, fit.y0)
    read = fit.weight @ fit.readings  # [d_in, d_out]
    gains = 2 * (read * (xy @ fit.directions)).sum(0)
    # the energy of r columns is a corner of this matrix, which grows by a row and a column; diagonal without a metric
    energy = (read.T @ xx @ read) * (fit.directions.T @ fit.directions)
    gains -= 2 * energy.tril(-1).sum(1) + energy.diagonal()
    total = yy.sum()
    return torch.cat([total[None], total - gains[: fit.max_rank].cumsum(0)]).clamp_min(0)
