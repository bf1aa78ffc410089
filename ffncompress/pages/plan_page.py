"""plan.html: what a plan makes of a model, as a picture; what it was chosen by; and what to do next.

It is made from plan.json, and from how long its stages took. The folder's name is not in it; the page finds that where
it lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ffncompress.pages.page import Words, asset, render_page
from ffncompress.records.commands import point_words, share_to_ask, short_name
from ffncompress.records.plan import BlockPlan, JointCheck, Plan
from ffncompress.records.task import MEASURES
from ffncompress.type_aliases import Json

FOLDER = "{folder}"  # in a command: the folder that the page lies in


def render_plan(plan: Plan, timings: Mapping[str, float]) -> str:
    """The whole page as HTML.

    Args:
        plan: the plan.
        timings: seconds of each stage, of the run that finished it; none: they are not known.
    """
    plan = plan.public()
    name = short_name(plan)
    words = Words(
        title=f"{name}: plan",
        heading=_heading(plan, name),
        without_script="The pictures and tables of this page need JavaScript; plan.json beside it does not.",
        footer=f"Made by ffncompress {plan.ffncompress_version} from plan.json, which has every figure of this page.",
    )
    return render_page(words, {**_shown(plan), "timings": list(timings.items())}, asset("plan.js"))


def _heading(plan: Plan, name: str) -> str:
    if not plan.replaced:
        return f"{name}: nothing is safe to replace"
    smaller = f"{name}: {100 * (1 - plan.ratios['whole_model']):.1f}\u00a0% smaller"
    if (final := plan.final_check) is None or plan.doubt:
        return smaller
    return f"{smaller}, {MEASURES[plan.base.task]} {100 * final.delta / final.base_perplexity:+.1f}\u00a0%"


def _shown(plan: Plan) -> Json:
    final = plan.final_check
    choices = [block.choice for block in plan.replaced if block.choice is not None]
    return {
        "summary": plan.summary,
        "asked": plan.settings.asks(),
        "measure": MEASURES[plan.base.task],
        "family": plan.base.family,
        "doubt": plan.doubt,
        "before": plan.base.parameters,
        "after": plan.parameters_after,
        "ffns": plan.base.ffn_parameters,
        "target": plan.settings.target,
        "at_target": plan.parameters_at_target,
        "base": plan.base_perplexity,
        "seq_len": plan.settings.seq_len,
        "limit": None if plan.settings.limit is None else str(plan.settings.limit),
        "tolerance": str(plan.tolerance.limit),
        "reason": plan.tolerance.reason if plan.settings.limit is None and final is not None else "",
        "warning": plan.tolerance.warning,
        "final": None if final is None or not choices else _check(final, plan),
        "added": _rise(1.0, sum(choice.predicted_loss for choice in choices)),
        "blocks": [_block(block, plan.base_perplexity) for block in plan.blocks],
        "kept_layers": [[layer, why] for layer, why in plan.kept_layers.items()],
        "checks": [_check(check, plan) for check in plan.joint_checks],
        "frontier": _frontier(plan),
        "texts": [
            {"used": used, **ref.model_dump(mode="json")}
            for used, refs in (("fitting", plan.fit_text), ("choosing", plan.choose_text))
            for ref in refs
        ],
        "settings": {"tokens": plan.settings.tokens, "seed": plan.settings.seed, "dtype": plan.settings.dtype},
        "next": ["ffncompress", "apply", FOLDER, "-o", "slim"] if plan.replaced else [],
    }


def _block(block: BlockPlan, base: float) -> Json:
    """A block, and what is kept of it by kind: of its parameters, those of kept neurons and those of a linear map."""
    choice, swap = block.choice, block.swap
    neurons = linear = 0
    if choice is not None:
        neurons = min(choice.parameters, round(block.parameters * choice.width / block.d_inner))
        linear = choice.parameters - neurons
    return {
        "index": block.index,
        "path": block.path,
        "parameters": block.parameters,
        "untouched": 0 if choice is not None else block.parameters,
        "neurons": neurons,
        "linear": linear,
        "width": block.d_inner,
        "becomes": "kept as it is" if choice is None else choice.describe(),
        "kept_neurons": None if choice is None else choice.width,
        "cost": None if choice is None else _rise(base, choice.predicted_loss),
        "seconds": None if choice is None else choice.seconds,
        "reason": block.reason,
        "scores": block.scores.model_dump(mode="json"),
        "tried": swap.describe(),
        "predicted": swap.predicted_delta,
        "measured": swap.delta,
        "error": swap.delta_error,
    }


def _check(check: JointCheck, plan: Plan) -> Json:
    return {
        **check.model_dump(mode="json", exclude={"blocks"}),
        "replaced": len(check.blocks),
        "share": check.parameters / plan.base.parameters,
        "chosen": check is plan.final_check,
    }


def _frontier(plan: Plan) -> Json:
    knee, shown = plan.knee, []
    for point in plan.frontier:
        share = share_to_ask(point)
        command = [] if share is None else point_words(plan, share, FOLDER)
        shown.append({**point.model_dump(mode="json"), "at": share, "knee": point is knee, "command": command})
    return shown


def _rise(base: float, nats: float) -> float:
    """What a rise of the mean loss is in perplexity; a file may say anything."""
    return base * math.expm1(nats) if nats < 700 else math.inf
