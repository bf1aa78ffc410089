"""The output matrix of more neurons than a Gram matrix is kept of, from rows.

Let r be what is left of the target, D the step of the output matrix, E the neurons' energies, and P where a ridge k
pulls the step. D minimises sum w |r - D'h|^2 + k |D - P|^2_E, so it solves

    (sum w h h' + k E) D = sum w h r' + k E P.

The matrix is only multiplied with, from rows. Its blocks along the diagonal are known, for runs of neurons, and their
inverses stand for the whole one's: conjugate gradients (see descent.py) find in a few steps what lies between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncompress.recovery.descent import descend
from ffncompress.recovery.neurons import with_ridge


@dataclass(frozen=True)
class OutRows:
    """Rows of an FFN with kept neurons in its place."""

    h: Tensor  # [rows, width]
    left: Tensor  # [rows, d_out]: the target less the output
    weights: Tensor  # [rows]
    held_out: bool

    def gradient(self, error: Tensor) -> Tensor:
        """sum w h error', [width, d_out]."""
        return self.h.T @ (self.weights[:, None] * error).to(self.h)


def out_steps(
    batches: Callable[[], Iterable[OutRows]],
    grams: Sequence[Tensor],
    pull: Tensor,
    ridge: float,
    total: Callable[[list[Tensor]], None],
) -> tuple[Tensor, float] | None:
    """The step of the output matrix that serves held-out rows best, and what it changes; none where no step does.

    Args:
        batches: the rows, fit and held-out, once more at each call.
        grams: sum w h h' of the fit rows, of each run of neurons.
        pull: where the ridge pulls the step, [width, d_out].
        ridge: relative to each neuron's own energy.
        total: what makes sums those of all processes.
    """
    energy = ridge * torch.cat([gram.diagonal() for gram in grams])[:, None]
    factors = [torch.linalg.cholesky(with_ridge(gram, ridge)) for gram in grams]

    def sums(error: Callable[[OutRows], Tensor]) -> tuple[Tensor, Tensor]:
        fit, held_out = (torch.zeros_like(pull, dtype=torch.float64) for _ in range(2))
        for rows in batches():
            (held_out if rows.held_out else fit).add_(rows.gradient(error(rows)))
        total([fit, held_out])
        return fit, held_out

    def products(direction: Tensor) -> tuple[Tensor, Tensor]:
        fit, held_out = sums(lambda rows: rows.h @ direction.to(rows.h))
        return fit + energy * direction, held_out

    def whiten(gradient: Tensor) -> Tensor:
        parts = gradient.split([len(factor) for factor in factors])
        return torch.cat([torch.cholesky_solve(*each) for each in zip(parts, factors, strict=True)])

    right, held_right = sums(lambda rows: rows.left)
    return descend(right + energy * pull, held_right, products, whiten)
