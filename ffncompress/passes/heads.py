"""Logits, a part at a time: of a large vocabulary they would be the largest tensor of all.

The part of a model below its head runs once, and hands its last states on to the model's own forward a few tokens at a
time, so that whatever a family makes of logits (a scale, a cap, a head of several layers) is its own code. Where a
gradient is wanted, that of each part is taken at once, and its logits go before the next one's come.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ffncompress.errors import ModelError
from ffncompress.models import embedding_rows, forward, standing_in
from ffncompress.type_aliases import LayerOutput, Model

NUMBERS = 2**24  # logits that are in memory together
EVERY = slice(None)
Part = tuple[slice, slice]  # of the windows of a batch, and of their tokens


def each_part(model: Model, batch: Tensor, at: slice = EVERY, vocabulary: int = 0) -> Iterator[tuple[Part, Tensor]]:
    """The logits of a batch in float32, part by part.

    Args:
        model: the model.
        batch: token ids, [windows, length].
        at: which tokens are wanted of each window.
        vocabulary: how many logits a token is taken to have, where it is more than the model's own.
    """
    below = below_head(model)
    output = forward(below, batch)
    states, ids = output.last_hidden_state[:, at], batch[:, at]
    for part in _parts(ids, max(vocabulary, embedding_rows(model))):
        yield part, _logits(model, below, output, states[part], ids[part])


def summed(model: Model, batch: Tensor, at: slice, loss_of: Callable[[Part, Tensor], Tensor]) -> Tensor:
    """The sum of a loss over the parts of a batch's logits, as far as gradients go a function of the whole batch."""
    below = below_head(model)
    output = forward(below, batch)
    states, ids = output.last_hidden_state[:, at], batch[:, at]
    total, gradient = torch.zeros((), device=states.device), torch.zeros_like(states)
    for part in _parts(ids, embedding_rows(model)):
        with torch.enable_grad():
            leaf = states[part].detach().requires_grad_(states.requires_grad)
            loss = loss_of(part, _logits(model, below, output, leaf, ids[part]))
        if loss.requires_grad:
            (gradient[part],) = torch.autograd.grad(loss, leaf)
        total += loss.detach()
    found: Tensor = _Known.apply(states, gradient, total)  # type: ignore[no-untyped-call]
    return found


class _Known(torch.autograd.Function):
    """A sum whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, _states: Tensor, gradient: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return outer * gradient, None, None


class _Reached(Exception):
    """A forward pass got as far as was asked."""


def _stop_at(part: Model, reached: list[Model], *_args: object, **_kwargs: object) -> None:
    reached.append(part)
    raise _Reached


def below_head(model: Model) -> Model:
    """The part of a model whose last states its head reads: some go past their base model, to the decoder in it.

    Raises:
        ModelError: there is none.
    """
    found: Model | None = model.__dict__.get("_below_head")
    if found is not None:
        return found
    parts = [part for part in (model.base_model, model.get_decoder()) if part is not None and part is not model]
    reached: list[Model] = []
    with ExitStack() as aside:
        for part in parts:
            aside.enter_context(standing_in([part], partial(_stop_at, part, reached)))
        with suppress(_Reached):
            forward(model, torch.arange(2, 4, device=model.device)[None])
    if not reached:
        kind = model.config.model_type
        raise ModelError(f"{kind}: its head does not stand on a part of its own; give a model of another family")
    found = reached[0]
    model.__dict__["_below_head"] = found  # no attribute of a module: it is one of the model's own
    return found


def _parts(ids: Tensor, vocabulary: int) -> Iterator[Part]:
    """Whole windows together where some fit, or a window in parts."""
    windows, length = ids.shape
    tokens = max(1, NUMBERS // vocabulary)
    together, size = max(1, tokens // length), min(tokens, length)
    for first in range(0, windows, together):
        for start in range(0, length, size):
            yield slice(first, first + together), slice(start, start + size)


def _logits(model: Model, below: Model, output: LayerOutput, states: Tensor, ids: Tensor) -> Tensor:
    """What a model's own forward makes of some of its last states."""
    some = copy.copy(output)
    # laid out anew: to multiply a slice by the head's matrix, torch would copy that first
    some.last_hidden_state = states.flatten(0, 1).view_as(states)
    with standing_in([below], lambda *_args, **_kwargs: some):
        logits: Tensor = forward(model, ids).logits
    return logits.float()
