"""The transformers plugin: `from_pretrained` of an emitted folder rebuilds its stand-ins before the weights are read.

transformers has one hook that runs while a model is still an empty skeleton: a quantizer. Ours is named in the
folder's config.json, and swaps the listed FFNs for stand-ins of the listed shapes. Once the weights are in, it checks
those shapes (transformers does not, when a quantizer is set) and takes its flags off again: the model is an ordinary
one, that can be cast, trained, or saved.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ffncompress.errors import ArtifactError
from ffncompress.models import Layout, set_module
from ffncompress.modules import Shape, empty

METHOD = "ffncompress"
FORMAT_VERSION = 2


class FfncompressConfig(QuantizationConfigMixin):
    """The stand-ins of a checkpoint: path -> kind, rank, widths, and the names of the projections."""

    def __init__(self, blocks: dict[str, dict[str, Any]], format_version: int = FORMAT_VERSION, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # a plain string is what is registered
        self.format_version = format_version
        self.blocks = blocks


class FfncompressQuantizer(HfQuantizer):
    """Rebuilds the stand-ins; no number is ever quantised."""

    requires_calibration = True
    quantization_config: FfncompressConfig

    def validate_environment(self, *_args: Any, **_kwargs: Any) -> None:
        version = self.quantization_config.format_version
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"this checkpoint is of ffncompress format {version}, this release reads {FORMAT_VERSION}; "
                "install the release that wrote it (ffncompress/origin.json names it), or emit it again"
            )

    def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> None:
        for path, spec in self.quantization_config.blocks.items():
            set_module(model, path, _module(spec, model.get_submodule(path)))

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> None:
        for path, spec in self.quantization_config.blocks.items():
            expected = spec["tensors"]
            for name, value in model.get_submodule(path).state_dict().items():
                if list(value.shape) != expected[name]:
                    raise ArtifactError(
                        f"{path}.{name}: shape {tuple(value.shape)} in the weights, {tuple(expected[name])} in "
                        "config.json; the checkpoint is corrupted, emit it again with ffncompress apply"
                    )
        _look_ordinary(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def spec_of(shape: Shape, layout: Layout, module: torch.nn.Module) -> dict[str, Any]:
    """One entry of the config, as config.json carries it: what it is, and the shape of each tensor."""
    tensors = {name: list(value.shape) for name, value in module.state_dict().items()}
    return {**asdict(shape), "inner": list(layout.inner), "out": layout.out, "tensors": tensors}


def _module(spec: dict[str, Any], ffn: torch.nn.Module) -> torch.nn.Module:
    layout = Layout(tuple(spec["inner"]), spec["out"])
    return empty(Shape(spec["kind"], spec["width"], spec["rank"]), layout, ffn)


def _look_ordinary(model: Any) -> None:
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
