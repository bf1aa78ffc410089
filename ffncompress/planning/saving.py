"""A plan into its folder, pictures and all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ffncompress.pages.plan_page import render_plan
from ffncompress.planning.figures import draw_frontier, draw_profile
from ffncompress.records.plan import PLAN_FILE, Plan
from ffncompress.records.plan_files import (
    FIGURE_FILE,
    FRONTIER_FILE,
    MOMENTS_FILE,
    PAGE_FILE,
    TENSOR_FILE,
    TIMINGS_FILE,
)
from ffncompress.storage.manifest import Manifest, sha256_of
from ffncompress.storage.outputs import staged_directory


def save_plan(
    plan: Plan,
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    moments: Mapping[str, Tensor] | None = None,
    *,
    timings: Mapping[str, float] | None = None,
    overwrite: bool = False,
    placing: Callable[[Manifest], None] = lambda _: None,
) -> Plan:
    """Write the plan folder, whole or not at all; returns the plan as it was written.

    Args:
        plan: the plan.
        directory: its folder.
        tensors: the fitted tensors of its replacements.
        moments: those of every block, where they are to be kept.
        timings: seconds of each stage; they stay apart from the plan, which does not depend on who made it when.
        overwrite: replace an earlier plan.
        placing: called with the manifest just before the folder is put in place.
    """
    from safetensors.torch import save_file

    with staged_directory(directory, "plan", overwrite=overwrite, placing=placing) as stage:
        save_file(dict(tensors), stage / TENSOR_FILE, metadata={"format": "pt"})
        if moments is not None:
            save_file(dict(moments), stage / MOMENTS_FILE)
        plan = plan.model_copy(update={"replacements_sha256": sha256_of(stage / TENSOR_FILE)})
        (stage / PLAN_FILE).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (stage / PAGE_FILE).write_text(render_plan(plan, timings or {}), encoding="utf-8")
        if timings:
            (stage / TIMINGS_FILE).write_text(json.dumps(timings, indent=1) + "\n", encoding="utf-8")
        draw_profile(plan, stage / FIGURE_FILE)
        if plan.frontier:
            draw_frontier(plan, stage / FRONTIER_FILE)
    return plan
