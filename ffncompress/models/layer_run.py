"""One layer of a model, run again and again on the same input: what its modules were fed, and what they gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.type_aliases import Hook, LayerOutput

MATRICES = (nn.Linear, Conv1D)
Change = Callable[[Tensor], Tensor]  # of what a module gives


@dataclass(frozen=True, eq=False)  # a module may run twice: each call is its own
class Call:
    """A module of the layer at work. Tensors are copies: some families add to theirs in place."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    alone: bool  # the input is all that it was given


@dataclass(frozen=True)
class LayerRun:
    """A layer with the arguments that the model gave it, and what happened inside."""

    layer: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    calls: list[Call]  # in the order in which they ended
    output: Tensor
    _silenced: dict[str, LayerRun] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> LayerRun:
        """Run the layer, and keep what its modules are fed and give."""
        calls, output = _run(layer, args, kwargs, {})
        return cls(layer, args, kwargs, calls, output)

    @property
    def tokens(self) -> int:
        """How many rows most of its matrices see; more leave it where it hands on several streams side by side."""
        seen = Counter(rows(call.input) for call in self.calls if isinstance(call.module, MATRICES))
        leaving = rows(self.output)
        return leaving if leaving in seen or not seen else seen.most_common(1)[0][0]

    def call(self, name: str) -> Call | None:
        """What a module did; none where it did not run, or more than once."""
        found = [call for call in self.calls if call.name == name]
        return found[0] if len(found) == 1 else None

    def call_after(self, name: str, call: Call) -> Call | None:
        """The first time that a module ran after a call; none where it did not."""
        at = [each.name for each in self.calls].index(call.name)  # the call may be of another run of this layer
        return next((each for each in self.calls[at + 1 :] if each.name == name), None)

    def changed(self, changes: Mapping[str, Change]) -> LayerRun:
        """The same run with what some modules give changed."""
        calls, output = _run(self.layer, self.args, self.kwargs, changes)
        return LayerRun(self.layer, self.args, self.kwargs, calls, output)

    def silenced(self, name: str) -> LayerRun:
        """The same run with one module giving nothing but zeros."""
        if name not in self._silenced:
            self._silenced[name] = self.changed({name: torch.zeros_like})
        return self._silenced[name]


def rows(tensor: Tensor) -> int:
    """How many vectors a tensor has."""
    return tensor.numel() // tensor.shape[-1]


def first_tensor(output: LayerOutput) -> Tensor:
    """The hidden state of a layer's output, which may be a tuple or a list."""
    tensor = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a {type(tensor).__name__} where a tensor was expected")
    return tensor


@torch.inference_mode()
def _run(
    layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], changes: Mapping[str, Change]
) -> tuple[list[Call], Tensor]:
    calls: list[Call] = []
    fed: dict[str, tuple[Tensor, bool]] = {}

    def before(name: str) -> Hook:
        def hook(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            given = [each for each in (*args, *kwargs.values()) if each is not None]
            tensors = [each for each in given if isinstance(each, Tensor)]
            if tensors:
                fed[name] = tensors[0].clone(), len(given) == 1

        return hook

    def after(name: str) -> Hook:
        def hook(module: nn.Module, _args: object, output: object) -> object:
            if name in fed and isinstance(output, Tensor):
                output = changes[name](output) if name in changes else output
                calls.append(Call(name, module, fed[name][0], output.clone(), fed[name][1]))
            return output

        return hook

    handles = []
    for name, module in layer.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(after(name)))
    try:
        output = first_tensor(layer.forward(*args, **kwargs)).clone()
    finally:
        for handle in handles:
            handle.remove()
    return calls, output
