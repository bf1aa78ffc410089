"""Neurons in runs: how many, and what is kept of them."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model

from ffncompress.models import Block, find_blocks
from ffncompress.models.families import GATED
from ffncompress.passes.calibration import collect_moments
from ffncompress.replacement.moments import BlockMoments, moment_bytes, run_sizes, runs_within
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers

MOMENT_BYTES = 8 * 2**30


@pytest.mark.parametrize(
    ("width", "inner", "runs"), [(576, 1536, 1), (4096, 14336, 1), (5120, 27648, 2), (8192, 28672, 4)]
)
def test_as_few_runs_as_fit(width: int, inner: int, runs: int) -> None:
    block = Block(0, "b", "l", GATED, width, inner, width, 1)
    assert runs_within(block, MOMENT_BYTES) == runs
    assert moment_bytes(block, runs) <= MOMENT_BYTES
    assert runs == 1 or moment_bytes(block, runs - 1) > MOMENT_BYTES


def test_runs_are_alike_and_whole() -> None:
    assert run_sizes(10, 4) == [3, 3, 2, 2]
    block = Block(0, "b", "l", GATED, 4, 8, 4, 1)
    assert runs_within(block, 0) == 4  # a run has two neurons at least


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_run_has_its_block_of_the_whole_gram_matrix(family: str) -> None:
    model, ids = tiny_model(family), torch.randint(1, 3000, (8, 16), generator=torch.Generator().manual_seed(0))
    block = find_blocks(model)[1]
    limit = 16 * block.d_inner**2 // 3 * 2
    assert runs_within(block, limit) == 3
    whole, divided = (
        collect_moments(model, [block], ids, ids, Run(Workers("cpu"), moment_bytes=each))[0]
        for each in (MOMENT_BYTES, limit)
    )
    assert not whole.runs
    assert len(divided.runs) == 3
    start = 0
    for own, _ in divided.runs:
        at = slice(start, start + own.d_in)
        torch.testing.assert_close(own.xx, whole.fit_inner.xx[at, at], rtol=1e-5, atol=1e-9)
        start += own.d_in
    for ours, expected in zip(divided.weighted(), whole.weighted(), strict=True):
        for a, b in zip(ours.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    weight, bias = torch.randn(block.d_inner, 32), torch.randn(32)
    shares = [fit for fit, _ in divided.of_neurons(weight, bias)]
    expected = whole.fit_inner.mapped(weight, bias)
    torch.testing.assert_close(sum(share.y for share in shares), expected.y, rtol=1e-4, atol=1e-6)


def test_runs_go_into_a_file_and_back() -> None:
    model, ids = tiny_model("llama"), torch.randint(1, 3000, (8, 16), generator=torch.Generator().manual_seed(0))
    moments = collect_moments(model, find_blocks(model)[:1], ids, ids, Run(Workers("cpu"), moment_bytes=98_304))[0]
    again = BlockMoments.named(moments.named_tensors())
    assert len(again.runs) == len(moments.runs) == 3
    assert again.neurons == 0
    for ours, theirs in zip(again.all(), moments.all(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
