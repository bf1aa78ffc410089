"""Finding the FFNs of every family, and refusing what is not one."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import GATED, TINY, WIDE, tiny_model

from ffncompress.errors import ModelError
from ffncompress.models import count_parameters, find_blocks


@pytest.mark.parametrize("family", TINY)
def test_every_family(family: str) -> None:
    model = tiny_model(family)
    blocks = find_blocks(model)
    assert [b.index for b in blocks] == [0, 1, 2]
    for block in blocks:
        ffn = model.get_submodule(block.path)
        assert block.d_in == block.d_out == 32
        assert block.parameters == sum(p.numel() for p in ffn.parameters())
        assert block.matrix_weights == sum(p.numel() for p in ffn.parameters() if p.dim() == 2)
        assert ffn(torch.randn(1, 2, 32)).shape == (1, 2, 32)


def test_a_family_that_is_not_in_the_table_is_detected() -> None:
    config = transformers.OlmoConfig(**GATED)
    blocks = find_blocks(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert [b.path for b in blocks] == [f"model.layers.{i}.mlp" for i in range(3)]


def test_a_scaled_residual_is_detected() -> None:
    config = transformers.GraniteConfig(**GATED, residual_multiplier=0.3)
    assert len(find_blocks(transformers.AutoModelForCausalLM.from_config(config).eval())) == 3


def test_an_ffn_that_goes_on_after_its_output_projection_is_refused() -> None:
    """The moments of its output are taken from its inner activations."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.OlmoConfig(**GATED)).eval()
    ffn = model.model.layers[0].mlp
    own = ffn.forward
    ffn.forward = lambda x: 2 * own(x)
    with pytest.raises(ModelError, match="olmo: layer 0: its FFN goes on after its output projection"):
        find_blocks(model)


def test_a_norm_behind_the_ffn_is_refused() -> None:
    config = transformers.Gemma2Config(**GATED, head_dim=8)
    with pytest.raises(ModelError, match=r"gemma2: .*residual stream.*supported families: .*gpt2.*llama"):
        find_blocks(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_routed_ffns_are_refused() -> None:
    config = transformers.MixtralConfig(**GATED, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ModelError, match=r"mixtral: .*supported families"):
        find_blocks(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_inline_ffns_are_refused() -> None:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    with pytest.raises(ModelError, match="opt: "):
        find_blocks(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_tied_parameters_count_once() -> None:
    tied, untied = tiny_model("llama-tied"), tiny_model("llama")
    assert count_parameters(untied) - count_parameters(tied) == 3072 * WIDE["hidden_size"]
