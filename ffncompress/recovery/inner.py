"""The matrices that lead into an FFN, refitted beside the one that leads out: Gauss-Newton on held rows.

An FFN is y = W'h + b, h = f(z_1, .., z_m) neuron by neuron, z_i = U_i x (one such matrix, or a gate and an up). With
neurons gone, the rows of U_i that are kept can take over part of what is left. For small steps D_i,

    y moves by W' sum_i (a_i * D_i x),    a_i = dh / dz_i;

exactly so for a matrix that a gate multiplies. Minimising sum w |left - that|^2 is a least-squares problem. Its
unknowns are too many to factorise, but its normal matrix can be multiplied with, from rows alone:

    N(D)_i = sum w (a_i * W W' sum_j (a_j * D_j x)) x'.

Conjugate gradients solve it (see descent.py), in coordinates where x is white and neurons are equally loud.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncompress.recovery.descent import descend

WHITENING_FLOOR = 1e-3  # of the mean energy of x: what is hardly there is not stretched
ENERGY_FLOOR = 1e-2  # the same of neurons


@dataclass(frozen=True)
class InnerRows:
    """Rows of an FFN with kept neurons in its place."""

    x: Tensor  # [rows, d_in]
    slopes: Tensor  # [m, rows, width]: how h moves with each z
    left: Tensor  # [rows, d_out]: the target less the output
    weights: Tensor  # [rows]
    held_out: bool

    def moved(self, steps: Tensor, out: Tensor) -> Tensor:
        """By how much y moves to first order, [rows, d_out]."""
        h = sum(slope * (self.x @ step.T) for slope, step in zip(self.slopes, steps.to(self.x), strict=True))
        assert isinstance(h, Tensor)
        return h @ out.to(h)

    def gradient(self, error: Tensor, out: Tensor) -> Tensor:
        """sum w (a_i * W error) x' for each i, [m, width, d_in]."""
        felt = (self.weights.to(error)[:, None] * error) @ out.to(error).T
        return torch.stack([(slope * felt).T @ self.x for slope in self.slopes])


Batches = Callable[[], Iterable[InnerRows]]  # all rows, once more at each call
Total = Callable[[list[Tensor]], None]  # sums each tensor over the processes, in place


def inner_steps(batches: Batches, like: Tensor, out: Tensor, total: Total) -> Tensor | None:
    """The steps of the inner matrices that serve held-out rows best, to first order; none where no step serves them.

    Args:
        batches: the rows, fit and held-out.
        like: the inner matrices, [m, width, d_in].
        out: W, [width, d_out].
        total: what makes sums those of all processes.
    """
    right, held_right, whiten = _right_hand_sides(batches, like, out, total)
    found = descend(right, held_right, lambda direction: _products(batches, direction, out, total), whiten)
    return None if found is None else found[0]


def _right_hand_sides(
    batches: Batches, like: Tensor, out: Tensor, total: Total
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The gradients of the fit rows and of the held-out rows at D = 0, and the map into white coordinates."""
    right, held_right = (torch.zeros_like(like, dtype=torch.float64) for _ in range(2))
    xx, energy = right.new_zeros(like.shape[2], like.shape[2]), right.new_zeros(like.shape[:2])
    for rows in batches():
        (held_right if rows.held_out else right).add_(rows.gradient(rows.left, out))
        if not rows.held_out:
            weights = rows.weights.to(rows.x)[:, None]
            xx += (weights * rows.x).T @ rows.x
            energy += (weights * rows.slopes.square()).sum(1)
    total([right, held_right, xx, energy])
    energy = energy * out.to(energy).square().sum(1)
    energy = energy + ENERGY_FLOOR * energy.mean().clamp_min(1e-300)
    xx = xx / xx.diagonal().mean().clamp_min(1e-300)
    xx.diagonal().add_(WHITENING_FLOOR)
    factor = torch.linalg.cholesky(xx)

    def whiten(gradient: Tensor) -> Tensor:
        scaled = gradient / energy[..., None]
        return torch.cholesky_solve(scaled.flatten(0, 1).T, factor).T.reshape(gradient.shape)

    return right, held_right, whiten


def _products(batches: Batches, direction: Tensor, out: Tensor, total: Total) -> tuple[Tensor, Tensor]:
    """N(direction) of the fit rows, and of the held-out rows."""
    fit, held_out = torch.zeros_like(direction), torch.zeros_like(direction)
    for rows in batches():
        (held_out if rows.held_out else fit).add_(rows.gradient(rows.moved(direction, out), out))
    total([fit, held_out])
    return fit, held_out
