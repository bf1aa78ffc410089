"""Layers run by themselves: what the blocks of a streamed model are measured by is what a whole pass measures."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY

from ffncompress.models import find_blocks, find_model, load_model
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import felt_by_block, gradients, label_seeds
from ffncompress.passes.walking import walk
from ffncompress.runtime.memory import Halving
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers

IDS = torch.arange(240).view(6, 40) * 7 % 3000 + 3


@pytest.fixture
def models(tiny_folder):
    def load(family):
        source = find_model(str(tiny_folder(family)))
        return [load_model(source, dtype="float32", stream=stream).requires_grad_(False) for stream in (False, True)]

    return load


@pytest.mark.parametrize("family", TINY)
def test_moments_of_groups_that_run_on_are_those_of_one_pass(family, models) -> None:
    whole, streamed = models(family)
    blocks, run = find_blocks(whole), Run(Workers("cpu"))
    run.workers.batch_tokens = 80
    expected = collect_moments(whole, blocks, IDS[:4], IDS[4:], run)
    found = []
    with walk(streamed, blocks, kept=True) as steps:
        for group in (blocks[:1], blocks[1:]):
            found += collect_moments(streamed, group, IDS[:4], IDS[4:], run, steps=steps)
        later = collect_moments(streamed, blocks[2:], IDS[:4], IDS[4:], run, steps=steps)  # nobody ran up to here
    for own, other in zip([*expected, expected[2]], [*found, *later], strict=True):
        for a, b in zip(own.named_tensors().values(), other.named_tensors().values(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize("family", TINY)
def test_gradients_come_layer_by_layer(family, models) -> None:
    whole, streamed = models(family)
    blocks = find_blocks(whole)
    expected = gradients(whole, blocks, IDS[:2], label_seeds(torch.arange(2), 0))
    found = [(i, felt) for i, felt, _ in felt_by_block(streamed, blocks, torch.arange(2), IDS[:2], Halving())]
    assert [i for i, _ in found] == [2, 1, 0]
    for i, felt in found:
        for a, b in (
            (expected[i].gradient, felt.gradient),
            (expected[i].rows.x, felt.rows.x),
            (expected[i].stream, felt.stream),
            (expected[i].gain, felt.gain),
        ):
            assert (a - b).abs().max() <= 1e-4 * a.abs().max()
