"""A model that is larger than memory: its weights stay in their files, and each module's are read while it runs.

transformers knows where every weight of a model lies, under which name, and what it is to be cast to; that index is
all that is taken from it. Between runs a module holds placeholders: of the right shape, dtype and device, and NaN
without storage, so that whatever reads one by mistake shows. Two matrices may be larger than a layer, and are never
read whole: of the embedding just the rows of the tokens that are there, of the head so many rows at a time.
"""

from __future__ import annotations

import copy
import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from shutil import rmtree
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ffncompress.errors import ModelError, NumericsError
from ffncompress.type_aliases import Model

HEAD_BYTES = 2**26  # of a head's rows that are in memory together
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_AT_ONCE = {"backend": "pread"} if "backend" in (safe_open.__text_signature__ or "") else {}  # safetensors 0.8
_ALIGNED = 64  # bytes, as torch's own tensors are: sums are the same to the last bit then
_OWN = "_streamed"  # the attribute of a module that holds placeholders: where its weights are


@dataclass
class Weights:
    """The weights of a model in their safetensors files, by name."""

    index: Mapping[str, Mapping[str, str]]  # as transformers makes it: safetensors_file, weight_name, dtype
    device: torch.device
    _open: dict[tuple[str, bool], Any] = field(default_factory=dict)

    def stored(self, name: str) -> Tensor:
        """A weight as it is stored: a view of its file, of which only what is looked at is read."""
        return self._get(name, {})

    def looked_through(self, name: str) -> Tensor:
        """A weight as it is stored, of which all will be looked at: in memory, unless it is large."""
        view = self.stored(name)
        return view if view.nbytes > HEAD_BYTES else self._get(name, _AT_ONCE)

    def read(self, name: str) -> Tensor:
        """A weight in memory, where and as it is computed with; read at once, far quicker than page by page."""
        found = self._get(name, _AT_ONCE)
        return self.cast(name, found) if not _AT_ONCE or found.data_ptr() % _ALIGNED else found.to(*self._place(name))

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Some of a weight's view in memory, where and as it is computed with."""
        return tensor.to(*self._place(name), copy=True)

    def _place(self, name: str) -> tuple[torch.device, torch.dtype]:
        return self.device, getattr(torch, self.index[name]["dtype"])

    def _get(self, name: str, way: Mapping[str, str]) -> Tensor:
        at = self.index[name]
        key = (at["safetensors_file"], bool(way))
        if key not in self._open:
            self._open[key] = safe_open(at["safetensors_file"], framework="pt", **way)
        tensor: Tensor = self._open[key].get_tensor(at["weight_name"])
        return tensor

    def rows(self, name: str, size: int) -> Iterator[tuple[slice, Tensor]]:
        """A matrix so many rows at a time."""
        stored = self.stored(name)
        for start in range(0, len(stored), size):
            at = slice(start, min(start + size, len(stored)))
            yield at, self.cast(name, stored[at])

    def __deepcopy__(self, _memo: object) -> Weights:
        return self


@dataclass(frozen=True)
class _Streamed:
    """What a module's placeholders stand for."""

    weights: Weights
    names: Mapping[str, str]  # of its parameters, and in the files
    placeholders: Mapping[str, nn.Parameter]

    def fill_(self, module: nn.Module, _args: object = None) -> None:
        """Put the weights in."""
        for name, at in self.names.items():
            module._parameters[name] = nn.Parameter(self.weights.read(at), requires_grad=False)

    def empty_(self, module: nn.Module, *_args: object) -> None:
        """Let them go."""
        module._parameters.update(self.placeholders)

    def __deepcopy__(self, _memo: object) -> _Streamed:
        return self


def is_streamed(model: nn.Module) -> bool:
    """Whether some of a model's weights are in their files alone."""
    return any(_OWN in module.__dict__ for module in model.modules())


@contextmanager
def offloading(wanted: bool) -> Iterator[dict[str, Any]]:
    """What makes transformers leave the weights where they are; `stream_` follows within."""
    if not wanted:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="ffncompress-offload-")  # for those that it has to convert
    try:
        yield {"device_map": {"": "disk"}, "offload_folder": folder}
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise


def stream_(model: Model, offload: Mapping[str, Any], device: torch.device) -> Model:
    """A model that was loaded with what `offloading` says, with hooks that bring each module's weights when it runs.

    Raises:
        ModelError: some weights are not to be found on disk.
    """
    _give_back_at_once()
    weights = Weights(_take_index(model), device)
    placeholders: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for path, module in model.named_modules():
        names = {name: f"{path}.{name}".strip(".") for name, _ in module.named_parameters(recurse=False)}
        if lost := [name for name in names.values() if name not in weights.index]:
            raise ModelError(f"{lost[0]} is not in the model's files, so it cannot be streamed; pass --no-stream")
        for parameter in module.parameters(recurse=False):
            placeholders.setdefault(id(parameter), _placeholder(parameter, device))
        if names:
            own = {name: placeholders[id(each)] for name, each in module.named_parameters(recurse=False)}
            module.__dict__[_OWN] = _Streamed(weights, names, own)
    for module in model.modules():
        if (own := module.__dict__.get(_OWN)) is not None:
            own.empty_(module)
    for name, buffer in list(model.named_buffers()):
        module, _, last = name.rpartition(".")
        model.get_submodule(module)._buffers[last] = buffer.to(device)
    _attach(model)
    model.save_pretrained = partial(_save_without_weights, model.save_pretrained)
    weakref.finalize(model, rmtree, offload["offload_folder"], ignore_errors=True)
    return model


def check_stored(model: nn.Module, name: str) -> None:
    """Every streamed weight, read once: transformers has not.

    Raises:
        ModelError: one has another shape than the model's.
        NumericsError: one is NaN or infinite.
    """
    streamed: list[_Streamed] = [module.__dict__[_OWN] for module in model.modules() if _OWN in module.__dict__]
    for own, key, at in [(each, key, at) for each in streamed for key, at in each.names.items()]:
        stored = own.weights.looked_through(at)
        if stored.shape != own.placeholders[key].shape:
            raise ModelError(f"{name}: {at} is of another shape than its config.json says; get the model again, whole")
        if not all(part.isfinite().all() for part in stored.flatten().split(2**22)):
            raise NumericsError(f"{name}: {at} is NaN or infinite in places; check the model's weights")


def loaded(module: nn.Module) -> nn.Module:
    """A copy of a streamed module with its weights in memory; any other module as it is."""
    if not is_streamed(module):
        return module
    memo: dict[int, Any] = {id(each): each for each in module.parameters()}  # placeholders are not copied
    found = copy.deepcopy(module, memo)
    for each in found.modules():
        own: _Streamed | None = each.__dict__.pop(_OWN, None)
        if own is not None:
            for hooks in (each._forward_pre_hooks, each._forward_hooks, each._forward_hooks_always_called):
                hooks.clear()
            each.__dict__.pop("forward", None)
            own.fill_(each)
    return found


def weight_of(module: nn.Module, name: str) -> Tensor | None:
    """One parameter of a module, read where it is streamed; or none."""
    own: _Streamed | None = module.__dict__.get(_OWN)
    if own is not None and name in own.names:
        return own.weights.read(own.names[name])
    found: Tensor | None = getattr(module, name, None)
    return found


def shelved(module: nn.Module, model: nn.Module) -> nn.Module:
    """A module that is made for a streamed model, its weights mapped from a file without a name; otherwise as it is.

    What a plan puts in place of many blocks is as large as a part of the model.
    """
    if not is_streamed(model):
        return module
    from safetensors.torch import load_file, save_file

    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    if state:
        handle, file = tempfile.mkstemp(suffix=".safetensors")
        os.close(handle)
        try:
            save_file(state, file)
            module.load_state_dict(load_file(file), assign=True)  # views of the file
        finally:
            with suppress(OSError):  # where an open file cannot go, it stays until the system clears up
                os.unlink(file)
    return module.requires_grad_(False)


def _give_back_at_once() -> None:
    """Have glibc return what a weight took as soon as it goes: by itself it keeps hundreds of megabytes for later."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def _take_index(model: Model) -> Mapping[str, Mapping[str, str]]:
    """Where the weights lie, from the hooks that accelerate has put on; they are taken off."""
    from accelerate.hooks import remove_hook_from_submodules

    maps = [getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules()]
    index: Mapping[str, Mapping[str, str]] = next(each for each in maps if each is not None).dataset.index
    remove_hook_from_submodules(model)
    for name in ("to", "cuda", "hf_device_map"):
        model.__dict__.pop(name, None)
    return index


def _placeholder(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    nothing = torch.full((1,), torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)


def _save_without_weights(save: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if options.get("state_dict") != {}:
        raise ModelError("a streamed model has no weights to save; write it with ffncompress apply")
    return save(*args, **options)


def _attach(model: Model) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in model.modules():
        own: _Streamed | None = module.__dict__.get(_OWN)
        if own is None:
            continue
        if module is embedding and isinstance(module, nn.Embedding):
            _read_rows_(module, own)
        elif module is head and type(module) is nn.Linear and module.weight.nbytes > HEAD_BYTES:
            _run_by_rows_(module, own)
        else:
            module.register_forward_pre_hook(own.fill_)
            module.register_forward_hook(own.empty_, always_call=True)


def _read_rows_(module: nn.Embedding, own: _Streamed) -> None:
    """An embedding that holds the rows of just those tokens that it is given, and sees them by their places."""
    padding = module.padding_idx

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, places = args[0].unique(return_inverse=True)
        for name, at in own.names.items():
            rows = own.weights.stored(at)[tokens.cpu()]
            module._parameters[name] = nn.Parameter(own.weights.cast(at, rows), requires_grad=False)
        module.__dict__["padding_idx"] = None  # it is about gradients alone
        return (places, *args[1:])

    def after(module: nn.Module, *_args: object) -> None:
        own.empty_(module)
        module.__dict__["padding_idx"] = padding

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _run_by_rows_(module: nn.Linear, own: _Streamed) -> None:
    """A head that is never whole in memory, forward or backward."""

    def forward(x: Tensor) -> Tensor:
        found: Tensor = _ByRows.apply(x, own)  # type: ignore[no-untyped-call]
        return found

    module.__dict__["forward"] = forward


class _ByRows(torch.autograd.Function):
    """x W' + b, of which the gradient is wanted with respect to x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: _Streamed) -> Tensor:
        ctx.own = own
        bias = own.weights.read(own.names["bias"]) if "bias" in own.names else None
        count = own.placeholders["weight"].shape[0]
        found = x.new_empty(*x.shape[:-1], count)
        for at, rows in _head_rows(own):
            found[..., at] = F.linear(x, rows, None if bias is None else bias[at])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        parts = (gradient[..., at] @ rows for at, rows in _head_rows(ctx.own))
        found = next(parts)
        for part in parts:
            found += part
        return found, None


def _head_rows(own: _Streamed) -> Iterator[tuple[slice, Tensor]]:
    matrix = own.placeholders["weight"]
    return own.weights.rows(own.names["weight"], max(1, HEAD_BYTES // (matrix.shape[1] * matrix.element_size())))
