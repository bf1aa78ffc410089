"""Which library multiplies single-precision matrices on a CPU: the faster one, where it is as exact.

torch's CPU builds multiply by MKL, which keeps its widest instructions for Intel's own processors. On AMD's with
AVX-512 oneDNN, which torch holds too, is about twice as fast. The only switch to it is one that also allows bfloat16,
of three digits; oneDNN takes that leave where a CPU has tiles for it (AMX), and stays in single precision elsewhere. So
the switch is tried first, and left alone unless its products are as exact as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

EXACT = 2e-6  # of a product's norm: ten times what rounding to float32 leaves, a thousandth of what bfloat16 does
_SHAPES = ((64, 96, 80), (257, 576, 131), (1024, 256, 512))  # of products that are tried


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Within, float32 products on a CPU go to the faster library, if that one is known and as exact."""
    if device.type != "cpu" or not _left_out_by_mkl():
        yield
        return
    with _precision("medium"):
        exact = products_are_exact()
    with _precision("medium" if exact else torch.get_float32_matmul_precision()):
        yield


@contextmanager
def usual_products() -> Iterator[None]:
    """Within, products are those of any other program: for what measures speed."""
    with _precision("highest"):
        yield


def products_are_exact() -> bool:
    """Whether products of float32 matrices are right to float32, as torch is set now."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in _SHAPES:
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(inner, columns, generator=generator)
        expected = a.double() @ b.double()
        for product in (a @ b, torch.nn.functional.linear(a, b.T)):
            if not (product.double() - expected).norm() < EXACT * expected.norm():
                return False
    return True


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _left_out_by_mkl() -> bool:
    try:
        found = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False
    return "AuthenticAMD" in found and re.search(r"^flags\b.*\bavx512f\b", found, re.M) is not None
