"""Products are given to the faster library only where it is exact, and given back."""

from __future__ import annotations

import pytest
import torch

from ffncompress.runtime import products
from ffncompress.runtime.products import fast_products, products_are_exact, usual_products

CPU = torch.device("cpu")


def test_products_stay_exact_within_and_are_as_they_were_after() -> None:
    before = torch.get_float32_matmul_precision()
    with fast_products(CPU):
        assert products_are_exact()
        with usual_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert products_are_exact()
    assert torch.get_float32_matmul_precision() == before


def test_products_of_three_digits_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with tiles for bfloat16."""
    linear = torch.nn.functional.linear

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if torch.get_float32_matmul_precision() == "medium":
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return linear(a, b)

    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    monkeypatch.setattr(products, "_left_out_by_mkl", lambda: True)
    with fast_products(CPU):
        assert torch.get_float32_matmul_precision() == "highest"
        assert products_are_exact()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not products_are_exact()
    finally:
        torch.set_float32_matmul_precision("highest")
