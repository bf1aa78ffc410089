"""The README: its commands parse, its code runs, its demo is the demo, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import ffncompress
from ffncompress.cli.commands import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/architecture.md",
        "docs/promises.md",
        "benchmarks/LOG.md",
    )
]


def fenced(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.M | re.S)


def test_the_two_set_up_commands_install_for_themselves() -> None:
    commands = [line for block in fenced("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("ffncompress demo")
    assert commands[1].endswith("pytest")
    assert all("pip install -q -c constraints.txt -e" in c for c in commands)


def test_every_command_shown_parses() -> None:
    shown = [line for block in fenced("sh") for line in block.splitlines() if line.startswith("ffncompress ")]
    assert len(shown) >= 5
    for line in shown:
        words = shlex.split(line, comments=True)[1:]
        command = cli.commands[words[0]]
        with click.Context(command) as context:
            command.parse_args(context, words[1:])  # raises on an unknown option


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `ffncompress (\w+)", README, re.M)
    assert sorted(rows) == sorted(cli.commands)


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(block for block in fenced("python") if "ffncompress.plan" in block)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["result"].main.tokens > 1000  # type: ignore[attr-defined]


def test_the_public_names_are_all_mentioned() -> None:
    for name in ffncompress.__all__:
        assert re.search(rf"\b{name}\b", README), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_demo_is_the_demo() -> None:
    """The settings shown are those of the recipe; the numbers come from a run and may differ in the last digits."""
    shown = README.split("<!-- demo -->")[1].split("<!-- /demo -->")[0]
    assert "demo (gpt2), limit 5 %" in shown
    assert "gate passed" in shown
    assert "limit 5 %" in shown
