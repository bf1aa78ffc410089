"""A stock checkpoint: one width for all layers and neurons alone, so that the family's own classes load it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from ffncompress.errors import ArtifactError, ModelError
from ffncompress.exporting.folding import Split, split
from ffncompress.exporting.record import ExportResult, Verification
from ffncompress.models import count_parameters, load_whole, quiet_bars
from ffncompress.models.families import FAMILIES, GATED
from ffncompress.storage.outputs import staged_directory
from ffncompress.type_aliases import Config, Model, Tokenizer

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KNOWN = ("gemma", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3")
WAY_OUT = "plan it with `ffncompress plan MODEL --native`, or export it to gguf"


def export_native(
    model: Model, tokenizer: Tokenizer, output: str | Path, *, dtype: str | None = None, overwrite: bool = False,
    source: Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write a checkpoint without any trace of ours, load it with the family's own classes, and compare logits.

    Raises:
        ModelError: its replacements are not of one width, or not neurons alone.
        ArtifactError: the output may not be written, or the logits differ.
    """
    width = _common_width(model)
    model = _cast(model, dtype)
    with staged_directory(output, "export", overwrite=overwrite, inputs=[source]) as folder:
        config, model.config = model.config, stock_config(model.config, width)
        try:
            with quiet_bars():
                model.save_pretrained(folder)
        finally:
            model.config = config
        tokenizer.save_pretrained(folder)
        verified = _verified(model, folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ExportResult(
        format="hf", output=str(output), architecture=str(model.config.model_type), dtype=dtype or "as stored",
        bytes=size, parameters=count_parameters(model), base_parameters=count_parameters(model),
        widths=[width] * int(model.config.num_hidden_layers), verified=verified,
    )  # fmt: skip


def stock_config(config: Config, width: int) -> Config:
    """A model's config with nothing of ours in it, and another FFN width."""
    stock = copy.deepcopy(config)
    ours = getattr(stock, "quantization_config", None)
    for key, name in getattr(ours, "activations", {}).items():
        setattr(stock, key, name)
    if ours is not None:
        del stock.quantization_config
    setattr(stock, "n_inner" if stock.model_type == "gpt2" else "intermediate_size", width)
    return stock


def layers_of(model: Model) -> torch.nn.ModuleList:
    """The decoder layers of a family that we know."""
    layers: torch.nn.ModuleList = model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers
    return layers


def split_layers(model: Model) -> list[Split]:
    """The FFN of every layer in neurons and a linear part.

    Raises:
        ModelError: the family's layers are not known here.
    """
    kind = model.config.model_type
    if kind not in KNOWN:
        raise ModelError(f"{kind}: its stock form is not known here; that of {', '.join(KNOWN)} is")
    layout = FAMILIES[kind].layout
    return [split(layer.get_submodule("mlp"), layout, model.config.hidden_size) for layer in layers_of(model)]


def widths_of(model: Model) -> list[int]:
    """How many neurons each FFN of a model has; nothing for a family that is not known here."""
    return [part.neurons.width for part in split_layers(model)] if model.config.model_type in KNOWN else []


def _common_width(model: Model) -> int:
    kind, parts = model.config.model_type, split_layers(model)
    linear = [index for index, part in enumerate(parts) if part.linear is not None]
    if linear:
        raise ModelError(f"block {linear[0]} has a linear part, which no stock {kind} has; {WAY_OUT}")
    widths = {part.neurons.width for part in parts}
    if len(widths) > 1:
        raise ModelError(
            f"its blocks have {min(widths)} to {max(widths)} neurons, and a stock {kind} has one width; {WAY_OUT}"
        )
    biased = parts[0].neurons.out_bias is not None
    if FAMILIES[kind].layout == GATED and biased and not getattr(model.config, "mlp_bias", False):
        raise ModelError(f"its blocks have output biases, which a stock {kind} has not; {WAY_OUT}")
    return widths.pop()


def _cast(model: Model, dtype: str | None) -> Model:
    if dtype is None:
        return model
    if dtype not in DTYPES:
        raise ModelError(f"{dtype}: a checkpoint is written as one of {', '.join(DTYPES)}; choose with --dtype")
    return model.to(DTYPES[dtype])


@torch.inference_mode()
def _verified(model: Model, folder: Path) -> Verification:
    """The folder, loaded by the family's own classes, must give the model's logits, bit for bit."""
    import transformers

    ids = torch.arange(3, 67)[None] % model.config.vocab_size
    again = load_whole(folder, str(folder), dtype=model.dtype, use_safetensors=True).eval()
    difference = (again(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()
    if not difference == 0:
        raise ArtifactError(f"the stock checkpoint gives other logits (by {float(difference):.1e}); nothing was kept")
    return Verification(
        runtime=f"transformers {transformers.__version__}", tokens=ids.numel(), max_difference=float(difference),
        of="logits", limit=None,
    )  # fmt: skip
