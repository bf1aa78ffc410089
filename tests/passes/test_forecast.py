"""The predicted cost: its algebra against brute force, its worth against what swaps really cost."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model

from ffncompress import Plan
from ffncompress.models import ffn_of, find_blocks, installed
from ffncompress.passes.activations import Rows, hooked
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import Felt, loss_metrics, predict_losses, steps_by_rank
from ffncompress.records.plan import Shape
from ffncompress.recovery import Metric, Moments, fit_linear
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import STREAM, fit_block
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.parts import read_parts
from ffncompress.text.windows import joined_windows


@pytest.mark.parametrize("metric", [None, Metric.of(torch.diag(torch.arange(1.0, 7.0)).double())])
def test_every_rank_by_brute_force(metric: Metric | None) -> None:
    torch.manual_seed(0)
    x, s, g = (torch.randn(30, 6, dtype=torch.float64) for _ in range(3))
    y = torch.tanh(x @ torch.randn(6, 6, dtype=torch.float64))
    fit = fit_linear(Moments.of(x, y), Moments.of(x, y), metric=metric)
    ours = steps_by_rank(fit, x, y, Felt.directly(Rows(x, x, y, s), g)).square() / 2
    for rank in range(7):
        down, up, bias = fit.at_rank(rank)
        e = x @ down.T @ up.T + bias - y
        u = (s + e) / (s + e).norm(dim=1, keepdim=True) - s / s.norm(dim=1, keepdim=True)
        expected = (s.norm(dim=1) * (g * u).sum(1)).square() / 2
        torch.testing.assert_close(ours[:, rank], expected, rtol=1e-3, atol=1e-4)  # products are single


@pytest.mark.slow
def test_the_metric_is_what_a_small_error_costs() -> None:
    """e' M e over draws of the labels is the Fisher information, which is the curvature of the divergence."""
    model, ids = tiny_model("llama"), torch.randint(1, 3000, (1, 4), generator=torch.Generator().manual_seed(0))
    blocks, run = find_blocks(model), Run(Workers("cpu"))
    model.double()
    metric = torch.stack([loss_metrics(model, blocks, ids, run, seed)[1] for seed in range(400)]).mean(0)
    e = torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def predictions(signs: torch.Tensor, step: float) -> torch.Tensor:
        with hooked(model, [(blocks[1].path, lambda _m, _a, out: out + step * signs[None, :, None] * e)]):
            return model(ids).logits[0, :-1].log_softmax(-1)

    divergences = []
    with torch.inference_mode():
        for signs in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4):
            p, q = (
                predictions(signs, 0.0),
                predictions(signs, 1e-2),
            )  # independent signs: what tokens share averages out
            divergences.append((p.exp() * (p - q)).sum() / 1e-4)
    expected = sum(divergences) / len(divergences) / ids.numel()
    assert (e @ metric @ e).item() / 2 == pytest.approx(expected.item(), rel=0.1)


def test_a_lost_massive_activation_is_seen() -> None:
    """The local form sees almost nothing of it, for the gradient next to a massive activation is tiny."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, dtype=torch.float64)
    massive = torch.tensor([[1000.0, 0, 0, 0]], dtype=torch.float64)
    small = torch.tensor([[0.0, 1, 1, 1]], dtype=torch.float64)
    g = torch.tensor([[0.0, 1e-3, 0, 0]], dtype=torch.float64)
    moments = Moments.of(torch.randn(50, 4, dtype=torch.float64), torch.zeros(50, 4, dtype=torch.float64))
    silent = fit_linear(moments, moments)  # writes nothing at all
    felt = Felt.directly(Rows(x, x, massive, massive + small), g)
    lost = steps_by_rank(silent, x, massive, felt)[0, 0].square().item() / 2
    local = (g * massive).sum().square().item() / 2
    assert lost > 1e-2
    assert local < 1e-12


@pytest.mark.slow
def test_it_is_near_what_the_model_really_loses(demo_model, tokenizer) -> None:
    """Labels are drawn from the model, so what is predicted is the divergence from it; within a factor of two."""
    parts, run = read_parts("stories"), Run(Workers("cpu"))
    fit_ids = joined_windows(parts["fit"], tokenizer, length=64, count=64)
    ids = torch.stack(joined_windows(parts["choose"], tokenizer, length=64, count=24).rows)
    blocks = find_blocks(demo_model)
    moments = collect_moments(demo_model, blocks, fit_ids, ids, run)
    ffns = [ffn_of(demo_model, block) for block in blocks]
    maps = [fit_block(*each).maps for each in zip(blocks, moments, ffns, strict=True)]
    predicted = predict_losses(demo_model, blocks, maps, ids, run)
    with torch.inference_mode():
        original = demo_model(ids).logits[:, :-1].log_softmax(-1)
        for block, ffn, own, losses in zip(blocks, ffns, maps, predicted, strict=True):
            for shape, name in (
                (Shape("dense", rank=block.d_in), STREAM),
                (Shape("neurons", block.d_inner // 4), f"neurons {block.d_inner // 4}"),
                (Shape("hybrid", block.d_inner // 8, 16), f"hybrid {block.d_inner // 8}"),
            ):
                with installed(demo_model, {block.path: build_replacement(block, ffn, shape, own[name])}):
                    swapped = demo_model(ids).logits[:, :-1].log_softmax(-1)
                divergence = (original.exp() * (original - swapped)).sum(-1).mean().item()
                at = 0 if shape.kind == "neurons" else shape.rank
                assert divergence / 2 < losses[name][at].item() < 2 * divergence, (block.index, shape)


def test_it_tells_what_a_swap_will_cost(demo_plan) -> None:
    """A thousand held-out tokens cannot order blocks that cost the same, but they tell the worst, and how bad."""
    swaps = [block.swap for block in Plan.load(demo_plan).blocks]
    assert max(swaps, key=lambda s: s.predicted_delta) is max(swaps, key=lambda s: s.delta)
    for swap in swaps:
        assert abs(swap.delta - swap.predicted_delta) < 0.5 * swap.predicted_delta + 3 * swap.delta_error
