"""The CI kits: they are YAML, their commands are the tool's own, and their shell lines run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from ffncompress.cli.commands import cli

KITS = Path(__file__).parents[2] / "recipes" / "ci"
NAMES = ["perplexity-gate.yml", "reusable-gate.yml", "action.yml", "gitlab-ci.yml"]


def scripts(name: str) -> list[str]:
    """Every shell script of a kit."""
    kit = yaml.safe_load((KITS / name).read_text())
    if name == "gitlab-ci.yml":
        return list(kit["perplexity-gate"]["script"])
    steps = kit["runs"]["steps"] if name == "action.yml" else kit["jobs"]["gate"]["steps"]
    return [step["run"] for step in steps if "run" in step]


def test_every_kit_is_looked_at() -> None:
    assert sorted(NAMES) == sorted(file.name for file in KITS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_are_real(name: str) -> None:
    shown = [script for script in scripts(name) if script.startswith("ffncompress ")]
    assert shown
    for script in shown:
        words = shlex.split(script.replace("${", " ").replace("}", " ").replace(":+", " ").replace("\\\n", " "))
        command = cli.commands[words[1]]
        known = {option for each in command.params for option in each.opts if isinstance(each, click.Option)}
        given = {word for word in words if word.startswith("--")}
        assert given <= known
        assert {"--json", "--junit", "--summary"} <= given


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_never_part_of_a_command(name: str) -> None:
    """`run: x ${{ inputs.name }}` would run what a stranger called a branch or a file."""
    assert not any("${{" in script for script in scripts(name))


def test_the_reusable_one_is_called_and_the_action_is_composite() -> None:
    called = yaml.safe_load((KITS / "reusable-gate.yml").read_text())
    assert "workflow_call" in called[True]  # YAML 1.1 reads `on` as true
    assert yaml.safe_load((KITS / "action.yml").read_text())["runs"]["using"] == "composite"


@pytest.mark.slow
def test_the_shell_lines_run(demo_slim: Path, tmp_path: Path) -> None:
    """The action's: once to keep a result, once against it, and once where it must fail."""
    shim = tmp_path / "bin" / "ffncompress"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ffncompress "$@"\n')
    shim.chmod(0o755)
    script = next(script for script in scripts("action.yml") if "ffncompress eval" in script)
    summary = tmp_path / "summary.md"
    summary.write_text("# before\n")
    env = {
        **os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "MODEL": str(demo_slim), "TOKENS": "600",
        "DATA": "", "TASKS": "", "MAX_DROP": "", "BASELINE": "", "GITHUB_STEP_SUMMARY": str(summary),
    }  # fmt: skip

    def run(**changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-c", script], cwd=tmp_path, env=env | changes, capture_output=True, text=True, check=False
        )

    first = run()
    assert first.returncode in (0, 1), first.stderr
    assert summary.read_text().startswith("# before\n### ffncompress gate ")
    assert "<testsuite" in (tmp_path / "gate.xml").read_text()
    kept = (tmp_path / "gate.json").rename(tmp_path / "kept.json")
    other = run(BASELINE=str(kept), TOKENS="900")
    assert other.returncode == 2
    assert "another tokens" in other.stderr or "another text" in other.stderr
