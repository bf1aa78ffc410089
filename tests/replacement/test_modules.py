"""Replacements of every kind in every family: what they compute, what they count, and how they come back from disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny_model
from transformers import AutoModelForCausalLM

from ffncompress import Plan, api, apply_
from ffncompress.models import ffn_of, find_blocks, find_model, load_model
from ffncompress.passes.calibration import collect_moments
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.measuring import measure_model
from ffncompress.planning.menus import menu_shapes
from ffncompress.planning.planner import describe
from ffncompress.planning.saving import save_plan
from ffncompress.records.plan import Kind, Shape
from ffncompress.replacement.building import build_replacement, tensors_of
from ffncompress.replacement.fitting import fit_block, fit_name, fit_some
from ffncompress.replacement.modules import build, parameters
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings

KINDS = Kind.__args__
IDS = torch.arange(5, 25)[None]
BIASED = {"gpt2", "gpt_neox"}


def of_kind(block, kind: str) -> Shape:
    """The widest of the menu's replacements of a kind."""
    return max((s for s in menu_shapes(block) if s.kind == kind), key=lambda s: (s.width, s.rank))


@pytest.fixture(scope="module")
def measured():
    """Model, blocks, and the moments of the second one, of each family."""
    made = {}

    def measure(family: str):
        if family not in made:
            model = tiny_model(family)
            blocks = find_blocks(model)
            ids = torch.randint(1, 3000, (40, 16), generator=torch.Generator().manual_seed(0))
            made[family] = model, blocks[1], collect_moments(model, blocks[1:2], ids, ids, Run(Workers("cpu")))[0]
        return made[family]

    return measure


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TINY)
@torch.inference_mode()
def test_it_computes_what_was_fitted(family: str, kind: str, measured) -> None:
    model, block, moments = measured(family)
    ffn, shape = ffn_of(model, block), of_kind(block, kind)
    name = f"{shape.kind} {shape.width}" if shape.width else "stream"
    fit = fit_some(block, moments, ffn, [name])[name]
    module = build_replacement(block, ffn, shape, fit)
    assert parameters(shape, block) == sum(p.numel() for p in module.parameters())
    seen = {}
    handle = ffn.get_submodule(block.layout.out).register_forward_hook(lambda _m, a, _o: seen.update(h=a[0]))
    x = torch.randn(2, 3, block.d_in)
    ffn(x)
    handle.remove()
    h = seen["h"].double()
    if kind == "neurons":
        expected = h[..., fit.kept] @ fit.out.double() + (0 if fit.bias is None else fit.bias)
    elif kind == "hybrid":
        out, down, up, bias = (t.double() for t in fit.at_rank(shape.rank))
        expected = h[..., fit.kept] @ out + x.double() @ down.T @ up.T + bias
    elif kind == "dense":
        expected = x.double() @ fit.weight + fit.bias
    else:
        down, up, bias = fit.at_rank(shape.rank)
        expected = x.double() @ down.T @ up.T + bias
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", TINY)
def test_neurons_alone_are_a_narrower_ffn_of_its_own_kind(family: str) -> None:
    model = tiny_model(family)
    block = find_blocks(model)[0]
    ffn = ffn_of(model, block)
    module = build(Shape("neurons", 7), block.layout, ffn)
    assert type(module) is type(ffn)
    assert list(module.state_dict()) == list(ffn.state_dict())
    assert parameters(Shape("neurons", block.d_inner), block) == block.parameters


@pytest.mark.parametrize("family", TINY)
def test_the_whole_width_refitted_is_the_ffn_itself(family: str, measured) -> None:
    """A known answer: y is linear in h, so least squares over all neurons gives the output matrix back."""
    model, block, moments = measured(family)
    ffn = ffn_of(model, block)
    fit = fit_some(block, moments, ffn, [f"neurons {block.d_inner}"])[f"neurons {block.d_inner}"]
    module = build_replacement(block, ffn, Shape("neurons", block.d_inner), fit)
    x = torch.randn(2, 3, block.d_in)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), ffn(x), rtol=1e-4, atol=1e-5)


def test_the_menu_is_smaller_than_the_block_and_fits_are_named(measured) -> None:
    model, block, moments = measured("llama")
    fitted = fit_block(block, moments, ffn_of(model, block))
    for shape in menu_shapes(block):
        assert (f"{shape.kind} {shape.width}" if shape.width else "plain") in fitted.maps
    assert {shape.kind for shape in menu_shapes(block)} == set(KINDS)


FORCED = PlanSettings(tokens=2048, seq_len=64, blocks="0,2", budget="2x")


@pytest.fixture(scope="module")
def measured_folder(tiny_folder) -> Callable[[str], tuple[Path, MeasuredModel]]:
    """A tiny model of a family and what the passes over it gave, once for all kinds."""

    @cache
    def measure(family: str) -> tuple[Path, MeasuredModel]:
        folder = tiny_folder(family)
        return folder, measure_model(find_model(str(folder)), FORCED, Run(Workers("cpu")))

    return measure


def plan_of_kind(found: MeasuredModel, kind: str, output: Path) -> Plan:
    """A plan that replaces blocks 0 and 2 by replacements of one kind."""
    choice: list = [None] * len(found.blocks)
    for i in (0, 2):
        choice[i] = max((o for o in found.menus[i] if o.kind == kind), key=lambda o: o.parameters)
    modules = {
        i: build_replacement(
            b, found.model.get_submodule(b.path), choice[i].shape, found.fitted[i].maps[fit_name(choice[i])]
        )
        for i, b in enumerate(found.blocks)
        if choice[i]
    }
    plan = describe(found, FORCED, found.space(), choice, [], [], [0, 2])
    return save_plan(plan, output, tensors_of(modules))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama-tied", "qwen2", "gemma"])
def test_every_kind_reloads_by_plain_from_pretrained(family: str, kind: str, measured_folder, tmp_path: Path) -> None:
    folder, found = measured_folder(family)
    plan = plan_of_kind(found, kind, tmp_path / "plan")
    slim = api.compress(tmp_path / "plan", tmp_path / "slim")
    in_place = apply_(load_model(find_model(str(folder))), tmp_path / "plan")
    reloaded = AutoModelForCausalLM.from_pretrained(slim)
    with torch.inference_mode():
        assert torch.equal(reloaded(IDS).logits, in_place(IDS).logits)
    assert sum(p.numel() for p in reloaded.parameters()) == plan.parameters_after
    reloaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    with torch.inference_mode():
        assert again(IDS).logits.dtype == torch.bfloat16
