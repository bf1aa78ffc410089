"""How transformers loads a checkpoint slimmed by ffncompress: the replacements, and the hook that rebuilds them.

This file travels. The package uses it, and a copy lies in each slimmed checkpoint, so that one loads where the
package is missing too: `from_pretrained(FOLDER, trust_remote_code=True)`. So it imports nothing but torch and
transformers, and holds no family's own code. Apache-2.0; ffncompress is on the package index under that name.

transformers has one hook that runs while a model is still an empty skeleton: a quantizer. Ours is named in the
folder's config.json, and puts replacements of the listed shapes where the listed FFNs were. transformers does not check
shapes when a quantizer is set, and fills what is missing with random numbers: so the loading is watched, and ends in an
error unless every tensor was there in its shape. Then the flags come off again: the model is an ordinary one, that can
be cast, trained, or saved. Another quantizer may follow ours: it finds the replacements in the skeleton.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "ffncompress"
FORMAT_VERSION = 5
READABLE = (2, 3, 4, 5)  # 2: no guard; 3: a constant has a matrix of no columns; 4: no fused and no inline FFNs
GUARD = "slimmed by ffncompress"
NOT_INSTALLED = (
    f"{GUARD}, which is not installed here: pip install ffncompress, or pass trust_remote_code=True to run the loader "
    "that lies beside the weights (do not set ignore_mismatched_sizes, it fills FFNs with random numbers)"
)
REPLACEMENT = "is_ffncompress_replacement"  # the attribute that tells a replacement from an FFN: its kind
BYPASS = ("bypass_down", "bypass_up")
LOADER_FILE = "modeling_ffncompress.py"
_HEADS = ("", "ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_AUTO = tuple(f"AutoModel{head}" for head in _HEADS)
AUTO_MAP = {name: f"modeling_ffncompress.Slimmed{name.removeprefix('Auto')}" for name in ("AutoConfig", *_AUTO)}
_ACTIVATION_KEYS = ("hidden_act", "activation_function", "hidden_activation", "activation")
_FLOATS = ("F64", "F32", "F16", "BF16")
_CONFIG_TURN = "update_attn_implementation" if hasattr(HfQuantizer, "update_attn_implementation") else "update_tp_plan"
_TURNS = ("validate_environment", _CONFIG_TURN, "preprocess_model", "postprocess_model")  # of a quantizer, in order
_EMIT_AGAIN = "the checkpoint is corrupted; emit it again with ffncompress apply"


class LinearFFN(nn.Module):
    """y = W x + b: one matrix, under the name of the FFN's output projection."""

    def __init__(self, out: str, d_in: int, d_out: int) -> None:
        super().__init__()
        self._out = out
        self.add_module(out, nn.Linear(d_in, d_out))

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """W x + b; what a family passes along is of no use here."""
        y: Tensor = getattr(self, self._out)(x)
        return y


class LowRankFFN(nn.Module):
    """y = U (D x) + b: two thin matrices, under the names of the FFN's last inner and its output projection."""

    def __init__(self, inner: str, out: str, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self._inner, self._out = inner, out
        self.add_module(inner, nn.Linear(d_in, rank, bias=False))
        self.add_module(out, nn.Linear(rank, d_out))

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """U (D x) + b."""
        z = getattr(self, self._inner)(x)
        y: Tensor = getattr(self, self._out)(z)
        return y


class Constant(nn.Module):
    """A bias without a matrix. It is called like a projection, so that whoever offloads weights brings it in time."""

    def __init__(self, d_out: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:
        """b, for every token."""
        return self.bias.expand(*x.shape[:-1], -1)


class ConstantFFN(LinearFFN):
    """y = b, under the name of the FFN's output projection."""

    def __init__(self, out: str, d_out: int) -> None:
        nn.Module.__init__(self)
        self._out = out
        self.add_module(out, Constant(d_out))


class InlineFFN(nn.Module):
    """An FFN without a module of its own: a lead, an activation and an output that lie among others in a layer.

    It holds them under the names that they have there, and stands for them as a whole. In a model they are replaced one
    by one (`put`): what runs is the layer's own code. A lead may lie within the module that holds the activation (in
    ESM, which applies one that is no module): then the two are one part.
    """

    def __init__(self, names: tuple[str, ...], parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.names = names
        for name, part in zip(self.names, parts, strict=True):
            *above, last = name.split(".")
            place: nn.Module = self
            for each in above:
                if each not in place._modules:
                    place.add_module(each, nn.Module())
                place = place.get_submodule(each)
            place.add_module(last, part)

    def forward(self, x: Tensor) -> Tensor:
        """One part after the other."""
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def inline_names(inner: str, activation: str, out: str) -> tuple[str, ...]:
    """The parts of an FFN without a module of its own, each named once."""
    return (activation, out) if inner.startswith(f"{activation}.") else (inner, activation, out)


class Enclosed(nn.Module):
    """A lead, under the name that it has in the module around it, and what comes behind it there."""

    def __init__(self, name: str, lead: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, lead)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        z: Tensor = self.between(getattr(self, self._name)(x))
        return z


class PartlyActive(nn.Module):
    """An activation of the first features; the others pass as they are."""

    def __init__(self, width: int, own: nn.Module) -> None:
        super().__init__()
        self.width, self.own = width, own

    def forward(self, z: Tensor) -> Tensor:
        """The two side by side."""
        return torch.cat([self.own(z[..., : self.width]), z[..., self.width :]], -1)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """A module at a dotted path; of an FFN without a module of its own, each part at its own."""
    for name in module.names if isinstance(module, InlineFFN) else ("",):
        part, place = (module.get_submodule(name), f"{path}.{name}") if name else (module, path)
        parent, _, last = place.rpartition(".")
        setattr(model.get_submodule(parent), last, part)


@cache
def _with_bypass(own: type[nn.Module]) -> type[nn.Module]:
    """The FFN's own class, with a low-rank linear map of its input added to its output."""

    class HybridFFN(own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
            y: Tensor = super().forward(x, *args, **kwargs)
            bypass: Tensor = self.bypass_up(self.bypass_down(x))
            return y + bypass

        def __reduce__(self) -> tuple[object, ...]:  # a pickle finds no class that was made in a function
            return _new_hybrid, (own,), self.__dict__.copy()

    return HybridFFN


def _new_hybrid(own: type[nn.Module]) -> nn.Module:
    """A hybrid without a state, for a pickle or a copy to fill."""
    made = _with_bypass(own)  # type: ignore[arg-type]
    return made.__new__(made)


def build(
    kind: str, width: int, rank: int, inner: Iterable[str], out: str, ffn: nn.Module, fused: int = 1,
    activation: str | None = None,
) -> nn.Module:  # fmt: skip
    """An uninitialised replacement for an FFN.

    Args:
        kind: what it becomes.
        width: neurons that are kept.
        rank: of a linear map, or of the bypass beside neurons.
        inner: the names of the matrices that lead in.
        out: the name of the matrix that leads out.
        ffn: the FFN; or, of one without a module of its own, what its parts lie in.
        fused: how many matrices stand above one another in an inner one (a gate and an up: 2).
        activation: the name of the module between, of an FFN without a module of its own.

    Raises:
        ValueError: there is no such kind.
    """
    inner = tuple(inner)
    if kind not in ("dense", "low-rank", "constant", "neurons", "hybrid"):
        raise ValueError(f"unknown replacement kind {kind!r}")
    d_in, d_out = in_out(ffn.get_submodule(inner[0]))[0], in_out(ffn.get_submodule(out))[1]
    module: nn.Module
    if activation is not None:
        module = _inline(kind, width, rank, inner[0], activation, out, ffn)
    elif kind == "dense":
        module = LinearFFN(out, d_in, d_out)
    elif kind == "low-rank":
        module = LowRankFFN(inner[-1], out, d_in, d_out, rank)
    elif kind == "constant":
        module = ConstantFFN(out, d_out)
    else:
        module = _narrowed(ffn, inner, out, width, fused)
        if kind == "hybrid":
            module.__class__ = _with_bypass(type(module))  # type: ignore[arg-type]
            module.add_module(BYPASS[0], nn.Linear(d_in, rank, bias=False))
            module.add_module(BYPASS[1], nn.Linear(rank, d_out))
    # of an FFN without a module of its own, only the parts are seen in a model
    for marked in map(module.get_submodule, module.names) if isinstance(module, InlineFFN) else (module,):
        setattr(marked, REPLACEMENT, kind)
    return module


def _inline(kind: str, width: int, rank: int, inner: str, activation: str, out: str, ffn: nn.Module) -> InlineFFN:
    """A replacement by parts. What is linear passes the activation by: a bypass is features that it leaves alone."""
    own_inner, own_out = ffn.get_submodule(inner), ffn.get_submodule(out)
    d_in, d_out = in_out(own_inner)[0], in_out(own_out)[1]
    names = inline_names(inner, activation, out)
    if kind in ("constant", "dense"):
        whole = Constant(d_out) if kind == "constant" else nn.Linear(d_in, d_out)
        return InlineFFN(names, (*(nn.Identity() for _ in names[:-1]), whole))
    lead = nn.Linear(d_in, rank, bias=False) if kind == "low-rank" else _projection(own_inner, d_in, width + rank)
    biased = getattr(own_out, "bias", None) is not None or kind != "neurons"
    last = _projection(own_out, width + rank, d_out, biased)
    own, enclosed = ffn.get_submodule(activation), len(names) == 2
    if kind == "neurons" and enclosed:
        return InlineFFN(names, (_copied(own, own_inner, lead), last))
    between = _copied(own, own_inner, nn.Identity()) if width else nn.Identity()
    if kind == "hybrid":
        between = PartlyActive(width, between)
    first = (Enclosed(inner.removeprefix(f"{activation}."), lead, between),) if enclosed else (lead, between)
    return InlineFFN(names, (*first, last))


def _copied(module: nn.Module, part: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of a module; where it holds the part, with another in its place."""
    made: nn.Module = copy.deepcopy(module, {id(part): other})
    _forget_hooks_(made)
    return made


def _forget_hooks_(module: nn.Module) -> None:
    """A copy runs as its class says: what accelerate put there is bound to the original."""
    for name in ("forward", "_hf_hook", "_old_forward"):
        module.__dict__.pop(name, None)


def _narrowed(ffn: nn.Module, inner: tuple[str, ...], out: str, width: int, fused: int) -> nn.Module:
    names = (*inner, out)
    placeholders: dict[int, object] = {id(ffn.get_submodule(name)): nn.Identity() for name in names}
    module = copy.deepcopy(ffn, placeholders)  # all but its matrices
    _forget_hooks_(module)
    for name in names:
        own = ffn.get_submodule(name)
        d_in, d_out = in_out(own)
        size = (width, d_out) if name == out else (d_in, fused * width)
        parent, _, last = name.rpartition(".")
        module.get_submodule(parent)._modules[last] = _projection(own, *size)
    return module


def _projection(like: nn.Module, d_in: int, d_out: int, biased: bool | None = None) -> nn.Module:
    if isinstance(like, Conv1D):
        return Conv1D(d_out, d_in)
    return nn.Linear(d_in, d_out, bias=like.bias is not None if biased is None else biased)


def in_out(projection: nn.Module) -> tuple[int, int]:
    """(input width, output width) of a projection."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


class FfncompressConfig(QuantizationConfigMixin):
    """The replacements of a checkpoint: path -> kind, rank, widths, and the names of the projections."""

    on_top: Any = None  # another quantizer's config, asked for at loading; never stored

    def __init__(
        self,
        blocks: Any = None,
        format_version: int = FORMAT_VERSION,
        activations: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # a plain string is what is registered
        self.format_version = format_version
        self.blocks = blocks  # as JSON has it; checked before it is followed
        self.activations = activations or {}  # what the config's guarded keys really say

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {name: value for name, value in super().to_dict().items() if name != "on_top"}


class FfncompressQuantizer(HfQuantizer):
    """Rebuilds the replacements; no number is ever quantised."""

    requires_calibration = True
    quantization_config: FfncompressConfig
    error: type[Exception] = ValueError

    def validate_environment(self, *_args: object, **_kwargs: object) -> None:
        """The first call: is this a format that we read, and is its list of replacements sound?"""
        ours = self.quantization_config
        if ours.format_version not in READABLE:
            raise self.error(
                f"this checkpoint is of ffncompress format {ours.format_version}, this release reads {READABLE}; "
                "install the release that wrote it (ffncompress/origin.json names it), or emit it again"
            )
        self._specs = {path: _as_written_now(spec) for path, spec in self.read_specs(ours.blocks).items()}
        if ours.format_version in (3, 4):  # what is saved again is of today's form
            ours.blocks, ours.format_version = self._specs, FORMAT_VERSION

    def read_specs(self, blocks: Any) -> dict[str, dict[str, Any]]:
        """The entries of config.json by path; whoever builds from one finds out whether it fits."""
        if not isinstance(blocks, dict) or not all(isinstance(spec, dict) for spec in blocks.values()):
            raise self.error(f"config.json: its list of replacements is damaged; {_EMIT_AGAIN}")
        return blocks

    def update_tp_plan(self, config: Any) -> Any:
        """The one look at the config before the model is built: the activations get their own names back."""
        words = of_words(config)
        for key, name in self.quantization_config.activations.items():
            if str(getattr(words, key, None)).startswith(GUARD) and isinstance(name, str) and name in ACT2FN:
                setattr(words, key, name)
        return config

    update_attn_implementation = update_tp_plan  # whichever of the two this transformers calls, or both

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_kwargs: object
    ) -> None:
        for path, spec in self._specs.items():
            place = _place_in(model, path)
            put(model, place, self._rebuilt(model, place, spec))
        self._check_stored(checkpoint_files or ())
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        _watch_loading(model, self.error)

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: object) -> None:
        for name, value in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tuple(value.shape) != expected:
                raise self.error(
                    f"{name}: shape {tuple(value.shape)} in the weights, {expected} in config.json; {_EMIT_AGAIN}"
                )
        _look_ordinary(model)
        guard_(model.config, self.quantization_config)
        model.save_pretrained = partial(_save_with_loader, model)

    def _rebuilt(self, model: nn.Module, place: str, spec: Mapping[str, Any]) -> nn.Module:
        """The empty replacement that a config's entry describes, of just the tensors that it lists."""
        form = {name: spec.get(name) for name in ("kind", "width", "rank", "inner", "out")}
        form |= {"fused": spec.get("fused", 1), "activation": spec.get("activation")}
        try:
            with torch.device("meta"):
                module = build(**form, ffn=model.get_submodule(place))  # type: ignore[arg-type]
        except (AttributeError, ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
            raise self.error(f"config.json: {place!r} is not an FFN that its entry fits; {_EMIT_AGAIN}") from error
        if {name: list(value.shape) for name, value in module.state_dict().items()} != spec.get("tensors"):
            raise self.error(f"config.json: the tensors of {place} are not those of its kind; {_EMIT_AGAIN}")
        return module

    def _check_stored(self, files: Iterable[str]) -> None:
        """Each replacement is stored in its shape, in floating point, in one precision: a cast would hide the rest."""
        from safetensors import safe_open

        stored: dict[str, tuple[str, list[int]]] = {}
        for file in files:
            if str(file).endswith(".safetensors"):
                with safe_open(file, framework="pt") as tensors:
                    slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                    stored |= {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
        for path, spec in self._specs.items():
            dtypes = set()
            for name, shape in spec["tensors"].items():
                found = stored.get(f"{path}.{name}") or stored.get(
                    f"{path.partition('.')[2]}.{name}"
                )  # of a base model
                if found and found[1] != shape:
                    raise self.error(
                        f"{path}.{name}: shape {found[1]} in the weights, {shape} in config.json; {_EMIT_AGAIN}"
                    )
                dtypes |= {found[0]} if found else set()
            if len(dtypes) > 1 or not dtypes <= {*_FLOATS}:
                raise self.error(f"{path}: its weights are stored as {', '.join(sorted(dtypes))}; {_EMIT_AGAIN}")

    def is_serializable(self) -> bool:
        """A model loaded by it can be saved again, and trained: nothing is quantised."""
        return True

    is_trainable = property(is_serializable)


def quantizer_of(config: FfncompressConfig, kind: type[FfncompressQuantizer], **options: Any) -> HfQuantizer:
    """Ours; where another is to follow it, that one, with ours run before each of its turns."""
    ours = kind(config, **options)
    if config.on_top is None:
        return ours
    theirs: Any = auto.AutoHfQuantizer.from_config(config.on_top, pre_quantized=False)
    for turn in _TURNS:
        setattr(theirs, turn, partial(_both, turn, ours, theirs))
    theirs.is_serializable = _not_serializable
    return theirs  # type: ignore[no-any-return]


def _not_serializable(*_args: object, **_kwargs: object) -> bool:
    """The other quantizer's config would forget the replacements: an adapter can be saved, the model not."""
    return False


def _both(turn: str, ours: FfncompressQuantizer, theirs: Any, subject: Any = None, **options: Any) -> Any:
    """Our turn, then theirs; after the last one, theirs is as if ours had never been."""
    if turn == "validate_environment":
        ours.validate_environment()
        return theirs.__class__.validate_environment(theirs, **options)
    subject = options.pop("config" if turn == _CONFIG_TURN else "model", subject)
    if turn == _CONFIG_TURN:
        subject = ours.update_tp_plan(subject)
    elif turn == "preprocess_model":
        ours._process_model_before_weight_loading(subject, **options)
    else:
        for name in _TURNS:
            del theirs.__dict__[name]
        _leave_unpacked_(subject)
    return getattr(theirs.__class__, turn)(theirs, subject, **options)


def _leave_unpacked_(model: nn.Module) -> None:
    """On some CPUs bitsandbytes packs 4-bit matrices, and fails on those that are not made of its blocks."""
    packed: Iterable[Any] = (m for m in model.modules() if getattr(m, "support_avx512bf16_for_cpu", False))
    for module in packed:
        module.support_avx512bf16_for_cpu = not (module.out_features % 32 or module.in_features % 64)


def merge_configs(original: Any, stored: Any, asked: Any = None, **options: Any) -> Any:
    """transformers' choice between a checkpoint's quantizer and one asked for; ours leaves room for another."""
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method != METHOD or asked is None or isinstance(asked, FfncompressConfig):
        return original(stored, asked, **options)
    ours = auto.AutoQuantizationConfig.from_dict(stored) if isinstance(stored, dict) else stored
    ours.on_top = asked
    return ours


def register(kind: type[FfncompressQuantizer] = FfncompressQuantizer, *, anew: bool = False) -> None:
    """Make transformers know the format; harmless when done twice."""
    if METHOD in auto.AUTO_QUANTIZER_MAPPING and not anew:
        return
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = FfncompressConfig
    quantizers: dict[str, Any] = auto.AUTO_QUANTIZER_MAPPING
    quantizers[METHOD] = partial(quantizer_of, kind=kind)
    theirs: Any = auto.AutoHfQuantizer
    merge = theirs.merge_quantization_configs
    if getattr(getattr(merge, "func", None), "__name__", "") != merge_configs.__name__:  # not ours yet
        theirs.merge_quantization_configs = staticmethod(partial(merge_configs, merge))


def guard_(config: Any, ours: FfncompressConfig) -> None:
    """Name the missing package where a stock FFN looks for its activation; one that is built does not look again."""
    if ours.format_version < 3:
        return
    words = of_words(config)
    ours.activations |= guardable(config)
    for key in _ACTIVATION_KEYS:
        if key in ours.activations:
            setattr(words, key, NOT_INSTALLED)
    config.auto_map = dict(AUTO_MAP)


def guardable(config: Any) -> dict[str, str]:
    """The activations that a config names, by key: what can be made unloadable by another name."""
    words = of_words(config)
    named = {key: getattr(words, key, None) for key in _ACTIVATION_KEYS}
    return {key: name for key, name in named.items() if isinstance(name, str) and name in ACT2FN and _takes(words, key)}


def _takes(config: Any, key: str) -> bool:
    """Whether a config lets another name stand there; some know the only one that it may be."""
    try:
        setattr(copy.deepcopy(config), key, GUARD)
    except Exception:  # whatever a config's own checks raise
        return False
    return True


def of_words(config: Any) -> Any:
    """The part of a config that is of the model that reads text, where it has others beside it."""
    return getattr(config, "text_config", config)


def _as_written_now(spec: dict[str, Any]) -> dict[str, Any]:
    """An entry of an earlier format as one of this: a constant has no matrix without columns."""
    tensors = spec.get("tensors")
    if spec.get("kind") != "constant" or not isinstance(tensors, dict):
        return spec
    return {**spec, "tensors": {n: shape for n, shape in tensors.items() if not n.endswith(".weight")}}


def _place_in(model: Any, path: str) -> str:
    """Where a block of the causal model is in this one, which may be the part below the head."""
    below = path.removeprefix(f"{model.base_model_prefix}.")
    return below if below != path and not hasattr(model, model.base_model_prefix) else path


def _watch_loading(model: Any, error: type[Exception]) -> None:
    """Stop where transformers, at the end of loading, counts what was missing and is about to say so in a warning."""
    count = model._adjust_missing_and_unexpected_keys
    is_own = type(model).__name__ in (model.config.architectures or ())
    below = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""

    def watched(info: Any, *rest: object) -> Any:
        del model._adjust_missing_and_unexpected_keys
        counted = count(info, *rest)
        keys: Iterable[str] = info if isinstance(info, list | set) else info.missing_keys  # as transformers has it
        missing = sorted(key for key in keys if is_own or key.startswith(below))  # a head of another kind is new
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise error(f"{missing[0]}{more} missing from the weights; {_EMIT_AGAIN}")
        return counted

    model._adjust_missing_and_unexpected_keys = watched


def _look_ordinary(model: Any) -> None:
    """transformers refuses to cast, train or re-quantise what it takes for quantised; nothing here is."""
    model.is_quantized = False
    for name in ("quantization_method", "hf_quantizer"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        getattr(getattr(module, "config", None), "__dict__", {}).pop("_is_quantized", None)


def _save_with_loader(model: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
    """As the model's own class saves it; this file goes along."""
    saved = type(model).save_pretrained(model, save_directory, *args, **options)
    if options.get("is_main_process", True):
        shutil.copyfile(__file__, Path(save_directory) / LOADER_FILE)
    return saved


class SlimmedConfig:
    """What config.json names for AutoConfig: transformers' own config of the family."""

    @classmethod
    def from_pretrained(cls, name: Any, **options: Any) -> Any:
        """The family's config; from here on transformers knows the format."""
        register()
        found, _ = transformers.PreTrainedConfig.get_config_dict(name, **options)
        return transformers.CONFIG_MAPPING[found["model_type"]].from_pretrained(name, **options)

    @classmethod
    def register_for_auto_class(cls, *_args: object, **_kwargs: object) -> None:
        """It stands for no class of its own."""


class SlimmedModel(SlimmedConfig):
    """What config.json names for AutoModel: transformers' own class of the family."""

    auto_class = "AutoModel"

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """The family's model, loaded as it loads itself."""
        register()
        own = getattr(transformers, cls.auto_class)
        return own.from_pretrained(name, *args, config=config, **{**options, "trust_remote_code": False})


for _head in _HEADS[1:]:  # SlimmedModelForCausalLM and the others, which config.json names
    globals()[f"SlimmedModel{_head}"] = type(
        f"SlimmedModel{_head}", (SlimmedModel,), {"auto_class": f"AutoModel{_head}", "__module__": __name__}
    )
