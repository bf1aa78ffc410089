"""Shared fixtures: the embedded model, tiny random models of every family, and a small text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side

import pytest
import torch
import transformers

from ffncompress.checkpoint.plugin import describe_in_config, spec_of, write_loader
from ffncompress.models import ffn_of, find_blocks, find_model, install_, load_model, load_tokenizer
from ffncompress.records.plan import Shape
from ffncompress.replacement.modules import build

WIDE = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = {**WIDE, "num_key_value_heads": 2, "vocab_size": 3072, "max_position_embeddings": 256}
TINY = {
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 3072, "n_positions": 256, "n_embd": 32, "n_layer": 3, "n_head": 4},
    ),
    "gpt_neox": (transformers.GPTNeoXConfig, {**WIDE, "vocab_size": 3072, "max_position_embeddings": 256}),
    "llama": (transformers.LlamaConfig, GATED),
    "llama-tied": (transformers.LlamaConfig, {**GATED, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {**GATED, "sliding_window": 64}),
    "qwen2": (transformers.Qwen2Config, GATED),
    "qwen3": (transformers.Qwen3Config, {**GATED, "head_dim": 8}),
    "gemma": (transformers.GemmaConfig, {**GATED, "head_dim": 8}),
    "smollm3": (transformers.SmolLM3Config, {**GATED, "pad_token_id": 0}),
    # gate and up in one matrix; a norm behind the FFN; parts inline in the layer; a residual added in the FFN's module
    "phi3": (transformers.Phi3Config, {**GATED, "pad_token_id": 0}),
    "gemma3_text": (transformers.Gemma3TextConfig, {**GATED, "head_dim": 8, "sliding_window": 64, "pad_token_id": 0}),
    "opt": (
        transformers.OPTConfig,
        {
            "hidden_size": 32,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": 3072,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 32,
            "init_std": 0.2,
            "pad_token_id": 0,
        },
    ),
    "bloom": (transformers.BloomConfig, {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 3072}),
}


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache is left alone; of the session, for so are the fixtures that note where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFNCOMPRESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def demo_source():
    return find_model("demo")


@pytest.fixture(scope="session")
def tokenizer(demo_source):
    return load_tokenizer(demo_source)


@pytest.fixture
def demo_model(demo_source):
    return load_model(demo_source, dtype="float32")  # it is stored in bfloat16


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory: pytest.TempPathFactory, demo_source, tokenizer) -> Path:
    """Three of the embedded model's seven layers: it still reads its text, and is planned in half the time."""
    model, folder = load_model(demo_source, dtype="float32"), tmp_path_factory.mktemp("short") / "short-demo"
    model.transformer.h = torch.nn.ModuleList(model.transformer.h[i] for i in (0, 3, 6))
    model.config.n_layer = 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_model(family: str, **changes: int) -> transformers.PreTrainedModel:
    """A random model with activations of ordinary size."""
    kind, options = TINY[family]
    options = {**options, **changes}
    torch.manual_seed(0)
    # 0.02, the usual spread, would leave FFNs this narrow almost silent
    config = kind(**options, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer):
    """Lays out a tiny model as a folder, once a session."""
    made: dict[str, Path] = {}

    def lay_out(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / family
            tiny_model(family).save_pretrained(made[family])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return lay_out


MIXED = (
    Shape("neurons", 64), Shape("dense"), Shape("hybrid", 32, 8), Shape("low-rank", 0, 8), Shape("constant"),
)  # fmt: skip


def mixed_model(family: str) -> transformers.PreTrainedModel:
    """A random model of six layers, five of them with a random replacement, one of each kind; the config says so."""
    model = tiny_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 6})
    blocks = find_blocks(model)
    modules, specs = {}, {}
    for block, shape in zip(blocks, MIXED, strict=False):
        module = build(shape, block.layout, ffn_of(model, block))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        modules[block.path], specs[block.path] = module, spec_of(shape, block.layout, module)
    install_(model, modules)
    describe_in_config(model.config, specs)
    return model.eval()


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer):
    """Lays out a mixed model as `apply` would, but for its papers; once a session."""
    made: dict[str, Path] = {}

    def lay_out(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(f"mixed-{family}") / family
            mixed_model(family).save_pretrained(made[family])
            write_loader(made[family])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return lay_out


@pytest.fixture(scope="session")
def demo_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small plan of the embedded model, forced so that it replaces something."""
    from ffncompress import api

    directory = tmp_path_factory.mktemp("plans") / "demo-plan"
    api.plan("demo", directory, tokens=4096, blocks="1,3", budget="8x")
    return directory


@pytest.fixture(scope="session")
def demo_slim(tmp_path_factory: pytest.TempPathFactory, demo_plan: Path) -> Path:
    from ffncompress import api

    return api.compress(demo_plan, tmp_path_factory.mktemp("slim") / "demo-slim")
