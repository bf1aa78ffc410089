"""apply writes what changed, and copies the rest."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file

from ffncompress.checkpoint.shards import has_own_names, shard_bytes, write_shards
from ffncompress.models import find_blocks, find_model, load_model
from ffncompress.storage.manifest import sha256_of


@pytest.fixture
def source(tmp_path, tokenizer):
    folder = tmp_path / "base"
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    return find_model(str(folder))


def stored(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("largest", [2**30, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_changed_is_written_anew(source, tmp_path, largest, dtype) -> None:
    model, out = load_model(source), tmp_path / "out"
    out.mkdir()
    block = find_blocks(model)[1]
    dtypes = {name: dtype for name in model.state_dict() if not name.startswith(block.path)}
    new = {"down_proj.weight": torch.randn(32, 8), "up_proj.weight": torch.randn(8, 32)}
    dtypes |= {f"{block.path}.{name}": dtype for name in new}
    assert has_own_names(source, model)
    write_shards(source, dtypes, {block.path: new}, out, largest)
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith(block.path)}
    expected |= {f"{block.path}.{name}": value for name, value in new.items()}
    found = stored(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in expected.items())
    before, after = ({sha256_of(file) for file in folder.glob("*.safetensors")} for folder in (source.directory, out))
    touched = {file for file in source.weight_files() if any(name.startswith(block.path) for name in load_file(file))}
    untouched = {sha256_of(file) for file in source.weight_files() if file not in touched}
    assert untouched
    assert (before & after == untouched) if dtype == torch.float32 else not before & after


def test_files_that_are_too_large_are_split(source, tmp_path) -> None:
    model, out = load_model(source), tmp_path / "out"
    out.mkdir()
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    write_shards(source, dtypes, {}, out, 20_000)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in stored(out).items())
    assert all(len(load_file(file)) == 1 for file in out.glob("*.safetensors") if file.stat().st_size > 21_000)


def test_a_model_of_other_names_is_not_copied(source, tmp_path) -> None:
    load_model(source).model.save_pretrained(tmp_path / "body")  # without the prefix, and without the head
    assert not has_own_names(find_model(str(tmp_path / "body")), load_model(source))


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5MiB", 3 * 2**19), ("100KB", 10**5)])
def test_sizes_of_files_are_read_as_transformers_does(text, size) -> None:
    assert shard_bytes(text) == size
