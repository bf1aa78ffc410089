"""profile, plan, apply and eval of a checkpoint that is at least four times larger than the memory they may take.

    python benchmarks/larger_than_memory.py FOLDER --limit 700MB [--only apply eval] [--plan --blocks 0,1 --budget 4x]

Writes a random Llama of about four times the limit into FOLDER, in shards, and runs each command as a child process in
a control group of the kernel's with that hard limit: who takes more is killed. Without control groups, or the right to
make one, the limit is that of a process's data (RLIMIT_DATA). Its attention is wide and its FFNs are narrow, so that
moments stay small beside it and the whole takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from shutil import copyfile

from ffncompress.budgets import parse_size

SHAPE = {
    "vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 128, "head_dim": 128,
    "num_key_value_heads": 128, "max_position_embeddings": 256,
}  # fmt: skip
READING = ["--tokens", "1440", "--data", "text.txt"]
COMMANDS = ("profile", "plan", "apply", "eval")


def write_model(folder: Path, size: int) -> int:
    """A random Llama of at least so many bytes, a shard for every few layers; returns its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = LlamaConfig(**SHAPE, num_hidden_layers=1, torch_dtype="float32", bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in LlamaForCausalLM(layer).state_dict().items()}
    own = {name: shape for name, shape in shapes.items() if ".layers.0." in name}
    others = {name: shape for name, shape in shapes.items() if name not in own}
    left = size - 4 * sum(shape.numel() for shape in others.values())
    layer.num_hidden_layers = -(-left // (4 * sum(shape.numel() for shape in own.values())))
    groups = [others] + [
        {
            name.replace(".0.", f".{i}.", 1): s
            for i in range(first, min(first + 4, layer.num_hidden_layers))
            for name, s in own.items()
        }
        for first in range(0, layer.num_hidden_layers, 4)
    ]
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    weight_map = {}
    for at, group in enumerate(groups):
        file = f"model-{at + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: torch.randn(s) / s[-1] ** 0.5 if len(s) > 1 else torch.ones(s) for name, s in group.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    layer.architectures = ["LlamaForCausalLM"]
    layer.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(str(files("ffncompress") / "demo" / "model" / name), folder / name)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """A control group of its own with a hard limit, or none where there is no making one."""
    root = Path("/sys/fs/cgroup")
    root = root / "memory" if (root / "memory").is_dir() else root
    group = root / f"ffncompress-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")).write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def run(words: list[str], folder: Path, group: Path | None, limit: int) -> tuple[int, float, int]:
    """Run a command under the limit: (its exit code, seconds, the most bytes that were its own)."""

    def enter() -> None:
        if group is None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        else:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    start, peak = time.monotonic(), 0
    child = subprocess.Popen([sys.executable, "-m", "ffncompress", *words], cwd=folder, preexec_fn=enter)
    while child.poll() is None:
        peak = max(peak, anonymous(child.pid))
        time.sleep(0.2)
    return child.returncode, time.monotonic() - start, peak


def forget(folder: Path) -> None:
    """Let the kernel drop what it has of some files: who reads them first is charged for their pages."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous(process: int) -> int:
    """What a process holds that is not a view of a file."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
    except OSError:
        return 0


def main() -> None:
    """Make the model, run the commands, print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", default="700MB")
    parser.add_argument("--times", type=float, default=4.05, help="how much larger than the limit the model is")
    parser.add_argument(
        "--only", nargs="+", choices=COMMANDS, default=COMMANDS, help="go on in a FOLDER that has the rest"
    )
    parser.add_argument("--plan", nargs=argparse.REMAINDER, default=["--budget", "-2%"], help="how to plan; comes last")
    asked = parser.parse_args()
    folder, limit = asked.folder.resolve(), parse_size(asked.limit)
    if not (folder / "large").is_dir():
        write_model(folder / "large", int(asked.times * limit))
    size = sum(file.stat().st_size for file in (folder / "large").glob("*.safetensors"))
    (folder / "text.txt").write_text("\n".join(topics.values()), encoding="utf-8")
    how = ["--memory", asked.limit, "--overwrite"]
    commands = {
        "profile": ["profile", "large", "-o", "report", "--no-swaps", *READING, *how],
        "plan": ["plan", "large", "-o", "plan", *asked.plan, "--context", "128", *READING, *how],
        "apply": ["apply", "plan", "-o", "slim", *how],
        "eval": ["eval", "slim", "--tokens", "512", "--context", "128", "--data", "text.txt", *how[:2]],
    }
    print(f"{size:,} bytes of weights, {size / limit:.2f} times the limit of {limit:,}")
    rows = []
    forget(folder / "large")
    with limited(limit) as group:
        for name in asked.only:
            code, seconds, peak = run(commands[name], folder, group, limit)
            rows.append(f"| {name} | {code} | {seconds:.0f} | {peak / 1e6:.0f} |")
            print(rows[-1], flush=True)
            if code not in (0, 1):  # a random model reads nothing: the gate says so, with 1
                break
    print(f"limit by {'a control group' if group else 'RLIMIT_DATA'}")
    print("\n".join(["| command | exit code | seconds | MB of its own at most |", "| --- | --- | --- | --- |", *rows]))


if __name__ == "__main__":
    main()
