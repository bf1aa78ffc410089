"""The pages of a plan and of a gate: made from records alone, harmless, and drawn in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import in_a_browser, opened

from ffncompress import Plan, api
from ffncompress.cli import run
from ffncompress.pages.gate_page import render_gate
from ffncompress.pages.plan_page import render_plan
from ffncompress.records.gate import GateResult, Perplexities, Sizes, Speed, TextResult
from ffncompress.records.plan import FrontierPoint
from ffncompress.storage.manifest import Manifest

OLD = Path(__file__).parents[1] / "data" / "plan-of-0.4"
NASTY = "</script><script>alert(1)</script>"


def text(name: str, base: float, slimmed: float) -> TextResult:
    return TextResult(
        text=name, part="report", sha256="a" * 64, tokens=600, context=64, rise_error=0.01,
        base=Perplexities(token=base, word=base**2, byte=2.0), slimmed=Perplexities(token=slimmed, word=9.0, byte=2.1),
    )  # fmt: skip


def gate(**changes: object) -> GateResult:
    result = GateResult(
        ffncompress_version="1", base_model="some/model", weights_sha256="b" * 64, dtype="float32", limit="5 %",
        passed=True, main=text("main.txt", 20.0, 20.8), also=[text("other.txt", 40.0, 50.0)],
        sizes=Sizes(replaced_ffns=(80, 20), all_ffns=(80, 20), whole_model=(200, 140), bytes_on_disk=(800, 560)),
        speed=Speed(base=100.0, slimmed=150.0, ratio=1.5, batch=(4, 64), repeats=5, device="cpu"),
        prompt="Once upon", continuation_base=" a time <b>there</b> was", continuation_slimmed=" a hill",
    )  # fmt: skip
    return result.model_copy(update=changes)


def with_frontier(plan: Plan) -> Plan:
    whole, losses = plan.base.parameters, [0.0, 0.01, 0.02, 0.03, 0.3, 0.7]
    points = [
        FrontierPoint(
            parameters=round(whole * (1 - 0.1 * i)), share=1 - 0.1 * i, predicted_loss=loss,
            expected_perplexity=50 * (1 + loss), measured_perplexity=50 * (1 + loss) if i % 2 == 0 else None,
        )
        for i, loss in enumerate(losses)
    ]  # fmt: skip
    return plan.model_copy(update={"frontier": points})


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_what_is_kept_adds_up_to_the_plan() -> None:
    plan = Plan.load(OLD)
    shown = data_of(render_plan(plan, {}))
    parts = [block["untouched"] + block["neurons"] + block["linear"] for block in shown["blocks"]]
    assert parts == [block.parameters_after for block in plan.blocks]
    assert [bool(block["untouched"]) for block in shown["blocks"]] == [not block.replace for block in plan.blocks]
    assert shown["before"] - shown["after"] == sum(b.parameters - b.parameters_after for b in plan.blocks)
    assert [check["chosen"] for check in shown["checks"]].count(True) == 1
    assert "% smaller" in render_plan(plan, {})


def test_the_bend_and_a_command_for_each_point() -> None:
    points = data_of(render_plan(with_frontier(Plan.load(OLD)), {}))["frontier"]
    assert [point["knee"] for point in points] == [False, False, False, True, False, False]
    assert points[0]["command"] == []
    assert points[3]["command"][:5] == ["ffncompress", "plan", "demo", "--at", "0.7"]


@pytest.mark.parametrize(
    "page", [render_plan(with_frontier(Plan.load(OLD)), {}), render_gate(gate())], ids=["plan", "gate"]
)
def test_they_ask_nothing_of_a_network(page: str) -> None:
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", page)
    assert "@import" not in page


def test_what_a_stranger_wrote_is_shown_and_not_obeyed() -> None:
    plan = Plan.load(OLD)
    nasty = plan.model_copy(update={"base": plan.base.model_copy(update={"name": NASTY}), "summary": NASTY})
    for page in (render_plan(nasty, {}), render_gate(gate(base_model=NASTY, prompt=NASTY, limit=NASTY))):
        assert "<script>alert" not in page


def test_no_folder_of_anybody_is_told_and_no_number_breaks_it() -> None:
    """A plan before 0.4 named models and texts by their paths; a file may hold any number."""
    plan = Plan.load(OLD)
    swap = plan.blocks[0].swap.model_copy(update={"delta": float("nan"), "predicted_delta": float("inf")})
    base = plan.base.model_copy(update={"name": "/home/ada/model", "is_hub": False})
    texts = [ref.model_copy(update={"source": "/home/ada/diary.txt"}) for ref in plan.fit_text]
    blocks = [plan.blocks[0].model_copy(update={"swap": swap}), *plan.blocks[1:]]
    page = render_plan(plan.model_copy(update={"base": base, "fit_text": texts, "blocks": blocks}), {})
    assert "/ada" not in page
    assert data_of(page)["blocks"][0]["measured"] is None
    assert "/ada" not in render_gate(gate(main=text("/home/ada/diary.txt", 1.0, 2.0), base_model="/home/ada/model"))


@pytest.mark.slow
@in_a_browser
def test_a_plan_in_a_browser(tmp_path: Path) -> None:
    """Bars, a frontier with its marks, another point chosen, and the folder's own name in the commands."""
    plan, folder = with_frontier(Plan.load(OLD)), tmp_path / "my plan"
    folder.mkdir()
    (folder / "plan.html").write_text(render_plan(plan, {}), encoding="utf-8")
    dump, seen = opened(
        folder / "plan.html",
        tmp_path,
        """
        seen.push("rows: " + document.querySelectorAll("#model .row").length);
        seen.push("cut: " + [...document.querySelectorAll("#model .row")].filter((r) => r.querySelector(".bar i")
          .style.width !== "100%").length);
        seen.push("labels: " + [...document.querySelectorAll("#frontier svg text")].map((t) => t.textContent)
          .filter((t) => t === "bend" || t === "this plan").join("+"));
        const picker = document.querySelector("#frontier select");
        picker.value = "0";
        picker.dispatchEvent(new Event("change"));
        seen.push("take: " + document.querySelector("#frontier .command").textContent);
        seen.push("next: " + document.querySelector("#summary .command").textContent);
        seen.push("points: " + document.querySelectorAll("#costs svg circle").length);
        """,
    )
    assert "error" not in seen
    assert f"rows: {len(plan.blocks)}" in seen
    assert f"cut: {len(plan.replaced)}" in seen
    assert "labels: bend+this plan" in seen
    assert "take: ffncompress plan demo --at 0.9 " in seen
    assert "next: ffncompress apply 'my plan' -o slim" in seen
    assert f"points: {2 * len(plan.blocks)}" in seen
    assert "wide: true" in seen  # on a phone, nothing but a table scrolls sideways
    assert re.findall(r'<section id="([\w-]+)"', dump) == ["model", "frontier", "costs", "checks", "blocks", "texts"]


@pytest.mark.slow
@in_a_browser
def test_a_gate_in_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "slim" / "ffncompress"
    folder.mkdir(parents=True)
    (folder / "gate.html").write_text(render_gate(gate()), encoding="utf-8")
    dump, seen = opened(
        folder / "gate.html",
        tmp_path,
        """
        seen.push("texts: " + [...document.querySelectorAll("#rises svg text")].map((t) => t.textContent)
          .filter((t) => t.endsWith(".txt")).join("+"));
        seen.push("lines: " + document.querySelectorAll("#rises svg path").length);
        seen.push("words: " + [...document.querySelectorAll("#continuations blockquote")].map((q) => q.textContent)
          .join("/"));
        seen.push("bars: " + document.querySelectorAll("#sizes .with i, #speed .with i").length);
        seen.push("next: " + document.querySelector("#summary .command").textContent);
        """,
    )
    assert "error" not in seen
    assert "texts: main.txt+other.txt" in seen
    assert "lines: 2" in seen  # the limit, and no change
    assert "words: basea time &lt;b&gt;there&lt;/b&gt; was/slimmeda hill" in seen
    assert "bars: 10" in seen
    assert "next: ffncompress push slim USER/REPO" in seen
    assert "wide: true" in seen
    assert "+4.00 % ±1.96" in dump
    assert re.findall(r'<section id="([\w-]+)"', dump) == ["rises", "continuations", "sizes", "speed"]


@pytest.mark.slow
def test_they_lie_where_the_verbs_write(
    short_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the manifest, and the plan's page in no checkpoint; the terminal says where."""
    monkeypatch.chdir(tmp_path)
    words = ["--data", "stories", "--tokens", "1024"]
    words += ["--no-refit", "--frontier", "--keep-moments", "--budget", "-15%", "-o", "p"]
    assert run(["plan", str(short_demo), *words]) == 0
    out = capsys.readouterr().out
    assert "To look at: p/plan.html" in out
    assert "Next: ffncompress apply p -o slim" in out
    timings = json.loads(Path("p/timings.json").read_text())
    assert (tmp_path / "p" / "plan.html").read_text() == render_plan(Plan.load("p"), timings)
    assert {"loading the model", "reading text"} < timings.keys()
    assert "plan.html" in Manifest.read("p").files
    api.compress("p", "slim")
    assert run(["eval", "slim", "--tokens", "600", "--repeats", "1", "--max-delta", "500%"]) == 0
    assert "To look at: slim/ffncompress/gate.html" in capsys.readouterr().out
    names = Manifest.read("slim").files
    assert "ffncompress/gate.html" in names
    assert not any(name.endswith("plan.html") for name in names)
    assert Manifest.read("slim").changes("slim") == []
    # --frontier ends in a command for each point, and the command takes it
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ffncompress plan ")]
    points = Plan.load("p").frontier
    assert len(commands) == len(points) - 1
    assert out.rstrip().endswith(commands[-1])
    assert run(commands[3].split()[1:]) == 0
    taken = Plan.load(commands[3].split()[-1])
    assert taken.parameters_after == points[4].parameters
