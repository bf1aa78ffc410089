"""From what a person types (a Hub id, a folder, a .gguf file) to a model, its tokenizer and its identity."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ffncompress.errors import FfncompressError, ModelError, NumericsError
from ffncompress.manifest import sha256_of
from ffncompress.words import in_short, parse_json

EMBEDDED = "demo"
DEFAULT_CONTEXT = 512
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
# besides the weights, what decides how a model reads and what it answers
_IDENTITY = (
    "config.json", "tokenizer*.json", "tokenizer*.model", "*.tiktoken", "spiece.model", "sentencepiece*.model",
    "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """A model that lies on this disk, and what it is called elsewhere."""

    name: str  # as it was given
    directory: Path
    gguf_file: str | None = None
    revision: str | None = None
    is_hub: bool = False
    trust_remote_code: bool = False

    @property
    def label(self) -> str:
        """What it is called in files that leave this machine: never a path."""
        if self.is_hub or self.name == EMBEDDED:
            return self.name
        return self.gguf_file or self.directory.resolve().name

    @property
    def place(self) -> Path:
        """Where it lies on this machine."""
        return (self.directory / self.gguf_file if self.gguf_file else self.directory).resolve()

    def weight_files(self) -> list[Path]:
        return [self.directory / self.gguf_file] if self.gguf_file else sorted(self.directory.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """sha256 over weights, config and tokenizer: what makes a plan this model's plan."""
        digest = hashlib.sha256()
        identity = [] if self.gguf_file else {file for name in _IDENTITY for file in self.directory.glob(name)}
        for file in (*self.weight_files(), *sorted(identity)):
            digest.update(f"{file.name} {_content(file)}\n".encode())
        return digest.hexdigest()

    def weights_fingerprint(self) -> str:
        """sha256 over the weight files alone, as plans before 0.4 knew a model."""
        return hashlib.sha256("".join(map(_content, self.weight_files())).encode()).hexdigest()

    def bytes_on_disk(self) -> int:
        return sum(file.stat().st_size for file in self.weight_files())


def find_model(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Locate a model; a Hub id is downloaded (safetensors and text files only, never a pickle).

    Raises:
        ModelError: there is no such model, or it has no safetensors.
    """
    name = str(name) if isinstance(name, Path) else name
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelError("give a model by its name: a Hub id, a model folder or a .gguf file")
    path = Path(name) if re.match(r"~[^/]", name) else Path(name).expanduser()  # another's home is not looked for
    if _is_there(path) and path.is_file() and path.suffix == ".gguf":
        return ModelSource(name, path.parent, gguf_file=path.name)
    if name == EMBEDDED:  # before any folder of that name, which is ./demo
        source = ModelSource(name, Path(str(files("ffncompress") / "demo" / "model")))
    elif _is_there(path) and path.is_dir():
        source = ModelSource(name, path, trust_remote_code=trust_remote_code)
    elif path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such file or folder; give a Hub id, a model folder or a .gguf file")
    else:
        directory = _snapshot(name, revision)
        source = ModelSource(name, directory, None, directory.name, True, trust_remote_code)
    if not (source.directory / "config.json").is_file():
        raise ModelError(f"{name}: there is no config.json in it; give the folder of a Hugging Face model")
    if (source.directory / "adapter_config.json").is_file():  # it would send transformers after another model
        raise ModelError(f"{name}: an adapter, not a whole model; merge it into its base first, and save that")
    if not source.weight_files():
        raise ModelError(
            f"{name}: it has no .safetensors weights, and pickled ones are never read; "
            "convert it first with model.save_pretrained(FOLDER)"
        )
    return source


def load_model(source: ModelSource, *, dtype: str = "auto", device_map: Any = None) -> Any:
    """The model in evaluation mode. "auto" keeps the dtype that the weights are stored in.

    Raises:
        ModelError: it cannot be loaded, or not whole.
        NumericsError: a weight is NaN or infinite.
    """
    import torch

    if dtype not in _DTYPES:
        raise ModelError(f"{dtype}: unknown dtype; one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "device_map": device_map}
    if source.gguf_file:
        if find_spec("gguf") is None:
            raise ModelError("reading a .gguf file needs the gguf package; install it: pip install 'ffncompress[gguf]'")
        from transformers import GgufConfig

        options |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        if dtype == "auto":
            options["dtype"] = torch.float32
    else:
        options |= {"use_safetensors": True, "trust_remote_code": source.trust_remote_code}
    with _explained(source, "not loadable as a causal language model"):
        model = load_whole(source.directory, source.name, **options)
    if source.gguf_file:
        model.is_quantized, model.hf_quantizer = False, None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model.eval()


def load_whole(directory: str | Path, name: str, **options: Any) -> Any:
    """A causal language model, all of it.

    transformers fills what is missing with random numbers, and says so in a warning that nobody sees.

    Raises:
        ModelError: some of its tensors were missing, or of another shape.
        NumericsError: a weight is NaN or infinite.
    """
    from transformers import AutoModelForCausalLM

    if "gguf_file" not in options:
        _check_depth(Path(directory), name)
    with quiet_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    model, info = loaded
    absent = sorted(str(key[0] if isinstance(key, tuple) else key)
                    for kind in ("missing_keys", "mismatched_keys") for key in info.get(kind, ()))  # fmt: skip
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelError(
            f"{name}: {absent[0]}{more} missing from its weights, or of another shape than its config.json says; "
            "get the model again, whole"
        )
    for key, value in model.named_parameters():
        if not value.is_meta and not value.isfinite().all():
            raise NumericsError(f"{name}: {key} is NaN or infinite in places; check the model's weights")
    return model


def _check_depth(directory: Path, name: str) -> None:
    """A layer has a tensor at least; transformers would first build all that a config names, for hours if it says so.

    Raises:
        ModelError: there are more layers than tensors.
    """
    from safetensors import safe_open

    config = parse_json((directory / "config.json").read_text(encoding="utf-8"))
    depths = [value for key in _DEPTHS if type(value := config.get(key)) in (int, float)]
    tensors = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            tensors += len(content.keys())
    if max(depths, default=0) > tensors:
        raise ModelError(
            f"{name}: its config.json speaks of {max(depths):g} layers, its weights are {tensors} tensors; "
            "get the model again, whole"
        )


def load_config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    options = {"gguf_file": source.gguf_file} if source.gguf_file else {"trust_remote_code": source.trust_remote_code}
    with _explained(source, "its config cannot be read"):
        return AutoConfig.from_pretrained(source.directory, **options)


def load_random(source: ModelSource, *, seed: int, dtype: str = "float32") -> Any:
    """The same architecture with fresh weights, as its family initialises them."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(source)
    config.quantization_config = None
    with _explained(source, "not to be built anew"), torch.random.fork_rng(devices=[]), quiet_bars():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
    return model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype)).eval()


def load_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    with _explained(source, "its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, gguf_file=source.gguf_file, trust_remote_code=source.trust_remote_code
        )
        tokenizer("a")  # a damaged one may load, and fail at the first word
    return tokenizer


def context_of(model: Any, asked: int | None) -> int:
    """The context length to measure perplexity at: as asked, or DEFAULT_CONTEXT where the model takes it.

    Raises:
        ModelError: it is more than the model takes.
    """
    longest = getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    if asked and asked > longest:
        raise ModelError(f"a context of {asked} is more than the model's {longest}; lower --context")
    return asked or min(DEFAULT_CONTEXT, longest)


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


def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # huggingface_hub, its HTTP client and the socket each have their own
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{name}{at}: neither a folder here nor a model that the Hub gives ({type(error).__name__}); "
            "check the name and the network, or give a local folder"
        ) from error


def _content(file: Path) -> str:
    """A file's sha256. The Hub's own cache names a large blob by it: only there is a name believed."""
    from huggingface_hub import constants

    blob = file.resolve()
    home = Path(constants.HF_HUB_CACHE).resolve()
    in_cache = blob.is_relative_to(home) and blob.parent.name == "blobs" and blob.parent.parent.parent == home
    if file.is_symlink() and in_cache and len(blob.name) == 64 and set(blob.name) <= set("0123456789abcdef"):
        return blob.name
    return sha256_of(file)


def _is_there(path: Path) -> bool:
    """Whether a path can be looked at; a name of a thousand letters cannot."""
    try:
        return path.exists()
    except OSError:
        return False


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
