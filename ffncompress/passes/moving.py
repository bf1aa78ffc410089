"""What may move while a slimmed model is healed: its replacements, all of it, or these and adapters beside the rest.

Embeddings and the head stay as they are: they are shared, large, and further from what was replaced than all else.
Adapters are peft's, of low rank, beside every linear layer that was kept; in the end they are added to its matrix, so
that the model is an ordinary one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.errors import ModelError
from ffncompress.passes.heads import below_head
from ffncompress.passes.objective import objective_of
from ffncompress.runtime.stages import on_disk
from ffncompress.settings import HealWhat
from ffncompress.type_aliases import Model

RANK = 16  # of an adapter
GAIN = 10.0  # an adapter's rate over that of weights: what it moves is a product with a matrix of small numbers


def check_can_move(what: HealWhat) -> None:
    """Said before a model is loaded.

    Raises:
        ModelError: peft is wanted, and is not installed.
    """
    if what == "lora" and find_spec("peft") is None:
        raise ModelError(
            "healing by adapters needs the peft package; install it: pip install 'ffncompress[heal]', "
            "or heal with --heal-what replaced"
        )


class Moving:
    """The parameters that move.

    Args:
        model: the slimmed model; of its parameters, just these want a gradient until they are settled.
        replacements: the modules in it that took an FFN's place.
        what: which move.
    """

    def __init__(self, model: Model, replacements: list[nn.Module], what: HealWhat) -> None:
        check_can_move(what)
        own = {id(p): p for module in replacements for p in module.parameters() if p.numel()}
        if what == "all":
            own |= {id(p): p for p in _below_head(model)}
        weights, kept = list(own.values()), _kept_layers(model, replacements) if what == "lora" else {}
        self._changed = [*weights, *(layer.weight for layer in kept.values())]  # in the end
        self._before = _held(self._changed)
        self._tuner = _with_adapters(model, list(kept)) if kept else None
        adapters = [p for name, p in model.named_parameters() if ".lora_" in name] if kept else []
        self._adapters, self._unlearnt = adapters, _held(adapters)
        self.groups: list[dict[str, Any]] = [{"params": weights, "gain": 1.0}]
        self.groups += [{"params": adapters, "gain": GAIN}] if adapters else []
        self.parameters = [*weights, *adapters]
        model.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def values(self) -> list[Tensor]:
        """Where they are now."""
        return [parameter.detach() for parameter in self.parameters]

    def begin_(self) -> None:
        """All as it was before anything moved; after they were settled too."""
        copy_(self._changed, self._before)
        copy_(self._adapters, self._unlearnt)

    def settle_(self, dtype: torch.dtype) -> None:
        """The end: adapters become part of the matrices beside them, and numbers are those that will be stored."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        if self._tuner is not None:
            self._tuner.merge_and_unload()
        copy_(self._changed, (parameter.detach().to(dtype) for parameter in self._changed))


@torch.no_grad()
def copy_(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Put values in their places."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _held(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Values as they are now, on disk."""
    return on_disk([parameter.detach().cpu() for parameter in parameters])


def _below_head(model: Model) -> Iterator[nn.Parameter]:
    """What lies between the embeddings and the head, of numbers that can move."""
    body = model if objective_of(model).task == "embedding" else below_head(model)
    apart = [module for module in body.modules() if isinstance(module, nn.Embedding)]
    apart += [head] if (head := model.get_output_embeddings()) is not None else []
    fixed = {id(parameter) for module in apart for parameter in module.parameters()}
    for parameter in body.parameters():
        if id(parameter) not in fixed and parameter.is_floating_point() and parameter.numel():
            yield parameter


def _kept_layers(model: Model, replacements: list[nn.Module]) -> dict[str, Any]:
    """The linear layers between the embeddings and the head that are no part of a replacement, by name.

    Raises:
        ModelError: there are none.
    """
    body = model if objective_of(model).task == "embedding" else below_head(model)
    inside = {id(part) for part in body.modules()} - {id(part) for own in replacements for part in own.modules()}
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    kept = {name: part for name, part in linear.items() if id(part) in inside and part.weight.numel()}
    if not kept:
        raise ModelError("no linear layer is left to put an adapter beside; heal with --heal-what replaced")
    return kept


def _with_adapters(model: Model, names: list[str]) -> Any:
    """peft's hand on a model, with an adapter beside each of these layers, which does nothing yet."""
    from peft import LoraConfig, LoraModel

    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # GPT-2's matrices lie the other way round, which peft finds out for itself
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names, lora_dropout=0.0)
        return LoraModel(model, config, "healing").eval()
