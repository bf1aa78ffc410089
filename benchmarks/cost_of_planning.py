"""What a plan costs: its stages as ratios to a bare forward pass, its peak memory, and how both grow.

    python benchmarks/cost_of_planning.py MODELS DATA --results FILE [--before CHECKOUT] [--cases headline growth]

Every plan is made in a fresh process through `ffncompress.plan`, of the model cut to some of its first layers; the
seconds of its stages are those of its timings.json. In the same process, before it, the bare pass is timed: the layers
without the head, over as many tokens as the plan is fitted on, in batches of 1,024, as transformers by itself runs
them. --before names another checkout of this project, whose plans are made in turns with ours. "headline" is a plan as
in frontier.py; "growth" has two widths, two depths, two token counts; "processes" is one plan by 1, 2 and 3 of them,
one thread each. FILE keeps each finished plan: a killed run goes on from it.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 1024  # tokens
WAYS = ("before", "after")
# model, layers, tokens of the survey (a quarter held out, 8,192 at most), tokens that are refitted on
HEADLINE = {"smollm2, as in the frontier": ("smollm2", 30, 32_768, 65_536)}
GROWTH = {
    "smollm2, 6 layers": ("smollm2", 6, 16_384, 16_384),
    "a half as wide: stories15m, 6 layers": ("stories15m", 6, 16_384, 16_384),
    "twice as deep": ("smollm2", 12, 16_384, 16_384),
    "twice the tokens": ("smollm2", 6, 32_768, 32_768),
}
PROCESSES = {"smollm2, 6 layers": GROWTH["smollm2, 6 layers"]}


def cut(model: Path, layers: int, folder: Path) -> None:
    """The first layers of a model, as a checkpoint."""
    found = AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=layers, dtype=torch.float32)
    found.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


@torch.inference_mode()
def bare_seconds(folder: Path, tokens: int, length: int) -> float:
    """One forward pass of the layers, after a warm-up."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model.eval()
    batch = torch.randint(3, 1000, (BATCH // length, length))
    model(input_ids=batch, use_cache=False)
    start = time.perf_counter()
    for _ in range(tokens // batch.numel()):
        model(input_ids=batch, use_cache=False)
    return time.perf_counter() - start


def work(folder: Path, case: tuple[str, int, int, int], data: Path) -> dict:
    """One plan, in this process."""
    import ffncompress

    name, _, tokens, refitted = case
    if name == "stories15m":
        length, texts = 256, {"data": [str(data / "domains" / "stories.txt")]}
    else:
        wiki = data / "wikitext2"
        length = 512
        texts = {"data": [str(wiki / "wiki.train.prefix.raw")], "choose_data": [str(wiki / "wiki.valid.raw")]}
    fitted = max(refitted, tokens - min(tokens // 4, 8192))
    alone = "RANK" not in os.environ
    bare = bare_seconds(folder, fitted, length) if alone else 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    start, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(os.environ.get("PLAN_OUTPUT", scratch)) / "plan"
        plan = ffncompress.plan(
            str(folder), output, budget="-10%", tokens=tokens, refit_tokens=refitted, seq_len=length, **texts
        )
        seconds = time.perf_counter() - start
        stages = json.loads((output / "timings.json").read_text()) if alone else {}
    return {
        "bare": bare, "seconds": seconds, "cpu": time.process_time() - used, "stages": stages, "bare MB": before,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "replaced": len(plan.replaced),
        "rise": plan.joint_checks[-1].delta / plan.joint_checks[-1].base_perplexity,
    }  # fmt: skip


def child(case: tuple[str, int, int, int], options: argparse.Namespace, way: str, processes: int = 0) -> dict:
    """One plan in a fresh process, or by several under torchrun; of those, the busiest one's answer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        cut(options.models / case[0], case[1], folder)
        answers = Path(scratch) / "answers"
        answers.mkdir()
        words = [__file__, "--work", str(folder), json.dumps(case), str(options.data.resolve()), str(answers)]
        package = options.before if way == "before" else Path(__file__).resolve().parent.parent
        environment = {**os.environ, "PYTHONPATH": str(package)}
        launcher = []
        if processes:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            environment |= {"OMP_NUM_THREADS": "1", "PLAN_OUTPUT": scratch}
        subprocess.run([sys.executable, *launcher, *words], check=True, env=environment, capture_output=True, text=True)
        found = [json.loads(file.read_text()) for file in answers.glob("*.json")]
    return max(found, key=lambda answer: answer["cpu"])


def table(results: dict, names: list[str]) -> str:
    """A row for each case and way."""
    lines = [
        "| plan | | of a bare pass | seconds | bare | peak MB (bare) | rise of perplexity |",
        "| --- |" + " --- |" * 6,
    ]
    for name in names:
        for way in WAYS:
            if found := results.get(f"{name} | {way}"):
                memory = f"{found['MB']:,.0f} ({found['bare MB']:,.0f})"
                times = f"{found['seconds'] / found['bare']:.2f} | {found['seconds']:.0f} | {found['bare']:.1f}"
                lines.append(f"| {name} | {way} | {times} | {memory} | {found['rise']:+.2%} |")
    return "\n".join(lines)


def stages(results: dict, names: list[str]) -> str:
    """A row for each stage that takes a fiftieth of a pass, a column for each plan."""
    found = {key: results[key] for name in names for way in WAYS if (key := f"{name} | {way}") in results}
    found = {
        key: answer | {"stages": {re.sub(r" \d+ ", " ", name): took for name, took in answer["stages"].items()}}
        for key, answer in found.items()
    }
    every = dict.fromkeys(stage for answer in found.values() for stage in answer["stages"])
    lines = [
        "| stage | " + " | ".join(key.replace(" | ", ", ") for key in found) + " |",
        "| --- |" + " --- |" * len(found),
    ]
    for stage in every:
        shares = [answer["stages"].get(stage, 0.0) / answer["bare"] for answer in found.values()]
        if max(shares) >= 0.02:
            lines.append(f"| {stage} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return "\n".join(lines)


def shared(results: dict) -> str:
    """A row for each number of processes."""
    lines = [
        "| processes | CPU seconds of the busiest | of one process's | rise of perplexity |",
        "| --- |" + " --- |" * 3,
    ]
    one = results.get("1 processes")
    for count in (1, 2, 3):
        if (found := results.get(f"{count} processes")) and one:
            lines.append(f"| {count} | {found['cpu']:.0f} | {found['cpu'] / one['cpu']:.2f} | {found['rise']:+.4%} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        folder, case, data, answers = sys.argv[2:]
        answer = work(Path(folder), tuple(json.loads(case)), Path(data))
        (Path(answers) / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(answer))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    kinds = ["headline", "growth", "processes"]
    parser.add_argument("--cases", nargs="+", choices=kinds, default=kinds)
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}

    def keep(key: str, *how: object) -> None:
        if key not in results:
            results[key] = child(*how)
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            print(key, {name: round(value, 3) for name, value in results[key].items() if name != "stages"}, flush=True)

    cases = (HEADLINE if "headline" in options.cases else {}) | (GROWTH if "growth" in options.cases else {})
    for name, case in cases.items():
        for way in WAYS if options.before else WAYS[1:]:
            keep(f"{name} | {way}", case, options, way)
    if cases:
        print(f"\n{table(results, [*cases])}\n\n{stages(results, [*cases])}")
    if "processes" in options.cases:
        for case in PROCESSES.values():
            for count in (1, 2, 3):
                keep(f"{count} processes", case, options, "after", count)
        print(f"\n{shared(results)}")


if __name__ == "__main__":
    main()
