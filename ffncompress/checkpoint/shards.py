"""A checkpoint's weights, written from its base's files: what no replacement touches is copied and never decoded.

A file without a replaced tensor is copied whole. Of the others, tensors that stay are views of the base's file, which
safetensors writes without a copy in memory; replacements stand beside them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffncompress.models import ModelSource
from ffncompress.type_aliases import Model

INDEX_FILE = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_Shard = Path | dict[str, Tensor]  # a file to copy, or what to write


def has_own_names(source: ModelSource, model: Model) -> bool:
    """Whether a model's files hold its weights under its own names, as plain numbers: then they need not be decoded."""
    if source.gguf_file:
        return False
    stored: dict[str, list[int]] = {}
    for file in source.weight_files():
        tensors = _views(file)
        if any(tensor.dtype not in _FLOATS for tensor in tensors.values()):
            return False
        stored |= {name: list(tensor.shape) for name, tensor in tensors.items()}
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    tied = getattr(model, "all_tied_weights_keys", {})
    return stored == {name: shape for name, shape in own.items() if name in stored or name not in tied}


def write_shards(
    source: ModelSource,
    dtypes: Mapping[str, torch.dtype],
    new: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    largest: int,
) -> None:
    """Write a slimmed model's weights.

    Args:
        source: its base, which `has_own_names`.
        dtypes: of all tensors that it has, by name.
        new: the tensors of each replacement, by the place of its FFN and their own names.
        folder: where the files go.
        largest: the bytes that a file may hold, where it is not one tensor alone.
    """
    shards: list[_Shard] = []
    left = dict(new)
    fresh = {f"{path}.{name}" for path, tensors in new.items() for name in tensors}
    for file in source.weight_files():
        tensors = _views(file)
        gone = [name for name in tensors if name not in dtypes or name in fresh]
        stays = {name: tensor for name, tensor in tensors.items() if name not in gone}
        as_it_is = not gone and all(tensor.dtype == dtypes[name] for name, tensor in stays.items())
        if as_it_is and file.stat().st_size <= largest:
            shards.append(file)
            continue
        for path in [path for path in left if any(name.startswith(f"{path}.") for name in gone)]:
            stays |= {f"{path}.{name}": tensor for name, tensor in left.pop(path).items()}
        shards += _split(stays, dtypes, largest)
    _write(shards, dtypes, folder)


def shard_bytes(text: str) -> int:
    """`5GB` or `500MiB` in bytes."""
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]i?)B", text).groups()  # type: ignore[union-attr]
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** (1 + "KMGT".index(unit[0])))


def _views(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, of which nothing is read until it is looked at."""
    with safe_open(file, framework="pt") as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def _split(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], largest: int) -> Iterator[_Shard]:
    """Tensors in their order, in shards that are no larger than they may be."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * dtypes[name].itemsize
        if shard and size + own > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += own
    if shard:
        yield shard


def _write(shards: list[_Shard], dtypes: Mapping[str, torch.dtype], folder: Path) -> None:
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        if isinstance(shard, Path):
            shutil.copyfile(shard, folder / name)  # no link: whoever saves into the one folder would change the other
        else:
            ready = {each: tensor.detach().to("cpu", dtypes[each]).contiguous() for each, tensor in shard.items()}
            save_file(ready, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(_views(folder / name), name)
    if len(shards) > 1:
        total = sum((folder / name).stat().st_size for name in set(index.values()))
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
