"""Streamed sufficient statistics of rows (x, y).

For rows x_t, y_t with weights w_t we keep, in float64,

    weight = sum w_t      x = sum w_t x_t      xx = sum w_t x_t x_t'
    rows   = sum 1        y = sum w_t y_t      xy = sum w_t x_t y_t'      yy = sum w_t y_t y_t'

Every least-squares fit, and its error on other rows, is a function of these alone, so no activation is ever
kept. They add: batches, processes and machines just sum. `yy` may be kept as its diagonal only, [d_out]: that is
enough for every R2, and a third cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Moments:
    """Sufficient statistics of (x, y) rows; see the module's docstring for the equations."""

    rows: Tensor  # []
    weight: Tensor  # []
    x: Tensor  # [d_in]
    y: Tensor  # [d_out]
    xx: Tensor  # [d_in, d_in]
    xy: Tensor  # [d_in, d_out]
    yy: Tensor  # [d_out, d_out], or its diagonal [d_out]

    @classmethod
    def zeros(cls, d_in: int, d_out: int, *, full_yy: bool = True, device: torch.device | str = "cpu") -> Moments:
        """The moments of no rows."""

        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        yy = zero(d_out, d_out) if full_yy else zero(d_out)
        return cls(zero(), zero(), zero(d_in), zero(d_out), zero(d_in, d_in), zero(d_in, d_out), yy)

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weights: Tensor | None = None, *, full_yy: bool = True) -> Moments:
        """The moments of some rows: x [rows, d_in], y [rows, d_out], weights [rows]."""
        moments = cls.zeros(x.shape[-1], y.shape[-1], full_yy=full_yy, device=x.device)
        moments.update_(x, y, weights)
        return moments

    def update_(
        self, x: Tensor, y: Tensor, weights: Tensor | None = None, products: torch.dtype = torch.float64
    ) -> None:
        """Add rows in place.

        Args:
            x: inputs, [rows, d_in].
            y: outputs, [rows, d_out].
            weights: of the rows, [rows].
            products: the precision in which the rows of this call are multiplied; their sum is added in float64.
        """
        x, y = x.to(products), y.to(products)
        own = torch.ones(len(x), dtype=products, device=x.device) if weights is None else weights.to(products)
        wx, wy = x * own[:, None], y * own[:, None]
        self.rows += len(x)
        self.weight += own.double().sum()
        self.x += wx.double().sum(0)
        self.y += wy.double().sum(0)
        _add_gram_(self.xx, wx, x)
        self.xy += wx.T @ y
        if self.yy.dim() == 2:
            _add_gram_(self.yy, wy, y)
        else:
            self.yy += (wy * y).sum(0)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def mapped(self, weight: Tensor, bias: Tensor | None = None, *, added: bool = False) -> Moments:
        """The moments of the same inputs with outputs weight' h + bias, h the first of them: no row is needed.

        Args:
            weight: [h, d_out].
            bias: [d_out], or none.
            added: these outputs come on top of the old ones instead of in their place.
        """
        h = slice(len(weight))
        weight = weight.to(self.xx)
        bias = torch.zeros_like(weight[0]) if bias is None else bias.to(self.xx)
        xy, y = self.xx[:, h] @ weight, weight.T @ self.x[h]  # without the bias
        yy = (weight * xy[h]).sum(0) + 2 * bias * y + self.weight * bias**2
        xy, y = xy + torch.outer(self.x, bias), y + self.weight * bias
        if added:
            yy = yy + self.y_energy + 2 * ((weight * self.xy[h]).sum(0) + bias * self.y)
            xy, y = xy + self.xy, y + self.y
        return Moments(self.rows, self.weight, self.x, y, self.xx, xy, yy)

    def of_inputs(self, at: slice | Tensor) -> Moments:
        """The moments of the same rows with only some of the input features."""
        return Moments(self.rows, self.weight, self.x[at], self.y, self.xx[at][:, at], self.xy[at], self.yy)

    def tensors(self) -> list[Tensor]:
        """The live tensors, in a fixed order, for a reduction over processes."""
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def d_in(self) -> int:
        """How many input features there are."""
        return self.x.shape[0]

    @property
    def d_out(self) -> int:
        """How many output features there are."""
        return self.y.shape[0]

    @property
    def y_energy(self) -> Tensor:
        """sum w y^2 of each output feature, [d_out]."""
        return self.yy.diagonal() if self.yy.dim() == 2 else self.yy

    def centred_on(self, x0: Tensor, y0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(xx, xy, diagonal of yy) of the rows (x - x0, y - y0)."""
        xx = self.xx - torch.outer(self.x, x0) - torch.outer(x0, self.x) + self.weight * torch.outer(x0, x0)
        xy = self.xy - torch.outer(self.x, y0) - torch.outer(x0, self.y) + self.weight * torch.outer(x0, y0)
        yy = self.y_energy - 2 * self.y * y0 + self.weight * y0**2
        return xx, xy, yy

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The weighted means of x and of y."""
        return self.x / self.weight, self.y / self.weight

    def covariance_x(self) -> Tensor:
        """Of the inputs, [d_in, d_in]."""
        mean = self.x / self.weight
        return self.xx / self.weight - torch.outer(mean, mean)

    def covariance_y(self) -> Tensor:
        """Of the outputs, [d_out, d_out]; only where `yy` is kept whole."""
        if self.yy.dim() != 2:
            raise ValueError("these moments keep only the diagonal of yy")
        mean = self.y / self.weight
        return self.yy / self.weight - torch.outer(mean, mean)

    def total_squares(self) -> Tensor:
        """Sum of squares of each output feature about its own mean, [d_out]."""
        return self.y_energy - self.y**2 / self.weight


def _add_gram_(gram: Tensor, wx: Tensor, x: Tensor, block: int = 128) -> None:
    """gram += (w x)' x, which is symmetric: the blocks above the diagonal are copied, a third of the work saved."""
    for start in range(0, len(gram), block):
        end = min(start + block, len(gram))
        product = wx[:, start:end].T @ x[:, :end]
        gram[start:end, :end] += product
        gram[:start, start:end] += product[:, :start].T
