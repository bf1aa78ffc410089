"""Optional healing: a little distillation of the replacements, from where the closed form left them.

Off by default. Only the replacements' own parameters move; the target is the original model's next-token distribution
on the plan's fit text. What it added is measured on the choose text, and where that is nothing the closed form stays.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

from ffncompress.passes.activations import own_batches
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.objective import objective_of
from ffncompress.records.origin import Healing
from ffncompress.runtime.launch import alone
from ffncompress.runtime.progress import Progress, silent
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Model

RATE, WARM_UP = 2e-4, 20  # of AdamW: small steps, for the start is already the least-squares one


def heal_(
    model: Model,
    original: Model,
    replacements: list[nn.Module],
    fit: TokenWindows,
    choose: TokenWindows,
    minutes: float,
    progress: Progress = silent,
) -> Healing:
    """Tune the replacements in place for so many minutes; the closed form is put back if that did not help.

    Args:
        model: the slimmed model, in float32.
        original: the model that it came from.
        replacements: the modules in `model` that may move.
        fit: token windows to distil on.
        choose: token windows to measure on.
        minutes: how long to go on.
        progress: wraps the steps, for a progress bar in percent of the time.
    """
    alone("healing")
    run = Run(Workers("cpu" if next(model.parameters()).device.type == "cpu" else "auto"), progress)
    scored = Windows.of(choose).scored
    before = perplexity(sequence_losses(model, choose, run), scored)
    start_state = copy.deepcopy([module.state_dict() for module in replacements])
    model.requires_grad_(False)
    for module in replacements:
        module.requires_grad_(True)
    optimiser = torch.optim.AdamW(
        [p for m in replacements for p in m.parameters() if p.numel()], RATE, weight_decay=0.0
    )
    steps, tokens = _distil(model, original, optimiser, fit, 60 * minutes, run)
    model.requires_grad_(False)
    after = perplexity(sequence_losses(model, choose, run), scored)
    kept = after < before
    if not kept:
        for module, state in zip(replacements, start_state, strict=True):
            module.load_state_dict(state)
    base = perplexity(sequence_losses(original, choose, run), scored)
    return Healing(minutes, steps, tokens, base, before, after, kept)


def _distil(
    model: Model,
    original: Model,
    optimiser: torch.optim.Optimizer,
    windows: TokenWindows,
    seconds: float,
    run: Run,
) -> tuple[int, int]:
    """Steps over shuffled batches until the time is up; returns (steps, tokens)."""
    generator = torch.Generator().manual_seed(0)
    batches = [batch for _, batch in own_batches(windows, run.workers)]
    order: list[int] = []
    start, steps, tokens = time.monotonic(), 0, 0
    for percent in run.progress(range(100), "healing"):
        while time.monotonic() - start < seconds * (percent + 1) / 100:
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            ids = batches[order.pop()]
            spent = min((time.monotonic() - start) / seconds, 1.0)
            for group in optimiser.param_groups:
                group["lr"] = RATE * min((steps + 1) / WARM_UP, 1.0) * (1 - 0.9 * spent)
            loss = objective_of(model).distance(model, original, ids)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps, tokens = steps + 1, tokens + ids.numel()
    return steps, tokens
