"""The table of families: a row names the projections of one FFN layout, a model type points at its row.

A model type that is not in the table is accepted when its layers hold an FFN of a known layout (finding.py). That the
output of every one of them reaches the residual stream unchanged is checked on a forward pass (residual.py), not
assumed, for types in the table too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ffncompress.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The names of an FFN's projections: into the inner width, and out of it."""

    inner: tuple[str, ...]
    out: str


GPT2 = Layout(("c_fc",), "c_proj")
NEOX = Layout(("dense_h_to_4h",), "dense_4h_to_h")
GATED = Layout(("gate_proj", "up_proj"), "down_proj")
LAYOUTS = (GPT2, NEOX, GATED)

FAMILIES = {
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "llama": GATED,
    "mistral": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "gemma": GATED,
    "smollm3": GATED,
}


def supported() -> str:
    """The families as a sentence for a person."""
    return ", ".join(sorted(FAMILIES)) + ", and models built like them"


def unsupported(model_type: str, reason: str) -> ModelError:
    """The refusal of a model, with the reason and what is supported."""
    return ModelError(f"{model_type}: {reason}; supported families: {supported()}")
