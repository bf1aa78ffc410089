"""ffncompress: slim Hugging Face language models by closed-form replacement of their FFN blocks.

    import ffncompress

    ffncompress.plan("gpt2", "gpt2-plan", budget="8x")
    ffncompress.compress("gpt2-plan", "gpt2-slim")
    result = ffncompress.evaluate("gpt2-slim")
    model = ffncompress.load("gpt2-slim")          # or AutoModelForCausalLM.from_pretrained("gpt2-slim")

The names below are the public surface. They load what they need when first touched: importing this package costs
nothing, which matters because torch imports it to find the loader of emitted checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.6.0"

__all__ = [
    "FfncompressError",
    "Plan",
    "apply_",
    "compress",
    "evaluate",
    "export",
    "load",
    "patched",
    "plan",
    "profile",
    "push",
    "run",
    "verify",
]

if TYPE_CHECKING:
    from ffncompress.api import compress, evaluate, export, plan, profile, push, run, verify
    from ffncompress.checkpoint.loading import load
    from ffncompress.checkpoint.patcher import apply_, patched
    from ffncompress.errors import FfncompressError
    from ffncompress.records.plan import Plan

_HOMES = {
    "FfncompressError": "ffncompress.errors",
    "Plan": "ffncompress.records.plan",
    "apply_": "ffncompress.checkpoint.patcher",
    "compress": "ffncompress.api",
    "evaluate": "ffncompress.api",
    "export": "ffncompress.api",
    "load": "ffncompress.checkpoint.loading",
    "patched": "ffncompress.checkpoint.patcher",
    "plan": "ffncompress.api",
    "profile": "ffncompress.api",
    "push": "ffncompress.api",
    "run": "ffncompress.api",
    "verify": "ffncompress.api",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ffncompress' has no attribute {name!r}")
