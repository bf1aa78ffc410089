"""Where the FFNs of a model live: one table, and a generic look behind it.

A row names the projections of one FFN layout; a model type points at its row. A model type that is not in the
table is accepted when its layers hold an FFN of a known layout. That the output of every one of them reaches the
residual stream unchanged is checked on a forward pass, not assumed, for types in the table too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffncompress.errors import FfncompressError, ModelError, NumericsError
from ffncompress.words import in_short


@dataclass(frozen=True)
class Layout:
    """The names of an FFN's projections: into the inner width, and out of it."""

    inner: tuple[str, ...]
    out: str


GPT2 = Layout(("c_fc",), "c_proj")
NEOX = Layout(("dense_h_to_4h",), "dense_4h_to_h")
GATED = Layout(("gate_proj", "up_proj"), "down_proj")
LAYOUTS = (GPT2, NEOX, GATED)
STAND_IN = "is_ffncompress_stand_in"  # the attribute that tells a stand-in from an FFN

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
    if any(getattr(module, STAND_IN, False) for module in model.modules()):
        raise ModelError(f"this {model_type} is slimmed already, and is not slimmed twice; start from its base model")
    layers_path, layers = _decoder_layers(model, model_type)
    known = FAMILIES.get(model_type)
    blocks = []
    for index, layer in enumerate(layers):
        found = next(_ffns(layer, (known,) if known else LAYOUTS), None)
        if found is None:
            raise _unsupported(model_type, f"layer {index} has no FFN of a known layout")
        name, layout = found
        _check_own_parameters(layer.get_submodule(name), layout, model_type, index)
        layer_path = f"{layers_path}.{index}"
        blocks.append(_block(index, f"{layer_path}.{name}", layer_path, layout, layer.get_submodule(name)))
    scales = _check_residuals(model, blocks, model_type)
    return [replace(block, scale=scale) for block, scale in zip(blocks, scales, strict=True)]


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


def _check_own_parameters(ffn: nn.Module, layout: Layout, model_type: str, index: int) -> None:
    """A norm between the neurons and their output, or the like, is of their width: fewer of them would not fit it."""
    known = {*layout.inner, layout.out}
    others = [name for name, _ in ffn.named_parameters() if name.split(".")[0] not in known]
    if others:
        raise _unsupported(model_type, f"layer {index}: its FFN has {others[0]} beside its projections")


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
def _check_residuals(model: nn.Module, blocks: list[Block], model_type: str) -> list[float]:
    """Silence each FFN: its layer's output must lose just what the FFN had returned, times a scale, which is returned.

    One forward pass: at each layer's end the layer is run once more on the same input, with its FFN silent.
    """
    scales: list[float] = []
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            seen[name] = _first(output).clone()  # a clone: some families add to it in place

        return hook

    def silence(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    def at_layer(block: Block) -> Any:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            spoken = _first(output).clone()
            handle = model.get_submodule(block.path).register_forward_hook(silence)
            y, projected = seen["ffn"], seen["projected"]
            try:
                silent = _first(layer.forward(*args, **kwargs))
            finally:
                handle.remove()
            scales.append(_scale(block, model_type, y, projected, spoken, silent))

        return hook

    handles = []
    for block in blocks:
        layer = model.get_submodule(block.layer_path)
        handles.append(model.get_submodule(block.out_path).register_forward_hook(keep("projected")))
        handles.append(model.get_submodule(block.path).register_forward_hook(keep("ffn")))
        handles.append(layer.register_forward_hook(at_layer(block), with_kwargs=True))
    ids = torch.arange(2, 10, device=next(model.parameters()).device)[None]
    try:
        model(input_ids=ids, use_cache=False)
    except FfncompressError:
        raise
    except Exception as error:  # whatever a family's own code says of it
        raise _unsupported(model_type, f"it does not run on plain token ids ({in_short(error)})") from error
    finally:
        for handle in handles:
            handle.remove()
    if len(scales) != len(blocks):
        raise _unsupported(model_type, f"{len(scales)} of its {len(blocks)} FFNs ran in a forward pass")
    return scales


def _scale(block: Block, model_type: str, y: Tensor, projected: Tensor, spoken: Tensor, silent: Tensor) -> float:
    """By what a layer multiplies its FFN's output y before adding it, from its output with and without it."""
    where = f"layer {block.index}: its FFN"
    if y.shape != projected.shape or not torch.allclose(y, projected, equal_nan=True):
        raise _unsupported(model_type, f"{where} goes on after its output projection")
    rounding = 4 * torch.finfo(y.dtype).eps  # of the stream, which may be a thousand times as long as y
    y, spoken, silent = (t.double().flatten() for t in (y, spoken, silent))
    if not (y.isfinite().all() and spoken.isfinite().all()):
        raise NumericsError(
            f"block {block.index} ({block.path}) gives NaN or infinite activations; "
            "try --dtype float32, or check the model's weights"
        )
    slack = 1e-2 * (y.abs() + y.abs().max()) + rounding * (spoken.abs() + silent.abs())
    energy = (y @ y).clamp_min(1e-300)
    for scale in (1.0, float(y @ (spoken - silent) / energy)):  # some families scale what they add
        if ((spoken - silent - scale * y).abs() <= slack * max(1.0, abs(scale))).all():
            return scale
    raise _unsupported(model_type, f"{where}'s output does not reach the residual stream as it is")


def _first(output: Any) -> Tensor:
    """The hidden state of a layer's output, which may be a tuple."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a {type(tensor).__name__} where a tensor was expected")
    return tensor
