"""A push for real, to a Hub on the loopback address, and a download of what was pushed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_process import COMMAND, run_python
from huggingface_hub import ModelCard
from loopback_hub import LoopbackHub, loopback_hub

from ffncompress import api
from ffncompress.errors import ArtifactError, HubError
from ffncompress.models import find_model, load_model

pytestmark = pytest.mark.slow

TOKEN = "hf_a_secret_that_must_not_show"


@pytest.fixture(scope="module")
def gated_slim(demo_slim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated checkpoint; 300 % lets the forced plan pass."""
    folder = shutil.copytree(demo_slim, tmp_path_factory.mktemp("gated") / "slim")
    api.evaluate(folder, tokens=1024, max_delta="300%", repeats=1)
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[LoopbackHub]:
    with loopback_hub(TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def child(hub: LoopbackHub, home: Path):
    """Runs a command where the Hub is that one, and its cache the tests' own."""
    environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": ""}

    def run(*arguments: str | Path, code: str = COMMAND, token: str = "") -> subprocess.CompletedProcess[str]:
        return run_python(code, *arguments, HF_TOKEN=token, **environment)

    return run


@pytest.fixture(scope="module")
def pushed(gated_slim: Path, hub: LoopbackHub, child) -> subprocess.CompletedProcess[str]:
    return child("push", gated_slim, "someone/slim", token=TOKEN)


LOAD = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("someone/slim")
tokenizer = AutoTokenizer.from_pretrained("someone/slim")
print(sum(p.numel() for p in model.transformer.h[1].mlp.parameters()), len(tokenizer))
"""


def test_push_then_load_from_the_hub(pushed, hub: LoopbackHub, gated_slim: Path, child) -> None:
    assert pushed.returncode == 0, pushed.stderr
    assert "someone/slim/commit/" in pushed.stdout
    assert TOKEN not in pushed.stdout + pushed.stderr
    there = hub.repos["someone/slim"]
    local = {p.relative_to(gated_slim).as_posix() for p in gated_slim.rglob("*") if p.is_file()}
    assert local <= set(there)
    assert not any(TOKEN.encode() in content for content in there.values())

    loaded = child(code=LOAD)
    assert loaded.returncode == 0, loaded.stderr
    width = load_model(find_model("demo")).config.n_embd
    assert 0 < int(loaded.stdout.split()[0]) < 8 * width**2 / 8 + 1000  # at most an eighth of the FFN, and biases

    # what was pushed is not the base that the plan was made for, and is not taken for it
    other = child("eval", gated_slim, "--model", "someone/slim", "--data", "stories")
    assert other.returncode == 2
    assert "not the weights, config and tokenizer that the plan was made for" in other.stderr


@pytest.mark.usefixtures("pushed")
def test_the_card(hub: LoopbackHub) -> None:
    card = ModelCard(hub.repos["someone/slim"]["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert card.data.license == "apache-2.0"
    assert "ffncompress" in card.data.tags
    assert {r.metric_type for r in card.data.eval_results} == {"perplexity"}
    for words in (
        "How to load",
        "How to reproduce",
        "ffncompress plan demo",
        "| 1 |",
        "neurons",
        "Gate: passed",
        'from_pretrained("someone/slim")',
    ):
        assert words in card.text
    assert 'from_pretrained("someone/slim")' in card.text


def test_a_hub_model_is_planned_by_its_id(tiny_folder, hub: LoopbackHub, home: Path, child, tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    hub.repos["someone/tiny"] = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    hub.repos["someone/tiny"]["pytorch_model.bin"] = b"a pickle"
    options = ["--tokens", "2048", "--seq-len", "64", "--blocks", "0", "--data", "stories"]
    plan, out = tmp_path / "plan", tmp_path / "slim"
    done = child("plan", "someone/tiny", *options, "-o", plan)
    assert done.returncode == 0, done.stderr
    applied = child("apply", plan, "-o", out)
    assert applied.returncode == 0, applied.stderr
    assert hub.sha("someone/tiny") in (out / "ffncompress" / "origin.json").read_text()
    assert "base_model: someone/tiny" in (out / "README.md").read_text()
    assert list(home.rglob("model.safetensors"))
    assert not list(home.rglob("pytorch_model.bin"))


def test_a_wrong_token_is_a_clear_refusal(gated_slim: Path, child) -> None:
    wrong = TOKEN[::-1]
    done = child("push", gated_slim, "someone/other", token=wrong)
    assert done.returncode == 2
    assert "the upload failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert wrong not in done.stdout + done.stderr


def test_no_push_without_a_passing_gate(demo_slim: Path, gated_slim: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="not evaluated"):
        api.push(shutil.copytree(demo_slim, tmp_path / "a"), "someone/slim")
    failed = shutil.copytree(demo_slim, tmp_path / "b")
    assert not api.evaluate(failed, tokens=1024, max_delta="0.0001", repeats=1).passed
    with pytest.raises(HubError, match="the gate failed"):
        api.push(failed, "someone/slim")
    changed = shutil.copytree(gated_slim, tmp_path / "c")
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ArtifactError, match=r"model\.safetensors has another content"):
        api.push(changed, "someone/slim")
