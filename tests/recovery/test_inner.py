"""Steps of the matrices that lead in, against a least-squares solver that has all unknowns at once."""

from __future__ import annotations

import pytest
import torch

from ffncompress.recovery import descent
from ffncompress.recovery.inner import InnerRows, inner_steps


def rows_of(seed: int, held_out: bool, noise: float = 0.0) -> tuple[InnerRows, torch.Tensor, torch.Tensor]:
    """Rows whose rest a known step explains, but for noise; the step; the output matrix."""
    shared, own = (torch.Generator().manual_seed(each) for each in (0, seed))
    out, step = torch.randn(3, 5, generator=shared).double(), torch.randn(2, 3, 4, generator=shared).double()
    x, slopes = torch.randn(60, 4, generator=own).double(), torch.randn(2, 60, 3, generator=own).double()
    weights = torch.rand(60, generator=own).double() + 0.1
    left = InnerRows(x, slopes, x, weights, held_out).moved(step, out)
    left = left + noise * torch.randn(left.shape, generator=own).double()
    return InnerRows(x, slopes, left, weights, held_out), step, out


def solve(fit: InnerRows, held_out: InnerRows, out: torch.Tensor) -> torch.Tensor | None:
    return inner_steps(lambda: [fit, held_out], torch.zeros(2, 3, 4), out, lambda _tensors: None)


def test_it_is_the_least_squares_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEPS", 100)
    monkeypatch.setattr(descent, "PATIENCE", 100)
    fit, _, out = rows_of(1, False, noise=0.5)
    held_out = InnerRows(fit.x, fit.slopes, fit.left, fit.weights, True)  # the same rows: the exact solution is best
    found = solve(fit, held_out, out)
    columns = [
        (fit.weights.sqrt()[:, None] * fit.moved(unit.view(2, 3, 4), out)).flatten() for unit in torch.eye(24).double()
    ]
    target = (fit.weights.sqrt()[:, None] * fit.left).flatten()
    exact = torch.linalg.lstsq(torch.stack(columns, 1), target[:, None]).solution.view(2, 3, 4)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


def test_a_planted_step_is_found() -> None:
    (fit, step, out), (held_out, _, _) = rows_of(1, False), rows_of(2, True)
    found = solve(fit, held_out, out)
    assert (found - step).norm() < 0.1 * step.norm()


def test_what_does_not_serve_held_out_rows_is_not_done() -> None:
    (fit, _, out), (held_out, _, _) = rows_of(1, False), rows_of(2, True)
    contrary = InnerRows(held_out.x, held_out.slopes, -held_out.left, held_out.weights, True)
    assert solve(fit, contrary, out) is None
