"""The house as it stands: the tree of the package, and which floor imports from which.

    python benchmarks/import_graph.py [FOLDER]

FOLDER is the package, by default this checkout's; `git worktree add /tmp/before v0.4.0` makes an older one to compare
with. A number in the graph says how many modules of the row's floor import from the column's. Imports under
TYPE_CHECKING do not count: nothing is loaded by them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ffncompress"
NAME = "ffncompress"


def imports_of(package: Path) -> dict[str, set[str]]:
    """What each module of a package imports of it: dotted names below the package."""
    modules = {_dotted(file, package) for file in package.rglob("*.py")}
    return {_dotted(file, package): set(_imported(file, modules)) for file in sorted(package.rglob("*.py"))}


def floors_of(package: Path) -> list[str]:
    """The packages within the package."""
    return sorted(folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file())


def _dotted(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imported(file: Path, modules: set[str]) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    for_types = {node for guard in guards for node in ast.walk(guard)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types and (node.module or "").split(".")[0] == NAME:
            _, _, module = (node.module or "").partition(".")
            below = [".".join(filter(None, (module, alias.name))) for alias in node.names]
            found += [name if name in modules else module for name in below]
    return [name for name in found if name]


def print_tree(package: Path) -> None:
    """Folders and files with their lines."""
    files = sorted(package.rglob("*.py"), key=lambda file: (file.parent, file.name))
    folder = None
    for file in files:
        place = file.parent.relative_to(package.parent)
        if place != folder:
            folder = place
            print(f"{folder}/")
        print(f"    {file.name:24}{len(file.read_text(encoding='utf-8').splitlines()):5}")
    print(f"{len(files)} files")


def print_graph(package: Path) -> None:
    """A row and a column for each floor, from the ground up; single files are one of each, "landing"."""
    floors = floors_of(package)
    counts: Counter[tuple[str, str]] = Counter()
    for module, imported in imports_of(package).items():
        own = module.split(".")[0]
        own = own if own in floors else "landing"
        for other in {name.split(".")[0] if name.split(".")[0] in floors else "landing" for name in imported}:
            counts[own, other] += own != other
    below = {floor: {other for own, other in counts if own == floor and counts[own, other]} for floor in floors}
    order = list(TopologicalSorter({floor: below[floor] - {"landing"} for floor in floors}).static_order())
    shown = ["landing", *order]
    width = max(map(len, shown))
    print(" " * width, *(name[:5].rjust(5) for name in shown))
    for row in shown:
        print(row.rjust(width), *(str(counts[row, column] or ".").rjust(5) for column in shown))


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    print_tree(where)
    print_graph(where)
