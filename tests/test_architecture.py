"""Imports go one way from floor to floor, each floor says what it is, and the project speaks of itself alone."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from import_graph import floors_of, imports_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ffncompress"
# from the ground up: a floor may import from those before it
FLOORS = [
    "storage", "runtime", "recovery", "text", "records", "pages", "models", "replacement", "passes", "planning",
    "checkpoint", "exporting", "gate", "profiling", "cli",
]  # fmt: skip
GROUND = {
    "__init__",
    "errors",
    "sanitize",
    "schema",
    "notebooks",
    "type_aliases",
    "budgets",
    "settings",
    "modeling_ffncompress",
}  # what every floor needs
ROOF = {"_autoload", "hub", "recipe", "journal", "resumable", "api", "__main__"}  # what joins the whole together
# pairs that the order would allow, and the floors' own words do not
STRANGERS = {("gate", "planning"), ("checkpoint", "planning"), ("profiling", "planning"), ("profiling", "checkpoint"),
             ("profiling", "gate"), ("exporting", "planning"), ("gate", "exporting"),
             ("profiling", "exporting"), ("recovery", "storage"), ("recovery", "runtime")}  # fmt: skip


def _height(module: str) -> int:
    first = module.split(".")[0]
    if first in GROUND:
        return -1
    return len(FLOORS) if first in ROOF else FLOORS.index(first)


IMPORTS = imports_of(PACKAGE)


def test_imports_go_one_way() -> None:
    for module, imported in IMPORTS.items():
        for other in imported:
            first, second = module.split(".")[0], other.split(".")[0]
            if first == "cli" and second in ROOF:  # the command line stands on the roof
                continue
            assert _height(other) <= _height(module), f"{module} imports {other}"
            assert (first, second) not in STRANGERS, f"{module} imports {other}"


def test_there_is_no_circle_within_a_floor() -> None:
    inner = {
        module: {other for other in imported if other != module and "." in other}
        for module, imported in IMPORTS.items()
        if "." in module
    }
    TopologicalSorter(inner).prepare()  # raises CycleError, which names the circle


def test_every_floor_is_in_the_order_and_says_what_it_is() -> None:
    assert sorted(FLOORS) == floors_of(PACKAGE)
    for floor in FLOORS:
        docstring = ast.get_docstring(ast.parse((PACKAGE / floor / "__init__.py").read_text()))
        assert docstring, floor
        names = re.findall(r"`(\w+_?)`", docstring.partition("Public:")[2])
        defined = {
            node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.unparse(node.targets[0])
            for file in (PACKAGE / floor).glob("*.py")
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
        }
        assert set(names) <= defined, f"{floor}: {set(names) - defined}"


def test_every_module_has_a_docstring_and_can_be_read_in_one_sitting() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text())), file
        longest = 600 if file.name == "modeling_ffncompress.py" else 330  # that one travels, and is whole by itself
        assert len(file.read_text().splitlines()) <= longest, file


def test_the_page_shows_the_floors_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/`", page, re.M)
    assert rows == FLOORS
    glossary = re.findall(r"^\| \*\*", page.partition("## Words")[2].partition("\n## ")[0], re.M)
    assert 10 < len(glossary) <= 25


@pytest.mark.parametrize("folder", [*FLOORS[:-1]])
def test_tests_mirror_the_floors(folder: str) -> None:
    assert list((ROOT / "tests" / folder).glob("test_*.py")), folder


def test_no_path_of_a_machine() -> None:
    for file in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.y*ml")]:
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", file.read_text()), file
