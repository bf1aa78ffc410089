"""Optional healing: a little distillation of the stand-ins, from where the closed form left them.

Off by default. Only the stand-ins' own parameters move; the target is the original model's next-token distribution on
the plan's fit text. What it added is measured on the choose text, and where that is nothing the closed form stays.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ffncompress.calibration import own_batches
from ffncompress.launch import alone
from ffncompress.swaps import perplexity, sequence_losses
from ffncompress.windows import TokenWindows, Windows
from ffncompress.workers import Track, Workers, silent

RATE, WARM_UP = 2e-4, 20  # of AdamW: small steps, for the start is already the least-squares one


@dataclass(frozen=True)
class Healing:
    """What healing did: perplexities on the choose text."""

    minutes: float
    steps: int
    tokens: int
    original: float
    closed_form: float
    healed: float
    kept: bool


def heal_(
    model: Any,
    original: Any,
    stand_ins: list[nn.Module],
    fit: TokenWindows,
    choose: TokenWindows,
    minutes: float,
    track: Track = silent,
) -> Healing:
    """Tune the stand-ins in place for so many minutes; the closed form is put back if that did not help.

    Args:
        model: the slimmed model, in float32.
        original: the model that it came from.
        stand_ins: the modules in `model` that may move.
        fit: token windows to distil on.
        choose: token windows to measure on.
        minutes: how long to go on.
        track: wraps the steps, for a progress bar in percent of the time.
    """
    alone("healing")
    workers = Workers("cpu" if next(model.parameters()).device.type == "cpu" else "auto")
    scored = Windows.of(choose).scored
    before = perplexity(sequence_losses(model, choose, workers), scored)
    start_state = copy.deepcopy([module.state_dict() for module in stand_ins])
    model.requires_grad_(False)
    for module in stand_ins:
        module.requires_grad_(True)
    optimiser = torch.optim.AdamW([p for m in stand_ins for p in m.parameters() if p.numel()], RATE, weight_decay=0.0)
    steps, tokens = _distil(model, original, optimiser, fit, workers, 60 * minutes, track)
    model.requires_grad_(False)
    after = perplexity(sequence_losses(model, choose, workers), scored)
    kept = after < before
    if not kept:
        for module, state in zip(stand_ins, start_state, strict=True):
            module.load_state_dict(state)
    base = perplexity(sequence_losses(original, choose, workers), scored)
    return Healing(minutes, steps, tokens, base, before, after, kept)


def _distil(
    model: Any,
    original: Any,
    optimiser: torch.optim.Optimizer,
    windows: TokenWindows,
    workers: Workers,
    seconds: float,
    track: Track,
) -> tuple[int, int]:
    """Steps over shuffled batches until the time is up; returns (steps, tokens)."""
    generator = torch.Generator().manual_seed(0)
    batches = [batch for _, batch in own_batches(windows, workers)]
    order: list[int] = []
    start, steps, tokens = time.monotonic(), 0, 0
    for percent in track(range(100), "healing"):
        while time.monotonic() - start < seconds * (percent + 1) / 100:
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            ids = batches[order.pop()]
            spent = min((time.monotonic() - start) / seconds, 1.0)
            for group in optimiser.param_groups:
                group["lr"] = RATE * min((steps + 1) / WARM_UP, 1.0) * (1 - 0.9 * spent)
            with torch.no_grad():
                target = original(input_ids=ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
            ours = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
            loss = F.kl_div(ours, target, log_target=True, reduction="batchmean")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            steps, tokens = steps + 1, tokens + ids.numel()
    return steps, tokens
