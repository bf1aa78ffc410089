"""Whether an FFN's output reaches the residual stream as it is: silence it, and see what its layer's output loses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ffncompress.errors import FfncompressError, NumericsError
from ffncompress.models.blocks import Block
from ffncompress.models.families import unsupported
from ffncompress.sanitize import in_short
from ffncompress.type_aliases import Hook, LayerOutput


@torch.inference_mode()
def residual_scales(model: nn.Module, blocks: list[Block], model_type: str) -> list[float]:
    """Silence each FFN: its layer's output must lose just what the FFN had returned, times a scale, which is returned.

    One forward pass: at each layer's end the layer is run once more on the same input, with its FFN silent.
    """
    scales: list[float] = []
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def hook(_module: nn.Module, _args: object, output: LayerOutput) -> None:
            seen[name] = _first(output).clone()  # a clone: some families add to it in place

        return hook

    def silence(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    def at_layer(block: Block) -> Hook:
        def hook(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: LayerOutput) -> None:
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
        raise unsupported(model_type, f"it does not run on plain token ids ({in_short(error)})") from error
    finally:
        for handle in handles:
            handle.remove()
    if len(scales) != len(blocks):
        raise unsupported(model_type, f"{len(scales)} of its {len(blocks)} FFNs ran in a forward pass")
    return scales


def _scale(block: Block, model_type: str, y: Tensor, projected: Tensor, spoken: Tensor, silent: Tensor) -> float:
    """By what a layer multiplies its FFN's output y before adding it, from its output with and without it."""
    where = f"layer {block.index}: its FFN"
    if y.shape != projected.shape or not torch.allclose(y, projected, equal_nan=True):
        raise unsupported(model_type, f"{where} goes on after its output projection")
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
    raise unsupported(model_type, f"{where}'s output does not reach the residual stream as it is")


def _first(output: LayerOutput) -> Tensor:
    """The hidden state of a layer's output, which may be a tuple."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a {type(tensor).__name__} where a tensor was expected")
    return tensor
