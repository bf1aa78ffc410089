"""Perplexity at a given size: our planner, each item of its menu alone, the paper's rule, and five peers' ideas.

    python benchmarks/frontier.py MODELS DATA --results FILE [--only smollm2] [--tasks 100] [--parts peers]
        [--shares 0.25]

One run, the same tokens for every method: at most 65,536 fit tokens. smollm2 is fitted on WikiText-2 train, choices are
made on validation, and perplexity is reported on the first 8,192 tokens of test and of web.txt, at context 512.
stories15m is fitted, chosen and reported on thirds of stories.txt, at context 256. Accuracy on LAMBADA and ARC-easy
comes from lm-eval. FILE collects the results as they come: a run that was stopped goes on where it was.
"""

import argparse
import copy
import json
import math
import resource
import time
from pathlib import Path

import torch
from library.baselines import METHODS, NEED_GRAMS, gather
from torch import Tensor

from ffncompress import recovery
from ffncompress.models import (
    context_of,
    count_parameters,
    ffn_of,
    find_blocks,
    find_model,
    install_,
    load_model,
    load_tokenizer,
)
from ffncompress.passes.activations import own_batches
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import loss_metrics
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.refit import refit
from ffncompress.planning.common_width import width_within_size
from ffncompress.planning.measuring import GRADIENT_TOKENS, measure_model
from ffncompress.planning.planner import solve
from ffncompress.records.plan import Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import exact_map, fit_some
from ffncompress.replacement.modules import parameters
from ffncompress.runtime.products import fast_products, usual_products
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings
from ffncompress.text.sources import read
from ffncompress.text.windows import joined_windows

FIT_TOKENS, SURVEY_TOKENS, REPORT_TOKENS = 65_536, 24_576, 8_192
SHARES = (0.10, 2 / 15, 0.25, 0.50)  # of the FFNs' parameters that go: 126.6 M, 123.9 M, 114.6 M and 94.7 M of smollm2
TASKS_AT = 0.25
BYPASS_RANK = 64
MENU = ("neurons", "hybrid", "dense", "low-rank", "constant", "paper's rule")
ORDER = ("dense model", "ours", "ours, fitted on both", "native", "native, unrounded", *MENU, *METHODS)


class Bench:
    """A model, its texts, and the results so far."""

    def __init__(
        self, name: str, models: Path, data: Path, results: Path, tasks: int, shares: tuple[float, ...] = SHARES
    ) -> None:
        self.name, self.data, self.file, self.task_count, self.shares = name, data, results, tasks, shares
        self.reread()
        self.source = find_model(str(models / name))
        self.tokenizer = load_tokenizer(self.source)
        self.run = Run(Workers("cpu"))
        self.model = load_model(self.source)
        self.blocks = find_blocks(self.model)
        self.whole = count_parameters(self.model)
        ffns = sum(block.parameters for block in self.blocks)
        self.sizes = {share: self.whole - round(share * ffns) for share in SHARES}
        self.context = context_of(self.model, None)
        wiki, web = data / "wikitext2", data / "domains" / "web.txt"
        if name == "stories15m":
            parts = thirds(data / "domains" / "stories.txt", results.parent)
        else:
            parts = [wiki / "wiki.train.prefix.raw", wiki / "wiki.valid.raw", wiki / "wiki.test.raw"]
        self.settings = {
            "data": [str(parts[0])], "choose_data": [str(parts[1])], "seq_len": self.context,
            "tokens": SURVEY_TOKENS + 8192, "refit_tokens": FIT_TOKENS,
        }  # fmt: skip
        count = REPORT_TOKENS // self.context
        self.reports = {"in domain": self.windows(parts[2], count)}
        if name != "stories15m":  # which has seen nothing but stories: its perplexity there is in the thousands
            self.reports["web"] = self.windows(web, count)
        self.fit = self.windows(parts[0], FIT_TOKENS // self.context, seed=0)

    def windows(self, file: Path, count: int, seed: int | None = None) -> Tensor:
        found = joined_windows(read(str(file)), self.tokenizer, length=self.context, count=count, seed=seed)
        return torch.stack(found.rows)

    def record(self, method: str, share: float, model: torch.nn.Module, **more: float) -> None:
        """Measure an edited model and write it down."""
        entry = {"parameters": count_parameters(model), **more}
        same = [e for k, e in self.results.items() if k.startswith(f"{self.name} | {method} |")]
        same = [
            e for e in same if e["parameters"] == entry["parameters"] and share != TASKS_AT and "time ratio" not in e
        ]
        if same:  # whole layers or blocks go: two sizes can be one model
            entry = {name: value for name, value in same[0].items() if name not in ("lambada", "arc_easy")}
        for text, ids in () if same else self.reports.items():
            entry[text] = perplexity(sequence_losses(model, ids, self.run))
        if share in (0.0, TASKS_AT) and self.task_count:
            entry |= accuracies(model, self.tokenizer, self.data / "tasks", self.task_count, self.context)
        self.reread()
        self.results[self.key(method, share)] = entry
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")
        print(self.key(method, share), {k: round(v, 3) for k, v in entry.items()}, flush=True)

    def reread(self) -> None:
        """Take up what another process wrote: several may share the work by --parts."""
        self.results = json.loads(self.file.read_text()) if self.file.exists() else {}

    def key(self, method: str, share: float) -> str:
        return f"{self.name} | {method} | {share:.4f}"

    def missing(self, method: str, shares: tuple[float, ...] | None = None) -> list[float]:
        """What is still to be measured, the size with tasks first."""
        todo = [share for share in shares or self.shares if self.key(method, share) not in self.results]
        return sorted(todo, key=lambda share: share != TASKS_AT)

    def edited(self, modules: dict[int, torch.nn.Module]) -> torch.nn.Module:
        model = copy.deepcopy(self.model)
        return install_(model, {self.blocks[i].path: module for i, module in modules.items()})


def thirds(file: Path, scratch: Path) -> list[Path]:
    """A text in three parts, cut at line ends."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = []
    for i in range(3):
        part = scratch / f"{file.stem}-{i + 1}.txt"
        part.write_text("".join(lines[len(lines) * i // 3 : len(lines) * (i + 1) // 3]), encoding="utf-8")
        parts.append(part)
    return parts


def accuracies(model: torch.nn.Module, tokenizer: object, folder: Path, count: int, context: int) -> dict[str, float]:
    """LAMBADA and ARC-easy through lm-eval, on the first `count` examples of each."""
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    def rows(name: str) -> list[dict]:
        with (folder / name).open(encoding="utf-8") as file:
            return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]

    cut = [row["text"].rsplit(" ", 1) for row in rows("lambada_test.jsonl")]
    lambada = datasets.Dataset.from_list([{"context": before, "last": after} for before, after in cut])
    arc = datasets.Dataset.from_list(rows("arc_easy.test.jsonl"))
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    tasks = [
        {"task": "lambada", "custom_dataset": lambda **_: {"test": lambada}, "test_split": "test",
         "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{' ' + last}}",
         "metric_list": [accuracy]},
        {"task": "arc_easy", "custom_dataset": lambda **_: {"test": arc}, "test_split": "test",
         "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
         "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [accuracy]},
    ]  # fmt: skip
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=context, backend="causal")
    answer = lm_eval.evaluate(lm=lm, task_dict=TaskManager(include_defaults=False).load(tasks), bootstrap_iters=0)
    return {name: scores["acc,none"] for name, scores in answer["results"].items()}


def dense(bench: Bench) -> None:
    if bench.missing("dense model", (0.0,)):
        bench.record("dense model", 0.0, bench.model)


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def ours(bench: Bench, row: str = "ours", **texts: list[str]) -> None:
    """The planner; and, at one size, the time and peak memory of a whole compression beside a bare forward pass."""
    order = bench.missing(row)
    if not order:
        return
    settings = bench.settings | texts
    start = time.perf_counter()
    with usual_products(), torch.inference_mode():
        for _, ids in own_batches(bench.fit, bench.run.workers):
            bench.model.base_model(input_ids=ids, use_cache=False)
    forward, forward_memory = time.perf_counter() - start, peak_gigabytes()
    start = time.perf_counter()
    found = measure_model(bench.source, PlanSettings(budget=budget(bench.sizes[order[0]]), **settings), bench.run)
    surveyed = time.perf_counter() - start
    print(f"{bench.name}: forward {forward:.0f} s, survey {surveyed:.0f} s", flush=True)
    for share in order:
        start = time.perf_counter()
        plan, tensors = solve(found, PlanSettings(budget=budget(bench.sizes[share]), **settings))
        taken = surveyed + time.perf_counter() - start
        costs = (
            {"time ratio": taken / forward, "memory ratio": peak_gigabytes() / forward_memory}
            if share == order[0]
            else {}
        )
        print(f"{plan.summary}; {[b.choice.describe() if b.choice else '-' for b in plan.blocks]}", flush=True)
        print(f"{taken:.0f} s, {peak_gigabytes():.2f} GB, forward {forward_memory:.2f} GB", flush=True)
        bench.record(row, share, bench.edited(planned_modules(bench, plan, tensors)), **costs)


def mixed(bench: Bench) -> None:
    """The same, fitted and chosen on web pages as well, half of the tokens each; those of the report are others."""
    _, fit, choose = (str(part) for part in thirds(bench.data / "domains" / "web.txt", bench.file.parent))
    data, choose_data = bench.settings["data"], bench.settings["choose_data"]
    ours(bench, "ours, fitted on both", data=[*data, fit], choose_data=[*choose_data, choose])


def planned_modules(bench: Bench, plan: object, tensors: dict[str, Tensor]) -> dict[int, torch.nn.Module]:
    from ffncompress.checkpoint.patcher import replacement_modules

    by_path = replacement_modules(bench.model, plan, tensors)
    return {block.index: by_path[block.path] for block in bench.blocks if block.path in by_path}


def native(bench: Bench, row: str = "native", align: int | None = None) -> None:
    """One width for all blocks, refitted in order: what `plan --native` makes of a size, without its menus."""
    todo = bench.missing(row)
    if not todo:
        return
    choose = bench.windows(Path(bench.settings["choose_data"][0]), 8192 // bench.context, seed=0)
    metrics = loss_metrics(bench.model, bench.blocks, bench.fit[: GRADIENT_TOKENS // bench.context], bench.run)
    for share in todo:
        settings = PlanSettings(budget=budget(bench.sizes[share]), target="native", align=align, **bench.settings)
        width = width_within_size(bench.model, bench.blocks, settings)
        shapes = {block.index: Shape("neurons", width) for block in bench.blocks}
        modules = refit(bench.model, bench.blocks, shapes, bench.fit, choose, bench.run, metrics=metrics, inner=True)
        bench.record(row, share, bench.edited(modules), width=width)


def unrounded(bench: Bench) -> None:
    """The same with `--align 1`: as many parameters as the peers' rows, whose widths nobody rounds."""
    native(bench, "native, unrounded", align=1)


def budget(size: int) -> str:
    return f"{size / 1e6:.6f}M"


def menu_alone(bench: Bench) -> None:
    """Each item of the menu by itself, spread evenly: one width for all blocks, or as many blocks as it takes."""
    todo = {item: bench.missing(item) for item in MENU}
    if not any(todo.values()):
        return
    fit = bench.fit[: SURVEY_TOKENS // bench.context]
    choose = bench.windows(Path(bench.settings["choose_data"][0]), 8192 // bench.context, seed=0)
    moments = collect_moments(bench.model, bench.blocks, fit, choose, bench.run)
    few = fit[: GRADIENT_TOKENS // bench.context]
    for own, metric in zip(moments, loss_metrics(bench.model, bench.blocks, few, bench.run), strict=True):
        own.metric = metric
    ffns = [ffn_of(bench.model, block) for block in bench.blocks]
    r2_lin = [recovery.r2(exact_map(m), m.held_out) for m in moments]

    def made(i: int, shape: Shape) -> torch.nn.Module:
        name = f"{shape.kind} {shape.width}" if shape.width else "stream"
        fit = fit_some(bench.blocks[i], moments[i], ffns[i], [name])[name]
        return build_replacement(bench.blocks[i], ffns[i], shape, fit)

    count, block = len(bench.blocks), bench.blocks[0]
    for item, shares in todo.items():
        for share in shares:
            if item in ("neurons", "hybrid"):
                room = (1 - share) * block.parameters
                rank = BYPASS_RANK if item == "hybrid" else 0
                room -= rank * (block.d_in + block.d_out) + block.d_out * (item == "hybrid")
                shape = Shape(item, int(room / block.weights_per_neuron), rank)
                chosen = dict.fromkeys(range(count), shape)
            else:
                shape = {
                    "constant": Shape("constant"), "low-rank": Shape("low-rank", rank=BYPASS_RANK)
                }.get(item, Shape("dense", rank=min(block.d_in, block.d_out)))  # fmt: skip
                needed = math.ceil(share * count * block.parameters / (block.parameters - parameters(shape, block)))
                if needed > count:
                    continue
                if item == "paper's rule":
                    picked = sorted(range(count), key=lambda i: -r2_lin[i])[:needed]
                else:
                    picked = [round((j + 0.5) * count / needed - 0.5) for j in range(needed)]
                chosen = dict.fromkeys(picked, shape)
            bench.record(item, share, bench.edited({i: made(i, shape) for i, shape in chosen.items()}))


def peers(bench: Bench) -> None:
    todo = {name: bench.missing(name) for name in METHODS}
    if not any(todo.values()):
        return
    found = gather(bench.model, bench.fit, grams=any(todo[name] for name in NEED_GRAMS))
    for name, shares in todo.items():
        for share in shares:
            more = (bench.fit,) if name == "ReplaceMe" else ()
            bench.record(name, share, METHODS[name](bench.model, found, bench.sizes[share], *more))


def table(bench: Bench) -> str:
    """Rows of methods, columns of sizes: perplexity in domain / on web text; the best of each column is bold."""
    found_names = dict.fromkeys(key.split(" | ")[1] for key in bench.results if key.startswith(bench.name))
    methods = [m for m in ORDER if m in found_names]
    found = {(m, s): bench.results.get(bench.key(m, s)) for m in methods for s in SHARES}
    lines = ["| method | " + " | ".join(f"{size / 1e6:.1f} M" for size in bench.sizes.values()) + " |"]
    lines.append("| --- |" + " --- |" * len(SHARES))
    for method in methods[1:]:
        cells = []
        for share in SHARES:
            entry = found[method, share]
            texts_ = []
            for text in bench.reports:
                values = [e[text] for m in methods if (e := found[m, share])] or [None]
                value = entry[text] if entry else None
                form = "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0e}"
                texts_.append(f"**{form}**" if value == min(values) else form)
            cells.append(" / ".join(texts_))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    original = bench.results.get(bench.key("dense model", 0.0))
    if original:
        figures = " / ".join(f"{original[text]:.2f}" for text in bench.reports)
        lines.append(f"\nthe original, {bench.whole:,} parameters: {figures}")
    for method in methods:
        entry = bench.results.get(bench.key(method, TASKS_AT if method != "dense model" else 0.0)) or {}
        if "lambada" in entry:
            lines.append(f"{method}: LAMBADA {entry['lambada']:.3f}, ARC-easy {entry['arc_easy']:.3f}")
        if "time ratio" in entry:
            lines.append(
                f"{method}: time {entry['time ratio']:.1f}, memory {entry['memory ratio']:.2f} of a forward pass's"
            )
    return "\n".join(lines)


PARTS = {
    "dense": dense, "ours": ours, "mixed": mixed, "native": native, "unrounded": unrounded, "peers": peers,
    "menu": menu_alone,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", choices=["smollm2", "stories15m"])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["dense", "ours", "native", "peers", "menu"])
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES)
    options = parser.parse_args()
    for name in [options.only] if options.only else ["stories15m", "smollm2"]:
        tasks = options.tasks if name == "smollm2" else 0
        bench = Bench(name, options.models, options.data, options.results, tasks, tuple(options.shares))
        with fast_products(bench.run.workers.device):  # as the commands have them
            for part in options.parts:
                PARTS[part](bench)
        print(f"\n## {name}\n\n{table(bench)}")


if __name__ == "__main__":
    main()
