"""The public surface: small, documented, pinned."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ffncompress

SURFACE = {
    "FfncompressError", "Plan", "apply_", "compress", "evaluate", "export", "load", "patched", "plan", "profile",
    "push", "run", "verify",
}  # fmt: skip


def test_the_surface_is_what_we_say() -> None:
    assert set(ffncompress.__all__) == SURFACE
    for name in SURFACE:
        thing = getattr(ffncompress, name)
        assert "ffncompress." in (inspect.getdoc(thing) or "") or name == "Plan", f"{name} has no example"


def test_importing_the_package_loads_nothing() -> None:
    """torch imports it at its own start-up, so it must cost nothing."""
    code = "import sys, ffncompress._autoload; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
