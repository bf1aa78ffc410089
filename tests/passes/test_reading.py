"""A model of short documents: read as documents it is good, joined it is lost, and everything has to know."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ffncompress import Plan, api, load
from ffncompress.cli import run
from ffncompress.errors import DoubtError, ModelError, TextError
from ffncompress.gate import measuring as gate
from ffncompress.models import find_model, load_model, load_tokenizer
from ffncompress.passes.doubts import MeanLoss, doubt_of_base, doubt_of_slimmed
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.reading import better_reading
from ffncompress.profiling import pitfall
from ffncompress.profiling.records import Study
from ffncompress.recovery import bilinear
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.storage.manifest import Manifest
from ffncompress.text.parts import read_parts
from ffncompress.text.sources import Text, read
from ffncompress.text.windows import document_windows, joined_windows

pytestmark = pytest.mark.slow

NAMES = [f"name{i}" for i in range(8)]
THINGS = [f"thing{i}" for i in range(40)]
PLAN = {"tokens": 8192, "seq_len": 64}


def documents(count: int, seed: int) -> list[str]:
    """A name likes things in an order that depends on where in the document one is; one word in ten is another."""
    order = random.Random(7).choices(THINGS, k=24)
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        name = draw.choice(NAMES)
        liked = [draw.choice(THINGS) if draw.random() < 0.1 else thing for thing in order[: draw.randint(10, 24)]]
        made.append(
            " ".join(f"{name} likes {thing}" if i % 3 == 0 else f"likes {thing}" for i, thing in enumerate(liked))
        )
    return made


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """No BOS, no EOS, no pad."""
    words = {word: i for i, word in enumerate([*NAMES, *THINGS, "likes", "a"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for some seconds, always from a document's beginning."""
    folder, tokenizer = tmp_path_factory.mktemp("short") / "short", bare_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    torch.nn.init.normal_(model.transformer.wpe.weight)  # a position that was never trained is not silent
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3)
    rows = [tokenizer(document)["input_ids"] for document in documents(2000, seed=1)]
    for step in range(250):
        batch = random.Random(step).sample(rows, 32)
        length = max(map(len, batch))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in batch])
        labels = torch.tensor([row + [-100] * (length - len(row)) for row in batch])
        optimiser.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": document}) for document in documents(700, seed=2)))
    return file


@pytest.fixture(scope="module")
def joined(rows: Path) -> Path:
    file = rows.with_name("joined.txt")
    file.write_text(read(str(rows)).joined)
    return file


@pytest.fixture(scope="module")
def slim(trained: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slim")
    api.plan(str(trained), folder / "plan", data=[str(rows)], blocks="1", budget="4x", **PLAN)
    return api.compress(folder / "plan", folder / "slim", heal=0.02)


@torch.inference_mode()
def directly(model, tokenizer, rows: list[str]) -> float:
    """Perplexity document by document, each behind its first token."""
    total, count = 0.0, 0
    for document in rows:
        ids = tokenizer(document, return_tensors="pt")["input_ids"]
        total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return math.exp(total / count)


def test_it_reads_documents_and_is_lost_on_joined_text(trained: Path, rows: Path, joined: Path) -> None:
    source, run = find_model(str(trained)), Run(Workers("cpu"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, None, None)
    text = read(str(rows))
    good = directly(model, tokenizer, list(text.documents))
    assert good < 4
    windows = joined_windows(read(str(joined)), tokenizer, length=256, count=20)
    assert perplexity(sequence_losses(model, windows, run)) > 5 * good
    assert better_reading(model, tokenizer, text, 256, run) == "documents"
    assert better_reading(model, tokenizer, read(str(joined)), 256, run) == "joined"


def test_lines_of_one_text_are_read_joined(demo_model, tokenizer) -> None:
    """As WikiText's rows are."""
    pages = read("stories").documents[:40]
    lines = tuple(line for page in pages for line in page.splitlines(keepends=True) if line.strip())
    assert better_reading(demo_model, tokenizer, Text("t", "all", lines), 256, Run(Workers("cpu"))) == "joined"


def test_the_plan_reads_as_its_base_does(trained: Path, rows: Path, tmp_path: Path) -> None:
    plan = api.plan(str(trained), tmp_path / "plan", data=[str(rows)], max_delta="30%", **PLAN)
    assert {ref.reading for ref in (*plan.fit_text, *plan.choose_text)} == {"documents"}
    assert plan.doubt is None
    source = find_model(str(trained))
    model, tokenizer = load_model(source), load_tokenizer(source)
    choose = read_parts(str(rows))["choose"]
    assert plan.base_perplexity == pytest.approx(directly(model, tokenizer, list(choose.documents)), rel=0.1)
    drawn = document_windows(choose, tokenizer, length=64, tokens=2048)
    assert plan.choose_text[0].tokens == drawn.numel()
    expected = perplexity(sequence_losses(model, drawn, Run(Workers("cpu"))), drawn.scored)
    assert plan.base_perplexity == pytest.approx(expected, rel=1e-6)
    assert Plan.load(tmp_path / "plan").choose_text == plan.choose_text


def test_the_gate_reads_as_the_plan_did(slim: Path, trained: Path, rows: Path, tmp_path: Path) -> None:
    result = api.evaluate(slim, tokens=2000, repeats=1, max_delta="1000%")
    tokenizer, base, slimmed = bare_tokenizer(), load_model(find_model(str(trained))), load(slim)
    report = read_parts(str(rows))["report"]
    pieces = gate.cut_pieces(report, tokenizer, 256, 2000, "documents")
    assert pieces[:-1] == list(report.documents[: len(pieces) - 1])
    assert result.main.reading == "documents"
    assert result.main.tokens == sum(len(tokenizer(piece)["input_ids"]) - 1 for piece in pieces)
    assert result.main.base.token == pytest.approx(directly(base, tokenizer, pieces), rel=1e-4)
    assert result.main.slimmed.token == pytest.approx(directly(slimmed, tokenizer, pieces), rel=1e-4)
    assert result.doubt is None
    assert result.passed
    assert result.continuation_base
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": document}) for document in documents(100, seed=5)))
    also = api.evaluate(slim, tokens=1000, repeats=1, data=str(other), max_delta="1000%")
    assert also.main.reading == "documents"


def test_healing_reads_the_same(slim: Path, rows: Path, trained: Path) -> None:
    healing = json.loads((slim / "ffncompress" / "origin.json").read_text())["healing"]
    choose = list(read_parts(str(rows))["choose"].documents)
    base = load_model(find_model(str(trained)))
    assert healing["original"] == pytest.approx(directly(base, bare_tokenizer(), choose), rel=0.1)


def test_a_profile_reads_the_same(trained: Path, rows: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pitfall, "STEPS", 50)  # how it reads is the point, not what it finds
    monkeypatch.setattr(bilinear, "ROUNDS", 3)
    api.profile(
        str(trained), tmp_path / "report", data=[str(rows)], tokens=4096, seq_len=64, probe=True, pitfall="0",
        against_random=True, cross_feed=True,
    )  # fmt: skip
    study = Study.load(tmp_path / "report")
    assert [p.held_out_text.reading for p in study.profiles] == ["documents"] * 2
    assert "each document by itself" in study.profiles[0].provenance
    assert study.profiles[0].base_perplexity < 4


def test_a_base_that_is_lost_stops_the_plan(trained: Path, joined: Path, tmp_path: Path) -> None:
    with pytest.raises(DoubtError, match=r"does not read this text.*let anything pass.*\.jsonl"):
        api.plan(str(trained), tmp_path / "plan", data=[str(joined)], **PLAN)
    assert not (tmp_path / "plan").exists()
    for asked in ({"blocks": "0"}, {"budget": "-10%"}):
        plan = api.plan(str(trained), tmp_path / "plan", data=[str(joined)], overwrite=True, **asked, **PLAN)
        assert "does not read this text" in plan.doubt
        assert plan.doubt in plan.summary
        assert "within" not in plan.summary
        assert not any(check.within_limit for check in plan.joint_checks)


def test_a_doubt_fails_the_gate(slim: Path, joined: Path, tmp_path: Path, capsys) -> None:
    own = shutil.copytree(slim, tmp_path / "slim")
    options = ["--tokens", "2000", "--repeats", "1", "--max-delta", "100000%", "--junit", str(tmp_path / "r.xml")]
    assert run(["eval", str(own), "--data", str(joined), *options]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "gate FAILED" in out
    assert "not to be believed: the base model's perplexity" in out
    assert "not to be believed" in (tmp_path / "r.xml").read_text()
    assert json.loads((own / "ffncompress" / "gate.json").read_text())["passed"] is False


def test_what_is_doubted() -> None:
    def at(context: int, value: float, error: float = 0.01) -> MeanLoss:
        return MeanLoss(context, math.log(value), error)

    assert doubt_of_base(at(128, 30), at(512, 25), 50_000) is None
    assert doubt_of_base(at(128, 30), at(512, 44), 50_000) is None
    assert "36.9 at context 128 but 5,367.7 at context 512" in doubt_of_base(at(128, 36.9), at(512, 5367.7), 50_000)
    assert doubt_of_base(at(128, 30), at(512, 60, 0.3), 50_000) is None  # a spread that could hide it
    assert "a quarter of its vocabulary of 3,072" in doubt_of_base(at(128, 800), at(512, 800), 3072)
    assert doubt_of_base(at(128, 30), MeanLoss(512, math.nan, 0.0), 3072)
    assert "beats its base (-517.00" in doubt_of_slimmed(5367.73, -517, 20)
    assert doubt_of_slimmed(5367.73, -517, 200) is None
    assert doubt_of_slimmed(30.0, -0.03, 0.001) is None  # too little to matter
    assert doubt_of_slimmed(30.0, 5.0, 0.1) is None


def test_text_that_repeats_itself_is_told_from_too_little(tmp_path: Path) -> None:
    file = tmp_path / "same.jsonl"
    file.write_text("\n".join([json.dumps({"text": "the very same words again and again " * 10})] * 50))
    with pytest.raises(TextError, match="repeats itself: all of its choose part stands word for word"):
        read_parts(str(file))
    file.write_text(json.dumps({"text": "x"}))
    with pytest.raises(TextError, match="too little text"):
        read_parts(str(file))


def test_a_tokenizer_of_another_model_and_windows_that_are_too_long(
    trained: Path, slim: Path, tokenizer, tmp_path: Path
) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"embedding has 50 rows.*own tokenizer"):
        api.plan(str(other), tmp_path / "plan", **PLAN)
    with pytest.raises(ModelError, match=r"embedding has 50 rows.*own tokenizer"):
        api.profile(str(other), tmp_path / "report", tokens=4096, seq_len=64)
    with pytest.raises(ModelError, match="a window of 300 tokens is more than its 256; lower --seq-len"):
        api.plan(str(trained), tmp_path / "plan", tokens=8192, seq_len=300)
    checkpoint = shutil.copytree(slim, tmp_path / "checkpoint")
    tokenizer.save_pretrained(checkpoint)
    Manifest.write(checkpoint, "checkpoint")
    with pytest.raises(ModelError, match=r"embedding has 50 rows.*own tokenizer"):
        api.evaluate(checkpoint, data="stories", tokens=600, repeats=1)
