"""A streamed model answers as the same model in memory does, bit for bit, and holds nothing between two answers."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file

from ffncompress.errors import ModelError, NumericsError
from ffncompress.models import (
    Footprint,
    count_parameters,
    ffn_of,
    find_blocks,
    find_model,
    installed,
    is_streamed,
    load_model,
    out_projection,
    shelved,
    streaming,
)

IDS = torch.arange(80).view(2, 40) * 7 + 3


def both(folder, dtype="float32"):
    source = find_model(str(folder))
    return (load_model(source, dtype=dtype, stream=stream).requires_grad_(False) for stream in (False, True))


@pytest.mark.parametrize("family", TINY)
def test_it_is_the_same_model(family, tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "HEAD_BYTES", 50_000)  # the head runs some rows at a time
    whole, streamed = both(tiny_folder(family))
    with torch.inference_mode():
        assert torch.allclose(whole(IDS).logits, streamed(IDS).logits, rtol=1e-6, atol=1e-6)
        assert torch.equal(whole.base_model(IDS)[0], streamed.base_model(IDS)[0])
    assert is_streamed(streamed)
    assert not is_streamed(whole)
    assert all(parameter.isnan().all() for parameter in streamed.parameters())
    assert count_parameters(streamed) == count_parameters(whole)
    assert (streamed.device, streamed.dtype) == (whole.device, whole.dtype)
    blocks = find_blocks(streamed)
    assert blocks == find_blocks(whole)
    own, other = (ffn_of(model, blocks[1]).state_dict() for model in (whole, streamed))
    assert all(torch.equal(own[name], value) for name, value in other.items())
    assert torch.equal(out_projection(whole, blocks[1])[0], out_projection(streamed, blocks[1])[0])


def test_weights_are_cast_as_they_are_read(tiny_folder, tmp_path) -> None:
    whole = load_model(find_model(str(tiny_folder("llama"))), dtype="bfloat16")
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    whole, streamed = both(tmp_path)
    with torch.inference_mode():
        assert torch.equal(whole(IDS).logits, streamed(IDS).logits)
    assert not list(tmp_path.glob("*.dat"))


def test_a_copy_of_it_is_streamed_too_and_takes_no_memory(tiny_folder) -> None:
    whole, streamed = both(tiny_folder("gpt2"))
    again = copy.deepcopy(streamed)
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, whole(IDS).logits)


def test_a_replacement_stands_in_it_and_its_weights_are_views_of_a_file(tiny_folder) -> None:
    whole, streamed = both(tiny_folder("llama"))
    block = find_blocks(whole)[1]
    module = shelved(ffn_of(whole, find_blocks(whole)[0]), streamed)
    with torch.inference_mode(), installed(whole, {block.path: module}), installed(streamed, {block.path: module}):
        assert torch.equal(whole(IDS).logits, streamed(IDS).logits)
    assert shelved(module, whole) is module


def test_gradients_pass_through_it(tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "HEAD_BYTES", 50_000)
    found = []
    for model in both(tiny_folder("llama")):
        x = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32).requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        found.append(x.grad)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-7)


def test_it_is_not_saved_and_what_is_damaged_is_said(tiny_folder, tmp_path) -> None:
    _, streamed = both(tiny_folder("llama"))
    with pytest.raises(ModelError, match="ffncompress apply"):
        streamed.save_pretrained(tmp_path / "copy")
    load_model(find_model(str(tiny_folder("llama")))).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(find_model(str(tmp_path)), stream=True)


def test_its_footprint_is_told_from_the_headers(tiny_folder) -> None:
    source = find_model(str(tiny_folder("llama")))
    found = Footprint.of(source, "float32")
    assert found.weights == 4 * count_parameters(load_model(source))
    assert Footprint.of(source, "bfloat16").weights * 2 == found.weights
    assert found.token == 3 * 4 * (4 * 32 + 3 * 96)  # four attention matrices, three of the FFN


def test_a_weight_of_another_shape_is_said_and_nothing_is_left_behind(tiny_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(streaming.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    load_model(find_model(str(tiny_folder("llama")))).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(90, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.*shape"):
        load_model(find_model(str(tmp_path / "model")), stream=True)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.*missing"):
        load_model(find_model(str(tmp_path / "model")), stream=True)
    assert not list((tmp_path / "temporary").glob("ffncompress-offload-*"))
