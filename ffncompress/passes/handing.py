"""What a layer hands to those behind it, kept, and handed on in place of running it again.

It is more than its output where layers share what they found: in Gemma 4 the last layers have no keys and values of
their own, and take those that an earlier one has put into a mapping that all are given. So what stands in such mappings
when a layer ends is kept beside its output, and put there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ffncompress.models import standing_in
from ffncompress.type_aliases import LayerOutput

Handed: TypeAlias = tuple[LayerOutput, list[dict[Any, Any]]]  # plain, as it goes to disk: an output, and mappings


@contextmanager
def kept_from(layers: list[nn.Module], keep: Callable[[Handed], object]) -> Iterator[None]:
    """Within, what each of these layers hands on is kept too."""

    def at_end(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: LayerOutput) -> None:
        keep((output, [dict(each) for each in _mappings(args, kwargs)]))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(at_end, with_kwargs=True).remove)
        yield


@contextmanager
def handing_on(layers: list[nn.Module], handed: Callable[[], Handed]) -> Iterator[None]:
    """Within, these layers hand on what was kept instead of running."""

    def hand_on(*args: object, **kwargs: object) -> LayerOutput:
        output, shared = handed()
        for mapping, entries in zip(_mappings(args, kwargs), shared, strict=True):
            mapping.update(entries)
        return output

    with standing_in(layers, hand_on):
        yield


def _mappings(args: tuple[object, ...], kwargs: dict[str, object]) -> list[MutableMapping[Any, Any]]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, MutableMapping)]


def windows_of(handed: Handed | None, windows: Sequence[int], of: int) -> Handed | None:
    """What was handed on, of some windows of a batch of so many."""
    if handed is None or len(windows) == of:
        return handed
    at = slice(windows[0], windows[-1] + 1)
    found: Handed = _each(lambda tensors: tensors[0][at] if tensors[0].shape[:1] == (of,) else tensors[0], [handed])
    return found


def together(handed: Sequence[Handed]) -> Handed:
    """What was handed on by the parts of a batch, as by the whole of it."""
    whole: Handed = handed[0] if len(handed) == 1 else _each(torch.cat, handed)
    return whole


def _each(work: Callable[[list[Tensor]], Tensor], values: Sequence[Any]) -> Any:
    """Values of one form, made into one, tensor by tensor."""
    first = values[0]
    if isinstance(first, Tensor):
        return work([*values])
    if isinstance(first, dict):
        return {key: _each(work, [value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)([_each(work, parts) for parts in zip(*values, strict=True)])
    return first
