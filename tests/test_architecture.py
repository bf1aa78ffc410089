"""Imports go one way, and the project speaks of itself alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ffncompress"
# bottom to top; a module may import what stands before it
ORDER = [
    "errors", "words", "launch", "recovery", "workers", "settings", "staging", "manifest", "locks", "places", "outputs",
    "working", "stages", "notebook", "models", "texts", "windows", "calibration", "swaps", "reading", "doubts",
    "forecast", "modules", "figures", "promise", "plans", "corpus", "patcher", "scoring", "refit", "allocation",
    "selection", "latency", "survey", "planner", "replan", "plugin",
    "_autoload", "report", "heal", "origin", "card", "artifact", "profiling",
    "lm", "gate", "hub", "recipe", "journal", "api", "cli", "__main__",
]  # fmt: skip


def _room(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_imports_go_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = _room(file)
        if room == "__init__":
            continue
        tree = ast.parse(file.read_text())
        typing_only = {
            node
            for guard in ast.walk(tree)
            if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.unparse(guard.test)
            for node in ast.walk(guard)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("ffncompress")
                and node not in typing_only
            ):
                rooms = [node.module.split(".")[1]] if "." in node.module else [a.name for a in node.names]
                for imported in rooms:
                    if imported != "__version__":
                        assert ORDER.index(imported) <= ORDER.index(room), f"{file.name} imports {imported}"


def test_every_module_has_its_place_and_its_docstring() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.name != "__init__.py" or file.parent.name in ("recovery", "models", "cli", "ffncompress"):
            assert ast.get_docstring(ast.parse(file.read_text())), file
        assert _room(file) in (*ORDER, "__init__")


def test_no_path_of_a_machine() -> None:
    for file in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.y*ml")]:
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", file.read_text()), file
