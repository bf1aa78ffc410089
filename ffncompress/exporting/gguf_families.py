"""Which architecture of llama.cpp a model is written as, its hyperparameters, and its tensors under their names there.

Only `deci` and `openelm` size each layer by itself; all others take one width for all. So a checkpoint of one width and
neurons alone keeps its family's own name, Llama's relatives become `deci`, and the rest are padded to one width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ffncompress.errors import ModelError
from ffncompress.exporting.folding import PAIRED, PlainFFN, Split, aligned, fold, median_norm, pad, with_biases
from ffncompress.exporting.native import layers_of, split_layers, stock_config
from ffncompress.models import oriented
from ffncompress.type_aliases import Config, Model

WAY_OUT = "plan it with `ffncompress plan MODEL --native` (one width, neurons alone), and export that"
_LLAMA_LIKE = ("llama", "mistral", "qwen2")
_OWN_ARCH = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gpt2": "gpt2",
    "gpt_neox": "gptneox",
}  # fmt: skip
_INTERLEAVED = ("llama", "deci")  # rotate neighbouring rows, where transformers rotates halves
_ACTIVATIONS = {
    "llama": ("silu",), "deci": ("silu",), "qwen2": ("silu",), "qwen3": ("silu",), "openelm": ("silu",),
    "gemma": ("gelu", "gelu_pytorch_tanh"), "gpt2": ("gelu_new", "gelu_pytorch_tanh"),
    "gptneox": ("gelu", "gelu_fast", "gelu_new"),
}  # fmt: skip


@dataclass
class GgufModel:
    """A model as llama.cpp reads it: keys without the architecture's prefix, and tensors by name."""

    architecture: str
    keys: dict[str, int | float | bool | str | list[int]]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)


def as_gguf(model: Model, *, align: int) -> GgufModel:
    """Lay out a model, slimmed or not, for llama.cpp.

    Raises:
        ModelError: it cannot be said exactly there; names the reason and the way out.
    """
    config = model.config
    kind = str(config.model_type)
    if kind not in _OWN_ARCH:
        raise ModelError(f"{kind}: no way to write it as GGUF is known here; one of {', '.join(sorted(_OWN_ARCH))} is")
    layers = layers_of(model)
    parts = split_layers(model)
    architecture = _architecture(config, parts)
    _check_exact(model, config, architecture, parts)
    ffns = _laid_out(architecture, parts, align)
    made = GgufModel(architecture, _keys(config, architecture), widths=[ffn.width for ffn in ffns])
    per_layer = architecture in ("deci", "openelm")
    made.keys["feed_forward_length"] = made.widths if per_layer else made.widths[0]
    for index, (layer, ffn) in enumerate(zip(layers, ffns, strict=True)):
        block = _WRITERS[kind](layer, config, architecture) | _ffn_tensors(ffn)
        made.tensors |= {f"blk.{index}.{name}": value for name, value in block.items()}
    made.tensors |= _outside(model, config)
    if architecture == "openelm":
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        made.keys |= {"attention.head_count": [heads] * len(ffns), "attention.head_count_kv": [groups] * len(ffns)}
        made.tensors.pop("output.weight", None)
    return made


def _architecture(config: Config, parts: list[Split]) -> str:
    kind = config.model_type
    one_width = len({part.neurons.width for part in parts}) == 1
    if all(part.linear is None for part in parts) and one_width:
        return _OWN_ARCH[kind]
    if kind in _LLAMA_LIKE:
        return "deci"
    neurons_alone = all(part.linear is None for part in parts)
    if kind == "qwen3" and neurons_alone and config.tie_word_embeddings:
        return "openelm"
    return _OWN_ARCH[kind]


def _check_exact(model: Model, config: Config, architecture: str, parts: list[Split]) -> None:
    kind = config.model_type
    stock = stock_config(config, 1)
    activation = getattr(stock, "hidden_act", None) or getattr(stock, "activation_function", "")
    if activation not in _ACTIVATIONS[architecture]:
        raise ModelError(f"{kind}: llama.cpp's {architecture} has no activation {activation!r}; {WAY_OUT}")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings and architecture in ("llama", "deci", "qwen2", "qwen3"):
        raise ModelError(
            f"{kind}: llama.cpp's {architecture} has no sliding window, and this model has one of {window}; "
            "export it to hf or onnx"
        )
    linear = [index for index, part in enumerate(parts) if part.linear is not None]
    if not linear or architecture == "deci":
        return
    gated = len(parts[0].neurons.inner) == 2
    if gated or activation not in PAIRED:
        raise ModelError(
            f"{kind}: block {linear[0]} has a linear part, which llama.cpp's {architecture} has no exact form for "
            f"(no bias on its gate); {WAY_OUT}"
        )


def _laid_out(architecture: str, parts: list[Split], align: int) -> list[PlainFFN]:
    """All FFNs as neurons, padded: each by itself, or all to the widest."""
    typical = median_norm(parts)
    ffns = [fold(part, typical) for part in parts]
    if architecture in ("deci", "openelm"):
        return [pad(ffn, aligned(ffn.width, align)) for ffn in ffns]
    if len(ffns[0].inner) == 1:  # these families have biases in every layer
        ffns = [with_biases(ffn) for ffn in ffns]
    widest = max(ffn.width for ffn in ffns)
    own = len({ffn.width for ffn in ffns}) == 1
    return [pad(ffn, widest if own and widest else aligned(widest, align)) for ffn in ffns]


def _keys(config: Config, architecture: str) -> dict[str, int | float | bool | str | list[int]]:
    """The hyperparameters, under llama.cpp's names."""
    heads = config.num_attention_heads
    keys: dict[str, int | float | bool | str | list[int]] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": heads,
        "vocab_size": config.vocab_size,
    }
    if config.model_type in ("gpt2", "gpt_neox"):
        epsilon = getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps
        keys["attention.layer_norm_epsilon"] = float(epsilon)
        if config.model_type == "gpt_neox":
            keys["use_parallel_residual"] = bool(config.use_parallel_residual)
            head = config.hidden_size // heads
            rope = _rope(config)
            keys["rope.dimension_count"] = int(head * float(rope.get("partial_rotary_factor", 1.0)))
            keys["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
        return keys
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys |= {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.freq_base": float(_rope(config).get("rope_theta", 10000.0)),
    }
    if _rope(config).get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(_rope(config)["factor"])}
    return keys


def _rope(config: Config) -> dict[str, float | str]:
    rope: dict[str, float | str] = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{config.model_type}: positions scaled by {kind!r} are not written to GGUF; export it to hf")
    return rope


def _outside(model: Model, config: Config) -> dict[str, Tensor]:
    """What does not belong to a layer."""
    base = model.base_model
    if config.model_type == "gpt2":
        found = {"token_embd.weight": base.wte.weight, "position_embd.weight": base.wpe.weight}
        found |= _named("output_norm", base.ln_f)
    elif config.model_type == "gpt_neox":
        found = {"token_embd.weight": base.embed_in.weight} | _named("output_norm", base.final_layer_norm)
    else:
        found = {"token_embd.weight": base.embed_tokens.weight} | _norm("output_norm", base.norm, config)
    head = model.get_output_embeddings()
    if not config.tie_word_embeddings or config.model_type == "gpt_neox":  # gptneox has no other way
        found["output.weight"] = head.weight
    if _rope(config).get("rope_type") == "llama3":
        base_frequencies = float(_rope(config)["rope_theta"]) ** (
            torch.arange(0, base.rotary_emb.inv_freq.numel()) * -2.0 / (2 * base.rotary_emb.inv_freq.numel())
        )
        found["rope_freqs.weight"] = base_frequencies / base.rotary_emb.inv_freq.float().cpu()
    return {name: value.detach().float() for name, value in found.items()}


def _ffn_tensors(ffn: PlainFFN) -> dict[str, Tensor]:
    names = ("ffn_gate", "ffn_up")[-len(ffn.inner) :]
    found = {f"{name}.weight": rows for name, rows in zip(names, ffn.inner, strict=True)}
    found |= {f"{n}.bias": b for n, b in zip(names, ffn.inner_bias, strict=True) if b is not None}
    found["ffn_down.weight"] = ffn.out
    if ffn.out_bias is not None:
        found["ffn_down.bias"] = ffn.out_bias
    return found


def _named(name: str, module: nn.Module) -> dict[str, Tensor]:
    """A module's weight and bias under llama.cpp's name, [out, in]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    matrix = oriented(module) if weight.dim() == 2 else weight
    found = {f"{name}.weight": matrix.detach().float()}
    bias = getattr(module, "bias", None)
    return found if not isinstance(bias, Tensor) else found | {f"{name}.bias": bias.detach().float()}


def _norm(name: str, module: nn.Module, config: Config) -> dict[str, Tensor]:
    """An RMS norm; Gemma's is stored as its distance from 1."""
    found = _named(name, module)
    return {key: value + 1 for key, value in found.items()} if config.model_type == "gemma" else found


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The rows of a query or key projection, or its bias, from rotating halves to rotating neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _llama_layer(layer: nn.Module, config: Config, architecture: str) -> dict[str, Tensor]:
    attention = layer.get_submodule("self_attn")
    found = _norm("attn_norm", layer.get_submodule("input_layernorm"), config)
    found |= _norm("ffn_norm", layer.get_submodule("post_attention_layernorm"), config)
    parts = {name: _named(f"attn_{name}", attention.get_submodule(f"{name}_proj")) for name in ("q", "k", "v")}
    found |= _named("attn_output", attention.get_submodule("o_proj"))
    if architecture in _INTERLEAVED:
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            parts[name] = {key: interleaved(value, heads) for key, value in parts[name].items()}
    if config.model_type == "qwen3":
        for name in ("q", "k"):
            found |= _named(f"attn_{name}_norm", attention.get_submodule(f"{name}_norm"))
    if architecture == "openelm":
        return found | {"attn_qkv.weight": torch.cat([parts[n][f"attn_{n}.weight"] for n in ("q", "k", "v")])}
    return found | parts["q"] | parts["k"] | parts["v"]


def _gpt2_layer(layer: nn.Module, _config: Config, _architecture: str) -> dict[str, Tensor]:
    names = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    return {key: v for path, name in names.items() for key, v in _named(name, layer.get_submodule(path)).items()}


def _neox_layer(layer: nn.Module, config: Config, _architecture: str) -> dict[str, Tensor]:
    names = {
        "input_layernorm": "attn_norm", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {key: v for path, name in names.items() for key, v in _named(name, layer.get_submodule(path)).items()}
    heads = config.num_attention_heads
    for key in ("attn_qkv.weight", "attn_qkv.bias"):  # by head, to all queries, all keys, all values
        rows = found[key]
        found[key] = rows.reshape(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    return found


_WRITERS: dict[str, Callable[[nn.Module, Config, str], dict[str, Tensor]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _llama_layer),
    "gpt2": _gpt2_layer,
    "gpt_neox": _neox_layer,
}
