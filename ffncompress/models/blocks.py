"""One FFN block: where it is, how large it is, and how another module is put in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.modeling_ffncompress import InlineFFN, inline_names, of_words, put
from ffncompress.models.families import Layout
from ffncompress.models.streaming import loaded, shelved, weight_of
from ffncompress.type_aliases import Config

WIDTH_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "ffn_intermediate_size")


@dataclass(frozen=True)
class Block:
    """One FFN: where it is, and how large."""

    index: int
    path: str
    layer_path: str
    layout: Layout
    d_in: int
    d_inner: int
    d_out: int
    parameters: int
    inner_bias: bool = False
    out_bias: bool = False
    scale: float = 1.0  # of its contribution where it is added to the residual stream
    other_parameters: int = 0  # beside matrices and biases, as of a learned activation
    after_path: str | None = None  # a norm of its output, before it is added
    gate_path: str | None = None  # a matrix of one row, whose sigmoid scales its output, token by token
    tied: bool = False  # its neurons do not stand each for itself, so none can be kept without the others
    stream_path: str | None = None  # what the residual stream after it enters first; none: it leaves the layer

    @property
    def weights_per_neuron(self) -> int:
        """How many matrix weights go with one neuron: its rows and columns in all projections."""
        return self.layout.leads * self.d_in + self.d_out

    @property
    def matrix_weights(self) -> int:
        """Parameters in matrices: what a factor such as 8x counts (biases are a fraction of a percent)."""
        return self.d_inner * self.weights_per_neuron

    @property
    def lead_path(self) -> str:
        """The first projection that leads in, whose input is the FFN's."""
        return f"{self.path}.{self.layout.inner[0]}"

    @property
    def out_path(self) -> str:
        """The output projection, whose input is the inner activations, and whose output is the FFN's."""
        return f"{self.path}.{self.layout.out}"


def ffn_of(model: nn.Module, block: Block, *, whole: bool = True) -> nn.Module:
    """The FFN as a module: its own, or its parts together.

    Args:
        model: the model.
        block: which FFN.
        whole: with its weights in memory: of a streamed model a copy; otherwise one that can only be run.
    """
    module = model.get_submodule(block.path)
    layout = block.layout
    if layout.activation is not None:
        names = inline_names(layout.inner[0], layout.activation, layout.out)
        module = InlineFFN(names, map(module.get_submodule, names))
    return loaded(module) if whole else module


def install_(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Put modules at their paths, on the device and in the dtype of what stood there."""
    for path, module in modules.items():
        like = next(model.get_submodule(path).parameters())
        is_cast = any(each.dtype != like.dtype for each in module.parameters())
        module = module.to(device=like.device, dtype=like.dtype)
        put(model, path, shelved(module, model) if is_cast else module)
    return model


@contextmanager
def installed(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """`install_` for the length of a `with`; afterwards the model's own modules are back."""
    old = {path: _standing_at(model, path, module) for path, module in modules.items()}
    install_(model, modules)
    try:
        yield model
    finally:
        for path, module in old.items():
            put(model, path, module)


def _standing_at(model: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """What a replacement is put in place of."""
    module = model.get_submodule(path)
    if not isinstance(replacement, InlineFFN):
        return module
    return InlineFFN(replacement.names, map(module.get_submodule, replacement.names))


def width_key(config: Config, blocks: Sequence[Block]) -> str | None:
    """The config's name for the one inner width of all blocks; none where they differ or it says something else."""
    widths, config = {block.d_inner for block in blocks}, of_words(config)
    places = {block.path.removeprefix(block.layer_path) for block in blocks}
    if len(places) > 1 or getattr(config, "num_hidden_layers", len(blocks)) != len(blocks):  # it says so of some alone
        return None
    named = {key: getattr(config, key) for key in WIDTH_KEYS if hasattr(config, key)}
    if named.get("n_inner", 0) is None:  # GPT-2's way to say four times its width
        named["n_inner"] = 4 * blocks[0].d_in
    found = [key for key, width in named.items() if {width} == widths]
    return found[0] if len(found) == 1 else None


def count_parameters(model: nn.Module) -> int:
    """All parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def oriented(projection: nn.Module) -> Tensor:
    """The weight of a projection as [out, in], whichever way it is stored."""
    weight = weight_of(projection, "weight")
    assert weight is not None
    return weight.T if isinstance(projection, Conv1D) else weight


def out_projection(model: nn.Module, block: Block) -> tuple[Tensor, Tensor | None]:
    """(weight [d_inner, d_out], bias) of an FFN's output projection."""
    projection = model.get_submodule(block.out_path)
    bias = weight_of(projection, "bias")
    return oriented(projection).T.detach(), None if bias is None else bias.detach()


def inner_matrices(ffn: nn.Module, layout: Layout) -> Tensor:
    """The matrices that lead in, one for each way into a neuron, [leads, width, d_in]."""
    rows = [oriented(ffn.get_submodule(name)) for name in layout.inner]
    return torch.cat([each.unflatten(0, (layout.fused, -1)) for each in rows]).detach()
