"""Streamed moments against the activations themselves, and what stops a pass."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model

from ffncompress.errors import NumericsError, TextError
from ffncompress.models import find_blocks
from ffncompress.passes.calibration import check_enough_rows, collect_moments, group_by_memory
from ffncompress.recovery import Moments
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers


def windows(count: int, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 3000, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", TINY)
def test_moments_are_those_of_the_activations(family: str) -> None:
    model = tiny_model(family)
    blocks = find_blocks(model)
    fit, held_out = windows(5), windows(2, seed=1)
    moments = collect_moments(model, blocks, fit, held_out, Run(Workers("cpu")))
    block = blocks[1]
    seen: dict[str, torch.Tensor] = {}

    def watch(path: str, **names) -> None:
        def hook(_module, args, output) -> None:
            output = output[0] if isinstance(output, tuple) else output
            seen.update({k: (args[0] if what == "in" else output).flatten(0, -2).clone() for k, what in names.items()})

        model.get_submodule(path).register_forward_hook(hook)

    watch(block.lead_path, x="in")
    watch(block.out_path, h="in", y="out")
    watch(block.after_path or block.out_path, added="out")
    watch(block.layer_path, s="out")
    for ids, plain, inner, weighted in (
        (fit, moments[1].fit, moments[1].fit_inner, moments[1].weighted()[0]),
        (held_out, moments[1].held_out, moments[1].held_out_inner, moments[1].weighted()[1]),
    ):
        with torch.inference_mode():
            model(ids)
        # an error of y weighs what it is where it is added, behind a norm if there is one
        gain = seen["added"].double().square().sum(1) / seen["y"].double().square().sum(1)
        weights = gain / seen["s"].double().square().sum(1)
        full = plain.yy.dim() == 2
        for ours, expected in (
            (plain, Moments.of(seen["x"], seen["y"], full_yy=full)),
            (inner, Moments.of(torch.cat([seen["h"], seen["x"]], 1), seen["y"], weights, full_yy=False)),
            (weighted, Moments.of(seen["x"], seen["y"], weights, full_yy=False)),
        ):
            for a, b in zip(ours.tensors(), expected.tensors(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # float32 forwards, other batching


def test_not_finite_activations_name_the_block() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    with pytest.raises(NumericsError, match=r"layer 1 \(transformer\.h\.1\).*--dtype float32"):
        collect_moments(model, find_blocks(model), windows(2), windows(1), Run(Workers("cpu")))


def test_too_few_rows_say_how_many_are_needed() -> None:
    blocks = find_blocks(tiny_model("gpt2"))
    check_enough_rows(blocks, 128)
    with pytest.raises(TextError, match="127 fit tokens are too few for FFNs 32 wide: at least 128"):
        check_enough_rows(blocks, 127)


def test_a_large_model_takes_several_passes() -> None:
    blocks = find_blocks(tiny_model("gpt2"))
    wide = 128 + 32
    size = 16 * (32 * (32 + 32) + wide * (wide + 32))
    assert [len(group) for group in group_by_memory(blocks, 2**30)] == [3]
    assert [len(group) for group in group_by_memory(blocks, 2 * size)] == [2, 1]
    assert [len(group) for group in group_by_memory(blocks, 1)] == [1, 1, 1]
    model, ids = tiny_model("gpt2"), windows(4)
    whole = collect_moments(model, blocks, ids, ids, Run(Workers("cpu")))
    for block, expected in zip(blocks, whole, strict=True):
        alone = collect_moments(model, [block], ids, ids, Run(Workers("cpu")))[0]
        held = sum(t.numel() for part in alone.all() for t in part.tensors() if t.dim() == 2) * 8
        assert held == size + 8 * 32**2  # and the outputs' own covariance
        for a, b in zip(alone.fit.tensors(), expected.fit.tensors(), strict=True):
            assert torch.equal(a, b)
