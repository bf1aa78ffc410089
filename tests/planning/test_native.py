"""Native plans: one common width, and a checkpoint that plain transformers loads where this package is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fresh_process import LOAD, run_python
from library.small_models import small_model

import ffncompress
from ffncompress import api
from ffncompress.checkpoint.card import reproduce_command
from ffncompress.errors import BudgetError, FfncompressError, PlanError
from ffncompress.models import count_parameters, find_blocks, find_model, load_model, width_key
from ffncompress.planning.common_width import width_within_size
from ffncompress.records.plan import Plan
from ffncompress.settings import PlanSettings

QUICK = {"tokens": 2048, "seq_len": 64}
WIDTH_KEYS = {"gpt2": "n_inner", "gpt_neox": "intermediate_size", "llama-tied": "intermediate_size", "opt": "ffn_dim"}


@pytest.fixture(scope="module")
def native_slim(tiny_folder, tmp_path_factory):
    """A native plan of a tiny model and its checkpoint, once for each family."""
    made: dict[str, tuple[Plan, Path]] = {}

    def make(family: str) -> tuple[Plan, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp("native")
            plan = api.plan(str(tiny_folder(family)), folder / "plan", native=True, budget="-5%", align=8, **QUICK)
            made[family] = plan, api.compress(folder / "plan", folder / "slim")
        return made[family]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDTH_KEYS)
def test_a_native_checkpoint_is_a_stock_one(family: str, native_slim, tiny_folder) -> None:
    plan, slim = native_slim(family)
    config = json.loads((slim / "config.json").read_text())
    before = json.loads((tiny_folder(family) / "config.json").read_text())
    (width,) = {block.choice.width for block in plan.blocks}
    assert width % 8 == 0
    key = WIDTH_KEYS[family]
    assert config == {**before, key: width, "dtype": config["dtype"]}  # no quantizer, no guard, nothing added
    assert not (slim / "config.json").read_text().count("ffncompress")
    names = {path.name for path in slim.iterdir()}
    assert {"ffncompress", "ffncompress.json", "README.md"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDTH_KEYS)
def test_it_loads_where_the_package_is_not(family: str, native_slim) -> None:
    _, slim = native_slim(family)
    without = run_python(
        "import sys\nsys.modules['ffncompress'] = None\n" + LOAD.format(folder=str(slim)),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert without.returncode == 0, without.stderr
    ours = ffncompress.load(slim)
    with torch.inference_mode():
        expected = ours(torch.arange(5, 25)[None]).logits.double().sum().item()
    assert float(without.stdout.split("SUM ")[1]) == pytest.approx(expected, abs=1e-6)
    assert "newly initialized" not in without.stderr


@pytest.mark.slow
def test_it_is_known_again(native_slim) -> None:
    plan, slim = native_slim("llama-tied")
    assert api.verify(slim).parameters_after == plan.parameters_after == plan.final_check.parameters
    assert count_parameters(ffncompress.load(slim)) <= 0.95 * plan.base.parameters
    assert "--for native" in reproduce_command(plan)
    card = (slim / "README.md").read_text()
    assert "pip install" not in card
    assert "stock checkpoint" in card
    assert api.evaluate(slim, tokens=512, repeats=1).sizes.whole_model[1] == plan.parameters_after
    with pytest.raises(BudgetError, match="plan again from the model"):
        api.plan(str(slim.parent / "plan"), slim.parent / "other", at=0.9)


@pytest.mark.slow
def test_a_slimmed_stock_model_can_be_slimmed_again(native_slim, tmp_path: Path) -> None:
    plan, slim = native_slim("llama-tied")
    again = api.plan(str(slim), tmp_path / "plan", native=True, budget="-3%", align=8, **QUICK)
    out = api.compress(tmp_path / "plan", tmp_path / "slim")
    assert again.blocks[0].d_inner == plan.blocks[0].choice.width
    assert json.loads((out / "config.json").read_text())["intermediate_size"] == again.blocks[0].choice.width


@pytest.mark.parametrize("budget", ["-1%", "-5%", "-10%", "-12%,2x"])
@pytest.mark.parametrize("align", [1, 8, 32])
def test_caps_hold_and_widths_are_aligned(budget: str, align: int, tiny_folder) -> None:
    model = load_model(find_model(str(tiny_folder("llama-tied"))))
    blocks, whole = find_blocks(model), count_parameters(model)
    settings = PlanSettings(target="native", budget=budget, align=align)
    width = width_within_size(model, blocks, settings)
    assert width % align == 0
    assert 0 < width < blocks[0].d_inner
    share = {"-1%": 0.99, "-5%": 0.95, "-10%": 0.9, "-12%,2x": 0.88}[budget]
    per_neuron = 3 * 3 * 32
    after = whole - (96 - width) * per_neuron
    assert after <= share * whole
    if "x" not in budget:  # and it is the widest that is small enough
        assert after + align * per_neuron > share * whole
    else:
        assert width <= 48


def test_what_no_common_width_gives_is_refused(tiny_folder) -> None:
    model = load_model(find_model(str(tiny_folder("llama-tied"))))
    blocks = find_blocks(model)
    with pytest.raises(BudgetError, match="with 32 neurons a block"):
        width_within_size(model, blocks, PlanSettings(target="native", budget="-13.9%"))


@pytest.mark.slow
def test_by_a_limit(short_demo: Path, tmp_path: Path) -> None:
    plan = api.plan(
        str(short_demo), tmp_path / "plan", data=["stories"], max_delta="15%", native=True, align=16, tokens=4096
    )
    assert len({block.choice.width for block in plan.blocks}) == 1
    assert plan.joint_checks[-1] == plan.final_check
    assert plan.final_check.within_limit
    assert plan.final_check.refitted


@pytest.mark.slow
def test_by_a_speed(tmp_path: Path) -> None:
    plan = api.plan("demo", tmp_path / "plan", target_speed="1.05x", native=True, refit=False, tokens=2048)
    assert len({block.choice.width for block in plan.blocks}) == 1
    assert plan.blocks[0].choice.width % 32 == 0


@pytest.mark.parametrize("family", ["deepseek_v3", "jamba", "bloom"])
def test_no_width_of_some_layers_alone(family: str) -> None:
    """The number in the config is of dense layers, and these have others too; or there is no such number."""
    model = small_model(family)
    assert width_key(model.config, find_blocks(model)) is None


@pytest.mark.parametrize("options", [{"blocks": "0"}, {"frontier": True}, {"kinds": "linear"}])
def test_what_does_not_go_with_it_is_refused(options: dict, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="native"):
        api.plan("demo", tmp_path / "plan", native=True, **options)
    assert not (tmp_path / "plan").exists()


def test_two_targets_are_one_too_many(tmp_path: Path) -> None:
    assert PlanSettings.model_validate({"native": True}).target == "native"
    with pytest.raises(FfncompressError, match="two targets"):
        api.plan("demo", tmp_path / "plan", native=True, target="gguf")


@pytest.mark.slow
def test_a_forged_plan_of_several_widths_is_not_native(native_slim) -> None:
    _, slim = native_slim("gpt2")
    file = slim.parent / "plan" / "plan.json"
    content = json.loads(file.read_text())
    content["blocks"][0]["choice"] = None
    forged = slim.parent / "forged"
    forged.mkdir()
    (forged / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match="not all of one width"):
        Plan.load(forged)
