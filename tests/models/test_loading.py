"""Models from a folder, a GGUF file, or nowhere; and what identifies them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import GATED, tiny_model
from library.small_models import small_config
from safetensors.torch import load_file, save_file

from ffncompress import api, load
from ffncompress.errors import ModelError
from ffncompress.models import find_blocks, find_model, load_model, load_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.fixture
def gguf_file(tmp_path: Path, tokenizer) -> Path:
    """A tiny Llama as llama.cpp would write it, float32."""
    model = tiny_model("llama-tied")
    config, file = model.config, tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    spec = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(spec["vocab"], key=spec["vocab"].get))
    writer.add_token_types([3] + [1] * (config.vocab_size - 1))
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in spec["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for i in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            writer.add_tensor(f"blk.{i}.{theirs}.weight", state[f"model.layers.{i}.{ours}.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.slow
def test_a_gguf_file_goes_through_the_pipeline(gguf_file: Path, tmp_path: Path) -> None:
    source = find_model(str(gguf_file))
    model = load_model(source)
    assert len(find_blocks(model)) == 3
    assert len(load_tokenizer(source)) == 3072
    api.plan(str(gguf_file), tmp_path / "plan", tokens=2048, seq_len=64, blocks="1", budget="4x")
    slim = load(api.compress(tmp_path / "plan", tmp_path / "slim"))
    assert sum(p.numel() for p in slim.model.layers[1].mlp.parameters()) <= 3 * 96 * 32 / 4 + 64
    ffn, other = model.model.layers[0].mlp, slim.model.layers[0].mlp
    assert torch.equal(ffn.down_proj.weight, other.down_proj.weight)


def test_a_fingerprint_is_the_weights(tmp_path: Path, demo_source) -> None:
    copy = shutil.copytree(demo_source.directory, tmp_path / "copy")
    assert find_model(str(copy)).fingerprint() == demo_source.fingerprint()
    (copy / "README.md").write_text("other words")
    assert find_model(str(copy)).fingerprint() == demo_source.fingerprint()
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert find_model(str(copy)).fingerprint() != demo_source.fingerprint()


def test_a_folder_called_demo_is_not_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_source) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("demo").directory == demo_source.directory
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model("./demo")


def test_a_name_that_is_nowhere() -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        find_model("/no/such/folder")
    with pytest.raises(ModelError, match="no such file or folder"):
        find_model("missing.gguf")
    with pytest.raises(ModelError, match="check the name and the network"):
        find_model("nobody/nothing", revision="v9")


def test_quantised_weights_are_made_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers can undo is undone; a slimmed model then stores plain numbers."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    # on some CPUs it packs rows, and wants them in multiples of 64
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_model("llama").save_pretrained(tmp_path / "plain")
    wanted = BitsAndBytesConfig(load_in_4bit=True)
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=wanted)
    quantised.save_pretrained(tmp_path / "quantised")
    model = load_model(find_model(str(tmp_path / "quantised")))
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not hasattr(model.config, "quantization_config")
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, quantised(ids).logits)


def test_quantised_weights_without_a_way_back_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised \(gptq\); start from the model as it was before"):
        load_model(find_model(str(tmp_path / "model")))


def test_four_bit_experts_are_made_plain_and_refused_as_routed(tmp_path: Path) -> None:
    """gpt-oss, the one family in MXFP4: what a person reads is that its FFNs are experts."""
    config = transformers.GptOssConfig(**GATED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    packed = {name: weight for name, weight in plain.items() if not name.endswith(("up_proj", "down_proj"))}
    for name in plain.keys() - packed.keys():  # two numbers a byte, one scale for 32: [experts, out, in / 32, 16]
        experts, d_in, d_out = plain[name].shape
        packed[f"{name}_blocks"] = torch.randint(256, (experts, d_out, d_in // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.full((experts, d_out, d_in // 32), 120, dtype=torch.uint8)
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    model = load_model(find_model(str(tmp_path)))
    assert model.model.layers[0].mlp.experts.down_proj.is_floating_point()
    with pytest.raises(ModelError, match="gpt_oss: all of its FFNs are routed to experts, and only dense ones"):
        find_blocks(model)


def test_a_part_for_text_that_loads_by_itself_nowhere_is_refused(tmp_path: Path) -> None:
    """Before a plan that could not be applied."""
    model = transformers.MllamaForConditionalGeneration(small_config("mllama"))
    model.save_pretrained(tmp_path / "mllama")
    with pytest.raises(ModelError, match=r"of a mllama model transformers takes the part for text .* a model for text"):
        load_model(find_model(str(tmp_path / "mllama")))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match=r"t5: an encoder-decoder; .* give a decoder or an encoder"):
        load_model(find_model(str(tmp_path / "t5")))
