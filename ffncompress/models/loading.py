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

from ffncompress.errors import ModelError

EMBEDDED = "demo"
DEFAULT_CONTEXT = 512
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSource:
    """A model that lies on this disk, and what it is called elsewhere."""

    name: str  # as it was given
    directory: Path
    gguf_file: str | None = None
    revision: str | None = None
    is_hub: bool = False
    trust_remote_code: bool = False

    def weight_files(self) -> list[Path]:
        return [self.directory / self.gguf_file] if self.gguf_file else sorted(self.directory.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """sha256 over the weight files: what makes a plan this model's plan."""
        digest = hashlib.sha256()
        for file in self.weight_files():
            blob = file.resolve().name  # the Hub's cache names a blob by its sha256
            digest.update((blob if re.fullmatch("[0-9a-f]{64}", blob) else _sha256(file)).encode())
        return digest.hexdigest()

    def bytes_on_disk(self) -> int:
        return sum(file.stat().st_size for file in self.weight_files())


def find_model(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Locate a model; a Hub id is downloaded (safetensors and text files only, never a pickle).

    Raises:
        ModelError: there is no such model, or it has no safetensors.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(name, path.parent, gguf_file=path.name)
    if name == EMBEDDED:  # before any folder of that name, which is ./demo
        source = ModelSource(name, Path(str(files("ffncompress") / "demo" / "model")))
    elif path.is_dir():
        source = ModelSource(name, path, trust_remote_code=trust_remote_code)
    elif path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such file or folder; give a Hub id, a model folder or a .gguf file")
    else:
        directory = _snapshot(name, revision)
        source = ModelSource(name, directory, None, directory.name, True, trust_remote_code)
    if not (source.directory / "config.json").is_file():
        raise ModelError(f"{name}: there is no config.json in it; give the folder of a Hugging Face model")
    if not source.weight_files():
        raise ModelError(
            f"{name}: it has no .safetensors weights, and pickled ones are never read; "
            "convert it first with model.save_pretrained(FOLDER)"
        )
    return source


def load_model(source: ModelSource, *, dtype: str = "auto", device_map: Any = None) -> Any:
    """The model in evaluation mode. "auto" keeps the dtype that the weights are stored in."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

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
    try:
        with quiet_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(source.directory, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{source.name}: not loadable as a causal language model: {_first_line(error)}") from error
    if source.gguf_file:
        model.is_quantized, model.hf_quantizer = False, None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model.eval()


def load_config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    try:
        options = (
            {"gguf_file": source.gguf_file} if source.gguf_file else {"trust_remote_code": source.trust_remote_code}
        )
        return AutoConfig.from_pretrained(source.directory, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{source.name}: its config cannot be read: {_first_line(error)}") from error


def load_random(source: ModelSource, *, seed: int, dtype: str = "float32") -> Any:
    """The same architecture with fresh weights, as its family initialises them."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(source)
    config.quantization_config = None
    with torch.random.fork_rng(devices=[]), quiet_bars():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
    return model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype)).eval()


def load_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source.directory, gguf_file=source.gguf_file, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{source.name}: its tokenizer cannot be loaded: {_first_line(error)}") from error


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


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:240] if lines else type(error).__name__
