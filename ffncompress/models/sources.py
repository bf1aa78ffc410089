"""From what a person types (a Hub id, a folder, a .gguf file) to a model on this disk, and its identity."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ffncompress.errors import ModelError
from ffncompress.storage.manifest import sha256_of

EMBEDDED = "demo"
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
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
        if self.is_hub or self.is_embedded:
            return self.name
        return self.gguf_file or self.directory.resolve().name

    @property
    def is_embedded(self) -> bool:
        """Whether it is the model that ships inside the package."""
        return self.name == EMBEDDED

    @property
    def place(self) -> Path:
        """Where it lies on this machine."""
        return (self.directory / self.gguf_file if self.gguf_file else self.directory).resolve()

    def weight_files(self) -> list[Path]:
        """The files that hold its weights, in a fixed order."""
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
        """What its weights take."""
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
