"""A model that was found, loaded: its weights, its config, its tokenizer; all of it, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncompress.errors import FfncompressError, ModelError, NumericsError
from ffncompress.modeling_ffncompress import METHOD, of_words
from ffncompress.models.sources import ModelSource
from ffncompress.models.streaming import check_stored, offloading, stream_
from ffncompress.models.tasks import auto_class
from ffncompress.sanitize import in_short, parse_json
from ffncompress.type_aliases import Config, DeviceMap, LoadingInfo, Model, Tokenizer

if TYPE_CHECKING:
    import torch

DEFAULT_CONTEXT = 512
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    source: ModelSource, *, dtype: str = "auto", device_map: DeviceMap = None, stream: bool = False
) -> Model:
    """The model in evaluation mode.

    Args:
        source: where it lies.
        dtype: what it is computed with; "auto" keeps what the weights are stored in.
        device_map: where it is put.
        stream: leave its weights in their files, and read each when it is used.

    Raises:
        ModelError: it cannot be loaded, or not whole.
        NumericsError: a weight is NaN or infinite.
    """
    import torch

    if dtype not in _DTYPES:
        raise ModelError(f"{dtype}: unknown dtype; one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "device_map": device_map}
    if source.gguf_file:
        if stream:
            raise ModelError(
                f"{source.name}: a .gguf file is read whole; give a folder of safetensors, or pass --no-stream"
            )
        if find_spec("gguf") is None:
            raise ModelError("reading a .gguf file needs the gguf package; install it: pip install 'ffncompress[gguf]'")
        from transformers import GgufConfig

        options |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        if dtype == "auto":
            options["dtype"] = torch.float32
    else:
        options |= {"use_safetensors": True, "trust_remote_code": source.trust_remote_code}
        options |= _dequantising(source)
    method = _quantised_by(source)
    quantised = f"its weights are quantised ({method}); start from the model as it was before: it is " if method else ""
    with _explained(source, f"{quantised}not loadable as a language model"):
        model = load_whole(source.directory, source.name, stream=stream, **options)
    return _dequantised(model, source).eval()


def _quantised_by(source: ModelSource) -> str | None:
    """The method that a model's weights were quantised by; ours quantises nothing."""
    stated = {} if source.gguf_file else _stated(source.directory).get("quantization_config")
    method = stated.get("quant_method", "an unnamed method") if isinstance(stated, dict) else None
    return None if method == METHOD else method if stated else None


def _dequantising(source: ModelSource) -> dict[str, Any]:
    """What makes transformers give plain weights while it reads them, where it can."""
    import transformers

    kind = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}.get(_quantised_by(source) or "")
    return {"quantization_config": getattr(transformers, kind)(dequantize=True)} if kind else {}


def _dequantised(model: Model, source: ModelSource) -> Model:
    """The model with plain weights: fits are exact in the numbers that are stored, and a slimmed model stores new ones.

    Raises:
        ModelError: transformers has no way back from them.
    """
    method = "gguf" if source.gguf_file else _quantised_by(source)
    if method is None:
        return model
    if getattr(model, "is_quantized", False) and method != "gguf":
        try:
            model = model.dequantize()
        except Exception as error:  # each method has its own
            raise ModelError(
                f"{source.name}: its weights are quantised ({method}), and transformers has no way back from that here "
                f"({in_short(error)}); start from the model as it was before"
            ) from error
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def load_whole(directory: str | Path, name: str, *, stream: bool = False, **options: Any) -> Model:
    """A model with the head that its config names, all of it; streamed, its weights stay in their files.

    transformers fills what is missing with random numbers, and says so in a warning that nobody sees.

    Raises:
        ModelError: some of its tensors were missing, or of another shape.
        NumericsError: a weight is NaN or infinite.
    """
    kind = auto_class(_stated(Path(directory)))
    if "gguf_file" not in options:
        _check_depth(Path(directory), name)
    with quiet_bars(), offloading(stream) as offload:
        loaded: Model = kind.from_pretrained(directory, output_loading_info=True, **options | offload)
        model, info = loaded
        _check_complete(name, info)
        _check_own_type(model, _stated(Path(directory)), kind, name)
        if stream:
            check_stored(stream_(model, offload, _one_device(options.get("device_map"))), name)
            return model
    for key, value in model.named_parameters():
        if not value.is_meta and not value.isfinite().all():
            raise NumericsError(f"{name}: {key} is NaN or infinite in places; check the model's weights")
    return model


def _check_complete(name: str, info: LoadingInfo) -> None:
    absent = sorted(str(key[0] if isinstance(key, tuple) else key)
                    for kind in ("missing_keys", "mismatched_keys") for key in info.get(kind, ()))  # fmt: skip
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelError(
            f"{name}: {absent[0]}{more} missing from its weights, or of another shape than its config.json says; "
            "get the model again, whole"
        )


def _check_own_type(model: Model, stated: dict[str, Any], kind: Any, name: str) -> None:
    """Of some models for pictures and text transformers takes the part for text, and loads no checkpoint of that alone.

    Raises:
        ModelError: what was loaded could not be saved and loaded again.
    """
    own = getattr(model.config, "model_type", None)
    if own != stated.get("model_type", own) and type(model.config) not in kind._model_mapping:
        raise ModelError(
            f"{name}: of a {stated['model_type']} model transformers takes the part for text ({own}), and has no class "
            "that loads a checkpoint of that part alone; give a model for text"
        )


def _one_device(device_map: DeviceMap) -> torch.device:
    """Where a streamed model computes: on the device that it would be on, or the first of several."""
    import torch

    if isinstance(device_map, dict):
        return torch.device(next(iter(device_map.values()), "cpu"))
    return torch.device("cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu")


def _check_depth(directory: Path, name: str) -> None:
    """A layer has a tensor at least; transformers would first build all that a config names, for hours if it says so.

    Raises:
        ModelError: there are more layers than tensors.
    """
    from safetensors import safe_open

    config = _stated(directory)
    depths: list[float] = [value for key in _DEPTHS if type(value := config.get(key, "")) in (int, float)]
    tensors = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            tensors += len(content.keys())
    if max(depths, default=0) > tensors:
        raise ModelError(
            f"{name}: its config.json speaks of {max(depths):g} layers, its weights are {tensors} tensors; "
            "get the model again, whole"
        )


def _stated(directory: Path) -> dict[str, Any]:
    """What a folder's config.json says; nothing, where it cannot be read: whoever loads the model finds that out."""
    try:
        stated = parse_json((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stated if isinstance(stated, dict) else {}


def load_config(source: ModelSource) -> Config:
    """The config of a model, without its weights."""
    from transformers import AutoConfig

    options = {"gguf_file": source.gguf_file} if source.gguf_file else {"trust_remote_code": source.trust_remote_code}
    with _explained(source, "its config cannot be read"):
        return AutoConfig.from_pretrained(source.directory, **options)


def load_random(source: ModelSource, *, seed: int, dtype: str = "float32") -> Model:
    """The same architecture with fresh weights, as its family initialises them."""
    import torch

    config = load_config(source)
    config.quantization_config = None
    with _explained(source, "not to be built anew"), torch.random.fork_rng(devices=[]), quiet_bars():
        torch.manual_seed(seed)
        model: Model = auto_class(config.to_dict()).from_config(config, trust_remote_code=source.trust_remote_code)
    return model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype)).eval()


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model, tried on a word."""
    from transformers import AutoTokenizer

    with _explained(source, "its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, gguf_file=source.gguf_file, trust_remote_code=source.trust_remote_code
        )
        tokenizer("a")  # a damaged one may load, and fail at the first word
    return tokenizer


def context_of(model: Model, asked: int | None) -> int:
    """The context length to measure perplexity at: as asked, or DEFAULT_CONTEXT where the model takes it.

    Raises:
        ModelError: it is more than the model takes.
    """
    longest = longest_of(model.config) or DEFAULT_CONTEXT
    if asked and asked > longest:
        raise ModelError(f"a context of {asked} is more than the model's {longest}; lower --context")
    return asked or min(DEFAULT_CONTEXT, longest)


def longest_of(config: Config) -> int | None:
    """How many tokens a model takes at once; none: it does not say, or says that it knows no end."""
    longest = getattr(of_words(config), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def embedding_rows(model: Model) -> int:
    """How many tokens a model can read; what some give for their embedding is something else."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return int(of_words(model.config).vocab_size if weight is None else weight.shape[0])


@contextmanager
def quiet_bars() -> Iterator[None]:
    """transformers' own bars off for a while: whoever calls us shows how far it is."""
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@contextmanager
def _explained(source: ModelSource, what: str) -> Iterator[None]:
    """Whatever transformers, tokenizers or safetensors say of somebody's files: one sentence of ours.

    Each of them raises a dozen kinds, the Rust ones even a bare Exception.
    """
    try:
        yield
    except FfncompressError:
        raise
    except MemoryError as error:
        raise ModelError(f"{source.name}: there is not enough memory to load it; use a larger machine") from error
    except Exception as error:
        raise ModelError(
            f"{source.name}: {what} ({in_short(error)}); check its files, or get the model again"
        ) from error
