"""The README: its commands parse, its code runs, its demo is the demo, its links lead somewhere."""

from __future__ import annotations

import os
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
        "docs/serving.md",
        "benchmarks/LOG.md",
        "benchmarks/README.md",
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


@pytest.mark.slow
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


def test_every_figure_was_printed_by_a_script() -> None:
    """What README states with a decimal point, outside what the demo prints, stands in the log of the benchmarks."""
    log = (ROOT / "benchmarks" / "LOG.md").read_text()
    prose = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`|arXiv [\d.]+|Apache-[\d.]+", "", README, flags=re.S)
    figures = set(re.findall(r"\d[\d,]*\.\d+|\de[+-]\d+", prose))
    assert len(figures) > 30
    assert not {figure for figure in figures if figure not in log}


def test_the_readmes_demo_is_the_demo() -> None:
    """The plan and the gate that README shows are those of a run; CI makes one, and says where its output lies."""
    file = os.environ.get("FFNCOMPRESS_DEMO_OUTPUT")
    if not file:
        pytest.skip("FFNCOMPRESS_DEMO_OUTPUT names no output of a demo; .ci/run makes one")
    shown, printed = (
        _figures(README.split("<!-- demo -->")[1].split("<!-- /demo -->")[0]),
        _figures(Path(file).read_text()),
    )
    assert len(shown) > 15
    for words, figures in shown.items():
        assert words in printed
        assert figures == pytest.approx(printed[words], rel=0.02, abs=0.02), words


def _figures(text: str) -> dict[str, list[float]]:
    """The numbers of each line, by its words; of the lines that are the same wherever they are printed."""
    found = {}
    for line in text.splitlines():
        if "Written" in line or "tokens/s" in line or "[...]" in line or "```" in line:
            continue
        numbers = [
            float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?", line)
        ]
        words = " ".join(re.sub(r"[-+±]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?", "#", line).split())
        block = re.match(r"\s+(\d+)  0\.", line)
        if numbers:
            found[f"block {block[1]}" if block else words] = numbers
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|benchmarks|docs|recipes|ffncompress)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_one_version_of_every_tool() -> None:
    """The linter that a commit meets is the one that CI runs."""
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    hook = re.search(r"ruff-pre-commit\n    rev: v(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned
    assert hook
    assert pinned[1] == hook[1]


def test_the_families_are_those_of_the_table() -> None:
    from ffncompress.models.families import FAMILIES

    listed = README.partition("<!-- families -->")[2].partition("<!-- /families -->")[0]
    names = re.findall(r"[\w-]+", listed)
    assert names == sorted(FAMILIES), "python -c 'from ffncompress.models import supported; print(supported())'"
