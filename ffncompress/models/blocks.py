"""One FFN block: where it is, how large it is, and how another module is put in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.models.families import GPT2, Layout
from ffncompress.type_aliases import Config


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
    scale: float = 1.0  # of the output where it is added to the residual stream

    @property
    def weights_per_neuron(self) -> int:
        """How many matrix weights go with one neuron: its rows and columns in all projections."""
        return len(self.layout.inner) * self.d_in + self.d_out

    @property
    def matrix_weights(self) -> int:
        """Parameters in matrices: what a factor such as 8x counts (biases are a fraction of a percent)."""
        return self.d_inner * self.weights_per_neuron

    @property
    def out_path(self) -> str:
        """The output projection, whose input is the inner activations."""
        return f"{self.path}.{self.layout.out}"


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def install_(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Put modules at their paths, on the device and in the dtype of what stood there."""
    for path, module in modules.items():
        like = next(model.get_submodule(path).parameters())
        set_module(model, path, module.to(device=like.device, dtype=like.dtype))
    return model


@contextmanager
def installed(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """`install_` for the length of a `with`; afterwards the model's own modules are back."""
    old = {path: model.get_submodule(path) for path in modules}
    install_(model, modules)
    try:
        yield model
    finally:
        for path, module in old.items():
            set_module(model, path, module)


def width_key(config: Config, blocks: Sequence[Block]) -> str | None:
    """The config's name for the one inner width of all blocks; none where they differ or it says something else."""
    widths = {block.d_inner for block in blocks}
    if len(widths) != 1:
        return None
    key = "n_inner" if blocks[0].layout == GPT2 else "intermediate_size"
    named = getattr(config, key, None)
    if named is None and key == "n_inner":  # GPT-2's way to say four times its width
        named = 4 * blocks[0].d_in
    return key if {named} == widths else None


def count_parameters(model: nn.Module) -> int:
    """All parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def oriented(projection: nn.Module) -> Tensor:
    """The weight of a projection as [out, in], whichever way it is stored."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(projection, Conv1D) else weight


def out_projection(model: nn.Module, block: Block) -> tuple[Tensor, Tensor | None]:
    """(weight [d_inner, d_out], bias) of an FFN's output projection."""
    projection = model.get_submodule(block.out_path)
    bias: Tensor | None = getattr(projection, "bias", None)
    return oriented(projection).T.detach(), None if bias is None else bias.detach()
