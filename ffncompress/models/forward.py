"""A forward pass over tokens, whatever the family: no cache is kept, for a layer may be run more than once."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from ffncompress.type_aliases import LayerOutput, Model


def forward(model: Model, ids: Tensor) -> LayerOutput:
    """What a model, or the part below its head, makes of token ids."""
    kind: Any = type(model)
    return model(input_ids=ids, use_cache=False) if _takes_cache(kind) else model(input_ids=ids)


@cache
def _takes_cache(kind: Any) -> bool:
    """Whether a class has a cache to do without; an encoder has none."""
    return "use_cache" in inspect.signature(kind.forward).parameters
