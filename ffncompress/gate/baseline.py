"""A result that was kept, and what became of the model since: comparable, or refused with what differs.

On the same text, in the same windows, two runs differ by the models alone, so there is no sampling error between them
to allow for; a margin (1 % unless another is asked for) is what software and machines may differ by, and what nobody
would call worse.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ffncompress.budgets import Limit
from ffncompress.errors import ArtifactError
from ffncompress.records.gate import BaselineChange, GateResult, TextResult
from ffncompress.sanitize import parse_json, plain
from ffncompress.schema import first_fault

LONGEST = 10_000_000  # characters


def read_baseline(file: str | Path) -> GateResult:
    """What `ffncompress eval --json FILE` wrote.

    Raises:
        ArtifactError: it did not.
    """
    otherwise = "give what ffncompress eval --json FILE wrote"
    try:
        with Path(file).open(encoding="utf-8") as stream:
            return GateResult.model_validate(parse_json(stream.read(LONGEST)))
    except ValidationError as error:
        where, what = first_fault(error)
        raise ArtifactError(f"{file}: not a result to compare with, at {plain(where)} ({what}); {otherwise}") from error
    except OSError as error:
        raise ArtifactError(f"{file}: there is no such baseline; {otherwise}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: not a result to compare with, but something else; {otherwise}") from error


def check_base(baseline: GateResult, base_name: str, base_sha256: str) -> None:
    """Before anything is measured.

    Raises:
        ArtifactError: the baseline is of another base model.
    """
    known = baseline.base_sha256
    if (known and known != base_sha256) or (not known and Path(baseline.base_model).name != Path(base_name).name):
        _refuse([f"base model ({baseline.base_model}, sha256 {known[:12] or 'unknown'}; now {base_name}, "
                 f"{base_sha256[:12]})"])  # fmt: skip


def check_text(baseline: GateResult, now: TextResult) -> None:
    """As soon as the text is known.

    Raises:
        ArtifactError: the baseline is of another text, or of one that was read otherwise.
    """
    _refuse(_differences(baseline.main, now))


def compare(result: GateResult, baseline: GateResult, margin: str) -> BaselineChange:
    """What changed since a baseline that was found comparable."""
    tasks = {(task.task, task.metric, task.sha256): task.slimmed for task in baseline.tasks}
    return BaselineChange(
        margin=str(Limit.parse(margin)),
        perplexity=(baseline.main.slimmed.token, result.main.slimmed.token),
        parameters=(baseline.sizes.whole_model[1], result.sizes.whole_model[1]),
        accuracies={
            task.task: (tasks[key], task.slimmed)
            for task in result.tasks
            if (key := (task.task, task.metric, task.sha256)) in tasks
        },
    )


def _differences(then: TextResult, now: TextResult) -> list[str]:
    pairs = {
        "text": (f"{then.text} {then.sha256[:12]}".strip(), f"{now.text} {now.sha256[:12]}".strip()),
        "context": (then.context, now.context),
        "tokens": (then.tokens, now.tokens),
        "reading": (then.reading, now.reading),
    }
    if then.sha256 == now.sha256 and then.sha256:  # a text is known by its content, whatever it is called
        del pairs["text"]
    return [f"{name} ({before}; now {after})" for name, (before, after) in pairs.items() if before != after]


def _refuse(differences: list[str]) -> None:
    if differences:
        raise ArtifactError(
            f"the baseline is not comparable, for it is of another {plain(' and another '.join(differences))}; measure "
            "as it was measured, or keep a new one with --json"
        )
