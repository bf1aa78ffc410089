"""Folding: neurons alone that compute what neurons and a linear part did, to the last bits."""

from __future__ import annotations

import pytest
import torch
from exporting.slimmed import EVERY_KIND, REST, slimmed
from torch.nn import functional

from ffncompress.exporting.folding import PlainFFN, aligned, fold, median_norm, pad, split
from ffncompress.models.families import FAMILIES


def _gated(ffn: PlainFFN, x: torch.Tensor) -> torch.Tensor:
    gate, up = (functional.linear(x, rows, bias) for rows, bias in zip(ffn.inner, ffn.inner_bias, strict=True))
    return functional.linear(functional.silu(gate) * up, ffn.out, ffn.out_bias)


def _plain(ffn: PlainFFN, x: torch.Tensor) -> torch.Tensor:
    inner = functional.linear(x, ffn.inner[0], ffn.inner_bias[0])
    return functional.linear(functional.gelu(inner, approximate="tanh"), ffn.out, ffn.out_bias)


@pytest.mark.parametrize("shapes", [EVERY_KIND, REST], ids=["linear", "rest"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folded_replacement_computes_the_same(family: str, shapes: list) -> None:
    model = slimmed(family, shapes)
    layers = model.base_model.h if family == "gpt2" else model.base_model.layers
    parts = [split(layer.mlp, FAMILIES[family].layout, 32) for layer in layers]
    x = torch.randn(50, 32)
    for layer, part in zip(layers, parts, strict=True):
        folded = fold(part, median_norm(parts))
        padded = pad(folded, aligned(folded.width, 32))
        assert padded.width % 32 == 0
        assert padded.width > 0
        again = (_gated if family == "llama" else _plain)(padded, x)
        expected = layer.mlp(x).detach()
        assert (again - expected).abs().max() < 2e-6 * max(1.0, float(expected.abs().max()))


def test_folded_columns_are_as_long_as_the_neurons() -> None:
    """Formats that share a scale among neighbours would lose columns of another size."""
    model = slimmed("llama", EVERY_KIND)
    part = split(model.base_model.layers[0].mlp, FAMILIES["llama"].layout, 32)
    folded = fold(part, 1.0)
    typical = float(part.neurons.out.norm(dim=0).median())
    own, added = folded.out[:, :17].norm(dim=0), folded.out[:, 17:].norm(dim=0)
    assert torch.equal(folded.out[:, :17], part.neurons.out)
    assert len(own) == 17
    assert ((added / typical).log2().abs() <= 0.51).all()


def test_folding_rounds_nothing() -> None:
    """Scales are powers of two, and silu(32) is 32."""
    part = split(slimmed("llama", EVERY_KIND).base_model.layers[0].mlp, FAMILIES["llama"].layout, 32)
    folded = fold(part, 1.0)
    assert part.linear is not None
    scale = folded.inner[1][17:] / part.linear.down
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert torch.equal(folded.out[:, 17:] * 32 * scale[:, 0], part.linear.up)
    assert float(functional.silu(torch.tensor(32.0))) == 32.0
