"""The transformers plugin: `from_pretrained` of a checkpoint rebuilds its replacements before the weights are read.

What does it is `modeling_ffncompress.py`, of which each checkpoint carries a copy. Here, where the package is
installed, a config's list of replacements is read as strictly as any file of a stranger's, and errors are our own.

Where the package is missing, no quantizer of this name is known, and transformers would go on without one. So the
config names an activation that nobody has, whose name says what is missing: the stock FFN cannot be built, whatever
its shapes and whatever flags are set, and the sentence is the last line that a person reads.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from ffncompress import modeling_ffncompress as loader
from ffncompress.errors import ArtifactError
from ffncompress.models import Layout
from ffncompress.records.plan import Kind, Shape
from ffncompress.schema import Record, first_fault
from ffncompress.type_aliases import Config, Json

Name = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class ReplacementSpec(Record):
    """One entry of the list in config.json: what takes an FFN's place, and the shape of each of its tensors."""

    kind: Kind
    width: Size
    rank: Size
    inner: Annotated[list[Name], Field(min_length=1)]  # the names of the FFN's projections
    out: Name
    tensors: dict[Name, list[Size]]
    fused: Annotated[int, Field(strict=True, ge=1, le=8)] = 1  # how many matrices one of `inner` holds
    activation: Name | None = None  # the module between, of an FFN without a module of its own


_SPECS: TypeAdapter[dict[str, ReplacementSpec]] = TypeAdapter(dict[Name, ReplacementSpec])


class StrictQuantizer(loader.FfncompressQuantizer):
    """The travelling quantizer, with our own checks and errors."""

    error = ArtifactError

    def read_specs(self, blocks: Json) -> dict[str, dict[str, Any]]:
        """The replacements as somebody's config.json lists them, by path: data of the right form, or an error.

        Raises:
            ArtifactError: they are not.
        """
        try:
            return {path: spec.model_dump() for path, spec in _SPECS.validate_python(blocks).items()}
        except ValidationError as error:
            where, what = first_fault(error)
            raise ArtifactError(
                f"config.json: its list of replacements is damaged at {where} ({what}); "
                "the checkpoint is corrupted; emit it again with ffncompress apply"
            ) from error


def register() -> None:
    """Make transformers know the format; harmless when done twice."""
    loader.register(StrictQuantizer, anew=True)


def describe_in_config(config: Config, blocks: dict[str, dict[str, Json]]) -> None:
    """Write replacements into a model's config, beside those that an earlier slimming left in it."""
    earlier = getattr(config, "quantization_config", None)
    ours = loader.FfncompressConfig(dict(blocks))
    if isinstance(earlier, loader.FfncompressConfig):
        ours.blocks, ours.activations = {**earlier.blocks, **blocks}, dict(earlier.activations)
    loader.guard_(config, ours)
    config.quantization_config = ours


def spec_of(shape: Shape, layout: Layout, module: torch.nn.Module) -> dict[str, Json]:
    """One entry of the config, as config.json carries it: what it is, and the shape of each tensor."""
    tensors = {name: list(value.shape) for name, value in module.state_dict().items()}
    spec = ReplacementSpec(**asdict(shape), **{**asdict(layout), "inner": list(layout.inner)}, tensors=tensors)
    return spec.model_dump()


def write_loader(folder: Path) -> None:
    """Put the file into a checkpoint by which it loads where this package is not installed."""
    shutil.copyfile(loader.__file__, folder / loader.LOADER_FILE)
