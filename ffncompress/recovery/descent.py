"""Least squares with more unknowns than can be factorised: conjugate gradients on a quadratic known by its products.

They begin at zero, the weights as they were, and leave them step by step; how far is chosen on held-out rows, as a
ridge would be. The error there is the same quadratic of other rows, so it is known at every step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

STEPS = 8
PATIENCE = 2  # steps without a gain on held-out rows before it is given up

Products = Callable[[Tensor], tuple[Tensor, Tensor]]  # of a direction with the normal matrices of fit and held-out rows


def descend(
    right: Tensor, held_right: Tensor, products: Products, whiten: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float] | None:
    """The step that serves held-out rows best, and by how much it changes their error; none where no step serves them.

    Args:
        right: half the gradient of the fit rows' error at zero, downhill.
        held_right: the same of the held-out rows.
        products: what multiplies a direction with both normal matrices.
        whiten: an approximate inverse of the first of them.
    """
    step, held_product = right.new_zeros(right.shape), right.new_zeros(right.shape)
    residual, direction = right.clone(), whiten(right)
    size = (residual * direction).sum()
    best, best_error, best_at = None, 0.0, -1
    for at in range(STEPS):
        product, held = products(direction)
        curvature = (direction * product).sum()
        if not curvature > 0:  # solved, or nothing to solve
            break
        length = size / curvature
        step += length * direction
        held_product += length * held
        residual -= length * product
        error = (step * (held_product - 2 * held_right)).sum().item()
        if error < best_error:
            best, best_error, best_at = step.clone(), error, at
        elif at - best_at >= PATIENCE:
            break
        white = whiten(residual)
        before, size = size, (residual * white).sum()
        direction = white + size / before * direction
    return None if best is None else (best, best_error)
