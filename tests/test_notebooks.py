"""What a notebook shows: tables that escape whatever a stranger wrote, frames, the quickstart from top to bottom."""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ffncompress.errors import FfncompressError
from ffncompress.notebooks import Bar, table_html
from ffncompress.profiling.records import Study
from ffncompress.records.gate import GateResult
from ffncompress.records.plan import Plan

OLD_PLAN = Path(__file__).parent / "data" / "plan-of-0.4"
QUICKSTART = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"
EVIL = "\x1b]0;owned\x07\u202e</table><script>alert(1)</script><img src=x onerror=alert(1)> \"' {{7*7}} &lt;"


class Tags(HTMLParser):
    """The elements and attributes of a piece of HTML; it must close what it opens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attributes} <= {"style"}
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def shown(page: str) -> str:
    """The words of a piece of HTML that is well formed and has none but plain elements."""
    tags = Tags(page)
    assert tags.seen <= {"div", "b", "span", "table", "thead", "tbody", "tr", "th", "td"}
    assert "\x1b" not in page
    assert "\u202e" not in page
    return " ".join(tags.words)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(OLD_PLAN)


def hostile(plan: Plan) -> Plan:
    """The plan with a stranger's words in every place that takes words."""
    block = plan.blocks[0].model_copy(update={"path": EVIL, "reason": EVIL})
    base = plan.base.model_copy(update={"name": EVIL, "family": EVIL})
    settings = plan.settings.model_copy(update={"budget": None, "kinds": EVIL})
    return plan.model_copy(
        update={"base": base, "summary": EVIL, "settings": settings, "blocks": [block, *plan.blocks[1:]]}
    )


def test_a_plan_is_shown_as_a_table(plan: Plan) -> None:
    words = shown(plan._repr_html_())
    assert plan.base.name in words
    assert plan.summary in words
    assert plan.blocks[1].choice is not None
    assert plan.blocks[1].choice.describe() in words


def test_a_strangers_words_stay_words(plan: Plan) -> None:
    words = shown(hostile(plan)._repr_html_())
    assert "<script>alert(1)</script>" in words  # as text
    assert "<script" not in hostile(plan)._repr_html_()


def test_a_plan_as_a_frame(plan: Plan) -> None:
    frame = plan.to_frame()
    assert len(frame) == len(plan.blocks)
    assert frame["parameters_after"].sum() == sum(block.parameters_after for block in plan.blocks)
    assert frame.loc[0, "becomes"] == "itself"
    assert frame.loc[1, "r2_lin"] == plan.blocks[1].scores.r2_lin
    assert hostile(plan).to_frame().loc[0, "reason"] == EVIL  # data, as it was


def test_without_pandas_it_is_said(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FfncompressError, match="pip install pandas"):
        plan.to_frame()


@pytest.mark.parametrize("share", [-1.0, 0.5, 7.0, math.nan, math.inf])
def test_a_bar_stays_within_its_cell(share: float) -> None:
    page = table_html("t", ("a", "b"), [("x", Bar(share))], ())
    shown(page)
    width = float(page.split("height:100%;width:")[1].split("%")[0])
    assert 0 <= width <= 100


def gate(words: str) -> GateResult:
    """A result with the same words in every place that takes any."""
    figures = {"token": 10.0, "word": 90.0, "byte": None}
    text = {"text": words, "part": "report", "sha256": "", "tokens": 1000, "context": 128, "base": figures}
    return GateResult.model_validate({
        "ffncompress_version": "0", "base_model": words, "weights_sha256": "", "dtype": "float32", "limit": "5%",
        "passed": False, "doubt": words, "main": {**text, "slimmed": {**figures, "token": 11.0}}, "also": [],
        "sizes": {"whole_model": (100, 80), "bytes_on_disk": (0, 320)},
        "speed": {"base": 10.0, "slimmed": 12.0, "ratio": 1.2, "batch": (1, 8), "repeats": 1, "device": "cpu"},
        "prompt": words, "continuation_base": words, "continuation_slimmed": words,
    })  # fmt: skip


def test_a_gate_is_shown_with_its_verdict() -> None:
    words = shown(gate("story")._repr_html_())
    assert "Gate FAILED" in words
    assert "+10.00 %" in words
    assert "slimmed: story" in words
    assert "<script" not in gate(EVIL)._repr_html_()
    shown(gate(EVIL)._repr_html_())


def test_a_gate_as_a_frame() -> None:
    frame = gate("story").to_frame().set_index("measure")
    assert frame.loc["perplexity (token)", "relative"] == pytest.approx(0.1)
    assert frame.loc["parameters, whole model", "change"] == -20
    assert math.isnan(frame.loc["bytes on disk", "relative"])  # of nothing
    assert "parameters, all FFNs" not in frame.index  # which no plan told


def test_a_study_is_shown_and_framed() -> None:
    study = exemplary_study()
    words = shown(study._repr_html_())
    assert "nonlinear" in words
    assert "<script" not in study._repr_html_()
    frame = study.to_frame()
    assert list(frame["block"]) == [block.index for profile in study.profiles for block in profile.blocks]


def exemplary_study() -> Study:
    """A record with every field filled, and a stranger's words."""
    from watching import exemplary

    study = exemplary(Study)
    profile = study.profiles[0]
    block = profile.blocks[0].model_copy(update={"regime": "nonlinear"})
    changed = profile.model_copy(update={"model": EVIL, "family": EVIL, "text": EVIL, "blocks": [block]})
    return study.model_copy(update={"profiles": [changed], "learned": [EVIL]})


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """Every cell, in a kernel of its own, in an empty folder; what it shows are our own tables."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(QUICKSTART, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # stripped: figures belong to a run
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pages = ["".join(output["data"].get("text/html", "")) for output in outputs if "data" in output]
    for heading in ("Plan: demo", "Gate ", "Profile: demo"):
        assert any(heading in page for page in pages), heading
    assert (tmp_path / "report" / "report.html").is_file()
