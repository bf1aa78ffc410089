"""The gate: its perplexity against a direct computation, its verdict, its reports."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ffncompress import api, gate, load, texts
from ffncompress.errors import ArtifactError, ModelError, TextError


@pytest.fixture
def slim(demo_slim: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_slim, tmp_path / "slim")


@torch.inference_mode()
def test_token_perplexity_is_what_it_says(slim: Path, tokenizer) -> None:
    """Each piece alone, behind the opening token, every token scored once."""
    result = api.evaluate(slim, tokens=1500, context=100, repeats=1, batch_size=3)
    text = texts.read_parts("python-docs")["report"]
    pieces = gate.cut_pieces(text, tokenizer, 100, 1500)
    model, total, count = load(slim), 0.0, 0
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert len(ids) <= 104  # a cut may be tokenised a little differently
        logits = model(torch.tensor([[0, *ids[:-1]]])).logits[0]
        total += F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
        count += len(ids)
    assert result.main.part == "report"
    assert result.main.tokens == count
    assert result.main.slimmed.token == pytest.approx(math.exp(total / count), rel=1e-3)
    words = sum(len(re.split(r"\s+", piece)) for piece in pieces)
    assert result.main.slimmed.word == pytest.approx(math.exp(total / words), rel=1e-3)


def test_the_base_is_cached_and_the_verdict_is_the_limits(slim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = api.evaluate(slim, tokens=600, repeats=1, max_delta="500%")
    assert first.passed
    calls = []
    original = gate.lm_eval_perplexity
    monkeypatch.setattr(gate, "lm_eval_perplexity", lambda *a: calls.append(a[-1]) or original(*a))
    second = api.evaluate(slim, tokens=600, repeats=1, max_delta="0.001")
    assert calls == ["lm-eval: slimmed on python-docs"]
    assert not second.passed
    assert second.main == first.main
    assert json.loads((slim / "ffncompress" / "gate.json").read_text())["passed"] is False
    for entry in (Path(os.environ["FFNCOMPRESS_CACHE"]) / "base").glob("*.json"):
        entry.write_text('{"word": 1.0}')  # as another release might have left it
    assert api.evaluate(slim, tokens=600, repeats=1, max_delta="500%").main == first.main


def test_everything_is_reported(slim: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("It was a dark and stormy night; the rain fell in torrents. " * 60)
    result = api.evaluate(slim, tokens=600, repeats=2, also=[str(other)], max_delta="500%")
    assert result.also[0].text == "other.txt"
    assert result.also[0].part == "all"
    before, after = result.sizes.whole_model
    assert before > after
    assert result.sizes.replaced_ffns[0] - result.sizes.replaced_ffns[1] == before - after
    assert result.sizes.bytes_on_disk[0] > result.sizes.bytes_on_disk[1]
    assert result.speed.base > 0
    assert result.speed.repeats == 2
    assert result.speed.ratio == pytest.approx(result.speed.slimmed / result.speed.base)
    assert "perplexity" in (slim / "README.md").read_text().split("---")[1]  # the card knows
    assert result.continuation_base
    assert result.continuation_slimmed


def test_the_text_of_the_plan_is_never_reported_on(slim: Path, tmp_path: Path) -> None:
    """Known by content: a copy under another name is recognised."""
    plan = tmp_path / "plan"
    source = tmp_path / "mine.txt"
    source.write_text("\n\n".join(texts.read("python-docs").documents[:150]))
    api.plan("demo", plan, data=[str(source)], tokens=2048, blocks="1")
    out = api.compress(plan, tmp_path / "out")
    copy = shutil.copyfile(source, tmp_path / "copy.txt")
    assert api.evaluate(out, data=str(copy), tokens=600, repeats=1).main.part == "report"

    other = tmp_path / "choose.txt"
    other.write_text("\n\n".join(texts.read("python-docs").documents[200:300]))
    api.plan("demo", plan, data=[str(source)], choose_data=[str(other)], tokens=2048, blocks="1", overwrite=True)
    api.compress(plan, out, overwrite=True)
    assert api.evaluate(out, tokens=600, repeats=1).main.text == "choose.txt"
    with pytest.raises(TextError, match="fitted on this text"):
        api.evaluate(out, data=str(source), tokens=600)


def test_bad_input(slim: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not made by ffncompress apply"):
        api.evaluate(tmp_path)
    with pytest.raises(ModelError, match="more than the model's 256"):
        api.evaluate(slim, context=1000)
    with pytest.raises(TextError, match="no such text"):
        api.evaluate(slim, data="nowhere.txt")


def test_the_stock_task_needs_the_hub(slim: Path) -> None:
    with pytest.raises(TextError, match=r"needs the Hub.*--data python-docs"):
        api.evaluate(slim, data="wikitext")
