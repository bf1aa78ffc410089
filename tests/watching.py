"""Eyes on a process while it reads what a stranger sent: what it writes, runs and says."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from ffncompress.settings import _Settings

RUNS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect"}
WRITES = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.symlink": 2, "os.link": 2, "os.truncate": 1}
CANARY = "import pathlib\npathlib.Path({spy!r}).touch()\nCanary = object\n"
PICKLE = b"cbuiltins\nopen\n(V{spy}\nVw\ntR."  # opens the spy's file for writing when it is loaded
_watching: list[Watch] = []


class Wrong(AssertionError):
    """What must never happen, happened."""


class Watch:
    """Watches what happens within: files outside a folder, code, programs, connections."""

    def __init__(self, root: Path) -> None:
        self.root, self.spy = root.resolve(), root.resolve() / "canary-ran"
        self._seen: list[str] = []
        self._before: set[tuple[str, int, int]] = set()
        if not any(hook is _audit for hook in _hooks):
            sys.addaudithook(_audit)
            _hooks.append(_audit)

    def put_canary(self, folder: Path) -> None:
        """Code in several forms, each of which would leave a trace."""
        (folder / "canary.py").write_text(CANARY.format(spy=str(self.spy)))
        for name in ("pytorch_model.bin", "training_args.bin"):
            (folder / name).write_bytes(PICKLE.replace(b"{spy}", str(self.spy).encode()))

    def begin(self) -> None:
        """A case is laid out: from here on nothing that is there may change."""
        self._before = self._tree()

    @contextmanager
    def __call__(self) -> Iterator[Callable[[], str]]:
        """Watch; yields what was said to standard error so far."""
        out, err = io.StringIO(), io.StringIO()
        _watching.append(self)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                yield err.getvalue
        finally:
            _watching.pop()

    def solve(self, *rewritten: str) -> None:
        """Whether anything was seen that must not be; files of the case that are named may have been rewritten.

        Raises:
            Wrong: it was.
        """
        seen, self._seen = self._seen, []
        free = tuple(os.path.join("case", name) for name in rewritten)
        changed = {name for name, *_ in self._tree() ^ self._before if not name.startswith(free or "\0")}
        seen += [f"{name} changed" for name in sorted(changed)]
        if self.spy.exists():
            self.spy.unlink()
            seen.append("code of a stranger ran")
        if seen:
            raise Wrong("; ".join(seen[:3]))

    def _tree(self) -> set[tuple[str, int, int]]:
        """Every file below the root but outputs."""
        found, queue, cut = set(), [str(self.root)], len(str(self.root)) + 1
        while queue:
            for entry in os.scandir(queue.pop()):
                if entry.is_dir(follow_symlinks=False):
                    queue += [entry.path] if entry.path[cut:] != "out" else []
                else:
                    status = entry.stat(follow_symlinks=False)
                    found.add((entry.path[cut:], status.st_size, status.st_mtime_ns))
        return found

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if event in RUNS or (event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(str(self.root))):
            self._seen.append(f"{event} {str(args)[:200]}")
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._check(event, args[0])
        elif event in WRITES:
            for path in args[: WRITES[event]]:
                self._check(event, path)

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        place = os.path.abspath(os.fsdecode(path))
        free = (str(self.root), os.environ["FFNCOMPRESS_CACHE"], "/dev/null")
        if not place.startswith(free) and "__pycache__" not in place:
            self._seen.append(f"{event} {place}")


_hooks: list[Any] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event in RUNS or event in WRITES or event in ("open", "exec")):
        _watching[-1].note(event, args)


def exemplary(kind: Any) -> Any:
    """A record of a class with every field filled, the optional ones and the lists too."""
    if isinstance(kind, type) and issubclass(kind, _Settings):
        return kind()
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fixed = {"schema_version", "windows"}
        fields = {n: f for n, f in kind.model_fields.items() if n not in fixed or f.is_required()}
        return kind(**{name: exemplary(field.annotation) for name, field in fields.items()})
    if dataclasses.is_dataclass(kind):
        return kind(**{name: exemplary(hint) for name, hint in get_type_hints(kind).items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return exemplary(next(option for option in inner if option is not type(None)))
    if origin is Literal or kind is bool:
        return inner[0] if inner else True
    if origin in (list, tuple):
        return [exemplary(inner[0]), exemplary(inner[-1])] if origin is list else tuple(map(exemplary, inner))
    if origin is dict:
        return {"a": exemplary(inner[1])}
    return exemplary(inner[0]) if inner else {str: "words", int: 3, float: 0.5}[kind]
