"""The transformers plugin: `from_pretrained` of a checkpoint rebuilds its replacements before the weights are read.

transformers has one hook that runs while a model is still an empty skeleton: a quantizer. Ours is named in the
folder's config.json, and puts replacements of the listed shapes where the listed FFNs were. transformers does not check
shapes when a quantizer is set, and fills what is missing with random numbers: so the loading is watched, and ends in an
error unless every tensor was there in its shape. Then the flags come off again: the model is an ordinary one, that can
be cast, trained, or saved.

Where this package is missing, no quantizer of this name is known, and transformers would go on without one. So the
config names an activation that nobody has, whose name says what is missing: the stock FFN cannot be built, whatever
its shapes and whatever flags are set, and the sentence is the last line that a person reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from transformers.activations import ACT2FN
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ffncompress.errors import ArtifactError
from ffncompress.models import Layout, set_module
from ffncompress.records.plan import Kind, Shape
from ffncompress.replacement.modules import empty
from ffncompress.schema import Record, first_fault
from ffncompress.type_aliases import Config, Json, LoadingInfo, Model

METHOD = "ffncompress"
FORMAT_VERSION = 3
READABLE = (2, 3)  # 2: without the activations' guard
NOT_INSTALLED = (
    "slimmed by ffncompress, which is not installed here: pip install ffncompress "
    "(do not set ignore_mismatched_sizes, it fills FFNs with random numbers)"
)
_ACTIVATION_KEYS = ("hidden_act", "activation_function", "hidden_activation")
Name = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_FLOATS = ("F64", "F32", "F16", "BF16")
_EMIT_AGAIN = "the checkpoint is corrupted; emit it again with ffncompress apply"


class ReplacementSpec(Record):
    """One entry of the list in config.json: what takes an FFN's place, and the shape of each of its tensors."""

    kind: Kind
    width: Size
    rank: Size
    inner: Annotated[list[Name], Field(min_length=1)]  # the names of the FFN's projections
    out: Name
    tensors: dict[Name, list[Size]]


_SPECS: TypeAdapter[dict[str, ReplacementSpec]] = TypeAdapter(dict[Name, ReplacementSpec])


class FfncompressConfig(QuantizationConfigMixin):
    """The replacements of a checkpoint: path -> kind, rank, widths, and the names of the projections."""

    def __init__(
        self,
        blocks: Json = None,
        format_version: int = FORMAT_VERSION,
        activations: dict[str, str] | None = None,
        **_: Json,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # a plain string is what is registered
        self.format_version = format_version
        self.blocks = blocks  # as JSON has it; checked before it is followed
        self.activations = activations or {}  # what the config's guarded keys really say


class FfncompressQuantizer(HfQuantizer):
    """Rebuilds the replacements; no number is ever quantised."""

    requires_calibration = True
    quantization_config: FfncompressConfig

    def validate_environment(self, *_args: object, **_kwargs: object) -> None:
        """The first call: is this a format that we read, and is its list of replacements sound?"""
        version = self.quantization_config.format_version
        if version not in READABLE:
            raise ArtifactError(
                f"this checkpoint is of ffncompress format {version}, this release reads {READABLE}; "
                "install the release that wrote it (ffncompress/origin.json names it), or emit it again"
            )
        self._specs = read_specs(self.quantization_config.blocks)

    def update_attn_implementation(self, config: Config) -> Config:
        """The one look at the config before the model is built: the activations get their own names back."""
        for key, name in self.quantization_config.activations.items():
            if getattr(config, key, None) == NOT_INSTALLED and isinstance(name, str) and name in ACT2FN:
                setattr(config, key, name)
        return config

    def _process_model_before_weight_loading(
        self, model: Model, checkpoint_files: list[str] | None = None, **_kwargs: object
    ) -> None:
        for path, spec in self._specs.items():
            set_module(model, path, _rebuilt(model, path, spec))
        _check_dtypes(checkpoint_files or (), self._specs)
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        _watch_loading(model)

    def _process_model_after_weight_loading(self, model: Model, **_kwargs: object) -> None:
        for name, value in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tuple(value.shape) != expected:
                raise ArtifactError(
                    f"{name}: shape {tuple(value.shape)} in the weights, {expected} in config.json; {_EMIT_AGAIN}"
                )
        _look_ordinary(model)
        guard_(model.config, self.quantization_config)

    def is_serializable(self) -> bool:
        """A model loaded by it can be saved again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """And trained: nothing is quantised."""
        return True


def guard_(config: Config, ours: FfncompressConfig) -> None:
    """Name the missing package where a stock FFN looks for its activation; one that is built does not look again."""
    if ours.format_version < 3:
        return
    for key in _ACTIVATION_KEYS:
        name = getattr(config, key, None)
        if isinstance(name, str) and name in ACT2FN:
            ours.activations[key] = name
            setattr(config, key, NOT_INSTALLED)


def spec_of(shape: Shape, layout: Layout, module: torch.nn.Module) -> dict[str, Json]:
    """One entry of the config, as config.json carries it: what it is, and the shape of each tensor."""
    tensors = {name: list(value.shape) for name, value in module.state_dict().items()}
    spec = ReplacementSpec(**asdict(shape), inner=list(layout.inner), out=layout.out, tensors=tensors)
    return spec.model_dump()


def read_specs(blocks: Json) -> dict[str, ReplacementSpec]:
    """The replacements as somebody's config.json lists them, by path: data of the right form, or an error.

    Raises:
        ArtifactError: they are not.
    """
    try:
        return _SPECS.validate_python(blocks)
    except ValidationError as error:
        where, what = first_fault(error)
        raise ArtifactError(
            f"config.json: its list of replacements is damaged at {where} ({what}); {_EMIT_AGAIN}"
        ) from error


def _rebuilt(model: Model, path: str, spec: ReplacementSpec) -> torch.nn.Module:
    """The empty replacement that a config's entry describes, of just the tensors that it lists."""
    try:
        layout = Layout(tuple(spec.inner), spec.out)
        module = empty(Shape(spec.kind, spec.width, spec.rank), layout, model.get_submodule(path))
    except (AttributeError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"config.json: {path!r} is not an FFN that its entry fits; {_EMIT_AGAIN}") from error
    built = {name: list(value.shape) for name, value in module.state_dict().items()}
    if built != spec.tensors:
        raise ArtifactError(f"config.json: the tensors of {path} are not those of its kind; {_EMIT_AGAIN}")
    return module


def _check_dtypes(files: Iterable[str], blocks: Mapping[str, ReplacementSpec]) -> None:
    """Each replacement is stored in floating point, in one precision: a cast on loading would hide the rest."""
    from safetensors import safe_open

    stored: dict[str, str] = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                stored |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    for path, spec in blocks.items():
        found = {dtype for name in spec.tensors if (dtype := stored.get(f"{path}.{name}"))}
        if len(found) > 1 or not found <= {*_FLOATS}:
            raise ArtifactError(f"{path}: its weights are stored as {', '.join(sorted(found))}; {_EMIT_AGAIN}")


def _watch_loading(model: Model) -> None:
    """Stop where transformers, at the end of loading, counts what was missing and is about to say so in a warning."""
    count = model._adjust_missing_and_unexpected_keys

    def watched(info: LoadingInfo, *rest: object) -> LoadingInfo:
        del model._adjust_missing_and_unexpected_keys
        counted = count(info, *rest)
        keys: Iterable[str] = info if isinstance(info, list | set) else info.missing_keys  # as transformers has it
        missing = sorted(keys)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ArtifactError(f"{missing[0]}{more} missing from the weights; {_EMIT_AGAIN}")
        return counted

    model._adjust_missing_and_unexpected_keys = watched


def _look_ordinary(model: Model) -> None:
    """transformers refuses to cast, train or re-quantise what it takes for quantised; nothing here is."""
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model, "hf_quantizer")):
        if name in vars(owner):
            delattr(owner, name)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and "_is_quantized" in vars(config):
            del config._is_quantized


def register() -> None:
    """Make transformers know the format; harmless when done twice."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, FfncompressConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, FfncompressQuantizer)
