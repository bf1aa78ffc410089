"""The commands that make a plan again, or one of another size: what a person copies from a card, a page, a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ffncompress.budgets import Budget
from ffncompress.records.plan import FrontierPoint, Plan
from ffncompress.settings import PlanSettings


def plan_words(
    plan: Plan,
    *,
    settings: PlanSettings | None = None,
    model: str | None = None,
    data: Sequence[str] | None = None,
    choose_data: Sequence[str] | None = None,
    brief: bool = False,
) -> list[str]:
    """The command that makes a plan, word by word.

    Args:
        plan: the plan; it names models and texts, and knows no paths.
        settings: in place of the plan's own.
        model: as it is called here.
        data: the texts as they are called here.
        choose_data: the same of texts to choose on.
        brief: leave out what is so anyway.
    """
    settings = settings or plan.settings
    words = ["ffncompress", "plan", short_name(plan) if model is None else model]
    for option in ("budget", "max_delta", "target_speed", "at", "kinds", "align", "refit_tokens"):
        value = getattr(settings, option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    words += ["--for", settings.target] if settings.target else []
    words += ["--no-refit"] if not settings.refit else []
    words += ["--thorough"] if settings.thorough else []
    words += ["--revision", plan.base.revision] if plan.base.revision else []
    for name in [_file_name(text.source) for text in plan.fit_text] if data is None else data:
        words += ["--data", name]
    for name in [Path(text).name for text in settings.choose_data] if choose_data is None else choose_data:
        words += ["--choose-data", name]
    words += ["--blocks", settings.blocks] if settings.blocks else []
    words += ["--context", str(settings.context)] if settings.context else []
    words += ["--dtype", settings.dtype] if settings.dtype != "auto" else []
    for option in ("tokens", "seq_len", "seed"):
        value = getattr(settings, option)
        if not brief or value != PlanSettings.model_fields[option].default:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


def share_to_ask(point: FrontierPoint) -> str | None:
    """What `--at` takes for a point: its share, rounded up so that the point itself is within; none: all is kept."""
    share = math.ceil(point.share * 1e4) / 1e4 if 0 < point.share < 1 else 1.0
    return f"{share:g}" if share < 1 else None


def point_words(
    plan: Plan,
    share: str,
    folder: str,
    *,
    model: str | None = None,
    data: Sequence[str] | None = None,
    choose_data: Sequence[str] | None = None,
) -> list[str]:
    """The command that takes a point of a plan's frontier, word by word.

    From kept moments that needs neither text nor a pass over the model; without them it is planned anew.

    Args:
        plan: the plan with the frontier.
        share: what `share_to_ask` gave.
        folder: where the plan lies; the new one goes beside it.
        model: as it is called here.
        data: the texts as they are called here.
        choose_data: the same of texts to choose on.
    """
    ratio = Budget.parse(plan.settings.budget).ratio  # the frontier was traced within it
    budget = None if ratio is None else f"{ratio:g}x"
    output = ["-o", f"{folder}-{share}"]
    if plan.settings.keep_moments:
        factor = [] if budget is None else ["--budget", budget]
        return ["ffncompress", "plan", folder, "--at", share, *factor, *output]
    wanted = {"at": float(share), "budget": budget, "max_delta": None, "target_speed": None, "blocks": None}
    settings = plan.settings.model_copy(update=wanted)
    words = plan_words(plan, settings=settings, model=model, data=data, choose_data=choose_data, brief=True)
    trust = ["--trust-remote-code"] if model is not None and plan.base.trust_remote_code else []  # typed then as well
    return [*words, *trust, *output]


def short_name(plan: Plan) -> str:
    """The base's name without anybody's folders in it."""
    return plan.base.name if plan.base.revision else Path(plan.base.name).name


def _file_name(source: str) -> str:
    return Path(source).name if "/" in source and ":" not in source else source
