"""A verdict for machines that run tests, and for those who read their pages: JUnit XML and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ffncompress.records.task import MEASURES, UNTIMED
from ffncompress.sanitize import in_markdown, plain

if TYPE_CHECKING:
    from ffncompress.records.gate import Failure, GateResult


def verdict_of(result: GateResult) -> list[tuple[Failure, str]]:
    """(what was held to a limit, how it fared in words), perplexity first."""
    text = result.main
    error = "" if text.rise_error is None else f" ±{100 * text.rise_error:.2f}"
    words = f"{text.delta:+.3f} {MEASURES[result.task]} ({100 * text.relative:+.2f}{error} %), limit {result.limit}"
    words += f"; not to be believed: {result.doubt}" if result.doubt else ""
    held: list[tuple[Failure, str]] = [("perplexity", words)]
    if result.max_drop is not None:
        held.append(("accuracy", f"{accuracy_change(result)}, limit -{result.max_drop:g}"))
    if result.baseline:
        then, now = result.baseline.perplexity
        change = f"{then:.3f} to {now:.3f} {MEASURES[result.task]} ({100 * result.baseline.relative:+.2f} %)"
        held.append(("baseline", f"{change} since the baseline, limit {result.baseline.margin}"))
    return held


def accuracy_change(result: GateResult) -> str:
    """The mean over tasks in words: a drop is below zero."""
    drop, error = result.mean_drop
    count = f"{len(result.tasks)} tasks" if len(result.tasks) > 1 else "1 task"
    return f"{-drop:+.1f}{'' if error is None else f' ±{error:.1f}'} points of accuracy on {count}"


def write_junit(file: str, result: GateResult) -> None:
    """One test case for each limit, one for each text that is only reported."""
    from ffncompress.storage.files import write_file

    held = verdict_of(result)
    names = {"perplexity": f"perplexity on {result.main.text}", "accuracy": "accuracy on tasks"}
    suite = ElementTree.Element("testsuite", name="ffncompress", tests=str(len(held) + len(result.also)))
    suite.set("failures", str(len(result.failed)))
    for limit, words in held:
        case = _case(suite, names.get(limit, limit), words)
        if limit in result.failed:
            ElementTree.SubElement(case, "failure", message=plain(words))
    for text in result.also:
        base, slimmed = text.headline
        _case(suite, f"perplexity on {text.text}", f"{base:.3f} to {slimmed:.3f} ({100 * text.relative:+.2f} %)")
    write_file(file, ElementTree.tostring(suite, encoding="unicode") + "\n")


def _case(suite: ElementTree.Element, name: str, words: str) -> ElementTree.Element:
    case = ElementTree.SubElement(suite, "testcase", classname="ffncompress.gate", name=plain(name))
    ElementTree.SubElement(case, "system-out").text = plain(words)
    return case


def append_summary(file: str, result: GateResult) -> None:
    """Add the Markdown to a file's end: others write into GitHub's step summary too.

    Raises:
        ArtifactError: it cannot be written.
    """
    from ffncompress.storage.files import explained

    try:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(summary(result))
    except OSError as error:
        raise explained(error, Path(file)) from error


def summary(result: GateResult) -> str:
    """A table for a pull request: what was held to which limit, then all that was measured."""
    lines = [f"### ffncompress gate {'passed' if result.passed else 'FAILED'}: {_named(result.base_model)}", ""]
    for limit, words in verdict_of(result):
        lines.append(f"- {'**failed**' if limit in result.failed else 'passed'}: {in_markdown(words)}")
    warnings = [warning for warning in (result.limit_warning, result.drop_warning) if warning]
    lines += [f"- note: {in_markdown(warning)}" for warning in warnings]
    lines += ["", "| | base | slimmed | change |", "| --- | ---: | ---: | ---: |", *_text_rows(result)]
    lines += [*_task_rows(result), *_size_rows(result), *_baseline_rows(result), ""]
    return "\n".join(lines) + "\n"


def _text_rows(result: GateResult) -> list[str]:
    rows = []
    for text in (result.main, *result.also):
        base, slimmed = text.headline
        name = f"{MEASURES[result.task]}, {_named(text.text)}, context {text.context}"
        rows.append(_row(name, f"{base:.3f}", f"{slimmed:.3f}", f"{100 * text.relative:+.2f} %"))
        if alike := text.agreement:
            rows.append(_row("KL from the base, nats per token", "", f"{alike.kl:.4f}", ""))
            rows.append(_row("same top token", "", f"{100 * alike.same_top:.1f} %", ""))
    return rows


def _task_rows(result: GateResult) -> list[str]:
    rows = []
    for task in result.tasks:
        majority = "-" if task.majority is None else f"{100 * task.majority:.1f} %"
        name = f"{_named(task.task)}, {_named(task.metric)}, {task.examples:,} examples, majority {majority}"
        rows.append(_row(
            name, with_error(task.base, task.base_error), with_error(task.slimmed, task.slimmed_error),
            points(-task.drop, task.drop_error),
        ))  # fmt: skip
    return rows


def _size_rows(result: GateResult) -> list[str]:
    sizes = result.sizes
    figures = {"parameters": sizes.whole_model, "bytes of weights on disk": sizes.bytes_on_disk}
    rows = [
        _row(name, f"{a:,}", f"{b:,}", f"{100 * (b / a - 1):+.1f} %" if a else "") for name, (a, b) in figures.items()
    ]
    if result.speed is None:
        return [*rows, _row(UNTIMED, "", "", "")]
    for pace in result.paces:
        name = f"tokens/s, {_named(pace.what)}, {_named(result.speed.device)}"
        change = f"{pace.measured}{pace.expected and f'; {pace.expected}'}"
        rows.append(_row(name, f"{pace.base:,.0f}", f"{pace.slimmed:,.0f}", change))
    return rows


def _baseline_rows(result: GateResult) -> list[str]:
    if (change := result.baseline) is None:
        return []
    (then, now), (before, after) = change.perplexity, change.parameters
    rows = ["", "| since the baseline | then | now | change |", "| --- | ---: | ---: | ---: |"]
    rows.append(_row(MEASURES[result.task], f"{then:.3f}", f"{now:.3f}", f"{100 * change.relative:+.2f} %"))
    rows.append(_row("parameters", f"{before:,}", f"{after:,}", f"{after - before:+,}"))
    for task, (first, last) in change.accuracies.items():
        rows.append(_row(_named(task), with_error(first, None), with_error(last, None), points(last - first, None)))
    return rows


def with_error(share: float, error: float | None) -> str:
    """An accuracy in per cent."""
    return f"{100 * share:.1f}{'' if error is None else f' ±{100 * error:.1f}'} %"


def points(change: float, error: float | None) -> str:
    """A change of accuracy, in points."""
    return f"{100 * change:+.1f}{'' if error is None else f' ±{100 * error:.1f}'}"


def _named(name: str) -> str:
    return in_markdown(Path(name).name)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
