"""Every replacement as the neurons of an ordinary FFN: what a linear map does is folded into neurons, exactly.

A gated FFN computes U (silu(G x + g) * (D x + d)) + b. A neuron with gate row 0 and gate bias 32 has the gate
silu(32) = 32, in float32 to the last bit, so it passes on 32 times its up projection: a linear map of rank r is r such
neurons. An ungated one has no gate to hold open; act(z) - act(-z) = z then serves, with two neurons for a rank.
Scales are powers of two, so folding rounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ffncompress.errors import ModelError
from ffncompress.modeling_ffncompress import BYPASS, ConstantFFN, LinearFFN, LowRankFFN
from ffncompress.models import Layout, oriented

GATE_BIAS = 32.0  # silu(32) = 32 in float32, and a power of two
LONG_ROWS = 64.0  # the norm of a folded row where there is no gate
PAIRED = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")  # act(z) - act(-z) = z


@dataclass(frozen=True)
class PlainFFN:
    """An FFN as any runtime knows it: rows [neurons, d] into it, columns [d, neurons] out of it, and biases."""

    inner: tuple[Tensor, ...]  # gate and up, or up alone
    out: Tensor
    inner_bias: tuple[Tensor | None, ...]
    out_bias: Tensor | None

    @property
    def width(self) -> int:
        """How many neurons it has."""
        return self.out.shape[1]


@dataclass(frozen=True)
class LinearPart:
    """U D x + b, what a replacement adds to its neurons; D of no rows where there is only b."""

    down: Tensor
    up: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Split:
    """A replacement taken apart: neurons of the family's own kind, and a linear part where it has one."""

    neurons: PlainFFN
    linear: LinearPart | None


def split(module: nn.Module, layout: Layout, d: int) -> Split:
    """Take an FFN or a replacement apart, in float32.

    Args:
        module: what stands in the FFN's place.
        layout: how the family names its projections.
        d: the width of the residual stream.

    Raises:
        ModelError: it is neither an FFN of this layout nor a replacement.
    """
    with torch.inference_mode():
        if isinstance(module, ConstantFFN | LinearFFN | LowRankFFN):
            return _split_linear(module, layout, d)
        if not all(hasattr(module, name) for name in (*layout.inner, layout.out)):
            raise ModelError(f"{type(module).__name__}: not an FFN of a known layout; export its base model instead")
        neurons = _neurons(module, layout)
        if not hasattr(module, BYPASS[0]):
            return Split(neurons, None)
        down, up = (module.get_submodule(name) for name in BYPASS)
        return Split(neurons, LinearPart(_matrix(down), _matrix(up), _bias(up)))


def _split_linear(module: nn.Module, layout: Layout, d: int) -> Split:
    count = len(layout.inner)
    none = PlainFFN((torch.zeros(0, d),) * count, torch.zeros(d, 0), (None,) * count, None)
    bias = module.float()(torch.zeros(1, d))[0].clone()  # of no input, however it is stored
    if isinstance(module, ConstantFFN):
        return Split(none, LinearPart(torch.zeros(0, d), torch.zeros(d, 0), bias))
    up = _matrix(module.get_submodule(layout.out))
    down = _matrix(module.get_submodule(layout.inner[-1])) if isinstance(module, LowRankFFN) else torch.eye(d)
    return Split(none, LinearPart(down, up, bias))


def _neurons(module: nn.Module, layout: Layout) -> PlainFFN:
    inner = [module.get_submodule(name) for name in layout.inner]
    out = module.get_submodule(layout.out)
    return PlainFFN(tuple(map(_matrix, inner)), _matrix(out), tuple(map(_bias, inner)), _bias(out))


def _matrix(projection: nn.Module) -> Tensor:
    return oriented(projection).detach().float()


def _bias(projection: nn.Module) -> Tensor | None:
    bias = getattr(projection, "bias", None)
    return bias.detach().float() if isinstance(bias, Tensor) else None


def median_norm(parts: list[Split]) -> float:
    """The median norm of the neurons' output columns: what quantisation in groups sees as ordinary."""
    norms = torch.cat([part.neurons.out.norm(dim=0) for part in parts])
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 0.0


def fold(part: Split, typical: float) -> PlainFFN:
    """One FFN of neurons alone that computes what the neurons and the linear part do.

    Args:
        part: what was taken apart.
        typical: the norm that folded output columns get, to a power of two; with columns of another size, formats
            that share a scale among neighbours would lose the smaller ones.
    """
    linear = part.linear
    if linear is None:
        return part.neurons
    own = part.neurons
    bias = _added(own.out_bias, linear.bias)
    own_typical = median_norm([part]) or typical
    if len(own.inner) == 1:
        return _fold_in_pairs(own, linear, bias)
    rank = linear.down.shape[0]
    scale = _power_of_two(linear.up.norm(dim=0) / GATE_BIAS, linear.down.norm(dim=1), own_typical)
    gate_bias, up_bias = (_filled(b, own.width) for b in own.inner_bias)
    return PlainFFN(
        inner=(
            torch.cat([own.inner[0], torch.zeros_like(linear.down)]),
            torch.cat([own.inner[1], linear.down * scale[:, None]]),
        ),
        out=torch.cat([own.out, linear.up / (GATE_BIAS * scale)], dim=1),
        inner_bias=(
            torch.cat([gate_bias, torch.full((rank,), GATE_BIAS)]) if rank or own.inner_bias[0] is not None else None,
            torch.cat([up_bias, torch.zeros(rank)]) if own.inner_bias[1] is not None else None,
        ),
        out_bias=bias,
    )


def _fold_in_pairs(own: PlainFFN, linear: LinearPart, bias: Tensor | None) -> PlainFFN:
    """act(z) - act(-z) = z: two neurons for a rank, for an FFN without a gate.

    The rows are made long, for an activation that is looked up in a table of 16-bit numbers is exact where it is
    nearly linear; and a group of 32 neurons that shares a scale holds folded ones alone.
    """
    rank = linear.down.shape[0]
    rows = linear.down.norm(dim=1)
    scale = torch.exp2((LONG_ROWS / rows.where(rows > 0, torch.ones_like(rows))).log2().round())
    own = pad(own, -(-own.width // 32) * 32) if rank else own
    down, up = linear.down * scale[:, None], linear.up / scale
    inner_bias = torch.cat([_filled(own.inner_bias[0], own.width), torch.zeros(2 * rank)])
    return PlainFFN(
        inner=(torch.cat([own.inner[0], down, -down]),),
        out=torch.cat([own.out, up, -up], dim=1),
        inner_bias=(inner_bias if own.inner_bias[0] is not None else None,),
        out_bias=bias,
    )


def _power_of_two(columns: Tensor, rows: Tensor, typical: float) -> Tensor:
    """For each folded neuron, the power of two that brings its column near the typical norm.

    Without a typical norm, row and column are made alike.
    """
    wanted = columns / typical if typical else (columns / rows).sqrt()
    usable = (columns > 0) & (rows > 0)
    exponent = wanted.where(usable, torch.ones_like(wanted)).log2().round().clamp(-24, 24)
    return torch.exp2(exponent)


def pad(ffn: PlainFFN, width: int) -> PlainFFN:
    """The same FFN with neurons that do nothing, up to a width."""
    more = width - ffn.width
    if more <= 0:
        return ffn
    d = ffn.out.shape[0]
    return replace(
        ffn,
        inner=tuple(torch.cat([rows, torch.zeros(more, rows.shape[1])]) for rows in ffn.inner),
        out=torch.cat([ffn.out, torch.zeros(d, more)], dim=1),
        inner_bias=tuple(None if b is None else torch.cat([b, torch.zeros(more)]) for b in ffn.inner_bias),
    )


def with_biases(ffn: PlainFFN) -> PlainFFN:
    """The same FFN with every bias there, zero where it had none."""
    return replace(
        ffn,
        inner_bias=tuple(_filled(bias, ffn.width) for bias in ffn.inner_bias),
        out_bias=_filled(ffn.out_bias, ffn.out.shape[0]),
    )


def aligned(width: int, align: int) -> int:
    """The next multiple, and never 0: some runtimes take a layer without neurons for one without attention."""
    return max(1, -(-width // align)) * align


def _filled(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width) if bias is None else bias


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other
