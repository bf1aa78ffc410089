"""GGUF: what llama.cpp makes of the file is what transformers makes of the checkpoint, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import tiny_model
from exporting.slimmed import EVERY_KIND, ONE_WIDTH, REST, VARIED, slimmed

from ffncompress.errors import ArtifactError, ModelError
from ffncompress.exporting import llama_cpp
from ffncompress.exporting.gguf_families import as_gguf
from ffncompress.exporting.gguf_file import export_gguf
from ffncompress.exporting.gguf_tokenizer import KNOWN_RULES, as_gguf_tokenizer, pre_tokenizer_of
from ffncompress.exporting.page import PAGE
from ffncompress.type_aliases import Model, Tokenizer

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
needs_llama = pytest.mark.skipif(not llama_cpp.available(), reason="xllamacpp is not installed")
NO_WINDOW = {"sliding_window": None}


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shapes", "options", "architecture"),
    [
        ("llama", EVERY_KIND, {}, "deci"),
        ("llama-tied", REST, {}, "deci"),
        ("llama", VARIED, {}, "deci"),
        ("mistral", EVERY_KIND, NO_WINDOW, "deci"),
        ("qwen2", EVERY_KIND, {}, "deci"),
        ("llama", ONE_WIDTH, {}, "llama"),
        ("qwen2", [None] * 3, {}, "qwen2"),
        ("qwen3", ONE_WIDTH, {}, "qwen3"),
        ("qwen3", VARIED, {}, "qwen3"),
        ("gemma", VARIED, {}, "gemma"),
        ("gpt2", EVERY_KIND, {}, "gpt2"),
        ("gpt2", [None] * 3, {}, "gpt2"),
        ("gpt_neox", REST, {}, "gptneox"),
    ],
)
def test_llama_cpp_agrees(
    family: str, shapes: list, options: dict, architecture: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = slimmed(family, shapes, **options)
    made = export_gguf(model, tokenizer, tmp_path / "m.gguf", name="tiny", dtype="f32")
    assert made.architecture == architecture
    assert made.verified.max_difference is not None
    assert made.verified.max_difference < (made.verified.limit or 0)
    assert made.verified.same_tokens == len(PAGE)
    assert made.bytes == (tmp_path / "m.gguf").stat().st_size


@needs_llama
@pytest.mark.slow
def test_qwen3_tied_with_varied_widths_is_an_openelm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=3072, max_position_embeddings=256, head_dim=8, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer, width in zip(model.model.layers, (40, 64, 96), strict=True):
        for name in ("gate_proj", "up_proj"):
            rows = getattr(layer.mlp, name).weight.data[:width].clone()
            getattr(layer.mlp, name).weight = torch.nn.Parameter(rows)
        layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.data[:, :width].clone())
    made = export_gguf(model, tokenizer, tmp_path / "m.gguf", name="tiny", dtype="f32")
    assert (made.architecture, made.widths) == ("openelm", [64, 64, 96])
    assert made.verified.max_difference is not None
    assert made.verified.max_difference < 1e-3


@needs_llama
@pytest.mark.slow
def test_llama_3_positions_go_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=3072, max_position_embeddings=256, rope_parameters=rope, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    made = export_gguf(model, tokenizer, tmp_path / "m.gguf", name="tiny", dtype="f32")
    assert made.verified.max_difference is not None
    assert made.verified.max_difference < 1e-3


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "share"), [("f16", 0.55), ("bf16", 0.55), ("q8_0", 0.35)])
def test_other_types_are_smaller_and_said_to_differ(
    dtype: str, share: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = slimmed("llama", EVERY_KIND)
    whole = export_gguf(model, tokenizer, tmp_path / "f32.gguf", name="tiny", dtype="f32", verify=False)
    made = export_gguf(model, tokenizer, tmp_path / "m.gguf", name="tiny", dtype=dtype)  # type: ignore[arg-type]
    header = whole.bytes - 4 * whole.parameters
    assert made.bytes - header < share * (whole.bytes - header)
    assert made.verified.limit is None
    assert made.verified.max_difference is not None
    assert 0 < made.verified.max_difference < 1


def test_widths_are_aligned_and_never_0() -> None:
    made = as_gguf(slimmed("llama", REST), align=32)
    assert made.widths == [32, 64, 64]  # a constant, 40 neurons, 33 and a rank of 2
    assert as_gguf(slimmed("llama", REST), align=256).widths == [256] * 3
    assert made.keys["feed_forward_length"] == made.widths


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: slimmed("gemma", EVERY_KIND), "block 0 has a linear part.*plan MODEL --native"),
        (lambda: slimmed("qwen3", EVERY_KIND), "block 0 has a linear part.*plan MODEL --native"),
        (lambda: slimmed("mistral", [None] * 3), "no sliding window, and this model has one of 64"),
        (lambda: tiny_model("smollm3"), "smollm3: no way to write it as GGUF"),
        (lambda: slimmed("llama", [None] * 3, hidden_act="relu"), "no activation 'relu'"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused(model: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        as_gguf(model(), align=32)  # type: ignore[operator]


def test_pre_tokenizers_are_known_by_their_rule(tokenizer: Tokenizer) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_of({"pre_tokenizer": byte_level}) == "gpt-2"
    assert pre_tokenizer_of({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}}) == "smollm"
    with pytest.raises(ModelError, match="splits text by a rule"):
        pre_tokenizer_of({"pre_tokenizer": {"type": "Whitespace"}})
    words = as_gguf_tokenizer(tokenizer, 3080)
    assert (words.pre, words.model, len(words.tokens), words.types[-1]) == ("gpt-2", "gpt2", 3080, 5)


GPT2_RULE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _with_rule(rule: object) -> Tokenizer:
    """A tokenizer that splits text by a rule, with merges across what rules differ in: numbers, spaces, line ends."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), max_token_length=4,
    )  # fmt: skip
    backend.train_from_iterator([PAGE], trainer)
    spec = json.loads(backend.to_str()) | {"pre_tokenizer": rule}
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "qwen2"])
def test_llama_cpp_splits_by_the_rule_of_that_name(name: str, tmp_path: Path) -> None:
    (steps, own_pattern) = next(rule for rule, known in KNOWN_RULES.items() if known == name)
    splits = [
        {"type": "Digits", "individual_digits": True}
        if step == "digits"
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
    ]
    ruled = _with_rule({"type": "Sequence", "pretokenizers": [*splits, GPT2_RULE | {"use_regex": own_pattern}]})
    made = export_gguf(slimmed("llama", ONE_WIDTH), ruled, tmp_path / "m.gguf", name="tiny", dtype="f32")
    assert made.verified.same_tokens == len(PAGE)
    assert ruled(PAGE, verbose=False).input_ids != _with_rule(GPT2_RULE)(PAGE, verbose=False).input_ids


@needs_llama
@pytest.mark.slow
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of names is wrong on purpose: the comparison finds it, and nothing is left behind."""
    monkeypatch.setattr("ffncompress.exporting.gguf_tokenizer.pre_tokenizer_of", lambda _: "llama-bpe")
    with pytest.raises(ArtifactError, match="tokenises otherwise"):
        export_gguf(slimmed("llama", ONE_WIDTH), _with_rule(GPT2_RULE), tmp_path / "m.gguf", name="tiny")
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_only_its_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model: Model = slimmed("llama", ONE_WIDTH)
    file = tmp_path / "m.gguf"
    file.write_text("somebody's")
    for overwrite, reason in ((False, "already exists"), (True, "did not write it")):
        with pytest.raises(ArtifactError, match=reason):
            export_gguf(model, tokenizer, file, name="tiny", verify=False, overwrite=overwrite)
    assert file.read_text() == "somebody's"
    file.unlink()
    export_gguf(model, tokenizer, file, name="tiny", verify=False)
    export_gguf(model, tokenizer, file, name="tiny", verify=False, overwrite=True, dtype="q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    fields = gguf.GGUFReader(file).fields
    assert fields["general.name"].contents() == "tiny"
    assert not any("/" in str(fields[key].contents()) for key in fields if key.startswith("general."))
