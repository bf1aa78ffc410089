"""Refitting in order: one layer at a time is the model itself, and the stream comes closer to the original's."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model
from library.small_models import small_model

from ffncompress import Plan
from ffncompress.models import ffn_of, find_blocks, first_tensor, installed
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.refit import refit, run_layer
from ffncompress.records.plan import Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import fit_some
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.parts import read_parts
from ffncompress.text.windows import joined_windows


def windows(count: int = 40, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 3000, (count, length), generator=torch.Generator().manual_seed(seed))


def neurons(model, block, shape: Shape, moments) -> torch.nn.Module:
    """Kept neurons as fitted on the original model's activations."""
    ffn, name = ffn_of(model, block), f"neurons {shape.width}"
    return build_replacement(block, ffn, shape, fit_some(block, moments, ffn, [name])[name])


@torch.inference_mode()
def distance(model, blocks, ids: torch.Tensor, modules) -> float:
    """How far the stream of a model with these in place is from its own."""
    original = model.base_model(ids).last_hidden_state
    with installed(model, {blocks[i].path: module for i, module in modules.items()}):
        return (model.base_model(ids).last_hidden_state - original).square().mean().item()


@pytest.mark.parametrize("family", [*TINY, "gemma3n_text", "gemma4_text"])
@torch.inference_mode()
def test_layer_by_layer_is_the_whole_model(family: str) -> None:
    """Also where the last layers take keys and values from an earlier one (Gemma 3n and 4)."""
    model, ids = (tiny_model(family) if family in TINY else small_model(family)), windows(3)
    blocks = find_blocks(model)
    streams: list[torch.Tensor] = []
    for block in blocks:
        model.get_submodule(block.layer_path).register_forward_hook(
            lambda _m, _a, out: streams.append(out[0] if isinstance(out, tuple) else out)
        )
    model(ids)
    expected = list(streams)
    state = None
    for i in range(len(blocks)):
        rows, state = run_layer(model, blocks, i, ids, state)
        torch.testing.assert_close(first_tensor(state[0]), expected[i])
        if blocks[i].stream_path is None:
            torch.testing.assert_close(rows.stream, expected[i].flatten(0, 1))
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("shape", [Shape("neurons", 48), Shape("hybrid", 24, 4), Shape("low-rank", rank=8)], ids=str)
def test_the_first_block_is_fitted_as_on_the_original_model(shape: Shape) -> None:
    """Nothing has drifted before it, so both ways give the same replacement."""
    model, ids, run = tiny_model("llama"), windows(), Run(Workers("cpu"))
    blocks = find_blocks(model)
    ours = refit(model, blocks, {0: shape}, ids, ids, run)[0]
    moments = collect_moments(model, blocks[:1], ids, ids, run)[0]
    ffn = model.get_submodule(blocks[0].path)
    name = f"{shape.kind} {shape.width}" if shape.width else "stream"
    other = build_replacement(blocks[0], ffn, shape, fit_some(blocks[0], moments, ffn, [name])[name])
    x = torch.randn(5, 32)
    torch.testing.assert_close(ours(x), other(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma3_text", "gemma3n_text", "bert", "qwen2_moe"])
def test_undoing_the_drift_brings_the_stream_closer(family: str) -> None:
    """Where its output is added as it is, behind a norm, before more that the layer does, before a norm, by a gate."""
    model = tiny_model(family) if family in TINY else small_model(family)
    ids, run = windows(120), Run(Workers("cpu"))
    blocks = find_blocks(model)
    shapes = {i: Shape("neurons", block.d_inner // 4) for i, block in enumerate(blocks) if not block.tied}
    moments = collect_moments(model, blocks, ids, ids, run)
    alone = {i: neurons(model, blocks[i], shape, moments[i]) for i, shape in shapes.items()}

    in_order = distance(model, blocks, ids, refit(model, blocks, shapes, ids, ids, run, undo_drift=False))
    undone = distance(model, blocks, ids, refit(model, blocks, shapes, ids, ids, run))
    assert undone < in_order
    assert undone < distance(model, blocks, ids, alone)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "neurons"), ("llama", "hybrid"), ("gpt2", "hybrid"), ("opt", "hybrid")]
)
def test_a_thorough_one_brings_it_closer_still(family: str, kind: str) -> None:
    """The matrices that lead in move too; not where a bypass is rows of theirs, which the activation leaves alone."""
    model, ids, run = tiny_model(family), windows(120), Run(Workers("cpu"))
    blocks = find_blocks(model)
    shapes = {block.index: Shape(kind, block.d_inner // 4, 4 * (kind == "hybrid")) for block in blocks}
    usual, thorough = (
        distance(model, blocks, ids, refit(model, blocks, shapes, ids, ids, run, inner=inner))
        for inner in (False, True)
    )
    if family == "opt":
        assert thorough == usual
    else:
        assert thorough < 0.99 * usual


@pytest.mark.slow
def test_it_helps_the_embedded_model(demo_model, tokenizer) -> None:
    """On held-out text that neither way has seen."""
    from ffncompress.passes.losses import perplexity, sequence_losses

    parts, run = read_parts("stories"), Run(Workers("cpu"))
    fit, held, report = (
        joined_windows(parts[p], tokenizer, length=64, count=n)
        for p, n in (("fit", 240), ("choose", 40), ("report", 80))
    )
    blocks = find_blocks(demo_model)
    shapes = {i: Shape("neurons", block.d_inner // 4) for i, block in enumerate(blocks) if i}
    moments = collect_moments(demo_model, blocks, fit, held, run)
    alone = {i: neurons(demo_model, blocks[i], shape, moments[i]) for i, shape in shapes.items()}
    again = refit(demo_model, blocks, shapes, fit, held, run)
    found = []
    for modules in (alone, again):
        with installed(demo_model, {blocks[i].path: module for i, module in modules.items()}):
            found.append(perplexity(sequence_losses(demo_model, report, run)))
    assert found[1] < found[0]


def test_a_plan_keeps_the_better_of_both(demo_plan) -> None:
    plan = Plan.load(demo_plan)
    final = plan.final_check
    assert final is not None
    same = [c.perplexity for c in plan.joint_checks if c.blocks == final.blocks]
    assert len(same) >= 2
    assert final.perplexity == min(same)
