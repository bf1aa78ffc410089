"""Finding the FFNs of every family, and refusing what is not one."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import GATED, TINY, WIDE, tiny_model
from library.small_models import small_model
from torch import nn

from ffncompress.budgets import KINDS, LINEAR_KINDS
from ffncompress.errors import ModelError
from ffncompress.models import count_parameters, ffn_of, find_blocks, find_ffns, forward
from ffncompress.models.families import FAMILIES, ROWS
from ffncompress.models.layer_run import LayerRun
from ffncompress.models.looking import look
from ffncompress.models.trying import _scale as joined_by
from ffncompress.planning.menus import menu_shapes


@pytest.mark.parametrize("family", TINY)
def test_every_layout(family: str) -> None:
    model = tiny_model(family)
    blocks = find_blocks(model)
    assert [b.index for b in blocks] == [0, 1, 2]
    for block in blocks:
        ffn = ffn_of(model, block)
        assert block.d_in == block.d_out == 32
        assert block.parameters == sum(p.numel() for p in ffn.parameters())
        assert block.matrix_weights == sum(p.numel() for p in ffn.parameters() if p.dim() == 2)
        assert ffn(torch.randn(1, 2, 32)).shape == (1, 2, 32)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] if at else [])  # the inner loop has one of each row
        for _, names in ROWS
        for at, name in enumerate(names.split())
    ],
)
def test_a_row_is_what_would_be_found_without_it(family: str) -> None:
    model = small_model(family)
    found = find_ffns(model)
    assert found.blocks
    assert not found.kept
    layer = model.get_submodule(found.blocks[0].layer_path)
    seen = []
    handle = layer.register_forward_hook(lambda m, a, k, _: seen.append(LayerRun.of(m, a, k)), with_kwargs=True)
    with torch.inference_mode():
        forward(model, torch.arange(2, 10)[None])
    handle.remove()
    described, _ = look(seen[0])
    assert described == FAMILIES[family]


def built(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_a_family_that_is_not_in_the_table_is_detected() -> None:
    blocks = find_blocks(small_model("helium"))
    assert [b.path for b in blocks] == [f"model.layers.{i}.mlp" for i in range(3)]


def test_a_scaled_residual_is_detected() -> None:
    blocks = find_blocks(built(transformers.GraniteConfig(**GATED, residual_multiplier=0.3)))
    assert [block.scale for block in blocks] == pytest.approx([0.3] * 3)


def test_a_layer_whose_ffn_goes_on_after_its_output_projection_is_kept() -> None:
    """The moments of its output are taken from its inner activations."""
    model = built(transformers.OlmoConfig(**GATED))
    ffn = model.model.layers[0].mlp
    own = ffn.forward
    ffn.forward = lambda x: 2 * own(x)
    found = find_ffns(model)
    assert [block.layer_path for block in found.blocks] == ["model.layers.1", "model.layers.2"]
    assert "goes on after its output projection" in found.kept[0]


def test_neurons_that_tokens_share_are_no_ffn() -> None:
    """Attention has matrices of fitting sizes too, and one token's inner activations are others' business."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.gate_proj(x).relu() * self.up_proj(x)
            return self.down_proj(h + h.mean(1, keepdim=True))

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Mixing()
    with pytest.raises(ModelError, match="do not stand each for itself"):
        find_blocks(model)


def test_mixed_stacks_are_treated_where_they_are_dense() -> None:
    found = find_ffns(small_model("jamba"))
    assert [block.layer_path for block in found.blocks] == ["model.layers.0", "model.layers.2"]
    assert found.kept == {1: "its FFN is routed to experts"}
    shared = find_ffns(small_model("deepseek_v3"))
    assert [block.path for block in shared.blocks] == [
        "model.layers.0.mlp", "model.layers.1.mlp.shared_experts", "model.layers.2.mlp.shared_experts"
    ]  # fmt: skip


def test_a_shared_expert_behind_a_gate_is_found() -> None:
    blocks = find_blocks(small_model("qwen2_moe"))
    assert [block.path for block in blocks] == [f"model.layers.{i}.mlp.shared_expert" for i in range(3)]
    assert blocks[0].gate_path == "model.layers.0.mlp.shared_expert_gate"


def test_routed_ffns_alone_are_refused() -> None:
    config = transformers.MixtralConfig(**GATED, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ModelError, match="mixtral: all of its FFNs are routed to experts, and only dense ones"):
        find_blocks(built(config))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("albert", "all 3 layers share one FFN"),
        ("flaubert", "its FFNs are in a list of their own, and the residual stream is outside of it"),
        ("hy_v4", "its layers hand on 4 streams side by side"),
        ("hrm_text", "each of its 3 layers runs 6 times in a forward pass with the same FFN"),
        ("ibert", "its matrices are QuantLinear modules"),
        ("perceiver", "what it says of a text is not one prediction for each of its tokens"),
        ("qwen4_exp_text", "its layers hand on 4 streams side by side"),
        ("rwkv", "key and value: feed_forward does not run once and give one tensor"),
        ("squeezebert", "its matrices are Conv1d modules"),
        ("xlm", "its FFNs are in a list of their own, and the residual stream is outside of it"),
        ("zamba", "layer 2: its FFN is another layer's too"),
    ],
)
def test_a_dense_ffn_that_does_not_fit_is_refused_by_the_part_that_does_not(family: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"^{family}: .*{reason}.*; supported families"):
        find_blocks(small_model(family))


def test_an_ffn_whose_neurons_are_tied_together_can_go_as_a_whole() -> None:
    """A norm among its neurons (BitNet), or a threshold that is theirs together (the first layers of Gemma 3n)."""
    assert [block.tied for block in find_blocks(small_model("bitnet"))] == [True, True, True]
    blocks = find_blocks(small_model("gemma3n_text"))
    assert [block.tied for block in blocks] == [True, False, False]
    assert {shape.kind for shape in menu_shapes(blocks[0])} == set(LINEAR_KINDS)
    assert {shape.kind for shape in menu_shapes(blocks[1])} == set(KINDS)


def test_the_stream_may_enter_what_runs_more_than_once() -> None:
    """A norm before a language's adapter and after it (X-MOD); a router that looks before and after (Gemma 3n)."""
    assert find_blocks(small_model("xmod"))[0].stream_path == "roberta.encoder.layer.0.output.LayerNorm"
    block = find_blocks(small_model("gemma3n_text"))[0]
    assert block.stream_path == "model.layers.0.altup.router_norm"
    assert block.after_path == "model.layers.0.post_feedforward_layernorm"


def test_an_activation_that_is_no_module_lies_in_one_with_what_leads_in() -> None:
    model = small_model("esm")
    block = find_blocks(model)[0]
    assert (block.layout.inner, block.layout.activation) == (("intermediate.dense",), "intermediate")
    assert block.parameters == sum(p.numel() for p in ffn_of(model, block).parameters())


def test_a_small_scale_is_held_to_as_strictly() -> None:
    """What a norm makes of a contribution is no multiple of it, though both are small."""
    added = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    stream = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    assert joined_by(added, stream + 0.01 * added, stream) == pytest.approx(0.01, rel=1e-3)
    assert joined_by(added, stream + 0.01 * added.sign(), stream) is None


def test_only_what_reads_text_is_looked_at() -> None:
    """A model for pictures and text has a stack for each."""
    blocks = find_blocks(small_model("gemma3"))
    assert blocks[0].path == "model.language_model.layers.0.mlp"
    assert blocks[0].after_path == "model.language_model.layers.0.post_feedforward_layernorm"


def test_tied_parameters_count_once() -> None:
    tied, untied = tiny_model("llama-tied"), tiny_model("llama")
    assert count_parameters(untied) - count_parameters(tied) == 3072 * WIDE["hidden_size"]
