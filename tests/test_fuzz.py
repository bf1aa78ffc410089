"""Whatever a stranger sends is refused with a sentence of ours, or is what it says: by the thousand, and by example."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strangers import GATE, KINDS, PROMISED, REFUSED, Bench
from watching import Watch, Wrong, exemplary

from ffncompress import api, load
from ffncompress.checkpoint.origin import read_gate
from ffncompress.cli import run
from ffncompress.errors import ArtifactError, ModelError, PlanError, RecipeError, TextError
from ffncompress.profiling.records import STUDY_FILE, Study
from ffncompress.recipe import Recipe
from ffncompress.records.gate import GateResult
from ffncompress.records.plan import Plan
from ffncompress.records.plan_files import MOMENTS_FILE
from ffncompress.storage.manifest import Manifest
from ffncompress.text.sources import is_public, read

pytestmark = pytest.mark.slow

EXAMPLES = {  # half a minute in all; benchmarks/fuzz.py tries a hundred thousand
    "plans": 60, "sized-plans": 120, "replacements": 60, "configs": 60, "weights": 30, "gates": 100, "origins": 80,
    "carried-plans": 60, "manifests": 200, "studies": 300, "recipes": 300, "tokenizers": 50, "moments": 40,
    "texts": 300,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As every test has it: what is made once for all of them notes there where models are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFNCOMPRESS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny_folder) -> Path:
    """A plan for a size, of a small model, with moments and a frontier."""
    folder = tmp_path_factory.mktemp("kept") / "kept"
    api.plan(str(tiny_folder("gpt2")), folder, tokens=2048, budget="-10%", keep_moments=True, frontier=True)
    return folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_folder, demo_plan: Path, kept: Path) -> Bench:
    made = tmp_path_factory.mktemp("small")
    api.plan(str(tiny_folder("llama")), made / "plan", tokens=2048, blocks="0,2", budget="4x", refit=False)
    small = api.compress(made / "plan", made / "small")
    slim = api.compress(demo_plan, made / "slim", dtype="float32")
    return Bench(tmp_path_factory.mktemp("bench"), demo_plan, [slim, small], kept)


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_strangers(bench: Bench, kind: str) -> None:
    """A failing seed is made again by: python benchmarks/fuzz.py --kinds KIND --seed SEED --count 1."""
    ended = set()

    @settings(
        derandomize=True,
        deadline=None,
        max_examples=EXAMPLES[kind],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def once(seed: int) -> None:
        ended.add(bench.once(kind, seed))

    once()
    assert REFUSED in ended
    assert PROMISED in ended


def test_every_kind_is_tried() -> None:
    assert EXAMPLES.keys() == KINDS.keys()


# the eyes see


def test_what_must_not_happen_would_be_seen(tmp_path: Path) -> None:
    root, case = tmp_path / "root", tmp_path / "root" / "case"
    case.mkdir(parents=True)
    watch = Watch(root)
    watch.put_canary(case)
    watch.begin()
    own = importlib.util.spec_from_file_location("canary", case / "canary.py")

    def run_code() -> None:
        own.loader.exec_module(importlib.util.module_from_spec(own))

    for deed, words in (
        (run_code, "code of a stranger ran"),
        (lambda: pickle.loads((case / "pytorch_model.bin").read_bytes()).close(), r"pickle\.find_class"),
        (lambda: (tmp_path / "outside").write_text("x"), "outside"),
        (lambda: (case / "x").write_text("x"), "case/x changed"),
        (lambda: os.system("true"), r"os\.system"),
        (lambda: (case / "x").unlink(), "case/x changed"),
    ):
        with watch():
            deed()
        with pytest.raises(Wrong, match=words):
            watch.solve()
        watch.begin()
    watch.solve()


# what was found, each as it was


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `show` says of a folder that it can read."""
    assert run(["show", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def plan(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "kept")


def test_half_a_surrogate_pair(plan: Path, tmp_path: Path) -> None:
    edit(plan / "plan.json", lambda p: p.update(summary="\ud800"))
    with pytest.raises(PlanError, match="UnicodeEncodeError"):
        Plan.load(plan)
    (tmp_path / "t.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(TextError, match="line 1"):
        read(str(tmp_path / "t.jsonl"))
    edit(plan / "plan.json", lambda p: p.update(summary="\U0001f600"))
    assert Plan.load(plan).summary == "\U0001f600"


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, math.nan, math.inf])
def test_a_perplexity_that_no_model_has(plan: Path, value: float, capsys) -> None:
    edit(plan / "plan.json", lambda p: [check.update(perplexity=value) for check in p["joint_checks"]])
    assert "will hold it to" in shown(plan, capsys)


def test_windows_without_number(plan: Path) -> None:
    edit(plan / "plan.json", lambda p: [check.update(windows=10**400) for check in p["joint_checks"]])
    with pytest.raises(PlanError, match="windows"):
        Plan.load(plan)


def test_stand_ins_without_parameters(plan: Path, capsys) -> None:
    edit(plan / "plan.json", lambda p: [b["choice"].update(parameters=0) for b in p["blocks"] if b["choice"]])
    assert "none left" in shown(plan, capsys)


def test_blocks_larger_than_their_base(plan: Path) -> None:
    edit(plan / "plan.json", lambda p: p["base"].update(parameters=1))
    with pytest.raises(PlanError, match="more parameters than its base"):
        Plan.load(plan)


@pytest.mark.parametrize(
    ("section", "key", "value"), [("base", "token", 0.0), ("slimmed", "byte", -1.0), (None, "all_ffns", [1, 10**400])]
)
def test_a_gate_with_impossible_figures(tmp_path: Path, section: str | None, key: str, value: object) -> None:
    file = tmp_path / GATE
    file.parent.mkdir()
    file.write_text(exemplary(GateResult).model_dump_json())
    assert read_gate(tmp_path).main.relative == 0
    edit(file, lambda g: (g["main"][section] if section else g["sizes"]).update({key: value}))
    with pytest.raises(ArtifactError, match=key):
        read_gate(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["profiles"][0].update(blocks=[]),
        lambda s: s["pitfalls"][0].update(trained=[]),
        lambda s: s["pitfalls"][0]["trained"][0].update(steps=[]),
        lambda s: s["pitfalls"][0]["trained"][0].update(r2=[]),
    ],
)
def test_a_study_of_nothing(tmp_path: Path, change, capsys) -> None:
    (tmp_path / STUDY_FILE).write_text(exemplary(Study).model_dump_json())
    edit(tmp_path / STUDY_FILE, lambda s: s["profiles"][0]["probe"].update(p_value=None))
    assert "median gain" in shown(tmp_path, capsys)
    edit(tmp_path / STUDY_FILE, change)
    with pytest.raises(ArtifactError, match="corrupted"):
        Study.load(tmp_path)


def test_names_that_no_disk_takes(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"model: {'n' * 400}\noutput: out\n")
    recipe, text = Recipe.read(file)
    assert recipe.public_text(text) == text
    assert is_public(f"hub:{'n' * 400}:a:b:c")
    assert run(["plan", "demo", "-o", str(tmp_path / "p"), "--tokens", "512", "--blocks", "9" * 5000]) == 2


def test_brackets_within_brackets_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    for text in ("model: " + "[" * 90_000, "[\n" * 40_000, "{a: " * 20_000):
        file.write_text(text)
        started = time.process_time()
        with pytest.raises(RecipeError, match="nested"):
            Recipe.read(file)
        assert time.process_time() - started < 5


def without_one(tensors: dict) -> None:
    for name in [name for name in tensors if name.endswith("fit_inner.xy")]:
        del tensors[name]


def of_another_shape(tensors: dict) -> None:
    for name in [name for name in tensors if name.endswith("fit.x")]:
        tensors[name] = tensors[name][:-1].contiguous()


def no_numbers(tensors: dict) -> None:
    for value in tensors.values():
        value.fill_(math.nan)


@pytest.mark.parametrize("damage", [without_one, of_another_shape, no_numbers])
def test_damaged_moments(plan: Path, tmp_path: Path, damage) -> None:
    tensors = load_file(plan / MOMENTS_FILE)
    damage(tensors)
    save_file(tensors, plan / MOMENTS_FILE)
    with pytest.raises(PlanError, match="make the plan again"):
        api.plan(str(plan), tmp_path / "again", at=0.9)
    assert not (tmp_path / "again").exists()


def test_a_plan_of_other_blocks_is_not_made_anew(plan: Path, tmp_path: Path) -> None:
    edit(plan / "plan.json", lambda p: p["blocks"].pop())
    with pytest.raises(PlanError, match="make the plan again"):
        api.plan(str(plan), tmp_path / "again", at=0.9)


@pytest.mark.parametrize("depth", [2**31, 1e308])
def test_a_config_of_endless_layers(demo_slim: Path, demo_source, tmp_path: Path, depth: float) -> None:
    slim = shutil.copytree(demo_slim, tmp_path / "slim")
    edit(slim / "config.json", lambda c: c.update(n_layer=depth))
    Manifest.write(slim, "checkpoint")
    with pytest.raises(ModelError, match="speaks of"):
        load(slim)
    base = shutil.copytree(demo_source.directory, tmp_path / "base")
    edit(base / "config.json", lambda c: c.update(n_layer=depth))
    assert run(["plan", str(base), "-o", str(tmp_path / "p"), "--tokens", "512"]) == 2
