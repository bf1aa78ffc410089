"""The docs: commands parse, code runs, figures and schemas are the real ones, links lead somewhere, the site builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import jsonschema
import pytest
import schemas
import yaml

import ffncompress
from ffncompress.cli.commands import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/LOG.md", "benchmarks/README.md")
    ),
    *DOCS,
]
WITH_PYTHON = [page for page in (ROOT / "README.md", *DOCS) if "```python\n" in page.read_text()]
NOT_RUN = r"^<!-- not run: .+ -->\n```python\n.*?^```"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(kind: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def test_the_two_set_up_commands_install_for_themselves() -> None:
    commands = [line for block in fenced("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("ffncompress demo")
    assert commands[1].endswith("pytest")
    assert all("pip install -q -c constraints.txt -e" in c for c in commands)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_every_command_shown_parses(page: Path) -> None:
    blocks = fenced("sh", page.read_text())
    for line in (line for block in blocks for line in block.splitlines()):
        words = shlex.split(line, comments=True)
        words = words[words.index("ffncompress") + 1 :] if "ffncompress" in words else []
        if words and not words[0].startswith("-"):
            command = cli.commands[words[0]]
            with click.Context(command) as context:
                command.parse_args(context, words[1:])  # raises on an unknown option


def test_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 115
    assert sum(line.startswith("ffncompress ") for block in fenced("sh") for line in block.splitlines()) >= 4


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `ffncompress (\w+)", (ROOT / "docs/reference/cli.md").read_text(), re.M)
    assert sorted(rows) == sorted(cli.commands)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_plan: Path, demo_slim: Path
) -> None:
    """Its blocks, one after the other, where a plan and its checkpoint lie unless the page makes them."""
    monkeypatch.chdir(tmp_path)
    blocks = fenced("python", re.sub(NOT_RUN, "", page.read_text(), flags=re.M | re.S))
    if not any('ffncompress.plan("demo", "plan"' in block for block in blocks):
        shutil.copytree(demo_plan, "plan")
        shutil.copytree(demo_slim, "slim")
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name_of(page), "exec"), names)


def test_the_public_names_are_all_in_the_reference() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    for name in ffncompress.__all__:
        assert re.search(rf"^::: ffncompress\..*\b{name}$|`{name}`", page, re.M), name


def test_schemas_are_those_of_the_code() -> None:
    made = {name: schemas.text_of(schema) for name, schema in schemas.schemas().items()}
    written = {file.stem: file.read_text() for file in schemas.FOLDER.glob("*.json")}
    assert written == made, "run: python docs/building/schemas.py"


@pytest.mark.slow
def test_real_files_fit_their_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_plan: Path, demo_slim: Path
) -> None:
    slim = Path(shutil.copytree(demo_slim, tmp_path / "slim"))
    ffncompress.evaluate(slim, tokens=1000, repeats=1, max_delta="500%")
    ffncompress.profile("demo", tmp_path / "report", tokens=2048, seq_len=64)
    config = json.loads((slim / "config.json").read_text())
    real = {
        "plan": json.loads((demo_plan / "plan.json").read_text()),
        "gate": json.loads((slim / "ffncompress" / "gate.json").read_text()),
        "origin": json.loads((slim / "ffncompress" / "origin.json").read_text()),
        "manifest": json.loads((slim / "ffncompress.json").read_text()),
        "profile": json.loads((tmp_path / "report" / "profile.json").read_text()),
        "replacements": config["quantization_config"]["blocks"],
    }
    for name, content in real.items():
        schema = json.loads((schemas.FOLDER / f"{name}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(content, schema)
        with pytest.raises(jsonschema.ValidationError):  # nothing passes that the code would not read
            jsonschema.validate({**content, "surprise": 1}, schema)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_fit_their_schema(recipe: Path) -> None:
    jsonschema.validate(yaml.safe_load(recipe.read_text()), json.loads((schemas.FOLDER / "recipe.json").read_text()))


@pytest.mark.slow
def test_the_site_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        html = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)", html)
        assert not fetched, page
        assert "<!-- schema:" not in html
    assert "<math" in (tmp_path / "site" / "understand" / "r2-lin.html").read_text()
    commands = (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert all(f"ffncompress {name}" in commands for name in cli.commands)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


FROM_THE_LOG = [ROOT / "README.md", *(p for p in DOCS if p.parent.name in ("docs", "understand", "guides", "start"))]


@pytest.mark.parametrize("page", FROM_THE_LOG, ids=name_of)
def test_every_figure_was_printed_by_a_script(page: Path) -> None:
    """What a page states with a decimal point, outside code, equations and versions, stands in the benchmarks' log."""
    if page.stem in ("serving", "promises", "architecture", "regimes"):
        pytest.skip("has versions, limits of tests, or constants of the code")
    log = (ROOT / "benchmarks" / "LOG.md").read_text()
    code = r"```.*?```|\$\$.*?\$\$|\]\([^)]*\)|`[^`]*`|(?:arXiv|Apache-|Python|transformers) ?[\d.]+"
    prose = re.sub(code, "", page.read_text(), flags=re.S)
    figures = set(re.findall(r"\d[\d,]*\.\d+|\de[+-]\d+", prose))
    assert len(figures) > 30 or page.name != "README.md"
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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

    page = (ROOT / "docs/guides/family.md").read_text()
    listed = page.partition("<!-- families -->")[2].partition("<!-- /families -->")[0]
    names = re.findall(r"[\w-]+", listed)
    assert names == sorted(FAMILIES), "python -c 'from ffncompress.models import supported; print(supported())'"
