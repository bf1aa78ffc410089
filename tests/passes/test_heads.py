"""Logits that come a part at a time are the model's own, and so are gradients through them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model

from ffncompress.models import forward
from ffncompress.passes import heads
from ffncompress.passes.heads import each_part, summed
from ffncompress.passes.objective import CAUSAL

IDS = torch.arange(120).view(3, 40) * 7 + 3


@pytest.mark.parametrize("tokens", [1000, 80, 7])
@pytest.mark.parametrize("family", TINY)
@torch.inference_mode()
def test_parts_make_up_the_whole(family, tokens, monkeypatch) -> None:
    monkeypatch.setattr(heads, "NUMBERS", tokens * 3072)
    model = tiny_model(family)
    expected = forward(model, IDS).logits[:, :-1]
    found = torch.zeros_like(expected)
    for part, logits in each_part(model, IDS, slice(-1)):
        assert logits.shape[0] * logits.shape[1] <= max(tokens, 7)
        found[part] = logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    losses = F.cross_entropy(expected.flatten(0, 1), IDS[:, 1:].flatten(), reduction="none").view(3, -1)
    assert torch.allclose(CAUSAL.losses(model, IDS), losses.double().mean(1), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1000, 7])
def test_the_gradient_is_that_of_the_whole(tokens, monkeypatch) -> None:
    monkeypatch.setattr(heads, "NUMBERS", tokens * 3072)
    model = tiny_model("gemma3_text").requires_grad_(False)
    found = []
    for way in (
        lambda: forward(model, IDS).logits[:, :-1].float().logsumexp(-1).sum(),
        lambda: summed(model, IDS, slice(-1), lambda _, logits: logits.logsumexp(-1).sum()),
    ):
        zero = torch.zeros(3, 40, 32, requires_grad=True)
        handle = model.model.layers[1].register_forward_hook(lambda _m, _a, out, zero=zero: out + zero)
        total = way()
        total.backward()
        handle.remove()
        found.append((total.detach(), zero.grad))
    assert torch.allclose(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
