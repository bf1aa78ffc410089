"""Plans by several processes beside the plan of one: are the choices the same, how far apart are the tensors?

    python benchmarks/processes.py MODEL [--processes 1,2,3] [--tokens 4096] [--data TEXT] [--threads 1]

Every plan is made under torchrun, with as many threads to a process as --threads says: float32 products differ with the
number of threads, whatever the number of processes. The difference of two tensors is the largest of their elements'
over the largest element. Work is the CPU time of the busiest process, as a ratio to that of one process alone; what
cannot be shared out (loading the model, reading text, drawing) is in it, imports are not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = {
    "default limit": [],
    "--budget -15%": ["--budget=-15%"],
    "--blocks 0-1 --budget 8x": ["--blocks", "0-1", "--budget", "8x"],
    "--frontier": ["--frontier"],
}


def work(arguments: list[str], output: Path) -> None:
    """One process of a plan; what it took is left beside the plan."""
    import ffncompress.planner  # noqa: F401  # before the clock starts
    import torch.distributed

    from ffncompress.cli import run

    start = time.process_time()
    code = run(["plan", *arguments, "-o", str(output)])
    seconds = time.process_time() - start
    output.with_name(f"{output.name}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seconds))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


class Refused(Exception):
    """A plan that these settings do not give of this model."""


def launch(count: int, threads: int, arguments: list[str], output: Path) -> float:
    """A plan by so many processes; returns the CPU seconds of the busiest."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    command = [sys.executable, *launcher, __file__, "--work", str(output), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ffncompress")]
        raise Refused(said[0] if said else done.stderr)
    return max(json.loads(file.read_text()) for file in output.parent.glob(f"{output.name}.*.json"))


def choices(plan) -> list[tuple | None]:
    found = [block.choice for block in plan.blocks]
    return [option and (option.kind, option.width, option.rank, option.weighting) for option in found]


def apart(one: dict, other: dict) -> float:
    """The largest difference of two plans' tensors, relative to the largest element; infinite where shapes differ."""
    if {name: t.shape for name, t in one.items()} != {name: t.shape for name, t in other.items()}:
        return float("inf")
    pairs = [(tensor.double(), other[name].double()) for name, tensor in one.items() if tensor.numel()]
    return max((((a - b).abs().max() / a.abs().max().clamp_min(1e-300)).item() for a, b in pairs), default=0.0)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[3:], Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--processes", default="1,2,3")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", default="python-docs")
    options = parser.parse_args()
    counts = [int(count) for count in options.processes.split(",")]
    print(
        "| settings | processes | same choices | tensors | joint perplexity | work per process |\n" + "|---" * 6 + "|"
    )
    for name, settings in SETTINGS.items():
        try:
            compare(name, settings, counts, options)
        except Refused as refusal:
            print(f"| {name} | {refusal} | | | | |", flush=True)


def compare(name: str, settings: list[str], counts: list[int], options: argparse.Namespace) -> None:
    """A row for each number of processes but the first, which the others are compared with."""
    from safetensors.torch import load_file

    from ffncompress.records.plan import Plan
    from ffncompress.records.plan_files import TENSOR_FILE

    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            arguments = [options.model, "--tokens", options.tokens, "--data", options.data, *settings]
            output = Path(folder) / str(count)
            seconds = launch(count, options.threads, arguments, output)
            file = output / TENSOR_FILE
            made[count] = Plan.load(output), load_file(file) if file.is_file() else {}, seconds
    first, tensors, alone = made[counts[0]]
    for count in counts[1:]:
        plan, others, seconds = made[count]
        same = choices(plan) == choices(first)
        ends = [
            each.joint_checks[-1].perplexity if each.joint_checks else each.base_perplexity for each in (first, plan)
        ]
        rest = f"{abs(ends[1] / ends[0] - 1):.1e} | {seconds / alone:.2f}"
        print(f"| {name} | {count} | {same} | {apart(tensors, others):.1e} | {rest} |", flush=True)


if __name__ == "__main__":
    main()
