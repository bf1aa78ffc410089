"""The bilinear probe: how much of what a linear map leaves could one layer of products recover?

Beside the linear map stands one layer of degree 2 and rank k,

    y ~ b + W'x + U' phi,      phi = (A'x) * (B'x),      A, B [d_in, k],  U [k, d_out]

For given A and B the rest is a least-squares solution, so only A and B are searched (variable projection: at the
optimal U the gradient is the one with U held fixed): the products are freed of their own linear part, and U explains
what W left. x is whitened, or the search would crawl along the inputs' large directions. It begins with no products,
at the linear ceiling, and ends where sequences kept for that purpose say so; they also say how much of the products to
believe, and with which ridge the linear map is fitted to what they leave. What was found is measured on other
sequences still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffncompress.recovery.linear import LinearFit

RANK = 16
ROUNDS, STEPS, PATIENCE = 25, 4, 5  # of L-BFGS: rounds of steps, and rounds without a gain before it ends
MEMORY = 10  # past steps that L-BFGS learns the curvature from
WHITEN_FLOOR = 1e-3  # of a correlation matrix's mean eigenvalue: directions of next to no variance stay small
LINEAR_RIDGES = (1e-6, 1e-3, 1e-2, 1e-1)
RIDGE = 1e-6  # of the products


@dataclass(frozen=True)
class Bilinear:
    """A linear map and products beside it."""

    centre: Tensor  # [d_in]
    a: Tensor  # [d_in, k]
    b: Tensor  # [d_in, k]
    out: Tensor  # [k, d_out]
    weight: Tensor  # [d_in, d_out]
    bias: Tensor  # [d_out]
    steps: int

    def products(self, x: Tensor) -> Tensor:
        """What the products alone write, [rows, d_out]."""
        x = x - self.centre
        return (x @ self.a) * (x @ self.b) @ self.out

    def __call__(self, x: Tensor) -> Tensor:
        """The output that is predicted, [rows, d_out]."""
        return self.products(x) + (x - self.centre) @ self.weight + self.bias


def fit_bilinear(fit: LinearFit, x: Tensor, y: Tensor, stop_x: Tensor, stop_y: Tensor, seed: int) -> Bilinear:
    """Search A and B on rows (x, y), from the linear map; the best by the error on the stop rows.

    Args:
        fit: the linear map, where it begins.
        x: inputs, [rows, d_in].
        y: outputs, [rows, d_out].
        stop_x: inputs of other rows.
        stop_y: their outputs.
        seed: of the start.
    """
    white = Whitened(x)
    weight = fit.weight.to(x)
    begun = Bilinear(
        white.centre, x.new_zeros(x.shape[1], RANK), x.new_zeros(x.shape[1], RANK), x.new_zeros(RANK, y.shape[1]),
        weight, (fit.bias + fit.weight.T @ white.centre.to(fit.weight)).to(x), 0,
    )  # fmt: skip
    residual = y - begun(x)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(2, x.shape[1], RANK, generator=generator, dtype=x.dtype) / math.sqrt(x.shape[1])
    pair = start.requires_grad_(True)
    optimiser = torch.optim.LBFGS([pair], max_iter=STEPS, history_size=MEMORY, line_search_fn="strong_wolfe")
    total = residual.square().sum().clamp_min(1e-30)

    def loss() -> Tensor:
        """|r - phi U|^2 / |r|^2 at the best U, and its gradient, which needs no matrix as large as r."""
        optimiser.zero_grad()
        phi, _, _ = white.products(pair)
        with torch.no_grad():
            out = _solve(phi, residual)
            towards = residual @ out.T
            pull = towards - phi @ (out @ out.T)  # (r - phi U) U'
            value = 1 - (phi * (pull + towards)).sum() / total
        (-2 * (phi * pull).sum() / total).backward()  # type: ignore[no-untyped-call]
        return value

    def error(found: Bilinear) -> float:
        return (stop_y - found(stop_x)).square().sum().item()

    best, least, waited = begun, error(begun), 0
    for step in range(1, ROUNDS + 1):
        optimiser.step(loss)  # type: ignore[arg-type]
        with torch.no_grad():
            phi, means, slopes = white.products(pair)
            out = _solve(phi, residual)
            a, b = white.matrix @ pair[0], white.matrix @ pair[1]
            kept = weight - white.matrix @ slopes @ out
            found = Bilinear(white.centre, a, b, out, kept, begun.bias - means @ out, step * STEPS)
            found = _tempered(begun, found, stop_x, stop_y)
        now = error(found)
        waited = 0 if now < least else waited + 1
        if now < least:
            best, least = found, now
        if waited == PATIENCE:
            break
    left = y - best.products(x)
    return min([best, *(_refitted(best, white, left, ridge) for ridge in LINEAR_RIDGES)], key=error)


class Whitened:
    """Rows in the coordinates where they are white, by way of their correlation matrix."""

    def __init__(self, x: Tensor) -> None:
        self.centre = x.mean(0)
        scale = (x - self.centre).square().mean(0).sqrt().clamp_min(1e-12)
        scaled = ((x - self.centre) / scale).double()
        values, vectors = torch.linalg.eigh(scaled.T @ scaled / len(x))
        self.values = values.clamp_min(0)
        lifted = self.values + WHITEN_FLOOR
        self.matrix = ((vectors / lifted.sqrt()) / scale.double()[:, None]).to(x)
        self.rows = (x - self.centre) @ self.matrix

    def slopes(self, target: Tensor, ridge: float) -> Tensor:
        """The ridge regression of a target on the rows, in white coordinates."""
        shrink = (self.values + WHITEN_FLOOR) / (self.values + ridge)
        slopes: Tensor = shrink.to(target)[:, None] * (self.rows.T @ target) / len(self.rows)
        return slopes

    def products(self, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(phi [rows, k], the products' means [k], their slopes [d_in, k]): phi has neither mean nor slope left."""
        raw = (self.rows @ pair[0]) * (self.rows @ pair[1])
        means, slopes = raw.mean(0), self.slopes(raw, LINEAR_RIDGES[0])
        return raw - means - self.rows @ slopes, means, slopes


def _tempered(begun: Bilinear, found: Bilinear, stop_x: Tensor, stop_y: Tensor) -> Bilinear:
    """As much of the way from one to the other as the stop rows like best: rows are few for so many products."""
    start = begun(stop_x)
    change, wanted = found(stop_x) - start, stop_y - start
    part = ((change * wanted).sum() / change.square().sum().clamp_min(1e-30)).clamp(0, 1)
    weight, bias = (
        torch.lerp(one, other, part) for one, other in ((begun.weight, found.weight), (begun.bias, found.bias))
    )
    return replace(found, out=part * found.out, weight=weight, bias=bias)


def _refitted(found: Bilinear, white: Whitened, left: Tensor, ridge: float) -> Bilinear:
    """The same products, and the linear map of what they leave."""
    return replace(found, weight=white.matrix @ white.slopes(left, ridge), bias=left.mean(0))


def _solve(phi: Tensor, residual: Tensor) -> Tensor:
    """The best U for given products."""
    gram = (phi.T @ phi).double()
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    out: Tensor = torch.linalg.solve(gram, (phi.T @ residual).double()).to(phi)
    return out
