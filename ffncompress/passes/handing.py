"""What a layer hands to those behind it, kept, and handed on in place of running it again.

It is more than its output where layers share what they found: in Gemma 4 the last layers have no keys and values of
their own, and take those that an earlier one has put into a mapping that all are given. So what stands in such mappings
when a layer ends is kept beside its output, and put there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import nn

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
