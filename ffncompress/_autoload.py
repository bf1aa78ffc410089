"""Runs at `import torch` (entry point group torch.backends), so that emitted folders load with no import of ours.

It only leaves a note with the import system: once transformers' quantizer table has been executed, our format is
added to it. It costs microseconds, imports nothing heavy, and must never raise into somebody else's import.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# The table's own module cannot import ours while it is half executed by modeling_utils; either may come first.
_WATCHED = ("transformers.modeling_utils", "transformers.quantizers.auto")


def install() -> None:
    """Register now if transformers is loaded already, otherwise when it is."""
    try:
        if any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        if all(_is_loaded(name) for name in _WATCHED):
            _register()
        else:
            sys.meta_path.insert(0, _Finder())
    except Exception:
        pass


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _register() -> None:
    try:
        from ffncompress.checkpoint import plugin

        plugin.register()
    except Exception:  # a transformers too old or too new for us must still work for others
        pass


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Wrap the loader of the one module that is waited for; say nothing of all others."""
        if name not in _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The module's own loader, and then our registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the wrapped loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the wrapped loader does; then the plugin registers."""
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> Any:  # get_source, is_package and the like
        return getattr(self._loader, name)
