"""What is measured of a block, from moments.

R2_lin is 1 - SSE/SST over held-out rows, all output features pooled, for the closed-form map: how much of what the
block does a single matrix could do. It says nothing of how much the model minds the rest: it divides by the
block's own variance, and a few giant features can carry it. So beside it stand the median feature's R2, effective
ranks, and what is lost relative to the residual stream that the output is added to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffncompress.recovery.linear import LinearFit, feature_errors
from ffncompress.recovery.moments import Moments


def r2(fit: LinearFit, rows: Moments) -> float:
    """Pooled R2 of the map on these rows, about the rows' own mean."""
    return 1 - (feature_errors(fit, rows).sum() / rows.total_squares().sum().clamp_min(1e-300)).item()


def feature_r2(fit: LinearFit, rows: Moments) -> Tensor:
    """R2 of each output feature, [d_out]: the median is far below the pooled R2 where a few giant features carry it."""
    return 1 - feature_errors(fit, rows) / rows.total_squares().clamp_min(1e-300)


def effective_rank(spectrum: Tensor) -> float:
    """exp of the entropy of a non-negative spectrum: how many directions carry it (Roy & Vetterli, 2007)."""
    p = spectrum.clamp_min(0)
    p = p[p > 0] / p.sum()
    return torch.exp(-(p * p.log()).sum()).item() if len(p) else 0.0


def participation_ratio(spectrum: Tensor) -> float:
    """(sum p)^2 / sum p^2: another count of the directions that carry a spectrum, which minds the largest more."""
    p = spectrum.clamp_min(0)
    return (p.sum().square() / p.square().sum()).item() if p.sum() > 0 else 0.0


def spectrum_of(covariance: Tensor) -> Tensor:
    """The eigenvalues of a covariance, none below zero."""
    values: Tensor = torch.linalg.eigvalsh(covariance)
    return values.clamp_min(0)


def condition_number(spectrum: Tensor) -> float:
    """Largest over smallest positive eigenvalue of the input covariance, up to what float64 resolves."""
    floor = spectrum.max() * len(spectrum) * torch.finfo(spectrum.dtype).eps
    kept = spectrum[spectrum > floor]
    return (kept.max() / kept.min()).item() if len(kept) else float("inf")


def dynamic_range(covariance: Tensor) -> float:
    """Largest over smallest positive variance of a feature: what a change of units alone could mend."""
    variances = covariance.diagonal()
    kept = variances[variances > 1e-12 * variances.max()]
    return (kept.max() / kept.min()).item() if len(kept) else float("inf")


def r2_interval(squared_errors: Tensor, rows: Tensor, sums: Tensor, squares: Tensor) -> float:
    """Standard error of the pooled R2 by the jackknife over sequences.

    Tokens of a sequence are not independent, so whole sequences are left out.

    Args:
        squared_errors: SSE of each sequence, [n].
        rows: rows of each sequence, [n].
        sums: output sums of each sequence, [n, d_out].
        squares: sum of squared outputs of each sequence, [n].
    """
    n = len(rows)
    if n < 2:
        return float("nan")
    left_rows = rows.sum() - rows
    left_sums = sums.sum(0) - sums
    total = (squares.sum() - squares) - (left_sums**2).sum(1) / left_rows
    values = 1 - (squared_errors.sum() - squared_errors) / total.clamp_min(1e-300)
    return ((n - 1) / n * ((values - values.mean()) ** 2).sum()).sqrt().item()
