"""Kept neurons and their bypass against lstsq and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ffncompress.recovery import Metric, Moments, fit_hybrid, fit_linear, fit_neurons, remove_neurons, solve_ridged
from ffncompress.recovery.neurons import RIDGES, with_ridge

EXACT = (0.0,)


def ffn_rows(n: int = 400, d: int = 5, k: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, h, y and W of a small gated FFN: y = W'h, h = silu(Gx) * Ux."""
    g = torch.Generator().manual_seed(seed)
    gate, up, w = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((d, k), (d, k), (k, d)))
    x = torch.randn(n, d, generator=g, dtype=torch.float64) + 0.5
    h = torch.nn.functional.silu(x @ gate) * (x @ up)
    return x, h, h @ w, w


def lstsq(a: Tensor, b: Tensor, ones: bool) -> Tensor:
    a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) if ones else a
    return torch.linalg.lstsq(a, b).solution


def error(a: Tensor, b: Tensor, ones: bool = False) -> float:
    with_ones = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) if ones else a
    return (with_ones @ lstsq(a, b, ones) - b).square().sum().item()


def test_the_order_takes_out_what_costs_least_once_the_rest_is_refitted() -> None:
    _, h, y, w = ffn_rows()
    found = dict(remove_neurons(h.T @ h, w, range(1, 13), ridge=0.0))
    for width in range(12, 1, -1):
        left, after = (found[n][0].tolist() for n in (width, width - 1))
        (out,) = set(left) - set(after)
        costs = {j: error(h[:, [i for i in left if i != j]], y) for j in left}
        assert costs[out] <= min(costs.values()) * (1 + 1e-6) + 1e-9


def test_errors_that_the_loss_does_not_feel_cost_nothing() -> None:
    """Only the first output feature counts: the order is that of an FFN with no other."""
    _, h, _, w = ffn_rows()
    metric = torch.zeros(5, 5, dtype=torch.float64)
    metric[0, 0] = 3.0
    felt, alone, plain = (
        dict(remove_neurons(h.T @ h, *each))[4][0].tolist()
        for each in ((w, [4], Metric.of(metric)), (w[:, :1], [4]), (w, [4]))
    )
    assert felt == alone != plain


@pytest.mark.parametrize("ridge", [0.0, 1e-2, 1.0])
@pytest.mark.parametrize("biased", [True, False])
def test_the_run_passes_the_refit_of_every_width(biased: bool, ridge: float) -> None:
    _, h, y, w = ffn_rows()
    moments = Moments.of(h, y, full_yy=False)
    gram = moments.covariance_x() if biased else moments.xx / moments.weight
    for _, (kept, out) in remove_neurons(gram, w, [9, 5, 2], ridge=ridge):
        expected = fit_neurons(moments, moments, kept, w, biased=biased, ridges=(ridge,))
        torch.testing.assert_close(out, expected.out)


def test_a_strong_ridge_leaves_the_weights_as_they_were() -> None:
    _, h, y, w = ffn_rows()
    moments, kept = Moments.of(h, y, full_yy=False), torch.tensor([1, 4, 6])
    torch.testing.assert_close(fit_neurons(moments, moments, kept, w, biased=False, ridges=(1e9,)).out, w[kept])


def test_a_silent_neuron_goes_first() -> None:
    _, h, _, w = ffn_rows()
    h = h.clone()
    h[:, 4] = 0
    assert 4 not in dict(remove_neurons(h.T @ h, w, [11]))[11][0]


def test_one_run_is_all_neurons() -> None:
    _, h, _, w = ffn_rows()
    whole, run = (dict(remove_neurons(each, w, [9, 5, 2])) for each in (h.T @ h, [h.T @ h]))
    for width in whole:
        assert all(torch.equal(a, b) for a, b in zip(whole[width], run[width], strict=True))


def test_runs_that_are_unrelated_go_in_the_order_of_the_whole() -> None:
    """And what is left of the output only grows."""
    _, h, _, w = ffn_rows()
    blocks = [h[:, :5].T @ h[:, :5], h[:, 5:9].T @ h[:, 5:9], h[:, 9:].T @ h[:, 9:]]
    gram, errors = torch.block_diag(*blocks), []
    whole = dict(remove_neurons(gram, w, range(1, 13), ridge=0.0))
    for width, (kept, out) in remove_neurons(blocks, w, range(1, 13), ridge=0.0):
        assert kept.tolist() == whole[width][0].tolist()
        torch.testing.assert_close(out, whole[width][1])
        away = w.index_add(0, kept, -out)
        errors.append((away * (gram @ away)).sum().item())
    assert errors == sorted(errors)
    assert errors[-1] > 0


@pytest.mark.parametrize("biased", [True, False])
def test_kept_neurons_equal_lstsq(biased: bool) -> None:
    x, h, y, w = ffn_rows()
    weights = torch.rand(len(x), dtype=torch.float64) + 0.1
    moments = Moments.of(torch.cat([h, x], 1), y, weights, full_yy=False)
    kept = torch.tensor([1, 3, 4, 8, 11])
    fit = fit_neurons(moments, moments, kept, w, biased=biased, ridges=EXACT)
    root = weights.sqrt()[:, None]
    columns = [h[:, kept]] + [torch.ones(len(x), 1, dtype=x.dtype)] * biased
    expected = torch.linalg.lstsq(torch.cat(columns, 1) * root, y * root).solution
    torch.testing.assert_close(fit.out, expected[:5])
    assert (fit.bias is None) == (not biased)
    if fit.bias is not None:
        torch.testing.assert_close(fit.bias, expected[5])


def test_all_neurons_kept_is_the_ffn_itself() -> None:
    x, h, y, w = ffn_rows()
    moments = Moments.of(torch.cat([h, x], 1), y, full_yy=False)
    other = torch.randn_like(w)
    found = fit_neurons(moments, moments, torch.arange(12), other, biased=False, ridges=EXACT)
    torch.testing.assert_close(found.out, w)


def test_neurons_and_a_full_bypass_equal_lstsq_on_both() -> None:
    x, h, y, w = ffn_rows()
    moments, kept = Moments.of(torch.cat([h, x], 1), y, full_yy=False), torch.tensor([0, 2, 7])
    fit = fit_hybrid(moments, moments, kept, w, EXACT)
    out, down, up, bias = fit.at_rank(5)
    expected = lstsq(torch.cat([h[:, kept], x], 1), y, ones=True)
    torch.testing.assert_close(out, expected[:3])
    torch.testing.assert_close(down.T @ up.T, expected[3:8])
    torch.testing.assert_close(bias, expected[8])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_no_other_bypass_of_that_rank_does_better(rank: int) -> None:
    """Alternating least squares, from several starts and all the way, ends no lower than the closed form."""
    x, h, y, w = ffn_rows()
    moments, kept = Moments.of(torch.cat([h, x], 1), y, full_yy=False), torch.tensor([0, 2, 7])
    out, down, up, bias = fit_hybrid(moments, moments, kept, w, EXACT).at_rank(rank)
    ours = (h[:, kept] @ out + x @ down.T @ up.T + bias - y).square().sum().item()
    if rank == 0:
        assert ours == pytest.approx(error(h[:, kept], y, ones=True), rel=1e-6)
        return
    for seed in range(3):
        u = torch.randn(5, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for _ in range(300):
            v = x @ u  # the bypass's inner values; then everything that is linear in them
            solution = lstsq(torch.cat([h[:, kept], v], 1), y, ones=True)
            rest = y - h[:, kept] @ solution[:3] - solution[-1]
            u = torch.linalg.lstsq(x, rest @ torch.linalg.pinv(solution[3 : 3 + rank])).solution
        theirs = error(torch.cat([h[:, kept], x @ u], 1), y, ones=True)
        assert ours <= theirs * (1 + 1e-9)


def test_without_neurons_it_is_the_linear_map() -> None:
    x, h, y, w = ffn_rows()
    moments = Moments.of(torch.cat([h, x], 1), y, full_yy=False)
    none = torch.tensor([], dtype=torch.long)
    fit, linear = fit_hybrid(moments, moments, none, w), fit_linear(Moments.of(x, y), Moments.of(x, y))
    for rank in (0, 2, 5):
        _, down, up, bias = fit.at_rank(rank)
        expected = linear.at_rank(rank)
        torch.testing.assert_close(up @ down, expected[1] @ expected[0])
        torch.testing.assert_close(bias, expected[2])


def test_the_bypass_sees_what_the_neurons_leave() -> None:
    x, h, y, w = ffn_rows()
    moments, kept = Moments.of(torch.cat([h, x], 1), y, full_yy=False), torch.tensor([1, 5])
    fit = fit_hybrid(moments, moments, kept, w, EXACT)
    rest_x, rest_y = fit.remainders(h, x, y)
    out, down, up, bias = fit.at_rank(3)
    whole = h[:, kept] @ out + x @ down.T @ up.T + bias - y
    torch.testing.assert_close(whole, rest_x @ fit.bypass.at_rank(3)[0].T @ up.T - rest_y)


@pytest.mark.parametrize("metric", [False, True])
def test_errors_of_fits_are_those_of_their_rows(metric: bool) -> None:
    """What a fit says it leaves of held-out rows, at every rank, is what it leaves of them."""
    h, x = torch.randn(400, 12, dtype=torch.float64), torch.randn(400, 6, dtype=torch.float64)
    weight = torch.randn(12, 5, dtype=torch.float64)
    y = h @ weight + 0.3 * x @ torch.randn(6, 5, dtype=torch.float64) + 1.0
    z = torch.cat([h, x], 1)
    fit, held_out = (Moments.of(z[at], y[at], full_yy=False) for at in (slice(300), slice(300, None)))
    root = torch.randn(5, 5, dtype=torch.float64)
    kept = torch.tensor([0, 3, 4, 9])
    hybrid = fit_hybrid(fit, held_out, kept, weight, metric=Metric.of(root @ root.T) if metric else None)
    for rank in range(6):
        out, down, up, bias = hybrid.at_rank(rank)
        left = (y - h[:, kept] @ out - x @ down.T @ up.T - bias)[300:]
        assert hybrid.errors[rank].item() == pytest.approx(left.square().sum().item(), rel=1e-8)
    alone = fit_neurons(fit, held_out, kept, weight, biased=True)
    left = (y - h[:, kept] @ alone.out - alone.bias)[300:]
    assert alone.error(held_out).item() == pytest.approx(left.square().sum().item(), rel=1e-8)


def test_a_ridge_chosen_by_mixtures_of_many_outputs_serves_as_well() -> None:
    """And the solution is that of all outputs, not of the mixtures."""
    g = torch.Generator().manual_seed(0)
    h, held_h = (torch.randn(rows, 40, generator=g, dtype=torch.float64) for rows in (60, 200))
    true, noise, held_noise = (torch.randn(rows, 300, generator=g, dtype=torch.float64) for rows in (40, 60, 200))
    y, held_y = h @ true + 9 * noise, held_h @ true + 9 * held_noise
    gram, cross, held_gram, held_cross = h.T @ h, h.T @ y, held_h.T @ held_h, held_h.T @ held_y
    found, ridge = solve_ridged(gram, cross, held_gram, held_cross)

    def held_out(w: Tensor) -> float:
        return (held_h @ w - held_y).square().sum().item()

    each = {r: torch.linalg.solve(with_ridge(gram, r), cross) for r in RIDGES}
    assert torch.allclose(found, each[ridge])
    assert held_out(found) <= 1.005 * min(map(held_out, each.values())) < 0.97 * max(map(held_out, each.values()))
