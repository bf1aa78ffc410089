"""What people do with a slimmed checkpoint: on a mix of every kind of replacement in one model."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from conftest import MIXED, TINY, mixed_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from ffncompress.errors import ArtifactError

IDS = torch.arange(5, 25)[None]


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture
def slim(mixed_folder) -> Path:
    return mixed_folder("llama")


@pytest.mark.parametrize("family", TINY)
def test_every_family_loads_a_mix_in_any_form(family: str, mixed_folder, tmp_path: Path) -> None:
    folder = mixed_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), logits(mixed_model(family)))
    # the model below the head has the same layers
    below = AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        expected = model.base_model(IDS).last_hidden_state
        assert torch.equal(below(IDS).last_hidden_state, expected)
        below.save_pretrained(tmp_path / "below")
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "below")(IDS).last_hidden_state, expected)
    # pickles and copies
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), logits(model))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "qwen2"])
@pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_new_head_on_the_same_layers(family: str, head, mixed_folder) -> None:
    folder = mixed_folder(family)
    config = AutoConfig.from_pretrained(folder, num_labels=3)
    config.pad_token_id = 0  # GPT-NeoX has none in transformers 5.0, and asks for it
    model = head.from_pretrained(folder, config=config)
    assert model(IDS).logits.shape[-1] == 3
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder)(IDS).last_hidden_state
        assert torch.equal(model.base_model(IDS).last_hidden_state, expected)


def test_a_layer_that_is_missing_stops_every_form(slim: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(slim, tmp_path / "slim"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for form in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(ArtifactError, match=r"layers.1.mlp.down_proj.weight missing"):
            form.from_pretrained(folder)


def test_features_and_text_through_pipelines(slim: Path) -> None:
    features = pipeline("feature-extraction", model=str(slim))("Return the value")
    assert len(features[0][0]) == 32
    answer = pipeline("text-generation", model=str(slim))("Return the", max_new_tokens=3, do_sample=False)
    assert answer[0]["generated_text"].startswith("Return the")


def test_devices_precisions_shards_and_a_disk(slim: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(slim, device_map="auto")
    expected = logits(model)
    for dtype in (torch.bfloat16, torch.float16):
        assert logits(AutoModelForCausalLM.from_pretrained(slim, dtype=dtype)).dtype == dtype
    assert model.half().dtype == torch.float16
    model = AutoModelForCausalLM.from_pretrained(slim)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "shards")), expected)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(6)}
    offloaded = AutoModelForCausalLM.from_pretrained(slim, device_map=places, offload_folder=tmp_path / "off")
    assert torch.equal(logits(offloaded), expected)


def test_a_checkpoint_of_format_3_loads_and_is_saved_in_todays_form(slim: Path, tmp_path: Path) -> None:
    """A constant was a matrix of no columns, and the guard's sentence another."""
    import shutil

    folder = Path(shutil.copytree(slim, tmp_path / "slim"))
    config = json.loads((folder / "config.json").read_text())
    ours = config["quantization_config"]
    del config["auto_map"]
    ours["format_version"] = 3
    config["hidden_act"] = "slimmed by ffncompress, which is not installed here: pip install ffncompress"
    ours["blocks"]["model.layers.4.mlp"]["tensors"]["down_proj.weight"] = [32, 0]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.mlp.down_proj.weight"] = torch.zeros(32, 0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(slim)))
    model.save_pretrained(tmp_path / "again")
    now, then = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "again", slim))
    assert now == then
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


def _spawned(_rank: int, model, answers) -> None:
    answers.put(logits(model).double().sum().item())


@pytest.mark.slow
def test_other_processes_get_the_model(slim: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(slim)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    torch.multiprocessing.spawn(_spawned, (model, answers), nprocs=1)
    assert answers.get() == pytest.approx(logits(model).double().sum().item(), rel=1e-6)


def test_dynamic_int8(slim: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(slim)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert _near(logits(quantised), logits(AutoModelForCausalLM.from_pretrained(slim)))


def _near(answer: torch.Tensor, expected: torch.Tensor, share: float = 0.2) -> bool:
    """Within what few bits cost a random model."""
    return ((answer - expected).norm() < share * expected.norm()).item()


def _int8(package: str):
    if package == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if package == "optimum.quanto":
        from transformers import QuantoConfig

        return QuantoConfig(weights="int8")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torchao", "optimum.quanto", "bitsandbytes"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_a_quantised_load(package: str, family: str, mixed_folder, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    folder = mixed_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=_int8(package))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    if package == "bitsandbytes":
        _round_to_four_bits_(plain, model)
    # the same weights are left; a CPU that packs them multiplies in bfloat16
    assert _near(logits(model), logits(plain), 0.01 if package == "bitsandbytes" else 0.2)
    replaced = model.base_model.get_submodule("layers.1.mlp.down_proj" if family != "gpt2" else "h.1.mlp.c_proj")
    own = torch.nn.Linear(2, 2)
    assert type(replaced) is not type(own) or type(replaced.weight.data) is not torch.Tensor, "left as it was"
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    assert type(AutoModelForCausalLM.from_pretrained(folder).lm_head) is torch.nn.Linear  # nothing stays behind
    assert model.config.quantization_config.quant_method != "ffncompress"


def _round_to_four_bits_(plain, quantised) -> None:
    """The weights that a quantised model has, in a plain one."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, module in quantised.named_modules():
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            own = plain.get_submodule(name)
            own.weight.data.copy_(weight if isinstance(own, torch.nn.Linear) else weight.T)


def _train(model, steps: int = 2) -> float:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps + 1):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < losses[0]
    return losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_train_merge_and_reload(dora: bool, slim: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "bypass_down", "bypass_up"]
    layers = [0, 1, 2, 3, 5]  # a constant has no matrix to adapt
    config = peft.LoraConfig(
        r=4, target_modules=targets, layers_to_transform=layers, use_dora=dora, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(slim), config)
    _train(model)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(slim), tmp_path / "adapter")
    assert torch.allclose(logits(again), logits(model), atol=1e-4)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(reloaded), logits(merged))
    assert not torch.allclose(logits(reloaded), logits(AutoModelForCausalLM.from_pretrained(slim)))


@pytest.mark.slow
def test_adapters_on_four_bits(slim: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = AutoModelForCausalLM.from_pretrained(slim, quantization_config=_int8("bitsandbytes"))
    model = peft.prepare_model_for_kbit_training(model)
    targets = ["q_proj", "gate_proj", "up_proj", "bypass_down"]
    _train(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")), 4)


@pytest.mark.slow
def test_the_trainer_trains_it_with_gradient_checkpointing(slim: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(slim)
    before = logits(model)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    arguments = TrainingArguments(
        tmp_path / "runs", max_steps=2, report_to=[], use_cpu=True, gradient_checkpointing=True, save_strategy="no"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(logits(trained), logits(model.eval()))
    assert not torch.equal(logits(trained), before)


@pytest.mark.slow
@torch.inference_mode()
def test_graphs_hold_it_whole(slim: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(slim)
    expected = logits(model)
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(IDS), expected, atol=1e-5)
    exported = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    assert torch.allclose(exported.module()(input_ids=IDS, use_cache=False).logits, expected, atol=1e-5)


def test_the_mix_is_of_every_kind() -> None:
    assert sorted(shape.kind for shape in MIXED) == sorted(["neurons", "dense", "hybrid", "low-rank", "constant"])
