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
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ffncompress import api, load
from ffncompress.errors import ArtifactError, ModelError, TextError
from ffncompress.gate import measuring as gate
from ffncompress.gate import perplexity as lm
from ffncompress.runtime.progress import silent
from ffncompress.settings import EvalSettings
from ffncompress.text.parts import read_parts
from ffncompress.text.sources import read

pytestmark = pytest.mark.slow


@pytest.fixture
def slim(demo_slim: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_slim, tmp_path / "slim")


@torch.inference_mode()
def test_token_perplexity_is_what_it_says(slim: Path, tokenizer) -> None:
    """Each piece alone; this tokenizer opens a text with nothing, so the first token is given and not scored."""
    result = api.evaluate(slim, tokens=1500, context=100, repeats=1, batch_size=3)
    text = read_parts("stories")["report"]
    pieces = gate.cut_pieces(text, tokenizer, 100, 1500, result.main.reading)
    model, total, count = load(slim, dtype="float32"), 0.0, 0  # as the gate computes
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert len(ids) <= 101  # of which the last is not read
        logits = model(torch.tensor([ids[:-1]])).logits[0]
        total += F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    assert result.main.part == "report"
    assert result.main.tokens == count
    assert result.main.slimmed.token == pytest.approx(math.exp(total / count), rel=1e-3)
    words = sum(len(re.split(r"\s+", piece)) for piece in pieces)
    assert result.main.slimmed.word == pytest.approx(math.exp(total / words), rel=1e-3)


def test_what_is_read_keeps_no_cache(demo_model, tokenizer) -> None:
    """Nothing goes on from it; of many wide layers it outgrows what a streamed model may take."""
    kept: list[object] = []
    handle = demo_model.register_forward_hook(lambda *call: kept.append(call[-1].past_key_values))
    try:
        lm.lm_eval_perplexity(demo_model, tokenizer, ["Tom saw a dog. " * 8] * 2, 32, EvalSettings(), silent, "reading")
    finally:
        handle.remove()
    assert kept
    assert not any(kept)


@torch.inference_mode()
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("stock", [True, False])
def test_a_piece_begins_as_the_tokenizer_begins_a_text(
    opens: bool, stock: bool, demo_model, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's own task keeps its prefix token where there is one, and does without where there is none."""
    inner = tokenizer.backend_tokenizer
    bos = {"bos_token": "<|endoftext|>"} if opens else {}
    own = PreTrainedTokenizerFast(tokenizer_object=type(inner).from_str(inner.to_str()), **bos)
    if opens:
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    pages = ["The function returns a list of all names.", "It was a dark and stormy night; the rain fell."]
    if stock:
        local = lm._task_dict(pages)
        monkeypatch.setattr(lm, "_task_dict", lambda _: local)
    answer = lm.lm_eval_perplexity(demo_model, own, None if stock else pages, 64, EvalSettings(), silent, "")
    for page, found, tokens in zip(pages, answer.piece_log_likelihoods, answer.piece_tokens, strict=True):
        ids = [0] * opens + own(page, add_special_tokens=False)["input_ids"]
        logits = demo_model(torch.tensor([ids[:-1]])).logits[0]
        expected = -F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        assert found == pytest.approx(expected, rel=1e-4)
        assert tokens == len(ids) - 1
    assert answer.log_likelihood == pytest.approx(sum(answer.piece_log_likelihoods))
    assert answer.tokens == sum(answer.piece_tokens)
    assert own.pad_token_id is None  # lm-eval gave its copy one


def test_the_base_is_cached_and_the_verdict_is_the_limits(slim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = api.evaluate(slim, tokens=600, repeats=1, max_delta="500%")
    assert first.passed
    calls = []
    original = gate.lm_eval_perplexity
    monkeypatch.setattr(gate, "lm_eval_perplexity", lambda *a: calls.append(a[-1]) or original(*a))
    second = api.evaluate(slim, tokens=600, repeats=1, max_delta="0.001")
    assert calls == ["lm-eval: slimmed on stories"]
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
    assert [pace.of for pace in result.paces] == ["prefill", "prefill", "decode"]
    assert result.speed.ratio == result.paces[0].ratio
    text = (slim / "README.md").read_text()
    assert all(pace.what in text for pace in result.paces)
    assert "perplexity" in (slim / "README.md").read_text().split("---")[1]  # the card knows
    assert result.continuation_base
    assert result.continuation_slimmed


def test_the_text_of_the_plan_is_never_reported_on(short_demo: Path, tmp_path: Path) -> None:
    """Known by content: a copy under another name is recognised."""
    plan, wanted = tmp_path / "plan", {"tokens": 1024, "blocks": "1", "refit": False}
    source = tmp_path / "mine.txt"
    source.write_text("\n\n".join(read("stories").documents[:150]))
    api.plan(str(short_demo), plan, data=[str(source)], **wanted)
    out = api.compress(plan, tmp_path / "out")
    copy = shutil.copyfile(source, tmp_path / "copy.txt")
    assert api.evaluate(out, data=str(copy), tokens=600, repeats=1).main.part == "report"

    other = tmp_path / "choose.txt"
    other.write_text("\n\n".join(read("stories").documents[200:300]))
    api.plan(str(short_demo), plan, data=[str(source)], choose_data=[str(other)], **wanted, overwrite=True)
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
