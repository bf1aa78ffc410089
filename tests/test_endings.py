"""Every command ends in success, the gate's verdict, one sentence of ours, or an interrupt: never in a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import GATED, tiny_model
from safetensors.torch import load_file, save_file

from ffncompress import api, load
from ffncompress.cli import run
from ffncompress.errors import FfncompressError, ModelError, NumericsError

pytestmark = pytest.mark.slow

QUICK = ["--tokens", "2048", "--seq-len", "64", "--blocks", "1"]


def model_with(tmp_path: Path, source: Path, name: str, value: float) -> Path:
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for key in tensors:
        if name in key:
            tensors[key] = torch.full_like(tensors[key], value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, demo_source, value: float) -> None:
    folder = model_with(tmp_path, demo_source.directory, "h.2.mlp.c_fc.weight", value)
    with pytest.raises(NumericsError, match=r"h\.2\.mlp\.c_fc\.weight is NaN or infinite"):
        api.plan(str(folder), tmp_path / "p", tokens=2048)


def test_a_silent_ffn_is_planned_like_any_other(tmp_path: Path, short_demo: Path) -> None:
    folder = model_with(tmp_path, short_demo, "h.2.mlp.c_proj", 0.0)
    made = api.plan(str(folder), tmp_path / "p", data=["stories"], tokens=2048, blocks="2", budget="8x")
    slim = load(api.compress(tmp_path / "p", tmp_path / "s"))
    assert made.replaced[0].index == 2
    assert slim(torch.arange(8)[None]).logits.isfinite().all()
    assert run(["profile", str(folder), "-o", str(tmp_path / "r"), "--tokens", "2048"]) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["plan", "demo", "--seq-len", "4096"], "more than its 256"),
        (["plan", "demo", "--device", "cuda:7"], "no such device here"),
        (["plan", "demo", "--device", "nonsense"], "no such device here"),
        (["plan", "demo", "--seed", str(10**30)], "seed"),
        (["plan", "demo", "--tokens", str(10**30)], "tokens"),
        (["plan", "demo", "--tokens", str(10**9)], "tokens"),
        (["plan", "demo", "-o", ""], "not a name for an output"),
        (["plan", "demo", "-o", "n" * 300], "choose a shorter one"),
        (["plan", "~nobody/model"], "no such file or folder"),
        (["plan", "demo", "--json", "/nonexistent/x.json"], "cannot be written there"),
        (["profile", "demo", "-o", "r", "--device", "nonsense"], "no such device here"),
        (["profile", "demo", "-o", "r", "--pitfall", "-1"], "pitfall"),
    ],
)
def test_bad_words(arguments: list[str], match: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert match in error
    assert "a bug in" not in error
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - started < 20


def test_a_name_of_250_characters_is_a_name(tmp_path: Path, tiny_folder) -> None:
    name = tmp_path / ("n" * 250)
    assert run(["plan", str(tiny_folder("gpt2")), *QUICK, "-o", str(name)]) == 0
    assert run(["apply", str(name), "-o", str(tmp_path / ("o" * 250)), "--max-shard-size", "junk"]) == 2
    assert run(["apply", str(name), "-o", str(tmp_path / ("o" * 250))]) == 0


def test_a_vocabulary_larger_than_the_models(tmp_path: Path, tokenizer) -> None:
    config = transformers.LlamaConfig(**{**GATED, "vocab_size": 100})
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="100"):
        api.plan(str(folder), tmp_path / "p", tokens=2048, seq_len=64)


def test_a_model_object_is_not_a_name(tmp_path: Path) -> None:
    with pytest.raises(FfncompressError, match="by its name"):
        api.plan(tiny_model("gpt2"), tmp_path / "p")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
@pytest.mark.parametrize("spoil", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"model": 7}'])
def test_damaged_files_of_a_model(name: str, spoil: bytes, tmp_path: Path, short_demo: Path, capsys) -> None:
    folder = shutil.copytree(short_demo, tmp_path / "model")
    (folder / name).write_bytes(spoil)
    assert run(["plan", str(folder), *QUICK, "-o", str(tmp_path / "p")]) in (0, 2)
    error = capsys.readouterr().err
    assert "a bug in" not in error
    assert "Traceback" not in error


def tiny(kind: str, **options: object) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**options)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BitNet", GATED),
        ("OpenAIGPT", {"vocab_size": 3072, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("Mixtral", {**GATED, "num_local_experts": 2, "num_experts_per_tok": 1}),
        ("Bloom", {"vocab_size": 3072, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("Falcon", {"vocab_size": 3072, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    ],
)
def test_other_families_end_in_a_sentence(kind: str, options: dict, tmp_path: Path, tokenizer, capsys) -> None:
    folder = tmp_path / "model"
    tiny(kind, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert run(["plan", str(folder), *QUICK, "-o", str(tmp_path / "p")]) in (0, 2)
    assert "a bug in" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gate.json", "origin.json", "plan.json"])
@pytest.mark.parametrize("spoil", ["", "[]", "{}", "null", "7", "[" * 5000, '{"healing": 7}'])
def test_edited_records_of_a_checkpoint(name: str, spoil: str, demo_slim: Path, tmp_path: Path, capsys) -> None:
    slim = shutil.copytree(demo_slim, tmp_path / "slim")
    (slim / "ffncompress" / name).write_text(spoil)
    from ffncompress.storage.manifest import Manifest

    Manifest.write(slim, "checkpoint")  # an editor who covers the traces
    for command in (["show", str(slim)], ["push", str(slim), "a/b"], ["verify", str(slim)]):
        assert run(command) in (0, 2)
        error = capsys.readouterr().err
        assert "a bug in" not in error
        assert "Traceback" not in error


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffncompress", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_rank_that_is_no_number(demo_slim: Path) -> None:
    done = child("show", str(demo_slim), RANK="x")
    assert done.returncode == 2
    assert "RANK=x" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_pipe_is_no_error(demo_slim: Path) -> None:
    for line in (f"show {demo_slim}", f"show {demo_slim} --json -"):
        command = f"{sys.executable} -m ffncompress {line}; echo $? >&2"
        done = subprocess.run(f"({command}) | head -1", shell=True, capture_output=True, text=True, check=False)
        assert done.stderr.strip() == "0"
        assert len(done.stdout.splitlines()) == 1


def test_outputs_are_checked_before_the_work(demo_slim: Path, capsys) -> None:
    for option in ("--json", "--junit"):
        started = time.monotonic()
        assert run(["eval", str(demo_slim), option, "/nonexistent/x"]) == 2
        assert time.monotonic() - started < 2
        captured = capsys.readouterr()
        assert "gate" not in captured.out
        assert "cannot be written there" in captured.err


def test_what_nobody_foresaw_says_that_it_is_a_bug(monkeypatch, capsys, demo_plan: Path) -> None:
    from ffncompress.records.plan import Plan

    monkeypatch.setattr(Plan, "load", lambda *_: 1 / 0)
    assert run(["show", str(demo_plan)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ffncompress: a bug in ffncompress, not in what you did: ZeroDivisionError")
    assert error.count("\n") == 1
    assert "1 / 0" in Path(error.split()[-1]).read_text()


def test_memory_that_runs_out_on_a_cpu_is_no_bug(monkeypatch, capsys, tmp_path: Path) -> None:
    from ffncompress.records.plan import Plan

    def load(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Plan, "load", load)
    assert run(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("ffncompress: out of memory; use fewer --tokens")


def test_the_cache_believes_only_what_carries_its_facts(demo_slim: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FFNCOMPRESS_CACHE", str(tmp_path / "cache"))
    slim = shutil.copytree(demo_slim, tmp_path / "slim")
    first = api.evaluate(slim, tokens=600, repeats=1, max_delta="500%")
    (entry,) = (tmp_path / "cache" / "base").glob("*.json")
    content = json.loads(entry.read_text())
    content["answer"]["log_likelihood"] *= 2
    content["facts"]["base"] = "another"
    entry.write_text(json.dumps(content))
    assert api.evaluate(slim, tokens=600, repeats=1, max_delta="500%").main == first.main
