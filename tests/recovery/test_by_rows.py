"""An output matrix found from rows and the Gram matrices of runs, against the one that a whole Gram matrix gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ffncompress.recovery import Moments, descent, fit_neurons
from ffncompress.recovery.by_rows import OutRows, out_steps

KEPT, RUNS, RIDGE = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11]), (3, 3, 2), 1e-2


def rows_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """h with neurons that have much in common, weights of rows, and the output matrix."""
    shared, own = (torch.Generator().manual_seed(each) for each in (0, seed))
    mix, w = (torch.randn(12, n, generator=shared, dtype=torch.float64) for n in (12, 5))
    h = torch.randn(300, 12, generator=own, dtype=torch.float64) @ (mix + 2)
    return h, torch.rand(300, generator=own, dtype=torch.float64) + 0.1, w


def found(runs: tuple[int, ...], sign: float = 1.0) -> Tensor | None:
    """The output matrix of the kept neurons, from their weights as they were on."""
    h, weights, w = rows_of(1)
    fit = OutRows(h[:, KEPT], h @ w - h[:, KEPT] @ w[KEPT], weights, False)
    other = OutRows(fit.h, sign * fit.left, weights, True)
    grams = [part.T @ (weights[:, None] * part) for part in fit.h.split(runs, 1)]
    steps = out_steps(lambda: [fit, other], grams, torch.zeros_like(w[KEPT]), RIDGE, lambda _tensors: None)
    return None if steps is None else w[KEPT] + steps[0]


def exact() -> Tensor:
    h, weights, w = rows_of(1)
    moments = Moments.of(h, h @ w, weights, full_yy=False)
    return fit_neurons(moments, moments, KEPT, w, biased=False, ridges=(RIDGE,)).out


def test_it_ends_at_the_exact_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEPS", 100)
    monkeypatch.setattr(descent, "PATIENCE", 100)
    out = found(RUNS)
    assert out is not None
    h, weights, w = rows_of(1)
    errors = [
        (weights[:, None] * (h @ w - h[:, KEPT] @ each).square()).sum().item() for each in (out, exact(), w[KEPT])
    ]
    assert errors[0] <= errors[1] * (1 + 1e-6) < errors[2]  # held-out rows are the same: they may ask for less ridge


def test_of_one_run_it_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEPS", 1)
    torch.testing.assert_close(found((8,)), exact())


def test_what_does_not_serve_held_out_rows_is_not_done() -> None:
    assert found(RUNS, sign=-1.0) is None
