"""How much memory a model takes, told from the headers of its files: before any of it is loaded."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import NamedTuple

from ffncompress.models.sources import ModelSource

_BYTES = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I64": 8}
_COMPUTED = {"float32": 4, "bfloat16": 2, "float16": 2}
_COPIES = 3  # of what a matrix gives: while it is computed, as it is kept for a gradient, and the gradient


class Footprint(NamedTuple):
    """What a model needs."""

    weights: int  # bytes
    token: int  # bytes that pass through the widest layer for each token

    @classmethod
    def of(cls, source: ModelSource, dtype: str) -> Footprint:
        """Of a model in the dtype that it is computed with; a .gguf file is always read whole."""
        if source.gguf_file:
            return cls(0, 0)
        weights, features = 0, defaultdict[str, int](int)
        for file in source.weight_files():
            for name, (dtype_name, shape) in _header(file).items():
                weights += prod(shape) * _COMPUTED.get(dtype, _BYTES.get(dtype_name, 1))
                layer = re.search(r"\.\d+\.", name)
                if layer and len(shape) > 1:
                    features[layer[0]] += max(shape)
        return cls(weights, _COPIES * _COMPUTED.get(dtype, 4) * max(features.values(), default=0))


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """(dtype, shape) of each tensor of a file; nothing of a damaged one: whoever loads it finds that out."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except (SafetensorError, OSError, ValueError):
        return {}
