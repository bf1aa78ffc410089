"""The text that every CPython ships: the language reference pages, and the docstrings of the standard library.

Parsing six hundred modules takes seconds, so what was found is remembered in the user's cache, under a key of all that
it was read from; a cache that cannot be read or written is no reason to fail.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections import deque
from functools import cache
from pathlib import Path

from ffncompress.errors import ArtifactError, TextError
from ffncompress.storage.files import write_file
from ffncompress.storage.registry import cache_folder

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@cache
def python_docs() -> list[tuple[str, str]]:
    """(name, text) of the language reference pages and of each standard module's docstrings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _modules(root)
    memory = cache_folder() / "python-docs" / f"{_key(root, files)}.json"
    named = _remembered(memory)
    if not named:
        named = [*_topics(), *(("/".join(f.relative_to(root).parts), text) for f in files if (text := _docstrings(f)))]
        _remember(memory, named)
    if not named:
        raise TextError("python-docs: this Python ships without its reference pages; give --data a text file")
    return named


def _modules(root: Path) -> list[Path]:
    """The standard library's modules, in order."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found)


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [(f"topic:{name}", text) for name, text in sorted(topics.items())]


def _key(root: Path, files: list[Path]) -> str:
    """What the text follows from: the Python, and each file as it is."""
    digest = hashlib.sha256(f"{sys.version}\n{root}\n".encode())
    for file in files:
        known = file.stat()
        digest.update(f"{file} {known.st_size} {known.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _remembered(file: Path) -> list[tuple[str, str]]:
    try:
        return [(str(name), str(text)) for name, text in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _remember(file: Path, named: list[tuple[str, str]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(named))
    except (OSError, ValueError, ArtifactError):
        pass


def _docstrings(file: Path) -> str:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    queue: deque[ast.AST] = deque([tree])  # as ast.walk, but of expressions, which hold no docstring, nothing is seen
    while queue:
        node = queue.popleft()
        queue.extend(
            c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)
        )
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            name = getattr(node, "name", file.stem)
            found.append(f"{name}: {docstring}")
    return "\n\n".join(found)
