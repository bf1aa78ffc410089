"""The embedded model: small, and a teller of stories."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from ffncompress.models import find_model
from ffncompress.text.parts import FIT, REPORT, read_parts
from ffncompress.text.sources import STORIES, default_text, read
from ffncompress.text.windows import joined_windows

PROMPTS = ("Once upon a time, there was a little girl named Lily.", "One day, Tom and his dog went to the park.")


def test_it_takes_8_mb_with_its_text() -> None:
    folder = Path(str(files("ffncompress") / "demo"))
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 8_000_000


@torch.inference_mode()
def test_it_reads_stories_ten_times_better_than_their_words_frequencies_do(demo_model, tokenizer) -> None:
    parts = read_parts(STORIES)
    ids = torch.stack(list(joined_windows(parts[REPORT], tokenizer, length=256, count=16)))
    perplexity = demo_model(input_ids=ids, labels=ids).loss.exp().item()
    read_before = torch.tensor(tokenizer(parts[FIT].joined, verbose=False)["input_ids"])
    counts = torch.bincount(read_before, minlength=len(tokenizer)) + 1
    unigram = math.exp(-(counts / counts.sum()).log()[ids].mean().item())
    assert perplexity < 12
    assert unigram > 10 * perplexity


@torch.inference_mode()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_it_goes_on_in_words_and_sentences(prompt: str, demo_model, tokenizer) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = demo_model.generate(**inputs, max_new_tokens=60, do_sample=False, pad_token_id=0)[0]
    told = tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    known = set(re.findall(r"\w+", read(STORIES).joined))
    written = re.findall(r"\w+", told)
    assert len(written) > 20
    assert set(written[:-1]) <= known  # the last may be cut
    assert len(re.findall(r"[.!?]", told)) >= 2


def test_stories_are_its_text_and_nobody_elses() -> None:
    assert find_model("demo").is_embedded
    assert default_text(on_hub=False, embedded=True) == STORIES
    assert default_text(on_hub=False, embedded=False) == "python-docs"
    assert default_text(on_hub=True, embedded=False) == "wikitext"


def test_stories_are_divided_and_share_none() -> None:
    parts = read_parts(STORIES)
    told = [set(part.documents) for part in parts.values()]
    assert sum(map(len, told)) == len(set.union(*told)) > 1000
    assert min(part.characters for part in parts.values()) > 0.1 * read(STORIES).characters
