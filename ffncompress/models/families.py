"""Where the FFNs of a model live: one table, and a generic look behind it.

A row names the projections of one FFN layout; a model type points at its row. A model type that is not in the
table is accepted when its layers hold an FFN of a known layout whose output reaches the residual stream
unchanged, which is checked on a forward pass, not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The names of an FFN's projections: into the inner width, and out of it."""

    inner: tuple[str, ...]
    out: str


GPT2 = Layout(("c_fc",), "c_proj")
NEOX = Layout(("dense_h_to_4h",), "dense_4h_to_h")
GATED = Layout(("gate_proj", "up_proj"), "down_proj")
LAYOUTS = (GPT2, NEOX, GATED)

FAMILIES = {
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "llama": GATED,
    "mistral": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "gemma": GATED,
    "smollm3": GATED,
}


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
        return len(self.layout.inner) * self.d_in + self.d_out

    @property
    def matrix_weights(self) -> int:
        """Parameters in matrices: what a factor such as 8x counts (biases are a fraction of a percent)."""
        return self.d_inner * self.weights_per_neuron

    @property
    def out_path(self) -> str:
        """The output projection, whose input is the inner activations."""
        return f"{self.path}.{self.layout.out}"


def find_blocks(model: nn.Module) -> list[Block]:
    """Every FFN of a causal language model, in order of depth.

    Raises:
        ModelError: the model's FFNs are not of a supported kind.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "unknown")
    layers_path, layers = _decoder_layers(model, model_type)
    known = FAMILIES.get(model_type)
    blocks = []
    for index, layer in enumerate(layers):
        found = next(_ffns(layer, (known,) if known else LAYOUTS), None)
        if found is None:
            raise _unsupported(model_type, f"layer {index} has no FFN of a known layout")
        name, layout = found
        layer_path = f"{layers_path}.{index}"
        blocks.append(_block(index, f"{layer_path}.{name}", layer_path, layout, layer.get_submodule(name)))
    if not known:
        scale = _check_residual(model, blocks, model_type)
        blocks = [replace(block, scale=scale) for block in blocks]
    return blocks


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


def count_parameters(model: nn.Module) -> int:
    """All parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def supported() -> str:
    return ", ".join(sorted(FAMILIES)) + ", and models built like them"


def _unsupported(model_type: str, reason: str) -> ModelError:
    return ModelError(f"{model_type}: {reason}; supported families: {supported()}")


def _decoder_layers(model: nn.Module, model_type: str) -> tuple[str, nn.ModuleList]:
    base = getattr(model, "base_model", model)
    lists = [(name, m) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise _unsupported(model_type, "it has no stack of decoder layers")
    name, layers = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    prefix = next((n for n, m in model.named_modules() if m is base), "")
    return f"{prefix}.{name}" if prefix else name, layers


def _ffns(layer: nn.Module, layouts: tuple[Layout, ...]) -> Iterator[tuple[str, Layout]]:
    for name, child in layer.named_children():
        for layout in layouts:
            projections = [getattr(child, n, None) for n in (*layout.inner, layout.out)]
            if all(isinstance(p, nn.Linear | Conv1D) for p in projections):
                yield name, layout


def _block(index: int, path: str, layer_path: str, layout: Layout, ffn: nn.Module) -> Block:
    inner, out = ffn.get_submodule(layout.inner[0]), ffn.get_submodule(layout.out)
    d_in, d_inner = in_out(inner)
    _, d_out = in_out(out)
    parameters = sum(p.numel() for p in ffn.parameters())
    inner_bias, out_bias = (getattr(p, "bias", None) is not None for p in (inner, out))
    return Block(index, path, layer_path, layout, d_in, d_inner, d_out, parameters, inner_bias, out_bias)


def in_out(projection: nn.Module) -> tuple[int, int]:
    """(input width, output width) of a projection."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


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


@torch.inference_mode()
def _check_residual(model: nn.Module, blocks: list[Block], model_type: str) -> float:
    """Silence the first FFN: the layer's output must lose just what the FFN had returned, times the scale returned."""
    block = blocks[0]
    ffn, layer = model.get_submodule(block.path), model.get_submodule(block.layer_path)
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def silence(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    ids = torch.arange(2, 10, device=next(model.parameters()).device)[None]
    handles = [ffn.register_forward_hook(keep("ffn")), layer.register_forward_hook(keep("with"))]
    handles.append(model.get_submodule(block.out_path).register_forward_hook(keep("projected")))
    model(ids, use_cache=False)
    handles += [ffn.register_forward_hook(silence), layer.register_forward_hook(keep("without"))]
    spoken, projected = (seen["ffn"], seen["with"]), seen["projected"]
    try:
        model(ids, use_cache=False)
    except Exception as error:
        raise _unsupported(model_type, "its FFN does not return one tensor") from error
    finally:
        for handle in handles:
            handle.remove()
    if spoken[0].shape != projected.shape or not torch.allclose(spoken[0], projected):
        raise _unsupported(model_type, "its FFN goes on after its output projection")
    y, lost = spoken[0].double().flatten(), (spoken[1] - seen["without"]).double().flatten()
    scale = (y @ lost) / (y @ y)  # some families scale what they add
    if not torch.allclose(lost, scale * y, rtol=1e-2, atol=1e-2 * float(y.abs().max() * scale.abs())):
        raise _unsupported(model_type, "its FFN's output does not reach the residual stream as it is")
    return 1.0 if abs(scale - 1) < 1e-2 else float(scale)
