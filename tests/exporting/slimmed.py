"""Tiny models with a replacement of every kind in them, made without a plan."""

from __future__ import annotations

import torch
from conftest import tiny_model

from ffncompress.models.families import FAMILIES
from ffncompress.records.plan import Shape
from ffncompress.replacement.modules import build
from ffncompress.type_aliases import Model

EVERY_KIND = [Shape("hybrid", 17, 3), Shape("low-rank", 0, 5), Shape("dense", 0, 0)]
REST = [Shape("constant", 0, 0), Shape("neurons", 40, 0), Shape("hybrid", 33, 2)]
VARIED = [Shape("neurons", 17, 0), Shape("neurons", 64, 0), Shape("neurons", 33, 0)]
ONE_WIDTH = [Shape("neurons", 48, 0)] * 3


def slimmed(family: str, shapes: list[Shape | None], **options: object) -> Model:
    """A tiny model whose first blocks are replaced by random ones of these shapes."""
    model = tiny_model(family)
    for name, value in options.items():
        setattr(model.config, name, value)
    layout = FAMILIES[model.config.model_type].layout
    layers = model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers
    torch.manual_seed(1)
    for layer, shape in zip(layers, shapes, strict=True):
        if shape is None:
            continue
        module = build(shape, layout, layer.mlp)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        layer.mlp = module.eval()
    return model
