"""The modules that take an FFN's place, and what they weigh; their classes are in `modeling_ffncompress.py`.

Their parameters carry the names of the FFN's own projections, with other shapes. So a checkpoint opened without this
package cannot load quietly with a random FFN in place of ours: transformers stops at the size mismatch. Kept neurons
alone are the FFN's own class with narrower projections, which any runtime that allows a width per layer can read.
"""

from __future__ import annotations

import torch
from torch import nn

from ffncompress import modeling_ffncompress as loader
from ffncompress.modeling_ffncompress import BYPASS
from ffncompress.models import Block, Layout
from ffncompress.records.plan import Shape

__all__ = ["BYPASS", "build", "empty", "matrix_weights", "parameters"]


def build(shape: Shape, layout: Layout, ffn: nn.Module) -> nn.Module:
    """An uninitialised replacement for an FFN."""
    return loader.build(
        shape.kind, shape.width, shape.rank, layout.inner, layout.out, ffn, layout.fused, layout.activation
    )


def matrix_weights(shape: Shape, block: Block) -> int:
    """Parameters in the replacement's matrices: what a factor such as 8x counts."""
    if shape.kind == "dense":
        return block.d_in * block.d_out
    return shape.rank * (block.d_in + block.d_out) + shape.width * block.weights_per_neuron


def parameters(shape: Shape, block: Block) -> int:
    """All parameters of the replacement."""
    inline = block.layout.activation is not None
    rows = shape.width + shape.rank * (inline and shape.kind == "hybrid")  # a bypass inline is rows like neurons
    biases = rows * block.layout.leads * block.inner_bias if shape.width else 0
    biases += block.d_out * (shape.kind != "neurons")
    biases += block.d_out * (block.out_bias and shape.kind in ("neurons", "hybrid") and not (inline and shape.rank))
    return matrix_weights(shape, block) + biases + block.other_parameters * bool(shape.width)


def empty(shape: Shape, layout: Layout, ffn: nn.Module) -> nn.Module:
    """A replacement without storage, for shapes or to be filled by assignment."""
    with torch.device("meta"):
        return build(shape, layout, ffn)
