"""A slimmed model slimmed again: kept neurons are an FFN like any other, all else stays; for every pair of kinds."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY
from transformers import AutoModelForCausalLM

from ffncompress import api, load
from ffncompress.errors import ModelError
from ffncompress.models import find_blocks, find_model, installed, load_model
from ffncompress.passes.proof import proof_of
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.measuring import measure_model
from ffncompress.planning.planner import describe
from ffncompress.planning.saving import save_plan
from ffncompress.records.plan import Kind
from ffncompress.replacement.building import build_replacement, tensors_of
from ffncompress.replacement.fitting import fit_name
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings
from ffncompress.text.parts import read_parts

IDS = torch.arange(5, 25)[None]
KINDS = Kind.__args__


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


SETTINGS = PlanSettings(tokens=2048, seq_len=64, blocks="0,1", budget="2x")


@pytest.fixture(scope="module")
def measured(mixed_folder):
    """A mixed model as a plan measures it; once for each family."""
    return functools.cache(
        lambda family: measure_model(find_model(str(mixed_folder(family))), SETTINGS, Run(Workers("cpu")))
    )


def second_plan(found: MeasuredModel, kinds: list[str], output: Path):
    """A plan that gives the model's blocks replacements of these kinds, in order; and the model that it describes."""
    choice = [max((o for o in menu if o.kind == kind), key=lambda o: o.parameters)
              for menu, kind in zip(found.menus, kinds, strict=True)]  # fmt: skip
    modules = {
        i: build_replacement(
            b, found.model.get_submodule(b.path), choice[i].shape, found.fitted[i].maps[fit_name(choice[i])]
        )
        for i, b in enumerate(found.blocks)
    }
    plan = describe(found, SETTINGS, found.space(), choice, [], [], list(range(len(choice))))
    with installed(found.model, {b.path: modules[i] for i, b in enumerate(found.blocks)}):
        plan = plan.model_copy(update={"proof": proof_of(found.model)})
        expected = logits(found.model)
    return save_plan(plan, output, tensors_of(modules)), expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_kind_on_a_mix_of_every_kind(family: str, kind: str, measured, mixed_folder, tmp_path: Path) -> None:
    """Two FFNs are left in the mix: the kept neurons of the first layer, and the untouched last one."""
    first = mixed_folder(family)
    other = KINDS[(KINDS.index(kind) + 1) % len(KINDS)]
    plan, expected = second_plan(measured(family), [kind, other], tmp_path / "plan")
    assert len(plan.blocks) == 2
    second = api.compress(tmp_path / "plan", tmp_path / "slim")
    model = AutoModelForCausalLM.from_pretrained(second)
    assert torch.equal(logits(model), expected)
    was, now = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (first, second))
    assert [spec["kind"] for spec in now["blocks"].values()] == [kind, "dense", "hybrid", "low-rank", "constant", other]
    assert list(now["blocks"].items())[1:5] == list(was["blocks"].items())[1:5]
    assert now["activations"] == was["activations"]
    assert plan.base.parameters == sum(p.numel() for p in load_model(find_model(str(first))).parameters())
    assert plan.parameters_after == sum(p.numel() for p in model.parameters())
    assert plan.base.ffn_parameters == sum(p.numel() for name, p in load(first).named_parameters() if ".mlp." in name)
    assert api.verify(second).base_model == first.name
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected)


@pytest.mark.slow
def test_the_whole_way_twice(demo_slim: Path, tmp_path: Path) -> None:
    """By the verbs alone: the second checkpoint's base is the first, and the gate compares with it."""
    first = load(demo_slim)
    plan = api.plan(str(demo_slim), tmp_path / "plan", data=["stories"], tokens=2048, budget="-10%", refit=False)
    assert plan.replaced
    second = api.compress(tmp_path / "plan", tmp_path / "slim")
    result = api.evaluate(second, tokens=600, repeats=1, max_delta="500%")
    assert result.base_model == demo_slim.name
    assert result.sizes.whole_model == (
        sum(p.numel() for p in first.parameters()), sum(p.numel() for p in load(second).parameters()),
    )  # fmt: skip
    assert api.verify(second).parameters_before == result.sizes.whole_model[0]
    both = json.loads((second / "config.json").read_text())["quantization_config"]["blocks"]
    earlier = json.loads((demo_slim / "config.json").read_text())["quantization_config"]["blocks"]
    assert set(both) == set(earlier) | {block.path for block in plan.replaced}


@pytest.mark.parametrize("family", TINY)
def test_what_is_left_is_found(family: str, mixed_folder) -> None:
    blocks = find_blocks(load_model(find_model(str(mixed_folder(family)))))
    assert [block.layer_path.split(".")[-1] for block in blocks] == ["0", "5"]
    assert [block.index for block in blocks] == [0, 1]
    assert blocks[0].d_inner == 64


def test_nothing_left_is_said(mixed_folder, tmp_path: Path) -> None:
    model = load_model(find_model(str(mixed_folder("llama"))))
    del model.model.layers[5], model.model.layers[0]
    with pytest.raises(ModelError, match="no FFN left"):
        find_blocks(model)


@pytest.mark.slow
def test_any_two_models_are_judged(demo_slim: Path, tiny_folder, tmp_path: Path) -> None:
    """A slimmed model that was trained and saved elsewhere; its base; a model as such."""
    text = tmp_path / "text.txt"
    text.write_text(read_parts("stories")["report"].joined[:8000])
    trained = tmp_path / "trained"
    demo_slim = Path(shutil.copytree(demo_slim, tmp_path / "slim"))  # judging writes into it, and others use it too
    model = load(demo_slim)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(trained)
    for file in demo_slim.glob("tokenizer*"):
        shutil.copy(file, trained)
    options = {"data": str(text), "tokens": 500, "repeats": 1, "max_delta": "500%"}
    before = sorted(trained.iterdir())
    result = api.evaluate(trained, base="demo", **options)
    assert result.passed
    assert result.sizes.whole_model[0] > result.sizes.whole_model[1]
    assert result.sizes.all_ffns is None
    assert sorted(trained.iterdir()) == before
    own = api.evaluate(demo_slim, **options)
    assert api.evaluate(demo_slim, base="demo", **options).main == own.main  # the same measurement
    assert result.main.base == own.main.base
    assert result.main.slimmed != own.main.slimmed
    assert not api.evaluate(trained, base="demo", **{**options, "max_delta": "0.0001"}).passed
    with pytest.raises(ModelError, match="no such file or folder"):
        api.evaluate(trained, base="./nowhere", **options)
