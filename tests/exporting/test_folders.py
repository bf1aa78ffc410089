"""Exports that are folders: stock checkpoints, ONNX, vLLM; each compared where its runtime is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from exporting.slimmed import EVERY_KIND, ONE_WIDTH, REST, VARIED, slimmed
from safetensors.torch import load_file

from ffncompress import api
from ffncompress.errors import ArtifactError, ModelError
from ffncompress.exporting.native import export_native
from ffncompress.exporting.onnx_folder import OnnxModel, export_onnx
from ffncompress.exporting.vllm import export_vllm
from ffncompress.type_aliases import Tokenizer


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma"])
def test_a_stock_checkpoint_is_loaded_by_the_familys_own_class(
    family: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = slimmed(family, ONE_WIDTH)
    made = export_native(model, tokenizer, tmp_path / "native")
    assert made.verified.max_difference == 0
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["n_inner" if family == "gpt2" else "intermediate_size"] == 48
    again = type(model).from_pretrained(tmp_path / "native")
    assert type(again) is type(model)


@pytest.mark.parametrize(
    ("shapes", "reason"), [(EVERY_KIND, "block 0 has a linear part"), (VARIED, "17 to 64 neurons")]
)
def test_what_is_not_stock_is_refused_with_the_way_out(
    shapes: list, reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"{reason}.*plan MODEL --native"):
        export_native(slimmed("llama", shapes), tokenizer, tmp_path / "native")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_emitted_checkpoint_keeps_no_trace_of_ours(demo_slim: Path, tmp_path: Path) -> None:
    """Through the verb: a checkpoint with linear parts is refused, an untouched model is copied."""
    with pytest.raises(ModelError, match=r"a linear part|one width"):
        api.export(demo_slim, tmp_path / "native", to="hf")
    made = api.export("demo", tmp_path / "copy", to="merged", dtype="bf16")
    assert made.dtype == "bf16"
    with pytest.raises(ArtifactError, match="already exists"):
        api.export("demo", tmp_path / "copy", to="hf")
    api.export("demo", tmp_path / "copy", to="hf", overwrite=True)


@pytest.mark.slow
def test_onnx_runtime_generates_what_transformers_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = slimmed("llama", EVERY_KIND)
    made = export_onnx(model, tokenizer, tmp_path / "onnx")
    assert made.verified.max_difference is not None
    assert made.verified.max_difference < 1e-4
    runner = OnnxModel(tmp_path / "onnx", model.config)
    ids = torch.randint(3, 3000, (2, 7))  # another batch than was traced
    written, (logits, cache) = ids, runner(ids, runner.empty_cache(2))
    for _ in range(5):
        following = logits[:, -1].argmax(-1, keepdim=True)
        written = torch.cat([written, following], dim=1)
        logits, cache = runner(following, cache)
    expected = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(written, expected)


@pytest.mark.parametrize(("family", "shapes"), [("llama", EVERY_KIND), ("qwen2", REST), ("llama-tied", VARIED)])
def test_a_folder_for_vllm_is_a_llama_with_widths(
    family: str, shapes: list, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its weights, in a stock model whose layers get those widths, give the slimmed model's logits."""
    model = slimmed(family, shapes)
    made = export_vllm(model, tokenizer, tmp_path / "vllm")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "vllm", trust_remote_code=True)
    assert [block.ffn.intermediate_size for block in config.block_configs] == made.widths
    assert not any(hasattr(block.ffn, "ffn_mult") for block in config.block_configs)
    again = slimmed(family, [None] * 3)
    biased = bool(config.mlp_bias)
    for layer, width in zip(again.model.layers, made.widths, strict=True):
        layer.mlp.gate_proj, layer.mlp.up_proj = (torch.nn.Linear(32, width, bias=biased) for _ in range(2))
        layer.mlp.down_proj = torch.nn.Linear(width, 32, bias=biased)
    missing, unexpected = again.load_state_dict(load_file(tmp_path / "vllm" / "model.safetensors"), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    again.tie_weights()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (again(ids).logits - model(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "reason"), [("gpt2", "no Llama"), ("mistral", "sliding window of 64")])
def test_what_vllms_model_does_not_take_is_refused(
    family: str, reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        export_vllm(slimmed(family, ONE_WIDTH), tokenizer, tmp_path / "vllm")
