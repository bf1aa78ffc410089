"""Tasks in the gate, predictions compared, a kept result, and what a stranger's task may not do."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ffncompress import api
from ffncompress.budgets import Limit
from ffncompress.cli import reports
from ffncompress.cli.commands import cli
from ffncompress.errors import ArtifactError, FfncompressError, TextError
from ffncompress.gate.accuracy import majority, standard_error
from ffncompress.gate.agreement import compare_rows
from ffncompress.gate.baseline import check_base, check_text, compare, read_baseline
from ffncompress.gate.local_task import check_template, read_local_task
from ffncompress.gate.measuring import with_verdict
from ffncompress.records.gate import GateResult

TASK = """
task: little
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
"""
GATE = {
    "ffncompress_version": "0.6.0", "base_model": "demo", "weights_sha256": "b", "dtype": "float32", "limit": "5 %",
    "passed": True, "also": [], "prompt": "a", "continuation_base": "b", "continuation_slimmed": "c",
    "main": {
        "text": "x.txt", "part": "report", "sha256": "t", "tokens": 100, "context": 64,
        "base": {"token": 10.0}, "slimmed": {"token": 10.2},
    },
    "sizes": {"whole_model": [100, 90], "bytes_on_disk": [400, 360]},
    "speed": {"base": 1.0, "slimmed": 2.0, "ratio": 2.0, "batch": [1, 64], "repeats": 1, "device": "cpu"},
}  # as 0.6.0 wrote it  # fmt: skip


def task_of(name: str, base: float, slimmed: float, **more: object) -> dict[str, object]:
    return {"task": name, "metric": "acc", "examples": 100, "base": base, "slimmed": slimmed, **more}


def gate(**changes: object) -> GateResult:
    return GateResult.model_validate(GATE | changes)


def test_the_speed_of_an_older_result() -> None:
    """One use alone, and nothing predicted."""
    (only,) = gate().paces
    assert (only.what, only.measured, only.expected) == ("prefill 1 x 64, float32", "2.00x", "")
    assert "| tokens/s, prefill 1 x 64, float32, cpu | 1 | 2 | 2.00x |" in reports.summary(gate())


def write_task(folder: Path, text: str = TASK) -> str:
    rows = [{"question": f"a{i}", "choices": ["one", "two", "three"], "gold": min(i % 4, 1)} for i in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "task.yaml").write_text(text)
    return str(folder / "task.yaml")


def test_divergence_meets_its_definition() -> None:
    torch.manual_seed(0)
    own, other = torch.randn(40, 50), torch.randn(40, 53)  # one of them padded
    p, q = own.double().softmax(1), other[:, :50].double().softmax(1)
    total, same = compare_rows(own, other)
    assert total == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-4)
    assert same == (own.argmax(1) == other[:, :50].argmax(1)).sum().item()
    assert compare_rows(own, own) == (0.0, 40)


def test_the_drop_is_paired_and_its_mean_is_judged() -> None:
    tasks = [
        task_of("a", 0.60, 0.55, drop_error=0.03, majority=0.3),
        task_of("b", 0.50, 0.49, drop_error=0.04, majority=0.3),
    ]
    for limit, failures in ((3.0, []), (2.9, ["accuracy"])):
        result = with_verdict(gate(tasks=tasks, max_drop=limit), Limit.parse("5%"), None, "1%")
        assert result.failed == failures
        assert result.passed is not bool(failures)
    drop, error = result.mean_drop
    assert drop == pytest.approx(3.0)
    assert error == pytest.approx(2.5)  # half of the root of 3^2 + 4^2
    assert "error of 2.5 points" in result.drop_warning
    both = with_verdict(gate(tasks=tasks, max_drop=1.0), Limit.parse("1%"), None, "1%")
    assert both.failed == ["perplexity", "accuracy"]


def test_a_task_that_the_base_cannot_do_is_said() -> None:
    result = gate(tasks=[task_of("arc", 0.2, 0.25, drop_error=0.001, majority=0.3)], max_drop=2.0)
    assert "no better on arc" in result.drop_warning


def test_small_sums() -> None:
    assert majority([0, 1, 1, 2]) == 0.5
    assert majority(["1", "0", "1"]) == pytest.approx(2 / 3)
    assert majority([" word", "other"]) is None
    assert standard_error([1, 0, 1, 0]) == pytest.approx(math.sqrt(1 / 3 / 4))
    assert standard_error([1.0]) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("doc_to_target: gold", "doc_to_target: !function evil.py.run"), "would run"),
        (("doc_to_target: gold", "doc_to_target: gold\nprocess_docs: x"), "process_docs"),
        (("dataset_path: json", "dataset_path: evil/script.py"), "dataset_path"),
        (("test: rows.jsonl", "test: https://example.org/rows.jsonl"), "no such data file"),
        (("{{question}}", "{{question.__class__.__mro__}}"), "does more"),
        (("{{question}}", "{{question['__class__']}}"), "does more"),
        (("{{question}}", "{{question|attr('x')}}"), "does more"),
        (("{{question}}", "{{cycler}}"), "does more"),
        (("{{question}}", "{% for i in question %}{% endfor %}"), "does more"),
        (("{{question}}", "{% include 'x' %}"), "does more"),
        (("{{question}}", "{{question.format()}}"), "does more"),
        (("{{choices}}", "{{choices"), "cannot be read"),
        (("test_split: test", "test_split: other"), "no split"),
        (("test_split: test", "include: other.yaml"), "include"),
        (("task: little", "task: &a little\ntag: *a"), "aliases"),
        (("task: little", "task: ../../etc"), "task"),
    ],
)
def test_a_strangers_task_is_data(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert change[0] in TASK
    with pytest.raises(TextError, match=said):
        read_local_task(write_task(tmp_path, TASK.replace(*change)))


@pytest.mark.parametrize(
    "template", ["{{choices[gold]}}", "{{choices.text.index(key)|trim}}", "{{a if b else c ~ d[0]}}"]
)
def test_templates_that_pass(template: str) -> None:
    check_template(template, "x.yaml")


def test_the_recipe_is_a_task() -> None:
    task = read_local_task(str(Path(__file__).parents[2] / "recipes" / "tasks" / "questions.yaml"))
    assert len(task["custom_dataset"]()["test"]) == 10


def test_a_kept_result(tmp_path: Path) -> None:
    kept = tmp_path / "gate.json"
    kept.write_text(json.dumps(GATE | {"tasks": [task_of("a", 0.6, 0.5, sha256="q")]}))
    baseline = read_baseline(kept)
    worse = gate(main={**GATE["main"], "slimmed": {"token": 10.35}}, tasks=[task_of("a", 0.6, 0.4, sha256="q")])
    change = compare(worse, baseline, "1%")
    assert change.perplexity == (10.2, 10.35)
    assert change.accuracies == {"a": (0.5, 0.4)}
    assert with_verdict(worse, Limit.parse("5%"), baseline, "1%").failed == ["baseline"]
    assert with_verdict(worse, Limit.parse("5%"), baseline, "2%").passed
    check_base(baseline, "elsewhere/demo", "f")  # an old result has no fingerprint
    with pytest.raises(ArtifactError, match="another base model"):
        check_base(baseline, "gpt2", "f")
    with pytest.raises(
        ArtifactError, match=r"another text \(x.txt t; now x.txt u\) and another context \(64; now 32\)"
    ):
        check_text(baseline, gate(main={**GATE["main"], "sha256": "u", "context": 32}).main)
    for bad in ("{}", "[1", "nothing"):
        kept.write_text(bad)
        with pytest.raises(ArtifactError, match="give what ffncompress eval --json"):
            read_baseline(kept)
    with pytest.raises(ArtifactError, match="no such baseline"):
        read_baseline(tmp_path / "none.json")


def test_the_summary_is_appended_and_obeys_nobody(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    result = gate(
        base_model="<script>|x", tasks=[task_of("a|b", 0.6, 0.5, drop_error=0.1)], max_drop=2.0,
        passed=False, failures=["accuracy"],
    )  # fmt: skip
    reports.append_summary(str(file), result)
    text = file.read_text()
    assert text.startswith("before\n### ffncompress gate FAILED")
    assert "<script>" not in text
    assert "| a\\|b, acc, 100 examples, majority - | 60.0 % | 50.0 % | -10.0 ±10.0 |" in text
    assert "- **failed**: -10.0 ±10.0 points of accuracy on 1 task, limit -2" in text
    reports.write_junit(str(tmp_path / "x.xml"), result)
    assert (tmp_path / "x.xml").read_text().count("<failure") == 1


def test_a_limit_needs_tasks() -> None:
    with pytest.raises(FfncompressError, match="name some with --tasks"):
        api.evaluate("nowhere", max_drop=2.0)


@pytest.mark.slow
def test_tasks_end_to_end(demo_slim: Path, tmp_path: Path) -> None:
    slim = shutil.copytree(demo_slim, tmp_path / "slim")
    few = ["--tokens", "600", "--repeats", "1", "--max-delta", "500%", "--json", str(tmp_path / "gate.json")]
    asked = ["eval", str(slim), *few, "--tasks", write_task(tmp_path), "--limit", "8", "--max-drop", "100"]
    done = CliRunner().invoke(cli, asked, standalone_mode=False)
    assert done.exception is None, done.exception
    assert done.return_value == 0
    result = read_baseline(tmp_path / "gate.json")
    (task,) = result.tasks
    assert (task.task, task.metric, task.examples, task.majority) == ("little", "acc", 8, 0.75)
    assert "acc, little (8 examples)" in done.output
    alike = result.main.agreement
    assert alike is not None
    assert alike.tokens == result.main.tokens
    assert alike.kl > 0.001
    assert 0.1 < alike.same_top < 1
    card = (slim / "README.md").read_text()
    assert "| little (acc) | 8 | 75.0 % |" in card
    assert "KL(base || slimmed)" in card
    assert max(map(len, done.stdout.splitlines())) <= 100
    again = api.evaluate(slim, tokens=600, repeats=1, max_delta="500%", baseline=str(tmp_path / "gate.json"))
    assert again.passed
    assert again.baseline is not None
    assert again.baseline.relative == pytest.approx(0, abs=1e-6)
    same = api.evaluate("demo", base="demo", tokens=600, repeats=1).main.agreement
    assert same is not None
    assert (same.kl, same.same_top) == (pytest.approx(0, abs=1e-6), 1)
    with pytest.raises(TextError, match="no such task"):
        api.evaluate(slim, tokens=600, tasks=["no_such_task"])
