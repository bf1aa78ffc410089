"""What is said where a launcher was asked for several processes and one runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ffncompress.cli import run
from ffncompress.errors import FfncompressError
from ffncompress.runtime.launch import check_whole, note_if_alone
from ffncompress.runtime.workers import Workers

TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "SLURM_NTASKS", "SLURM_PROCID", "PMI_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "accelerate launch .* --nproc_per_node N -m"),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4; .* torchrun --nproc_per_node 4 -m ffncompress"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "one process runs"),
    ],
)
def test_one_process_of_several_says_so(
    environment: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(["plan", "./no-such-model"]) == 2
    note, _error = capsys.readouterr().err.splitlines()
    assert re.search(match, note)
    assert run(["show", "./nothing"]) == 2  # is of one process anyway
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ACCELERATE_USE_CPU": "True"},  # accelerate launch --cpu --num_processes 1
        {"MASTER_ADDR": "node1"},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"},  # the first says it
        {"SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "4"},
        {"SLURM_NTASKS": "4", "PMI_SIZE": "4"},
    ],
)
def test_what_was_asked_for_needs_no_words(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert note_if_alone() is None
    check_whole()


def test_a_launch_that_says_half_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining would wait for the others, who may never come: with MASTER_ADDR set, for hours."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(FfncompressError, match=r"WORLD_SIZE=2 and no RANK.*torchrun --nproc_per_node 2.*unset WORLD"):
        Workers("cpu")


@pytest.mark.slow
def test_accelerates_launcher_itself() -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes"]
    for count, said in (("2", 1), ("1", 0)):
        done = subprocess.run(
            [*command, count, "-m", "ffncompress", "plan", "./no-such-model"],
            capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.stderr.count("one process runs, although accelerate launch was asked for several") == said
        assert done.stderr.count("no such file or folder") == 1  # by the one that ran
