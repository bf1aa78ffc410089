"""From a fit to the module that takes the FFN's place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffncompress.models import Block, oriented
from ffncompress.records.plan import Shape
from ffncompress.recovery import HybridFit, LinearFit, NeuronFit
from ffncompress.recovery.neurons import Fit
from ffncompress.replacement.modules import BYPASS, build


def build_replacement(block: Block, ffn: nn.Module, shape: Shape, fit: Fit) -> nn.Module:
    """The replacement module with the fitted weights in it, float32 in main memory.

    Args:
        block: what is replaced.
        ffn: its FFN, as `ffn_of` gives it.
        shape: what it becomes.
        fit: the coefficients.
    """
    module = build(shape, block.layout, ffn).float()
    out = module.get_submodule(block.layout.out)
    if isinstance(fit, LinearFit):
        if shape.kind == "dense":
            set_projection_(out, fit.weight.T, fit.bias)
        elif shape.kind == "constant":
            out.get_parameter("bias").data.copy_(fit.at_rank(0)[2])
        else:
            down, up, bias = fit.at_rank(shape.rank)
            set_projection_(out, up, bias)
            set_projection_(module.get_submodule(block.layout.inner[-1]), down)
        return module.requires_grad_(False)
    leads = [_kept_rows(block, ffn.get_submodule(name), fit.kept) for name in block.layout.inner]
    if isinstance(fit, NeuronFit):
        set_projection_(out, fit.out.T, fit.bias)
    else:
        assert isinstance(fit, HybridFit)
        matrix, down, up, bias = fit.at_rank(shape.rank)
        if block.layout.activation is not None:  # the bypass is more rows of the same matrices, past the activation
            (weight, own_bias), rows = leads[0], down.to(leads[0][0])
            leads = [(torch.cat([weight, rows]), None if own_bias is None else F.pad(own_bias, (0, shape.rank)))]
            set_projection_(out, torch.cat([matrix.T, up], 1), bias)
        else:
            set_projection_(out, matrix.T, torch.zeros_like(bias) if block.out_bias else None)
            set_projection_(module.get_submodule(BYPASS[0]), down)
            set_projection_(module.get_submodule(BYPASS[1]), up, bias)
    for name, lead in zip(block.layout.inner, leads, strict=True):
        set_projection_(module.get_submodule(name), *lead)
    return module.requires_grad_(False)


def _kept_rows(block: Block, own: nn.Module, kept: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows of kept neurons in a matrix that leads in, and their biases; of each of those that are fused in it."""
    weight, bias = oriented(own).detach(), getattr(own, "bias", None)
    rows = torch.cat([kept + part * block.d_inner for part in range(block.layout.fused)]).to(weight.device)
    return weight[rows], None if bias is None else bias.detach()[rows]


def tensors_of(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """The tensors of replacements by block and name, as the plan's folder keeps them."""
    return {
        f"{index}.{name}": value.float().cpu().contiguous()
        for index, module in modules.items()
        for name, value in module.state_dict().items()
    }


def set_projection_(projection: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write [out, in] weights, and a bias where there is one."""
    oriented(projection).data.copy_(weight)
    if bias is not None:
        projection.get_parameter("bias").data.copy_(bias)
