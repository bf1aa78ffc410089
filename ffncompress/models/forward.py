"""A forward pass over tokens, whatever the family: no cache is kept, for a layer may be run more than once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from ffncompress.type_aliases import LayerOutput, Model


def forward(model: Model, ids: Tensor) -> LayerOutput:
    """What a model, or the part below its head, makes of token ids."""
    kind: Any = type(model)
    cached = _takes_cache(kind, hasattr(model.config, "use_cache"))
    return model(input_ids=ids, use_cache=False) if cached else model(input_ids=ids)


def on_rows(module: nn.Module, x: Tensor) -> Tensor:
    """What an FFN makes of rows, [rows, d]; some families want a batch and a length."""
    y: Tensor = module(x[None])[0]
    return y


@contextmanager
def standing_in(modules: list[nn.Module], run: Callable[..., LayerOutput]) -> Iterator[None]:
    """Within, a function runs in place of these modules.

    Only `forward` is set aside, on the instance: a loop over layers may read their other attributes.
    """
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = run
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


@cache
def _takes_cache(kind: Any, configured: bool) -> bool:
    """Whether a class has a cache to do without, by name or by what it hands on; many an encoder has none."""
    parameters = inspect.signature(kind.forward).parameters
    hands_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return "use_cache" in parameters or (configured and hands_on)
