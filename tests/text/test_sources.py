"""Reading, dividing and cutting text."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ffncompress.errors import TextError
from ffncompress.text import python_docs
from ffncompress.text.parts import SHARES, read_parts
from ffncompress.text.sources import PYTHON_DOCS, Text, read
from ffncompress.text.windows import joined_windows, opening_tokens

LINES = "".join(f"line {i} of a longer text about nothing in particular\n" for i in range(4000))


def test_a_file_is_divided_in_order_without_loss(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(LINES)
    parts = read_parts(str(file))
    assert "".join(d for part in parts.values() for d in part.documents) == LINES
    for name, share in SHARES.items():
        assert parts[name].characters / len(LINES) == pytest.approx(share, abs=0.01)
        assert all(d.endswith("\n") for d in parts[name].documents)


def test_rows_are_documents(tmp_path: Path) -> None:
    documents = [f"document {i} " * 20 for i in range(30)]
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text("\n".join(json.dumps({"text": d}) for d in documents))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), parquet)
    assert read(str(jsonl)).documents == tuple(documents)
    assert read(str(parquet)).documents == tuple(documents)


def test_a_repeated_document_is_in_one_part_only(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    same, heading = "the very same words in many rows " * 10, "= Plot ="
    rows = [(same, heading, f"document {i} " * 20)[i % 3] for i in range(90)]
    file.write_text("\n".join(json.dumps({"text": r}) for r in rows))
    parts = read_parts(str(file))
    assert sum(same in part.documents for part in parts.values()) == 1
    assert all(heading in part.documents for part in parts.values())


def test_lines_of_a_larger_text_are_joined_as_they_were() -> None:
    assert Text("t", "all", (" = Title = \n", " A line . \n", "A row")).joined == " = Title = \n A line . \nA row\n\n"


def test_python_docs_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read again from the cache, they are the same; a damaged cache, or a Python that changed, is read anew."""
    monkeypatch.setenv("FFNCOMPRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(python_docs, "_LEFT_OUT", {*os.listdir(sysconfig.get_paths()["stdlib"])} - {"email"})
    fresh = python_docs.python_docs.__wrapped__()
    assert any(name.startswith("email/") for name, _ in fresh)
    (memory,) = (tmp_path / "python-docs").glob("*.json")
    monkeypatch.setattr(python_docs, "_docstrings", lambda _: "other")
    assert python_docs.python_docs.__wrapped__() == fresh
    memory.write_text("[[1")
    assert python_docs.python_docs.__wrapped__() != fresh


def test_python_docs_are_divided_by_name() -> None:
    parts = read_parts(PYTHON_DOCS)
    seen = [set(part.documents) for part in parts.values()]
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))
    assert all(part.characters > 100_000 for part in parts.values())
    assert parts["fit"].sha256 == read_parts(PYTHON_DOCS)["fit"].sha256


def test_a_data_set_folder_is_read_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", "two"]}), tmp_path / "data" / "train-0.parquet")
    assert read(f"hub:{tmp_path}::train:body").documents == ("one", "two")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("missing.txt", None, "no such text"),
        ("empty.txt", b"  \n", "no text"),
        ("binary.txt", b"\xff\xfe\x00\x81", "not UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"body": 1}\n', "line 2"),
        ("bad.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: bytes | None, match: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=match):
        read(str(tmp_path / name))


def test_a_hub_source_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="write a Hub data set as"):
        read("hub:only-a-name")
    with pytest.raises(TextError, match="cannot be read"):
        read(f"hub:{tmp_path}/nothing::train:text")


@pytest.mark.slow
def test_windows_tile_the_text_and_are_seeded(tmp_path: Path, tokenizer) -> None:
    text = Text("t", "all", (LINES,))
    ids = tokenizer(LINES, add_special_tokens=False)["input_ids"]
    rows = joined_windows(text, tokenizer, length=64, count=10, seed=None)
    assert torch.cat(rows.rows).tolist() == ids[: 64 * 10]
    drawn = {seed: torch.stack(joined_windows(text, tokenizer, length=64, count=10, seed=seed).rows) for seed in (3, 4)}
    again = torch.stack(joined_windows(text, tokenizer, length=64, count=10, seed=3).rows)
    assert torch.equal(drawn[3], again)
    assert not torch.equal(drawn[3], drawn[4])
    assert len({tuple(row.tolist()) for row in joined_windows(text, tokenizer, length=64, seed=3)}) > 10


def test_windows_begin_as_the_tokenizer_begins_a_text(tokenizer) -> None:
    inner = tokenizer.backend_tokenizer
    with_bos = PreTrainedTokenizerFast(tokenizer_object=type(inner).from_str(inner.to_str()), bos_token="<|endoftext|>")
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert opening_tokens(tokenizer) == []
    assert opening_tokens(with_bos) == [0]
    rows = joined_windows(Text("t", "all", (LINES,)), with_bos, length=32, count=5)
    assert all(row[0] == 0 and (row[1:] != 0).all() for row in rows)
