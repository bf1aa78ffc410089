"""Optional healing: a slimmed model is distilled from its original, from where the closed form left it.

Off by default. What moves is the replacements, all weights between embeddings and head, or the replacements and
adapters (`moving.py`). The target is what the original predicts on the fit text: its likeliest tokens and the chance of
all others together, computed once for each batch, when it is first drawn, and kept on disk. The rate is not guessed:
a few are tried from the same start. What healing added is measured on the choose text, in the numbers that will be
stored, and where that is nothing the closed form stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.passes.activations import own_batches
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.moving import Moving, copy_
from ffncompress.passes.objective import Answers, objective_of
from ffncompress.passes.spool import Spool
from ffncompress.records.origin import Healing
from ffncompress.runtime.launch import alone
from ffncompress.runtime.products import fast_products
from ffncompress.runtime.progress import step
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Facts, fingerprint
from ffncompress.settings import HealWhat
from ffncompress.storage.working import spool
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Model

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)  # of AdamW
LADDER = 0.06  # of the time, to try them
FEWEST, MOST = 3, 24  # steps of a trial
HELD_OUT = 2  # batches that a trial is judged by
WARM_UP = 10  # steps
ON_GPU = 8  # times as many tokens in a step
_TRIALS = 4  # of the rates, most of the time


def heal_(
    model: Model,
    original: Model,
    replacements: list[nn.Module],
    fit: TokenWindows,
    choose: TokenWindows,
    minutes: float,
    run: Run,
    what: HealWhat = "replaced",
    stored: torch.dtype = torch.float32,
) -> Healing:
    """Tune a slimmed model in place for so many minutes; the closed form is put back if that did not help.

    Args:
        model: the slimmed model, in float32.
        original: the model that it came from.
        replacements: the modules in `model` that took an FFN's place.
        fit: token windows to distil on.
        choose: token windows to measure on.
        minutes: how long to go on.
        run: where, who is told, and where a killed run's state lies; its stages' facts say which model this is.
        what: which parameters move.
        stored: what the weights will be stored in.
    """
    alone("healing")
    scored, times = Windows.of(choose).scored, ON_GPU if run.workers.device.type == "cuda" else 1

    def measured(which: Model) -> float:
        return perplexity(sequence_losses(which, choose, run), scored)

    with fast_products(run.workers.device), spool() as folder:
        base, before = measured(original), measured(model)
        moving = Moving(model, replacements, what)
        batches = [batch for _, batch in own_batches(fit, run.workers, times)]
        course = _Course(model, original, moving, batches, Spool(folder))
        facts: Facts = {
            "what": what, "minutes": minutes, "device": str(run.workers.device),
            "fit": fingerprint(*Windows.of(fit)), "choose": fingerprint(*Windows.of(choose)),
        }  # fmt: skip
        course.go(60 * minutes, run, facts)
        moving.settle_(stored)
        after = measured(model)
        kept = after < before
        if not kept:
            moving.begin_()
    return Healing(
        minutes, course.steps, course.tokens, base, before, after, kept, what, course.rate, round(course.seconds, 3)
    )


class _Course:
    """Steps over shuffled batches, and how far they have come."""

    def __init__(self, model: Model, original: Model, moving: Moving, batches: list[Tensor], kept: Spool) -> None:
        self._model, self._original, self._moving, self._batches, self._kept = model, original, moving, batches, kept
        self.steps, self.tokens, self.rate = 0, 0, 0.0
        self.seconds = 0.0  # of these steps
        self.tried = 0.0  # seconds before them, for the rate

    def go(self, seconds: float, run: Run, facts: Facts) -> None:
        """On until the time is up; from where a killed run was, if one was."""
        optimiser = self._optimiser()
        if not self._take_up(run.stages.find("healing", facts), optimiser):
            with step(run.progress, "trying rates"):
                self._find_rate(seconds)
        whole = max(seconds - self.tried, 1e-9)
        for percent in run.progress(range(min(100, int(100 * self.seconds / whole)), 100), "healing"):
            while self.seconds < whole * (percent + 1) / 100:
                done = self.seconds / whole
                rate = self.rate * min((self.steps + 1) / WARM_UP, 1.0) * (1 + math.cos(math.pi * done)) / 2
                at = self._drawn(self.steps)
                self.seconds += _timed(lambda: self._step(optimiser, at, rate))  # noqa: B023
                self.steps, self.tokens = self.steps + 1, self.tokens + self._batches[at].numel()
                run.stages.note("healing", facts, self._state(optimiser))

    def loss(self, at: int) -> Tensor:
        """How far the model is from the original on a batch."""
        batch, objective = self._batches[at], objective_of(self._model)
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.device.type == "cuda"):
            answers: Answers | None = self._kept.get("answers", at)
            if answers is None:
                with torch.no_grad():
                    answers = objective.answers(self._original, batch)
                self._kept.put("answers", at, answers)
            return objective.distance(self._model, batch, answers)

    def _find_rate(self, seconds: float) -> None:
        """The rate by which a few steps from the start come nearest to the original, on other batches."""
        count = len(self._batches)
        held_out = [self._drawn(i) for i in range(count - max(1, min(HELD_OUT, count // 8)), count)]

        def once() -> None:
            self.loss(self._drawn(0)).backward()  # type: ignore[no-untyped-call]

        length = _timed(once)
        steps = min(MOST, max(FEWEST, int(LADDER * seconds / (_TRIALS * max(length, 1e-9)))))

        def tried(rate: float) -> float:
            self._moving.begin_()
            optimiser = self._optimiser()
            for i in range(steps):
                self._step(optimiser, self._drawn(i), rate * min((i + 1) / FEWEST, 1.0) * (1 - i / steps))
            with torch.no_grad():
                found = sum(self.loss(at).item() for at in held_out)
            return found if math.isfinite(found) else math.inf

        def climb() -> None:
            self.rate = best_of(RATES, tried)
            self._moving.begin_()

        self.tried = length + _timed(climb)

    def _drawn(self, number: int) -> int:
        """Which batch comes at a step: each of them once, in a random order, before any comes again."""
        turn, at = divmod(number, len(self._batches))
        order = torch.randperm(len(self._batches), generator=torch.Generator().manual_seed(turn))
        return int(order[at])

    def _optimiser(self) -> torch.optim.Optimizer:
        groups = [{**group, "params": list(group["params"])} for group in self._moving.groups]
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)

    def _step(self, optimiser: torch.optim.Optimizer, at: int, rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["gain"]
        optimiser.zero_grad(set_to_none=True)
        self.loss(at).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def _state(self, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        """All that the next steps depend on."""
        counts = {name: getattr(self, name) for name in ("steps", "tokens", "rate", "seconds", "tried")}
        return {**counts, "values": self._moving.values(), "optimiser": optimiser.state_dict()}

    def _take_up(self, state: Any, optimiser: torch.optim.Optimizer) -> bool:
        """Go on from a state, if it is one of ours; returns whether it was."""
        try:
            values = state["values"]
            if [value.shape for value in values] != [value.shape for value in self._moving.values()]:
                return False
            counts = {name: kind(state[name]) for name, kind in _COUNTS.items()}
            optimiser.load_state_dict(state["optimiser"])
            copy_(self._moving.parameters, values)
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError):
            return False
        for name, count in counts.items():
            setattr(self, name, count)
        return True


_COUNTS: dict[str, Callable[[Any], float]] = {
    "steps": int, "tokens": int, "rate": float, "seconds": float, "tried": float,
}  # fmt: skip


def best_of(ladder: tuple[float, ...], loss_of: Callable[[float], float]) -> float:
    """The rung with the least loss, walked to from the middle: it falls and then rises along the ladder."""
    at = len(ladder) // 2
    losses = {at: loss_of(ladder[at])}
    for way in (1, -1):
        while 0 <= (beside := at + way) < len(ladder):
            if beside not in losses:
                losses[beside] = loss_of(ladder[beside])
            if not losses[beside] < losses[at]:
                break
            at = beside
    return ladder[at]


def _timed(work: Callable[[], object]) -> float:
    """How many seconds work takes."""
    start = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - start
