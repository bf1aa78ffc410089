"""A folder that vLLM's own DeciLMForCausalLM loads: a Llama in which every layer says how wide its FFN is.

Replacements are folded into neurons as for GGUF (folding.py). Biases are in every layer or in none, for it has one
switch for all.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ffncompress.errors import ModelError
from ffncompress.exporting.folding import PlainFFN, aligned, fold, median_norm, pad, with_biases
from ffncompress.exporting.native import DTYPES, split_layers, stock_config
from ffncompress.exporting.record import ExportResult, Verification
from ffncompress.models import count_parameters
from ffncompress.storage.outputs import staged_directory
from ffncompress.type_aliases import Json, Model, Tokenizer

_TAKEN = ("llama", "mistral", "qwen2")
_FILE = "configuration_slimmed.py"
# all that vLLM needs to be told: what each layer's part of the config is called
_CODE = '''\
"""The config of a Llama whose layers have FFNs of their own widths, for vLLM's DeciLMForCausalLM."""

from types import SimpleNamespace

from transformers import LlamaConfig


class SlimmedConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **kwargs):
        self.block_configs = [
            SimpleNamespace(**{part: SimpleNamespace(**block[part]) for part in block}) for block in block_configs or []
        ]
        super().__init__(**kwargs)

    def to_dict(self):
        stated = super().to_dict()
        blocks = [vars(block) for block in self.block_configs]
        stated["block_configs"] = [{part: vars(block[part]) for part in block} for block in blocks]
        return stated
'''


def export_vllm(
    model: Model, tokenizer: Tokenizer, output: str | Path, *, dtype: str | None = None, align: int = 32,
    overwrite: bool = False, source: Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write a folder for vLLM: `vllm serve FOLDER --trust-remote-code`, for its config has a file of its own.

    Raises:
        ModelError: vLLM's DeciLM is no superset of this family.
        ArtifactError: the output may not be written.
    """
    config = model.config
    kind = str(config.model_type)
    window = getattr(config, "sliding_window", None)
    if kind not in _TAKEN or (window and window < config.max_position_embeddings):
        why = f"a sliding window of {window}" if kind in _TAKEN else "an architecture that is no Llama"
        raise ModelError(
            f"{kind}: vLLM's DeciLM does not have {why}; "
            "plan it with `ffncompress plan MODEL --native` and export that to hf"
        )
    activation = stock_config(config, 1).hidden_act
    if activation != "silu":
        raise ModelError(f"{kind}: vLLM's DeciLM has no activation {activation!r}; export it to hf")
    if dtype not in (None, *DTYPES):
        raise ModelError(f"{dtype}: a folder for vLLM is written as one of {', '.join(DTYPES)}; choose with --dtype")
    parts = split_layers(model)
    typical = median_norm(parts)
    ffns = [fold(part, typical) for part in parts]
    ffns = [pad(ffn, aligned(ffn.width, align)) for ffn in ffns]
    biased = any(bias is not None for ffn in ffns for bias in (*ffn.inner_bias, ffn.out_bias))
    ffns = [with_biases(ffn) for ffn in ffns] if biased else ffns
    precision = DTYPES[dtype or "f32"]
    tensors = {name: value.detach().to(precision).contiguous() for name, value in _tensors(model, ffns).items()}
    with staged_directory(output, "export", overwrite=overwrite, inputs=[source]) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        stated = _config(model, ffns, biased, str(precision).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
        (folder / _FILE).write_text(_CODE, encoding="utf-8")
        tokenizer.save_pretrained(folder)
        size = (folder / "model.safetensors").stat().st_size
    note = "vLLM is not asked here; serve it with: vllm serve FOLDER --trust-remote-code"
    return ExportResult(
        format="vllm", output=str(output), architecture="DeciLMForCausalLM", dtype=dtype or "f32", bytes=size,
        parameters=sum(value.numel() for value in tensors.values()), base_parameters=count_parameters(model),
        widths=[ffn.width for ffn in ffns], verified=Verification(runtime="none", note=note),
    )  # fmt: skip


def _tensors(model: Model, ffns: list[PlainFFN]) -> dict[str, Tensor]:
    """The model's own tensors, with folded FFNs in the place of its own."""
    kept = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    if model.config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    for index, ffn in enumerate(ffns):
        for name, rows, bias in zip(("gate_proj", "up_proj"), ffn.inner, ffn.inner_bias, strict=True):
            kept[f"model.layers.{index}.mlp.{name}.weight"] = rows
            kept |= {} if bias is None else {f"model.layers.{index}.mlp.{name}.bias": bias}
        kept[f"model.layers.{index}.mlp.down_proj.weight"] = ffn.out
        if ffn.out_bias is not None:
            kept[f"model.layers.{index}.mlp.down_proj.bias"] = ffn.out_bias
    return kept


def _config(model: Model, ffns: list[PlainFFN], biased: bool, dtype: str) -> dict[str, Json]:
    stated: dict[str, Json] = stock_config(model.config, max(ffn.width for ffn in ffns)).to_dict()
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    stated |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": f"{_FILE.removesuffix('.py')}.SlimmedConfig"},
        "dtype": dtype,
        "mlp_bias": biased,
        "block_configs": [
            {
                "attention": {"no_op": False, "n_heads_in_group": group},
                "ffn": {"no_op": False, "intermediate_size": ffn.width},
            }
            for ffn in ffns
        ],
    }
    if model.config.model_type == "qwen2":  # biases on queries, keys and values alone
        stated |= {"attention_bias": False, "qkv_bias": True}
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        stated.pop(key, None)
    return stated
