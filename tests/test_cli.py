"""The command line in process and as a subprocess: what it prints, how it ends, how fast it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fresh_process import COMMAND, OURS, run_python, start_python

from ffncompress import Plan
from ffncompress.cli import plan_tables, run
from ffncompress.records.plan import FrontierPoint
from ffncompress.records.task import MEASURES


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = "import sys; from ffncompress.cli import run; run(['--help']); assert 'torch' not in sys.modules"
    best = min(_timed([sys.executable, "-c", code]) for _ in range(3))
    assert best < 0.5


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


@pytest.mark.parametrize("command", ["plan", "profile", "apply", "eval", "push", "run", "demo", "show"])
def test_every_command_explains_itself_within_100_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: ffncompress " + command)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
def test_the_pipeline_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "demo", "--tokens", "2048", "--blocks", "1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "1 of 7 blocks replaced" in out
    assert "\x1b" not in out  # piped: plain
    assert run(["apply", "demo-plan", "-o", "slim"]) == 0
    assert "its answers are equal" in capsys.readouterr().out
    verdict = run(
        [
            "eval",
            "slim",
            "--tokens",
            "600",
            "--repeats",
            "1",
            "--max-delta",
            "500%",
            "--json",
            "r.json",
            "--junit",
            "r.xml",
        ]
    )
    assert verdict == 0
    out = capsys.readouterr().out
    assert "gate passed" in out
    assert max(map(len, out.splitlines())) <= 100
    assert json.loads(Path("r.json").read_text())["passed"] is True
    suite = ElementTree.parse("r.xml").getroot()
    assert suite.get("failures") == "0"
    assert run(["eval", "slim", "--tokens", "4000", "--repeats", "1", "--max-delta", "0.0001", "--junit", "r.xml"]) == 1
    assert ElementTree.parse("r.xml").getroot().get("failures") == "1"
    capsys.readouterr()
    assert run(["show", "slim"]) == 0
    out = capsys.readouterr().out
    assert "block 0: kept: not among --blocks" in out
    assert "gate FAILED" in out
    assert run(["show", "demo-plan", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["plan", "./no-such-model"], "no such file or folder"),
        (["plan", "nobody/nothing"], "check the name and the network"),
        (["plan", "demo", "--budget", "lots"], "is not a budget"),
        (["plan", "demo", "--budget", "1K"], "1,000 parameters cannot be reached"),
        (["plan", "demo", "--at", "1.5"], "at: Input should be less than 1"),
        (["plan", "demo", "--target-speed", "0.5x"], "is not a speed"),
        (["plan", "demo", "--target-speed", "encode:2x"], "is not a speed"),
        (["eval", "no-out", "--speed-dtypes", "int8"], "speed_dtypes.0: Input should be 'float32'"),
        (["plan", "demo", "--blocks", "99"], "0 to 6"),
        (["plan", "demo", "--data", "no.txt"], "no such text"),
        (["plan", "demo", "--max-delta", "some"], "is not a limit"),
        (["plan", "demo", "--tokens", "256"], "at least 640 are needed"),
        (["plan", "demo", "--what"], "No such option"),
        (["apply", "no-plan", "-o", "out"], "no such folder"),
        (["eval", "no-out"], "no such folder"),
        (["push", "no-out", "a/b"], "no such folder"),
        (["run", "no.yaml"], "cannot be read"),
        (["show", "nothing"], "no such folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    arguments: list[str],
    match: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert match in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str], demo_source) -> None:
    folder = shutil.copytree(demo_source.directory, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    assert run(["plan", str(folder), "-o", str(tmp_path / "p")]) == 2
    assert "not loadable" in capsys.readouterr().err
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert run(["plan", str(folder), "-o", str(tmp_path / "p")]) == 2
    assert "pickled ones are never read" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert run(["plan", str(folder), "-o", str(tmp_path / "p")]) == 2
    assert "no config.json" in capsys.readouterr().err


HELD = """
import time
from pathlib import Path
from ffncompress.planning import measuring
from ffncompress import cli
def held(*_arguments, **_options):  # past its first stages
    Path("held").touch()
    time.sleep(600)
measuring.predict_losses = held
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_plan_says_how_to_go_on(tmp_path: Path, how: signal.Signals) -> None:
    """SIGTERM ends like Ctrl-C: finished stages stay, nothing else does, and the next run uses them."""
    words = ["plan", "demo", "--tokens", "2048", "--seq-len", "64", "--blocks", "1", "--no-refit", "--quiet"]
    process = start_python(HELD, *words, imports=OURS, folder=tmp_path)
    end = time.monotonic() + 120
    while not (tmp_path / "held").exists() and time.monotonic() < end:
        time.sleep(0.05)
    (tmp_path / "held").unlink()
    os.kill(process.pid, how)
    done = process.wait()
    assert done.returncode == 130
    told = "interrupted; run it again to go on: finished stages are in demo-plan.partial"
    assert done.stderr.strip() == f"ffncompress: {told}"
    assert os.listdir(tmp_path) == ["demo-plan.partial"]
    if how == signal.SIGTERM:
        done = run_python(COMMAND, *words, imports=OURS, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert os.listdir(tmp_path) == ["demo-plan"]


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real GGUF file is large; a broken one must still end in a sentence."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 60)
    assert run(["plan", str(file), "-o", str(tmp_path / "p")]) == 2
    assert "broken.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("task", MEASURES)
def test_a_plan_fits_80_columns_and_explains_itself(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, whatever the model is for; wide cells too."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "25")  # without it COLUMNS does not count
    plan = Plan.load(Path(__file__).parent / "data" / "plan-of-0.4")
    wide = {"kind": "hybrid", "width": 12288, "rank": 1024}
    choice = plan.blocks[1].choice.model_copy(update=wide)
    swap = plan.blocks[1].swap.model_copy(update={**wide, "delta": 1e7, "delta_error": 123.4})
    points = [
        FrontierPoint(
            parameters=7_000_000_000 - 10**9 * i, share=1 - i / 7, predicted_loss=0.1, measured_perplexity=None,
            expected_perplexity=1000.0 * 1.2**(i * i),
        )
        for i in range(5)
    ]  # fmt: skip
    changes = {
        "base": plan.base.model_copy(update={"task": task}),
        "blocks": [plan.blocks[1].model_copy(update={"choice": choice, "swap": swap})] * 40,
        "frontier": points,
    }
    shown = plan.model_copy(update=changes)
    plan_tables.print_plan(shown)
    plan_tables.print_frontier(shown, None)
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out
    assert "12288n+r1024" in out
    assert "< it bends here" in out
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    for header in [line for line in out.splitlines() if line.lstrip().startswith(("block ", "share  "))][:2]:
        for column in set(header.split()) - {"block", "parameters"}:
            assert column in lines, column  # a line of its own below the table
