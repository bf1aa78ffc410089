"""`ffncompress export` as a person meets it: the README's way to Ollama, exit codes, JSON, sentences."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ffncompress.cli import run
from ffncompress.exporting import llama_cpp

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_readmes_way_to_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it on the embedded model, but Ollama itself; the Modelfile names the file that came of it."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = next(block for block in blocks if "ollama create" in block).splitlines()
    *lines, last = [line for line in lines if " eval " not in line]
    assert len(lines) == 3
    assert last.endswith("ollama run slim")
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = ["demo" if "/SmolLM2" in word else word for word in words]
        words += ["--tokens", "2048", "--no-refit"] if words[0] == "plan" else []
        assert run(words) == 0, line
    named = re.search(r"^FROM (.*)$", (ROOT / "recipes" / "ollama" / "Modelfile").read_text(), re.M)
    assert named
    assert (tmp_path / named[1]).read_bytes().startswith(b"GGUF")
    if llama_cpp.available():
        written = llama_cpp.ask(tmp_path / "slim.gguf", generate=[("The function returns", 8)], context=64)
        assert written.generated[0]["text"].strip()


def test_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    file = str(tmp_path / "demo.gguf")
    words = ["export", "demo", "--to", "gguf", "-o", file, "--no-verify", "--json"]
    assert run([*words, "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "gguf"
    assert said["bytes"] == Path(file).stat().st_size
    assert run(words[:-1]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "none"), "--to", "gguf", "-o", f"{file}2"]) == 2
    assert run(["export", "demo", "--to", "vllm", "-o", str(tmp_path / "v")]) == 2
    assert "plan MODEL --native" in capsys.readouterr().err


@pytest.mark.skipif(not llama_cpp.available(), reason="xllamacpp is not installed")
def test_a_file_that_llama_cpp_does_not_take_is_an_error_of_ours(tmp_path: Path) -> None:
    """It stops its own process, not ours."""
    from ffncompress.errors import ArtifactError

    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ArtifactError, match="does not take it"):
        llama_cpp.ask(tmp_path / "bad.gguf", texts=["a"])
