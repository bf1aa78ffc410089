"""A GGUF file asked through llama.cpp (the package xllamacpp): how it tokenises, what it predicts, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ffncompress.errors import ArtifactError

MISSING = "llama.cpp is not installed here; it is with: pip install 'ffncompress[gguf]'"
LONGEST = 3600.0  # seconds


@dataclass(frozen=True)
class Answer:
    """What llama.cpp said of a file, in the order of the questions."""

    tokens: list[list[int]]
    log_probabilities: list[list[list[tuple[int, float]]]]  # sequence, position, (token, log-probability)
    generated: list[dict[str, Any]]


def available() -> bool:
    """Whether a llama.cpp is installed that can be asked."""
    return find_spec("xllamacpp") is not None


def version() -> str:
    """Which one."""
    return f"xllamacpp {metadata.version('xllamacpp')}" if available() else "none"


def ask(
    file: str | Path,
    *,
    texts: Sequence[str] = (),
    sequences: Sequence[Sequence[int]] = (),
    generate: Sequence[tuple[str | list[int], int]] = (),
    top: int = 16,
    context: int = 512,
    exact: bool = True,
    threads: int = 1,
) -> Answer:
    """Load a file in llama.cpp, in a process of its own, and ask it.

    Args:
        file: a GGUF file.
        texts: to be tokenised.
        sequences: token ids whose log-probabilities are told, with those of the likeliest others.
        generate: prompts, and how many tokens to continue each by.
        top: how many of the likeliest tokens are told at each position.
        context: how many tokens it reads at once.
        exact: in 32-bit numbers throughout, as far as the file's are.
        threads: how many it computes with.

    Raises:
        ArtifactError: llama.cpp is missing, does not load the file, or stops.
    """
    if not available():
        raise ArtifactError(MISSING)
    question = {
        "texts": list(texts), "sequences": [list(ids) for ids in sequences], "generate": list(generate), "top": top,
        "context": context, "exact": exact, "threads": threads,
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "ffncompress.exporting.llama_child", str(file)]
    try:
        done = subprocess.run(command, input=json.dumps(question).encode(), capture_output=True, timeout=LONGEST)
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(f"{file}: llama.cpp did not answer within {LONGEST:g} s; use a quicker machine") from error
    if done.returncode:
        raise ArtifactError(f"{file}: llama.cpp does not take it ({_reason(done.stderr)}); please report this")
    said = json.loads(done.stdout[done.stdout.index(b'{"tokens"') :])
    return Answer(said["tokens"], said["log_probabilities"], said["generated"])


def _reason(log: bytes) -> str:
    """The line of llama.cpp's log that says what is wrong, or its last."""
    from ffncompress.sanitize import plain

    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "assert" in line.lower()]
    return plain((telling or lines or ["it said nothing"])[0])[:300]
