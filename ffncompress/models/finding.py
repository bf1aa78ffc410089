"""Finding the FFNs of a model: by its family's row in the table, or by looking; either is tried on a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ffncompress.errors import FfncompressError, ModelError, NumericsError
from ffncompress.modeling_ffncompress import REPLACEMENT, in_out
from ffncompress.models.blocks import Block
from ffncompress.models.families import FAMILIES, Family, unsupported
from ffncompress.models.forward import forward
from ffncompress.models.layer_run import LayerRun
from ffncompress.models.looking import look, other_matrices
from ffncompress.models.trying import NEURONS, WHOLE, UnfitError, below, try_family
from ffncompress.sanitize import in_short
from ffncompress.type_aliases import Hook, LayerOutput

ROUTED = "its FFN is routed to experts"
ONE_PLACE = "and a replacement is fitted to what one place sees"
SETTLED = "its FFN was replaced before"


@dataclass(frozen=True)
class Ffns:
    """The dense FFNs of a model in order of depth, and why other layers are kept as they are."""

    blocks: list[Block]
    kept: dict[int, str] = field(default_factory=dict)  # by layer


def find_blocks(model: nn.Module) -> list[Block]:
    """Every FFN of a model that can be slimmed, in order of depth.

    Raises:
        ModelError: there is none; says what was found.
    """
    return find_ffns(model).blocks


def find_ffns(model: nn.Module) -> Ffns:
    """Every dense FFN of a model, and of each other layer why it is kept.

    Of a model that is slimmed already, those that still are FFNs: kept neurons alone are one, only narrower. Linear
    maps, constants and neurons with a bypass stay as they are.

    Raises:
        ModelError: there is none; says what was found.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "unknown")
    layers_path, layers = _layers(model, model_type)
    known = FAMILIES.get(model_type)
    found = Ffns([])
    held: dict[int, int] = {}  # how much was true of what is nearest to an FFN in a layer without one
    owners = Counter(id(p) for _, p in layers.named_parameters(remove_duplicate=False))

    def at_layer(index: int) -> Hook:
        def hook(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: LayerOutput) -> None:
            if any(_is_settled(module) for module in layer.modules()):
                found.kept[index] = SETTLED
                return
            run = LayerRun.of(layer, args, kwargs)
            if not run.output.isfinite().all():
                raise NumericsError(
                    f"layer {index} ({layers_path}.{index}) gives NaN or infinite activations; "
                    "try --dtype float32, or check the model's weights"
                )
            try:
                family, scale = (known, try_family(run, known)) if known else look(run)
                block = _block(len(found.blocks), f"{layers_path}.{index}", layer, family, scale)
                if owners[id(layer.get_submodule(below(family, family.layout.out)).weight)] > 1:
                    raise UnfitError(f"its FFN is another layer's too, {ONE_PLACE}", WHOLE)
            except UnfitError as error:
                routed = _is_routed(layer) and error.held < WHOLE
                found.kept[index] = ROUTED if routed else str(error)
                held[index] = NEURONS if routed else error.held
                return
            found.blocks.append(block)

        return hook

    with _hooked([(layer, at_layer(i)) for i, layer in enumerate(layers)]):
        _read_some(model, model_type)
    if not found.blocks:
        told = sorted(found.kept, key=lambda index: -held.get(index, 0))  # what is nearest to an FFN first
        raise _refusal(model_type, {index: found.kept[index] for index in told})
    return found


def settled_parameters(model: nn.Module) -> int:
    """What replacements have that are not slimmed again."""
    return sum(p.numel() for module in model.modules() if _is_settled(module) for p in module.parameters())


def _is_settled(module: nn.Module) -> bool:
    return getattr(module, REPLACEMENT, "neurons") != "neurons"


def _is_routed(layer: nn.Module) -> bool:
    return any("expert" in name for name, _ in layer.named_parameters())


def _layers(model: nn.Module, model_type: str) -> tuple[str, nn.ModuleList]:
    """The largest stack of layers that runs when a model reads text: it may have others, for pictures or sound."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    ran: list[str] = []

    def ran_at(name: str) -> Hook:
        return lambda *_: ran.append(name)

    with _hooked([(m[0], ran_at(name)) for name, m in lists.items()]):
        _read_some(model, model_type)
    if not ran:
        other = next((reason for m in lists.values() if (reason := other_matrices(m[0]))), None)
        raise unsupported(model_type, other or "it has no stack of layers that runs when it reads text")
    name = max(dict.fromkeys(ran), key=lambda each: sum(p.numel() for p in lists[each].parameters()))
    if (times := ran.count(name)) > 1:
        shared = f"all {times} layers share one FFN" if len(lists[name]) == 1 else (
            f"each of its {len(lists[name])} layers runs {times} times in a forward pass with the same FFN"
        )  # fmt: skip
        raise unsupported(model_type, f"{shared}, {ONE_PLACE}")
    return name, lists[name]


def _read_some(model: nn.Module, model_type: str) -> None:
    """A forward pass over a few tokens.

    Raises:
        ModelError: the model cannot be run so.
    """
    ids = torch.arange(2, 10, device=next(model.parameters()).device)[None]
    try:
        with torch.inference_mode():
            output = forward(model, ids)
    except FfncompressError:
        raise
    except Exception as error:  # whatever a family's own code says of it
        raise unsupported(model_type, f"it does not run on plain token ids ({in_short(error)})") from error
    if "logits" in output and output["logits"].shape[:-1] != ids.shape:
        raise unsupported(model_type, "what it says of a text is not one prediction for each of its tokens")


@contextmanager
def _hooked(hooks: list[tuple[nn.Module, Hook]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refusal(model_type: str, kept: dict[int, str]) -> ModelError:
    """Why a model has no FFN to slim, by the layer that is nearest to having one: the first."""
    if not kept:
        return unsupported(model_type, "none of its layers ran in a forward pass")
    if set(kept.values()) == {SETTLED}:
        return ModelError(f"this {model_type} has no FFN left that could be slimmed further; start from its base model")
    index, reason = next(iter(kept.items()))
    if reason == ROUTED:
        return ModelError(
            f"{model_type}: all of its FFNs are routed to experts, and only dense ones can be slimmed; "
            "give a dense model, or one with shared experts"
        )
    return unsupported(model_type, f"layer {index}: {reason}")


def _block(index: int, layer_path: str, layer: nn.Module, family: Family, scale: float) -> Block:
    layout = family.layout
    parts = [layer.get_submodule(below(family, name)) for name in (*layout.inner, layout.out)]
    d_in, d_inner, d_out = in_out(parts[0])[0], *in_out(parts[-1])
    inner_bias, out_bias = (getattr(p, "bias", None) is not None for p in (parts[0], parts[-1]))
    whole = [layer.get_submodule(family.place)] if layout.activation is None else [
        *parts, layer.get_submodule(below(family, layout.activation))
    ]  # fmt: skip
    parameters = sum({id(p): p.numel() for part in whole for p in part.parameters()}.values())
    own = d_inner * (layout.leads * (d_in + inner_bias) + d_out) + d_out * out_bias
    return Block(
        index=index,
        path=f"{layer_path}.{family.place}" if family.place else layer_path,
        layer_path=layer_path,
        layout=layout,
        d_in=d_in,
        d_inner=d_inner,
        d_out=d_out,
        parameters=parameters,
        inner_bias=inner_bias,
        out_bias=out_bias,
        scale=scale,
        other_parameters=parameters - own,
        after_path=f"{layer_path}.{family.after}" if family.after else None,
        gate_path=f"{layer_path}.{family.gate}" if family.gate else None,
        tied=family.tied,
        stream_path=f"{layer_path}.{family.stream}" if family.stream else None,
    )
