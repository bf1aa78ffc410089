"""Finding the FFNs of a model: by its family's row in the table, or by looking for a layout that is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from ffncompress.errors import ModelError
from ffncompress.modeling_ffncompress import REPLACEMENT, in_out
from ffncompress.models.blocks import Block
from ffncompress.models.families import FAMILIES, LAYOUTS, Layout, unsupported
from ffncompress.models.residual import residual_scales


def find_blocks(model: nn.Module) -> list[Block]:
    """Every FFN of a causal language model, in order of depth.

    Of a model that is slimmed already, those that still are FFNs: kept neurons alone are one, only narrower. Linear
    maps, constants and neurons with a bypass stay as they are.

    Raises:
        ModelError: the model's FFNs are not of a supported kind, or none is left.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "unknown")
    layers_path, layers = _decoder_layers(model, model_type)
    known = FAMILIES.get(model_type)
    blocks: list[Block] = []
    for index, layer in enumerate(layers):
        if any(_is_settled(child) for child in layer.children()):
            continue
        found = next(_ffns(layer, (known,) if known else LAYOUTS), None)
        if found is None:
            raise unsupported(model_type, f"layer {index} has no FFN of a known layout")
        name, layout = found
        _check_own_parameters(layer.get_submodule(name), layout, model_type, index)
        layer_path = f"{layers_path}.{index}"
        blocks.append(_block(len(blocks), f"{layer_path}.{name}", layer_path, layout, layer.get_submodule(name)))
    if not blocks:
        raise ModelError(f"this {model_type} has no FFN left that could be slimmed further; start from its base model")
    scales = residual_scales(model, blocks, model_type)
    return [replace(block, scale=scale) for block, scale in zip(blocks, scales, strict=True)]


def settled_parameters(model: nn.Module) -> int:
    """What replacements have that are not slimmed again."""
    return sum(p.numel() for module in model.modules() if _is_settled(module) for p in module.parameters())


def _is_settled(module: nn.Module) -> bool:
    return getattr(module, REPLACEMENT, "neurons") != "neurons"


def _decoder_layers(model: nn.Module, model_type: str) -> tuple[str, nn.ModuleList]:
    base = getattr(model, "base_model", model)
    lists = [(name, m) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise unsupported(model_type, "it has no stack of decoder layers")
    name, layers = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    prefix = next((n for n, m in model.named_modules() if m is base), "")
    return f"{prefix}.{name}" if prefix else name, layers


def _ffns(layer: nn.Module, layouts: tuple[Layout, ...]) -> Iterator[tuple[str, Layout]]:
    for name, child in layer.named_children():
        for layout in layouts:
            projections = [getattr(child, n, None) for n in (*layout.inner, layout.out)]
            if all(isinstance(p, nn.Linear | Conv1D) for p in projections):
                yield name, layout


def _check_own_parameters(ffn: nn.Module, layout: Layout, model_type: str, index: int) -> None:
    """A norm between the neurons and their output, or the like, is of their width: fewer of them would not fit it."""
    known = {*layout.inner, layout.out}
    others = [name for name, _ in ffn.named_parameters() if name.split(".")[0] not in known]
    if others:
        raise unsupported(model_type, f"layer {index}: its FFN has {others[0]} beside its projections")


def _block(index: int, path: str, layer_path: str, layout: Layout, ffn: nn.Module) -> Block:
    inner, out = ffn.get_submodule(layout.inner[0]), ffn.get_submodule(layout.out)
    d_in, d_inner = in_out(inner)
    _, d_out = in_out(out)
    parameters = sum(p.numel() for p in ffn.parameters())
    inner_bias, out_bias = (getattr(p, "bias", None) is not None for p in (inner, out))
    return Block(index, path, layer_path, layout, d_in, d_inner, d_out, parameters, inner_bias, out_bias)
