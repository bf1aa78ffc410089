"""The modules that stand in for an FFN.

Their parameters carry the names of the FFN's own projections, with other shapes. So a checkpoint opened without this
package cannot load quietly with a random FFN in place of ours: transformers stops at the size mismatch. Kept neurons
alone are the FFN's own class with narrower projections, which any runtime that allows a width per layer can read.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.models import REPLACEMENT, Block, Layout, in_out
from ffncompress.records.plan import Kind, Shape

BYPASS = ("bypass_down", "bypass_up")


class LinearFFN(nn.Module):
    """y = W x + b: one matrix, under the name of the FFN's output projection."""

    def __init__(self, layout: Layout, d_in: int, d_out: int) -> None:
        super().__init__()
        self._out = layout.out
        self.add_module(layout.out, nn.Linear(d_in, d_out))

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """W x + b; what a family passes along is of no use here."""
        y: Tensor = getattr(self, self._out)(x)
        return y


class LowRankFFN(nn.Module):
    """y = U (D x) + b: two thin matrices, under the names of the FFN's last inner and its output projection."""

    def __init__(self, layout: Layout, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self._inner, self._out = layout.inner[-1], layout.out
        self.add_module(self._inner, nn.Linear(d_in, rank, bias=False))
        self.add_module(self._out, nn.Linear(rank, d_out))

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """U (D x) + b."""
        z = getattr(self, self._inner)(x)
        y: Tensor = getattr(self, self._out)(z)
        return y


class ConstantFFN(nn.Module):
    """y = b: an output projection with nothing to project."""

    def __init__(self, layout: Layout, d_out: int) -> None:
        super().__init__()
        self._out = layout.out
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a matrix without elements; that is the point of it
            self.add_module(layout.out, nn.Linear(0, d_out))

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """b, for every token."""
        bias: Tensor = getattr(self, self._out).bias
        return bias.expand(*x.shape[:-1], -1)


@cache
def _with_bypass(own: type[nn.Module]) -> type[nn.Module]:
    """The FFN's own class, with a low-rank linear map of its input added to its output."""

    class HybridFFN(own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
            y: Tensor = super().forward(x, *args, **kwargs)
            bypass: Tensor = self.bypass_up(self.bypass_down(x))
            return y + bypass

    return HybridFFN


def build(shape: Shape, layout: Layout, ffn: nn.Module) -> nn.Module:
    """An uninitialised replacement for an FFN."""
    module = _built(shape, layout, ffn)
    setattr(module, REPLACEMENT, True)
    return module


def _built(shape: Shape, layout: Layout, ffn: nn.Module) -> nn.Module:
    d_in, _ = in_out(ffn.get_submodule(layout.inner[0]))
    _, d_out = in_out(ffn.get_submodule(layout.out))
    if shape.kind == "dense":
        return LinearFFN(layout, d_in, d_out)
    if shape.kind == "low-rank":
        return LowRankFFN(layout, d_in, d_out, shape.rank)
    if shape.kind == "constant":
        return ConstantFFN(layout, d_out)
    if shape.kind not in get_args(Kind):
        raise ValueError(f"unknown replacement kind {shape.kind!r}")
    module = _narrowed(ffn, layout, shape.width)
    if shape.kind == "hybrid":
        module.__class__ = _with_bypass(type(module))  # type: ignore[arg-type]
        down, up = BYPASS
        module.add_module(down, nn.Linear(d_in, shape.rank, bias=False))
        module.add_module(up, nn.Linear(shape.rank, d_out))
    return module


def matrix_weights(shape: Shape, block: Block) -> int:
    """Parameters in the replacement's matrices: what a factor such as 8x counts."""
    if shape.kind == "dense":
        return block.d_in * block.d_out
    return shape.rank * (block.d_in + block.d_out) + shape.width * block.weights_per_neuron


def parameters(shape: Shape, block: Block) -> int:
    """All parameters of the replacement."""
    biases = shape.width * len(block.layout.inner) * block.inner_bias
    biases += block.d_out * (shape.kind != "neurons")
    biases += block.d_out * (block.out_bias and shape.kind in ("neurons", "hybrid"))
    return matrix_weights(shape, block) + biases


def _narrowed(ffn: nn.Module, layout: Layout, width: int) -> nn.Module:
    names = (*layout.inner, layout.out)
    placeholders: dict[int, object] = {id(ffn.get_submodule(name)): nn.Identity() for name in names}
    module = copy.deepcopy(ffn, placeholders)  # all but its matrices
    for name in ("forward", "_hf_hook", "_old_forward"):  # accelerate's, bound to the original
        module.__dict__.pop(name, None)
    for name in names:
        own = ffn.get_submodule(name)
        d_in, d_out = in_out(own)
        size = (width, d_out) if name == layout.out else (d_in, width)
        module._modules[name] = _projection(own, *size)
    return module


def _projection(like: nn.Module, d_in: int, d_out: int) -> nn.Module:
    if isinstance(like, Conv1D):
        return Conv1D(d_out, d_in)
    return nn.Linear(d_in, d_out, bias=like.bias is not None)


def empty(shape: Shape, layout: Layout, ffn: nn.Module) -> nn.Module:
    """A replacement without storage, for shapes or to be filled by assignment."""
    with torch.device("meta"):
        return build(shape, layout, ffn)
