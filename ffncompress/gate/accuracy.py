"""Tasks: the accuracy of both models by lm-eval, example by example, so that their difference is a paired one.

Perplexity is a mean over all tokens; a model can keep it and lose what it was used for. The two models answer the same
questions, so the error of the drop is that of the differences: mostly zeros, and far smaller than the error of
either accuracy.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

from ffncompress.errors import TextError
from ffncompress.gate.lm import counted, make_lm
from ffncompress.gate.local_task import is_local, read_local_task
from ffncompress.records.gate import TaskResult
from ffncompress.runtime.progress import Progress, step
from ffncompress.sanitize import in_short
from ffncompress.settings import EvalSettings
from ffncompress.type_aliases import Model, Tokenizer

METRICS = ("acc_norm", "acc")  # the first that a task has


@dataclass(frozen=True)
class Answers:
    """What one model answered: whether each example is right, and what identifies the examples."""

    metric: str
    right: list[float]
    gold: list[Any]
    sha256: str


def load_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Tasks by their names, lm-eval's own or local, as lm-eval loads them; a group is its tasks.

    Raises:
        TextError: one is unknown, cannot be had, or has no accuracy.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    specs = [read_local_task(name) if is_local(name) else name for name in dict.fromkeys(names)]
    with redirect_stderr(io.StringIO()):
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_defaults=not all(map(is_local, names)))
        tasks: dict[str, Any] = {}
        for name, spec in zip(dict.fromkeys(names), specs, strict=True):
            found = _load(manager, name, spec)
            if both := found.keys() & tasks.keys():
                raise TextError(f"two tasks are called {min(both)}; give one of them another name in its YAML")
            tasks |= found
    for name, task in tasks.items():
        if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
            raise TextError(f"task {name} is of {task.OUTPUT_TYPE}, not of right answers; choose one with an accuracy")
    return tasks


def _load(manager: Any, name: str, spec: Any) -> dict[str, Any]:
    if isinstance(spec, str) and spec not in manager.all_tasks:
        raise TextError(f"{name}: lm-eval has no such task; list them with: lm-eval ls tasks, or give a YAML file")
    try:
        found: dict[str, Any] = manager.load([spec])["tasks"]
    except Exception as error:  # datasets, huggingface_hub, Jinja and the socket each have their own
        way_out = "mend its fields" if is_local(name) else "its data come from the Hub; give a YAML file of local ones"
        raise TextError(f"task {name} cannot be loaded ({in_short(error)}); {way_out}") from error
    return found


def measure_tasks(
    base: Model, slimmed: Model, tokenizer: Tokenizer, tasks: dict[str, Any], settings: EvalSettings, progress: Progress
) -> list[TaskResult]:
    """Both models on every task."""
    if not tasks:
        return []
    before, after = (
        _answers(model, tokenizer, tasks, settings, progress, f"tasks: {name}")
        for model, name in ((base, "base"), (slimmed, "slimmed"))
    )
    return [_result(name, tasks[name], before[name], after[name]) for name in before]


def _answers(
    model: Model, tokenizer: Tokenizer, tasks: dict[str, Any], settings: EvalSettings, progress: Progress, label: str
) -> dict[str, Answers]:
    with step(progress, label), redirect_stderr(io.StringIO()):
        import lm_eval

        # the model's own length: a question is not cut to the context that texts are read in
        told = partial(counted, model, progress=progress, label=f"{label}, answers")
        lm = make_lm(model, tokenizer, settings.batch_size, counting=told)
        loaded = {"tasks": tasks, "groups": {}, "group_map": {}}
        found = lm_eval.evaluate(lm=lm, task_dict=loaded, limit=settings.limit, bootstrap_iters=0, log_samples=True)
    assert found is not None
    return {name: _read_samples(name, samples) for name, samples in found["samples"].items()}


def _read_samples(name: str, samples: list[dict[str, Any]]) -> Answers:
    samples = [each for each in samples if each["filter"] == samples[0]["filter"]]
    samples.sort(key=lambda each: int(each["doc_id"]))
    metric = next((metric for metric in METRICS if samples and metric in samples[0]), None)
    if metric is None:
        raise TextError(f"task {name} has no accuracy (acc or acc_norm); choose another")
    asked = "".join(each["prompt_hash"] + each["target_hash"] for each in samples)
    return Answers(
        metric, [float(each[metric]) for each in samples], [each["target"] for each in samples],
        hashlib.sha256(asked.encode()).hexdigest(),
    )  # fmt: skip


def _result(name: str, task: Any, before: Answers, after: Answers) -> TaskResult:
    falls = [b - a for b, a in zip(before.right, after.right, strict=True)]
    return TaskResult(
        task=name,
        metric=before.metric,
        examples=len(falls),
        base=_mean(before.right),
        base_error=standard_error(before.right),
        slimmed=_mean(after.right),
        slimmed_error=standard_error(after.right),
        drop_error=standard_error(falls),
        majority=majority(before.gold) if task.OUTPUT_TYPE == "multiple_choice" else None,
        sha256=before.sha256,
    )


def majority(gold: Sequence[Any]) -> float | None:
    """How often the most frequent answer is right; none where the right one is no place in a list of choices."""
    places = [str(each) for each in gold]
    if not places or not all(place.isdigit() for place in places):
        return None
    return Counter(places).most_common(1)[0][1] / len(places)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; a single value has none."""
    n, mean = len(values), _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
