"""Reading, dividing and cutting text."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ffncompress import texts
from ffncompress.errors import TextError

LINES = "".join(f"line {i} of a longer text about nothing in particular\n" for i in range(4000))


def test_a_file_is_divided_in_order_without_loss(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(LINES)
    parts = texts.read_parts(str(file))
    assert "".join(d for part in parts.values() for d in part.documents) == LINES
    for name, share in texts.SHARES.items():
        assert parts[name].characters / len(LINES) == pytest.approx(share, abs=0.01)
        assert all(d.endswith("\n") for d in parts[name].documents)


def test_rows_are_documents(tmp_path: Path) -> None:
    documents = [f"document {i} " * 20 for i in range(30)]
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text("\n".join(json.dumps({"text": d}) for d in documents))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), parquet)
    assert texts.read(str(jsonl)).documents == tuple(documents)
    assert texts.read(str(parquet)).documents == tuple(documents)


def test_a_repeated_document_is_in_one_part_only(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    same, heading = "the very same words in many rows " * 10, "= Plot ="
    rows = [(same, heading, f"document {i} " * 20)[i % 3] for i in range(90)]
    file.write_text("\n".join(json.dumps({"text": r}) for r in rows))
    parts = texts.read_parts(str(file))
    assert sum(same in part.documents for part in parts.values()) == 1
    assert all(heading in part.documents for part in parts.values())


def test_lines_of_a_larger_text_are_joined_as_they_were() -> None:
    assert (
        texts.Text("t", "all", (" = Title = \n", " A line . \n", "A row")).joined
        == " = Title = \n A line . \nA row\n\n"
    )


def test_python_docs_are_divided_by_name() -> None:
    parts = texts.read_parts(texts.PYTHON_DOCS)
    seen = [set(part.documents) for part in parts.values()]
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))
    assert all(part.characters > 100_000 for part in parts.values())
    assert parts["fit"].fingerprint() == texts.read_parts(texts.PYTHON_DOCS)["fit"].fingerprint()


def test_a_data_set_folder_is_read_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", "two"]}), tmp_path / "data" / "train-0.parquet")
    assert texts.read(f"hub:{tmp_path}::train:body").documents == ("one", "two")


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
        texts.read(str(tmp_path / name))


def test_a_hub_source_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="write a Hub data set as"):
        texts.read("hub:only-a-name")
    with pytest.raises(TextError, match="cannot be read"):
        texts.read(f"hub:{tmp_path}/nothing::train:text")


def test_windows_tile_the_text_and_are_seeded(tmp_path: Path, tokenizer) -> None:
    text = texts.Text("t", "all", (LINES,))
    ids = tokenizer(LINES, add_special_tokens=False)["input_ids"]
    rows = texts.windows(text, tokenizer, length=64, count=10, seed=None)
    assert rows.flatten().tolist() == ids[: 64 * 10]
    drawn = texts.windows(text, tokenizer, length=64, count=10, seed=3)
    assert torch.equal(drawn, texts.windows(text, tokenizer, length=64, count=10, seed=3))
    assert not torch.equal(drawn, texts.windows(text, tokenizer, length=64, count=10, seed=4))
    assert len(texts.windows(text, tokenizer, length=64, seed=3).unique(dim=0)) > 10


def test_windows_begin_as_the_tokenizer_begins_a_text(tokenizer) -> None:
    inner = tokenizer.backend_tokenizer
    with_bos = PreTrainedTokenizerFast(tokenizer_object=type(inner).from_str(inner.to_str()), bos_token="<|endoftext|>")
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert texts.opening_tokens(tokenizer) == []
    assert texts.opening_tokens(with_bos) == [0]
    rows = texts.windows(texts.Text("t", "all", (LINES,)), with_bos, length=32, count=5)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:] != 0).all()
