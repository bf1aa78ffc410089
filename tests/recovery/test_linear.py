"""The algebra against oracles: lstsq, sklearn, brute force, and rows whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from ffncompress import recovery
from ffncompress.recovery import Metric, Moments, errors_by_rank, feature_errors, fit_linear

OLS = (0.0,)


def rows(n: int, d_in: int = 7, d_out: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ill-conditioned inputs with a mean, and a noisy nonlinear output."""
    torch.manual_seed(seed)
    x = torch.randn(n, d_in, dtype=torch.float64) * torch.logspace(0, -3, d_in, dtype=torch.float64) + 3.0
    w = torch.randn(d_in, d_out, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x @ w + 0.5 * torch.tanh(x @ w.flip(0)) + 0.1 * torch.randn(n, d_out, dtype=torch.float64)


def test_least_squares_equals_lstsq_and_sklearn() -> None:
    x, y = rows(200)
    fit = fit_linear(Moments.of(x, y), Moments.of(x, y), OLS)
    augmented = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    solution = torch.linalg.lstsq(augmented, y).solution
    torch.testing.assert_close(fit.weight, solution[:-1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fit.bias, solution[-1], rtol=1e-6, atol=1e-6)
    sk = LinearRegression().fit(x.numpy(), y.numpy())
    torch.testing.assert_close(fit.weight, torch.from_numpy(sk.coef_.T), rtol=1e-6, atol=1e-6)


def test_held_out_r2_equals_sklearn() -> None:
    x, y = rows(300)
    fit_rows, held = slice(0, 200), slice(200, 300)
    fit = fit_linear(Moments.of(x[fit_rows], y[fit_rows]), Moments.of(x[held], y[held]), OLS)
    predicted = (x[held] @ fit.weight + fit.bias).numpy()
    expected = r2_score(y[held].numpy(), predicted, multioutput="variance_weighted")
    assert recovery.r2(fit, Moments.of(x[held], y[held])) == pytest.approx(expected, abs=1e-9)
    each = torch.from_numpy(r2_score(y[held].numpy(), predicted, multioutput="raw_values"))
    assert recovery.feature_r2(fit, Moments.of(x[held], y[held])).median().item() == pytest.approx(
        each.median().item(), abs=1e-9
    )


def test_weighted_fit_equals_weighted_sklearn() -> None:
    x, y = rows(200)
    weights = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.1
    moments = Moments.of(x, y, weights)
    fit = fit_linear(moments, moments, OLS)
    sk = LinearRegression().fit(x.numpy(), y.numpy(), sample_weight=weights.numpy())
    torch.testing.assert_close(fit.weight, torch.from_numpy(sk.coef_.T), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_reduced_rank_regression_by_brute_force(rank: int) -> None:
    """Eckart-Young on the fitted values of the rows themselves gives the best map of each rank."""
    x, y = rows(200)
    moments = Moments.of(x, y)
    fit = fit_linear(moments, moments, OLS)
    xc, yc = x - x.mean(0), y - y.mean(0)
    ols = torch.linalg.lstsq(xc, yc).solution
    _, _, vh = torch.linalg.svd(xc @ ols, full_matrices=False)
    best = ols @ vh[:rank].T @ vh[:rank]
    down, up, bias = fit.at_rank(rank)
    torch.testing.assert_close(down.T @ up.T, best, rtol=1e-6, atol=1e-7)
    direct = (y - x @ down.T @ up.T - bias).square().sum()
    assert errors_by_rank(fit, moments)[rank].item() == pytest.approx(direct.item(), rel=1e-8)
    assert direct <= (yc - xc @ best).square().sum() * (1 + 1e-9)
    # and no gradient step away from it does better
    left, right = down.T.clone().requires_grad_(), up.T.clone().requires_grad_()
    loss = (yc - xc @ left @ right).square().sum()
    for gradient in torch.autograd.grad(loss, (left, right)):
        assert gradient.abs().max() < 1e-5 * loss.item()


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -2.0])])
def test_linear_outputs_need_no_rows(bias: torch.Tensor | None, added: bool) -> None:
    x, d = rows(60, d_out=2)
    w = torch.randn(4, 2, dtype=torch.float64)
    weights = torch.rand(60, dtype=torch.float64)
    y = x[:, :4] @ w + (0 if bias is None else bias) + (d if added else 0)
    ours = Moments.of(x, d, weights, full_yy=False).mapped(w, bias, added=added)
    for a, b in zip(ours.tensors(), Moments.of(x, y, weights, full_yy=False).tensors(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rank", [1, 3])
def test_in_a_metric_it_is_the_regression_of_rotated_outputs(rank: int) -> None:
    """e'Me = |R'e|^2: the best map of a rank is the best one for the outputs R'y, turned back."""
    x, y = rows(200)
    g = torch.Generator().manual_seed(1)
    root = torch.randn(y.shape[1], y.shape[1], generator=g, dtype=y.dtype)
    metric = root @ root.T
    lifted = metric + recovery.linear.METRIC_FLOOR * torch.linalg.eigvalsh(metric).mean() * torch.eye(len(metric))
    root = torch.linalg.cholesky(lifted)
    turned = Moments.of(x, y @ root)
    down, up, _ = fit_linear(Moments.of(x, y), Moments.of(x, y), OLS, metric=Metric.of(metric)).at_rank(rank)
    other_down, other_up, _ = fit_linear(turned, turned, OLS).at_rank(rank)
    torch.testing.assert_close(down.T @ up.T @ root, other_down.T @ other_up.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("metric", [None, Metric.of(torch.diag(torch.tensor([4.0, 1, 1, 1, 0])).double())])
def test_full_rank_is_the_dense_map(metric: Metric | None) -> None:
    x, y = rows(200)
    moments = Moments.of(x, y)
    fit = fit_linear(moments, moments, OLS, metric=metric)
    down, up, bias = fit.at_rank(fit.max_rank)
    torch.testing.assert_close(down.T @ up.T, fit.weight)
    torch.testing.assert_close(bias, fit.bias)
    if metric is None:
        assert errors_by_rank(fit, moments)[-1].item() == pytest.approx(
            feature_errors(fit, moments).sum().item(), rel=1e-9
        )


def test_ridge_is_the_best_on_held_out_rows() -> None:
    x, y = rows(12)  # hardly more rows than features: plain least squares overfits
    held_x, held_y = rows(400, seed=9)
    held = Moments.of(held_x, held_y)
    errors = {
        r: feature_errors(fit_linear(Moments.of(x, y), held, (r,)), held).sum().item() for r in recovery.linear.RIDGES
    }
    chosen = fit_linear(Moments.of(x, y), held)
    assert chosen.ridge == min(errors, key=errors.__getitem__)
    assert chosen.ridge > 0


def test_dead_and_repeated_inputs_are_no_harm() -> None:
    x, y = rows(100)
    x = torch.cat([x, torch.zeros(100, 1, dtype=x.dtype), x[:, :1], torch.full((100, 1), 7.0, dtype=x.dtype)], 1)
    moments = Moments.of(x, y)
    fit = fit_linear(moments, moments, OLS)
    assert fit.weight.isfinite().all()
    plain = fit_linear(Moments.of(x[:, :7], y), Moments.of(x[:, :7], y), OLS)
    assert feature_errors(fit, moments).sum() == pytest.approx(
        feature_errors(plain, Moments.of(x[:, :7], y)).sum().item(), rel=1e-6
    )


def test_exactly_linear_rows_score_one() -> None:
    x, _ = rows(100)
    y = x @ torch.randn(7, 5, dtype=torch.float64) - 2
    moments = Moments.of(x, y)
    fit = fit_linear(moments, moments)
    assert recovery.r2(fit, moments) == pytest.approx(1, abs=1e-9)


def test_outlier_regime_shows_in_the_median_and_the_rank() -> None:
    """One giant linear feature, the others noise: the pooled R2 is high, the median and the rank say why."""
    torch.manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64)
    y = torch.randn(400, 8, dtype=torch.float64)
    y[:, 0] = 1000 * x[:, 0]
    moments = Moments.of(x, y)
    fit = fit_linear(moments, moments, OLS)
    assert recovery.r2(fit, moments) > 0.999
    assert recovery.feature_r2(fit, moments).median() < 0.1
    assert recovery.effective_rank(recovery.spectrum_of(moments.covariance_y())) < 1.01


def test_effective_rank_and_condition_number_of_known_spectra() -> None:
    assert recovery.effective_rank(torch.ones(6, dtype=torch.float64)) == pytest.approx(6)
    assert recovery.effective_rank(torch.tensor([3.0, 0.0])) == pytest.approx(1)
    assert recovery.condition_number(torch.tensor([100.0, 4.0, 0.0], dtype=torch.float64)) == pytest.approx(25)


def test_jackknife_equals_leaving_each_sequence_out() -> None:
    x, y = rows(60)
    fit = fit_linear(Moments.of(x, y), Moments.of(x, y), OLS)
    error = (y - x @ fit.weight - fit.bias).square().sum(1).view(6, 10).sum(1)
    sequences = y.view(6, 10, -1)
    ours = recovery.r2_interval(
        error, torch.full((6,), 10.0, dtype=torch.float64), sequences.sum(1), sequences.square().sum((1, 2))
    )
    values = []
    for left in range(6):
        keep = [i for i in range(6) if i != left]
        kept = sequences[keep].flatten(0, 1)
        values.append(1 - error[keep].sum().item() / (kept - kept.mean(0)).square().sum().item())
    mean = sum(values) / 6
    assert ours == pytest.approx(math.sqrt(5 / 6 * sum((v - mean) ** 2 for v in values)), rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(1, 49), seed=st.integers(0, 1000), full=st.booleans())
def test_moments_add(cut: int, seed: int, full: bool) -> None:
    x, y = rows(50, seed=seed)
    whole = Moments.of(x, y, full_yy=full)
    parts = Moments.of(x[:cut], y[:cut], full_yy=full) + Moments.of(x[cut:], y[cut:], full_yy=full)
    for a, b in zip(whole.tensors(), parts.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("width", [1, 100, 128, 300])
def test_grams_of_any_width_are_whole_and_symmetric(width: int) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(20, width, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
    moments = Moments.of(x, x, weights)
    torch.testing.assert_close(moments.xx, x.T @ (weights[:, None] * x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.yy, moments.xy, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), times=st.integers(2, 4))
def test_a_weight_is_a_repetition(seed: int, times: int) -> None:
    x, y = rows(20, seed=seed)
    weights = torch.ones(20, dtype=torch.float64)
    weights[:5] = times
    weighted = Moments.of(x, y, weights)
    repeated = Moments.of(torch.cat([x, *[x[:5]] * (times - 1)]), torch.cat([y, *[y[:5]] * (times - 1)]))
    for name in ("weight", "x", "y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(weighted, name), getattr(repeated, name), rtol=1e-12, atol=1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_r2_does_not_mind_units(seed: int, scale: float) -> None:
    x, y = rows(80, seed=seed)
    plain, scaled = Moments.of(x, y), Moments.of(x * scale, y * scale)
    r2s = [recovery.r2(fit_linear(m, m), m) for m in (plain, scaled)]
    assert r2s[0] == pytest.approx(r2s[1], abs=1e-7)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000))
def test_more_rank_never_fits_worse(seed: int) -> None:
    x, y = rows(60, seed=seed)
    moments = Moments.of(x, y)
    errors = errors_by_rank(fit_linear(moments, moments, OLS), moments)
    assert (errors.diff() <= 1e-9 * errors[0]).all()
