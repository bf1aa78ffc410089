"""The modules that stand in for an FFN.

Their parameters carry the names of the FFN's own projections, with other shapes. So a checkpoint opened without this
package cannot load quietly with a random FFN in place of ours: transformers stops at the size mismatch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ffncompress.models import Layout


class LinearFFN(nn.Module):
    """y = W x + b: one matrix, under the name of the FFN's output projection."""

    kind = "dense"

    def __init__(self, layout: Layout, d_in: int, d_out: int) -> None:
        super().__init__()
        self._out = layout.out
        self.add_module(layout.out, nn.Linear(d_in, d_out))

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        y: Tensor = self._modules[self._out](x)  # type: ignore[misc]
        return y


class LowRankFFN(nn.Module):
    """y = U (D x) + b: two thin matrices, under the names of the FFN's last inner and its output projection."""

    kind = "low-rank"

    def __init__(self, layout: Layout, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self._inner, self._out = layout.inner[-1], layout.out
        self.add_module(self._inner, nn.Linear(d_in, rank, bias=False))
        self.add_module(self._out, nn.Linear(rank, d_out))

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        z = self._modules[self._inner](x)  # type: ignore[misc]
        y: Tensor = self._modules[self._out](z)  # type: ignore[misc]
        return y


def build(kind: str, layout: Layout, d_in: int, d_out: int, rank: int) -> nn.Module:
    """An uninitialised stand-in of a kind; "dense" takes no notice of the rank."""
    if kind == LinearFFN.kind:
        return LinearFFN(layout, d_in, d_out)
    if kind == LowRankFFN.kind:
        return LowRankFFN(layout, d_in, d_out, rank)
    raise ValueError(f"unknown replacement kind {kind!r}")


def matrix_weights(kind: str, d_in: int, d_out: int, rank: int) -> int:
    """Parameters in the stand-in's matrices: what a budget counts."""
    return d_in * d_out if kind == LinearFFN.kind else rank * (d_in + d_out)
