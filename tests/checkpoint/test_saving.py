"""Emitted checkpoints: they load like any other, carry their origin, and never load wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh_process import LOAD, run_python
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, pipeline

from ffncompress import api, apply_, load, patched
from ffncompress.errors import ArtifactError, ModelError, PlanError
from ffncompress.models import find_model, load_model

pytestmark = pytest.mark.slow

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def slim_of(tiny_folder, tmp_path_factory: pytest.TempPathFactory):
    """A plan of a tiny model and its checkpoint, once for each family."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp("slim")
            api.plan(str(tiny_folder(family)), folder / "plan", budget="6x", blocks="0,2", tokens=2048, seq_len=64)
            made[family] = folder / "plan", api.compress(folder / "plan", folder / "slim")
        return made[family]

    return make


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize(
    "family", ["gpt2", "llama-tied", "phi3", "gemma3_text", "opt"]
)  # the others: test_every_family.py
def test_every_layout_applies_saves_and_reloads(family: str, slim_of, tiny_folder, tmp_path: Path) -> None:
    folder = tiny_folder(family)
    plan, slim = slim_of(family)
    in_place = apply_(load_model(find_model(str(folder))), plan)
    reloaded = AutoModelForCausalLM.from_pretrained(slim)
    assert torch.equal(logits(reloaded), logits(in_place))
    assert not torch.equal(logits(reloaded), logits(load_model(find_model(str(folder)))))
    # an ordinary model: it casts, trains, and saves again
    assert reloaded.half().float().dtype == torch.float32
    reloaded = AutoModelForCausalLM.from_pretrained(slim)
    reloaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(reloaded))
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (slim / "config.json").read_text()
    )


def test_two_runs_write_the_same_bytes(demo_plan: Path, tmp_path: Path) -> None:
    first, second = api.compress(demo_plan, tmp_path / "a"), api.compress(demo_plan, tmp_path / "b")
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_folder_carries_its_origin(demo_slim: Path, demo_source) -> None:
    origin = json.loads((demo_slim / "ffncompress" / "origin.json").read_text())
    assert origin["base_model"] == "demo"
    assert origin["base_fingerprint"] == demo_source.fingerprint()
    assert {text["part"] for text in origin["fit_text"]} == {"fit"}
    assert {text["part"] for text in origin["choose_text"]} == {"choose"}
    assert origin["parameters_after"] == sum(v.numel() for v in load_file(demo_slim / "model.safetensors").values())
    assert (demo_slim / "ffncompress" / "plan.json").is_file()
    assert (
        "base_model" in (demo_slim / "README.md").read_text() or "library_name" in (demo_slim / "README.md").read_text()
    )


def test_sharded_and_half_precision(slim_of, tmp_path: Path) -> None:
    plan, _ = slim_of("llama-tied")
    slim = api.compress(plan, tmp_path / "slim", dtype="bfloat16", max_shard_size="100KB")
    assert len(list(slim.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(slim)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    half = AutoModelForCausalLM.from_pretrained(slim, dtype=torch.float16)
    assert logits(half).isfinite().all()
    spread = AutoModelForCausalLM.from_pretrained(slim, device_map="auto")
    assert torch.equal(logits(spread), logits(model))


def test_generates_through_a_pipeline(demo_slim: Path) -> None:
    generate = pipeline("text-generation", model=str(demo_slim))
    answer = generate("Return the", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert answer.startswith("Return the")
    assert len(answer) > len("Return the")


def test_a_stranger_needs_no_import_of_ours(demo_slim: Path) -> None:
    done = run_python(LOAD.format(folder=str(demo_slim)))
    assert done.returncode == 0, done.stderr
    expected = logits(load(demo_slim)).double().sum().item()
    assert float(done.stdout.split("SUM")[1]) == pytest.approx(expected, rel=1e-6)


def test_import_order_does_not_matter(demo_slim: Path) -> None:
    code = "import transformers.quantizers.auto\n" + LOAD.format(folder=str(demo_slim))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_without_the_plugin_loading_fails_hard(family: str, slim_of) -> None:
    _, slim = slim_of(family)
    done = run_python(LOAD.format(folder=str(slim)), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "SUM" not in done.stdout
    assert "pip install ffncompress" in done.stderr.splitlines()[-1]
    flagged = LOAD.replace("from_pretrained({folder!r})", "from_pretrained({folder!r}, ignore_mismatched_sizes=True)")
    done = run_python(flagged.format(folder=str(slim)), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "SUM" not in done.stdout


def test_apply_in_place_and_for_the_length_of_a_with(demo_model, demo_plan: Path) -> None:
    before = logits(demo_model)
    own = demo_model.transformer.h[1].mlp
    with patched(demo_model, demo_plan):
        inside = logits(demo_model)
    assert torch.equal(logits(demo_model), before)
    assert demo_model.transformer.h[1].mlp is own
    assert torch.equal(logits(apply_(demo_model, demo_plan)), inside)
    assert not torch.equal(inside, before)


def test_weights_that_are_not_what_the_config_says(slim_of, tmp_path: Path) -> None:
    slim = shutil.copytree(slim_of("llama")[1], tmp_path / "slim")
    tensors = load_file(slim / "model.safetensors")
    for name in ("up_proj.weight", "down_proj.weight"):
        key = f"model.layers.0.mlp.{name}"
        tensors[key] = torch.cat([tensors[key]] * 2, 0 if "up" in name else 1)
    save_file(tensors, slim / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ArtifactError, RuntimeError), match=r"shape|mismatch"):
        load(slim)


def test_a_plan_for_another_model(tiny_folder, demo_plan: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not the weights, config and tokenizer that the plan was made for"):
        api.compress(demo_plan, tmp_path / "slim", model=str(tiny_folder("gpt2")))
    with pytest.raises(ModelError, match="the plan is for demo"):
        apply_(load_model(find_model(str(tiny_folder("llama")))), demo_plan)
    assert not (tmp_path / "slim").exists()


def test_a_checkpoint_is_not_a_plan(demo_slim: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="a slimmed checkpoint, not a plan"):
        api.compress(demo_slim, tmp_path / "slim")


def test_a_base_that_moved(tiny_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("gpt2"), tmp_path / "moved")
    plan = tmp_path / "plan"
    api.plan(str(folder), plan, budget="4x", blocks="0", tokens=2048, seq_len=64)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="--model"):
        api.compress(plan, tmp_path / "slim")
    assert api.compress(plan, tmp_path / "slim", model=str(tiny_folder("gpt2"))).is_dir()


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda p: (p / "plan.json").write_text("{"), "not JSON"),
        (lambda p: (p / "plan.json").unlink(), "there is no plan.json"),
        (
            lambda p: (p / "plan.json").write_text((p / "plan.json").read_text().replace('"r2_lin":', '"r2":')),
            "corrupted at",
        ),
        (lambda p: (p / "plan.json").write_text('{"schema_version": 99}'), "schema version 99"),
        (lambda p: (p / "replacements.safetensors").write_bytes(b"\0" * 64), "checksum"),
        (lambda p: (p / "replacements.safetensors").unlink(), "is missing"),
    ],
)
def test_a_corrupted_plan(demo_plan: Path, tmp_path: Path, spoil, match: str) -> None:
    plan = shutil.copytree(demo_plan, tmp_path / "plan")
    spoil(plan)
    with pytest.raises(PlanError, match=match):
        api.compress(plan, tmp_path / "slim")
    assert not (tmp_path / "slim").exists()


def test_an_output_that_exists(demo_plan: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="already exists"):
        api.compress(demo_plan, tmp_path / "mine")
    with pytest.raises(ArtifactError, match=r"no ffncompress\.json"):
        api.compress(demo_plan, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").is_file()
    api.compress(demo_plan, tmp_path / "ours")
    assert api.compress(demo_plan, tmp_path / "ours", overwrite=True).is_dir()


def test_a_full_disk_leaves_nothing(demo_plan: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(ArtifactError, match="the disk is full"):
            api.compress(demo_plan, small / "slim")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=False)


def test_an_empty_plan_is_refused_unless_asked_for(short_demo: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    made = api.plan(str(short_demo), plan, data=["stories"], tokens=2048, max_delta="0.0000001")
    assert not made.replaced
    assert "the nearest miss is" in made.summary
    with pytest.raises(ArtifactError, match="a plan, not a checkpoint"):
        api.evaluate(plan)
    with pytest.raises(PlanError, match="replaces nothing"):
        api.compress(plan, tmp_path / "slim")
    copy = api.compress(plan, tmp_path / "slim", allow_empty=True)
    assert torch.equal(logits(load(copy)), logits(load_model(find_model(str(short_demo)))))
