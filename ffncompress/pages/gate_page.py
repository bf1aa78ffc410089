"""gate.html: what `ffncompress eval` found, to look at: perplexities, both continuations, sizes, speed, the verdict."""

from __future__ import annotations

from pathlib import Path

from ffncompress.budgets import Limit
from ffncompress.errors import BudgetError
from ffncompress.pages.page import Words, asset, render_page
from ffncompress.records.gate import GateResult, TextResult
from ffncompress.records.task import MEASURES, UNTIMED
from ffncompress.type_aliases import Json

FOLDER = "{folder}"  # in a command: the checkpoint, above the folder that the page lies in


def render_gate(result: GateResult) -> str:
    """The whole page as HTML."""
    name = Path(result.base_model).name
    words = Words(
        title=f"{name}, slimmed: gate",
        heading=f"{name}, slimmed: gate {'passed' if result.passed else 'failed'}",
        without_script="The pictures and tables of this page need JavaScript; gate.json beside it does not.",
        footer=f"Made by ffncompress {result.ffncompress_version} from gate.json, which has every figure of this page.",
    )
    return render_page(words, _shown(result), asset("gate.js"))


def _shown(result: GateResult) -> Json:
    content: Json = result.model_dump(mode="json", exclude={"base_model"}) | {"untimed": UNTIMED}
    return {
        **content,
        "measure": MEASURES[result.task],
        "most": _most(result),
        "paces": [
            {"values": (p.base, p.slimmed), "what": p.what, "measured": p.measured, "expected": p.expected}
            for p in result.paces
        ],
        "next": ["ffncompress", "push", FOLDER, "USER/REPO"] if result.passed else [],
        "texts": [
            {**shown, "relative": text.relative, "delta": text.delta}
            for shown, text in zip([content["main"], *content["also"]], [result.main, *result.also], strict=True)
        ],
    }


def _most(result: GateResult) -> float | None:
    """The limit as a share of the base's perplexity; none where it cannot be read."""
    main: TextResult = result.main
    try:
        return Limit.parse(result.limit).allowance(main.base.token) / main.base.token
    except BudgetError:
        return None
