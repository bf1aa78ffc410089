"""Several processes, under torchrun: they equal one, one of them writes, and they fall together.

Its command starts some of them for real; where that is not the point, torchrun's own agent starts them by a fork of a
process that has imported everything, which is all that differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import OURS, run_python
from safetensors.torch import load_file

import ffncompress.__main__
from ffncompress import api
from ffncompress.profiling import pitfall
from ffncompress.records.plan import Plan
from ffncompress.records.plan_files import TENSOR_FILE
from ffncompress.recovery import bilinear

pytestmark = pytest.mark.slow


AGENT = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
def work(path, *arguments):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
count, *arguments = sys.argv[1:]
config = LaunchConfig(1, 1, int(count), rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
                      start_method="fork", monitor_interval=0.1)
elastic_launch(config, work)(*arguments)
"""


def fork(count: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A script in so many processes."""
    return run_python(AGENT, str(count), *arguments, imports=OURS, OMP_NUM_THREADS="1")


def launch(count: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """So many processes of a thread each."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    command = [sys.executable, *launcher, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Float32 products differ with the number of threads; torchrun gives each process one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_alike(one: Any, other: Any, tolerance: float, at: str = "") -> None:
    """The same words and whole numbers everywhere, and the same figures to within a tolerance; clocks aside."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            if "seconds" not in key and key != "replacements_sha256":
                assert_alike(one[key], other[key], tolerance, f"{at}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_alike(*pair, tolerance, f"{at}[{i}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance), at
    else:
        assert one == other, at


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("starting", "count", "family", "settings"),
    [
        (launch, 2, "gpt2", {"budget": "-5%"}),
        (fork, 3, "llama", {"blocks": "0,1", "budget": "4x"}),
    ],
)
def test_a_plan_is_that_of_one_process(
    starting, count: int, family: str, settings: dict, tmp_path: Path, tiny_folder
) -> None:
    name = str(tiny_folder(family))
    settings = {"tokens": 2048, "seq_len": 64, **settings}
    one = api.plan(name, tmp_path / "one", **settings)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    command = ["-m", "ffncompress"] if starting is launch else [ffncompress.__main__.__file__]
    done = starting(count, *command, "plan", name, *options, "-o", tmp_path / "many")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("blocks replaced") == 1
    assert "destroy_process_group" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]
    many = Plan.load(tmp_path / "many")
    assert [block.choice and block.choice.describe() for block in many.blocks] == [
        block.choice and block.choice.describe() for block in one.blocks
    ]
    assert_alike(one.model_dump(), many.model_dump(), 1e-9)
    tensors, others = load_file(tmp_path / "one" / TENSOR_FILE), load_file(tmp_path / "many" / TENSOR_FILE)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert (tensor - others[key]).abs().max() <= 1e-6 * tensor.abs().max(), key  # a float32's own precision


BRIEF = """
import sys
from ffncompress.cli import main
from ffncompress.profiling import pitfall
from ffncompress.recovery import bilinear
pitfall.STEPS, bilinear.ROUNDS = 50, 3
main(sys.argv[1:])
"""


@pytest.mark.usefixtures("one_thread")
def test_a_profile_is_that_of_one_process(tmp_path: Path, tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    model, script = str(tiny_folder("llama")), tmp_path / "brief.py"
    script.write_text(BRIEF)
    monkeypatch.setattr(pitfall, "STEPS", 50)
    monkeypatch.setattr(bilinear, "ROUNDS", 3)
    wishes = {"probe": True, "pitfall": "worst", "cross_feed": True, "against_random": True}
    one = api.profile(model, tmp_path / "one", tokens=1024, seq_len=64, **wishes)
    options = ["--tokens=1024", "--seq-len=64", "--probe", "--pitfall=worst", "--cross-feed", "--against-random"]
    done = fork(2, script, "profile", model, *options, "-o", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    assert sorted(os.listdir(tmp_path)) == ["brief.py", "one", "two"]
    two = json.loads((tmp_path / "two" / "profile.json").read_text())
    assert_alike(json.loads(one.model_dump_json()), two, 1e-7)
    assert sorted(os.listdir(tmp_path / "one" / "figures")) == sorted(os.listdir(tmp_path / "two" / "figures"))


HURT = """
import os, signal, sys, time
from pathlib import Path
from ffncompress.planning import measuring
from ffncompress.cli import main
who, how, note, *arguments = sys.argv[1:]
def hurt(*_arguments, **_options):
    Path(note).write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(28, "No space left on device")
if os.environ["RANK"] == who:
    measuring.loss_metrics = hurt
main(arguments)
"""


@pytest.mark.parametrize(("starting", "who", "how"), [(launch, "0", "killed"), (fork, "1", "fails")])
def test_processes_fall_together(starting, who: str, how: str, tmp_path: Path, tiny_folder) -> None:
    script, note, output = tmp_path / "hurt.py", tmp_path / "note", tmp_path / "plan"
    script.write_text(HURT)
    options = ["--tokens", "2048", "--seq-len", "64", "--blocks", "1"]
    done = starting(2, script, who, how, note, "plan", tiny_folder("llama"), *options, "-o", output)
    assert time.time() - float(note.read_text()) < 45  # seconds, on a busy machine
    said = [line for line in done.stderr.splitlines() if line.startswith("ffncompress")]
    assert len(said) == 1, done.stderr
    if how == "killed":
        assert "another process of this run ended; no output was written" in said[0]
        assert "run it again to go on" in said[0]
    else:
        assert said[0].startswith("ffncompress (process 1): OSError: [Errno 28] No space left on device")
    assert "exitcode: 2" in done.stderr or "exitcode  : 2" in done.stderr  # of whoever spoke; torchrun's own is 1
    assert not output.exists()


def test_what_is_not_shared_out_is_refused_once(tmp_path: Path) -> None:
    done = launch(2, "-m", "ffncompress", "demo", "-o", tmp_path / "demo")
    assert done.stderr.count("demo runs in one process; start it without torchrun") == 1
    assert "another process" not in done.stderr
    assert not list(tmp_path.iterdir())


RANKS = """
import sys
import torch
from pathlib import Path
from ffncompress.errors import BudgetError
from ffncompress.runtime.stages import Stages
from ffncompress.runtime.workers import Workers, leave
workers = Workers("cpu")
rank = 0 if workers.is_main else 1
assert workers.from_main(rank) == 0
assert workers.once(lambda: rank) == 0
def refuse():
    raise BudgetError("no")
try:
    workers.once(refuse)
except BudgetError as error:
    assert str(error) == "no"
assert list(workers.deal("abc", lambda word: (word, rank))) == [("a", 0), ("b", 1), ("c", 0)]
total = torch.tensor([1.0 + rank])
workers.sum_([total])
assert total.item() == 3.0
assert Stages(workers=workers).do("small", {}, int, lambda: rank) == 0
made = Stages(Path(sys.argv[1]), workers)
for turn in (0, 1):
    calls = []
    small = made.do("small", {}, int, lambda: calls.append(1) or 10 + rank)
    assert small == 10, small
    large = made.keep("large", {}, lambda: calls.append(1) or torch.full((2,), 5.0))
    assert large.tolist() == [5.0, 5.0]
    assert len(calls) == (0 if turn else 2), calls
    made.flush()
    workers.wait()
leave()
print("agreed")
"""


def test_processes_agree_on_what_one_of_them_decides(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = fork(2, script, tmp_path / "w")
    assert done.stdout.count("agreed") == 2, done.stderr
