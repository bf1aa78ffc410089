"""Perplexity at a given size: our planner, each item of its menu alone, the paper's rule, and eleven peers' ideas.

    python benchmarks/frontier.py MODELS DATA --results FILE [--only smollm2] [--tasks 100] [--parts peers]
        [--shares 0.25] [--seeds 0 1 2] [--also long domains agreement generation] [--also-at 0.25] [--trial]
    python benchmarks/frontier.py --print FILE

One run, the same tokens for every method: at most 65,536 fit tokens. smollm2 is fitted on WikiText-2 train, choices are
made on validation, and perplexity is reported on the first 8,192 tokens of test and of web.txt, at context 512.
stories15m is fitted, chosen and reported on thirds of stories.txt, at context 256. Accuracy on LAMBADA and ARC-easy
comes from lm-eval. FILE collects the results as they come: a run that was stopped goes on where it was, and a figure
that was not asked for before is added to what is there.

--also measures more of every model at --also-at: perplexity of the whole report text at a context of 2,048 (long) and
of the first 8,192 tokens of code.txt and books.txt (domains), KL to the original and how often both favour the same
token (agreement), and the original's perplexity of what the slimmed model writes (generation). --trial reads a
sixteenth of the tokens, to see that everything runs. --print shows FILE as the tables of LOG.md and README.md.
"""

import argparse
import copy
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from library.baselines import METHODS, NEED_GRAMS, gather
from library.columns import accuracies, generated, likeness
from library.frontier_tables import MENU, THOROUGH, TYR, for_the_log, for_the_readme, row_of_seed
from library.tyr import JUDGE_TOKENS, tyr
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
    longest_of,
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

SHARES = (0.10, 2 / 15, 0.25, 0.50)  # of the FFNs' parameters that go: 126.6 M, 123.9 M, 114.6 M and 94.7 M of smollm2
ALSO_AT = 0.25
BYPASS_RANK = 64
ALSO = ("long", "domains", "agreement", "generation")
LONG_CONTEXT = 2_048
DOMAINS = ("code", "books")
FIGURE_OF = {  # a figure that tells whether the column is there
    "report": "in domain", "long": "long", "domains": DOMAINS[-1], "agreement": "kl", "generation": "generated",
}  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """How many are read for what."""

    fit: int = 65_536
    survey: int = 24_576
    choose: int = 8_192
    report: int = 8_192
    long: int | None = None  # none: the whole text


TRIAL = Tokens(4_096, 2_048, 1_024, 1_024, 8_192)


@dataclass(frozen=True)
class Asked:
    """What the command asks for."""

    models: Path
    data: Path
    results: Path
    tasks: int | None  # examples; none: as many as the model is worth
    parts: list[str]
    shares: list[float]
    seeds: list[int]
    also: list[str]
    also_at: list[float]
    tokens: Tokens


class Bench:
    """A model, its texts, and the results so far."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.name, self.asked, self.tokens, self.file = name, asked, asked.tokens, asked.results
        self.examples = (100 if name == "smollm2" else 0) if asked.tasks is None else asked.tasks
        self.source = find_model(str(asked.models / name))
        self.tokenizer = load_tokenizer(self.source)
        self.run = Run(Workers("cpu"))
        self.model = load_model(self.source)
        self.blocks = find_blocks(self.model)
        whole, ffns = count_parameters(self.model), sum(block.parameters for block in self.blocks)
        self.sizes = {share: whole - round(share * ffns) for share in SHARES}
        self.context = context_of(self.model, None)
        wiki, self.domains = asked.data / "wikitext2", asked.data / "domains"
        if name == "stories15m":
            self.parts = thirds(self.domains / "stories.txt", self.file.parent)
        else:
            self.parts = [wiki / "wiki.train.prefix.raw", wiki / "wiki.valid.raw", wiki / "wiki.test.raw"]
        self.settings = {
            "data": [str(self.parts[0])], "choose_data": [str(self.parts[1])], "seq_len": self.context,
            "tokens": self.tokens.survey + self.tokens.choose, "refit_tokens": self.tokens.fit,
        }  # fmt: skip
        self.reports = {"in domain": self.windows(self.parts[2], self.tokens.report)}
        if name != "stories15m":  # which has seen nothing but stories: its perplexity there is in the thousands
            self.reports["web"] = self.windows(self.domains / "web.txt", self.tokens.report)
        self.fit = self.windows(self.parts[0], self.tokens.fit, seed=0)
        self.choose = self.windows(self.parts[1], self.tokens.choose, seed=0)
        self.columns: dict[str, Callable[[torch.nn.Module], dict[str, float]]] = {
            "report": lambda model: {text: self.perplexity(model, ids) for text, ids in self.reports.items()},
            "long": lambda model: {"long": self.perplexity(model, self.long_windows())},
            "domains": lambda model: {name: self.perplexity(model, self.domain_windows(name)) for name in DOMAINS},
            "agreement": lambda model: likeness(
                self.model, model, self.reports["in domain"], self.run.workers.batch_tokens
            ),
            "generation": lambda model: generated(self.model, model, self.reports["in domain"]),
            "tasks": lambda model: accuracies(model, self.tokenizer, asked.data / "tasks", self.examples, self.context),
        }
        about: dict[str, object] = {"parameters": whole, "context": self.context, "tokens": self.tokens.report}
        about["sizes"] = {f"{share:.4f}": size for share, size in self.sizes.items()}
        if "long" in asked.also:
            long = self.long_windows()
            about |= {"long context": long.shape[1], "long tokens": long.numel()}
        self.write(f"{name} | about", about)

    def windows(self, file: Path, tokens: int | None, seed: int | None = None, context: int | None = None) -> Tensor:
        length = context or self.context
        count = None if tokens is None else tokens // length
        found = joined_windows(read(str(file)), self.tokenizer, length=length, count=count, seed=seed)
        return torch.stack(found.rows)

    def long_windows(self) -> Tensor:
        context = min(LONG_CONTEXT, longest_of(self.model.config) or LONG_CONTEXT)
        return self.windows(self.parts[2], self.tokens.long, context=context)

    def domain_windows(self, name: str) -> Tensor:
        return self.windows(self.domains / f"{name}.txt", self.tokens.report)

    def perplexity(self, model: torch.nn.Module, ids: Tensor) -> float:
        return perplexity(sequence_losses(model, ids, self.run))

    def lacking(self, method: str, share: float) -> list[str]:
        """The columns that are asked for and not there yet."""
        entry = self.read().get(self.key(method, share), {})
        columns = ["report"]
        if (share == 0 or share in self.asked.also_at) and "seed" not in method:
            columns += [*self.asked.also, *(["tasks"] if self.examples else [])]
        return [each for each in columns if not self.has(entry, each)]

    def has(self, entry: dict[str, float], column: str) -> bool:
        if column == "tasks":
            return entry.get("examples", 0) >= self.examples
        return FIGURE_OF[column] in entry

    def record(self, method: str, share: float, model: torch.nn.Module, **more: float) -> None:
        """Measure an edited model and write it down, column by column: some take as long as a plan."""
        key = self.key(method, share)
        self.write(key, {"parameters": count_parameters(model), **more})
        for column in self.lacking(method, share):
            start = time.perf_counter()
            found = self.known(method, column, count_parameters(model)) or self.columns[column](model)
            self.write(key, found)
            figures = {name: round(value, 3) for name, value in found.items()}
            print(f"{key}: {figures}, {time.perf_counter() - start:.0f} s", flush=True)

    def known(self, method: str, column: str, parameters: int) -> dict[str, float]:
        """Perplexities of the same model at another size: whole layers or blocks go, so two sizes can be one model."""
        entries = (entry for key, entry in self.read().items() if key.startswith(f"{self.name} | {method} |"))
        same = next((each for each in entries if each["parameters"] == parameters and self.has(each, column)), {})
        return {text: same[text] for text in self.reports} if same and column == "report" else {}

    def read(self) -> dict[str, dict[str, float]]:
        """The results as they are now: several processes may share the work by --parts."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def write(self, key: str, figures: dict[str, float]) -> None:
        results = self.read()
        results[key] = results.get(key, {}) | figures
        self.file.write_text(json.dumps(results, indent=1) + "\n")

    def key(self, method: str, share: float) -> str:
        return f"{self.name} | {method} | {share:.4f}"

    def missing(self, method: str) -> list[float]:
        """The sizes at which something is still to be measured, those with more columns first."""
        todo = [share for share in self.asked.shares if self.lacking(method, share)]
        return sorted(todo, key=lambda share: share not in self.asked.also_at)

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


def dense(bench: Bench) -> None:
    if bench.lacking("dense model", 0.0):
        bench.record("dense model", 0.0, bench.model)


def peak_gigabytes() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 2**20


def forget_peak() -> None:
    """From here on: what was measured of other models before is none of the planner's."""
    Path("/proc/self/clear_refs").write_text("5")


def ours(bench: Bench) -> None:
    """The planner as it is, and thorough with the first seed: both after the same survey."""
    for seed in bench.asked.seeds:
        planned(bench, {row_of_seed(seed): {}, **({THOROUGH: {"thorough": True}} if seed == 0 else {})}, seed=seed)


def planned(bench: Bench, rows: dict[str, dict[str, object]], **changes: object) -> None:
    """Plans of one survey; and, at one size, the time and peak memory of a compression beside a bare forward pass."""
    todo = [(row, share) for row in rows for share in bench.missing(row)]
    if not todo:
        return
    settings = bench.settings | changes
    forget_peak()
    start = time.perf_counter()
    with usual_products(), torch.inference_mode():
        for _, ids in own_batches(bench.fit, bench.run.workers):
            bench.model.base_model(input_ids=ids, use_cache=False)
    forward, forward_memory = time.perf_counter() - start, peak_gigabytes()
    start = time.perf_counter()
    found = measure_model(bench.source, PlanSettings(budget=budget(bench.sizes[todo[0][1]]), **settings), bench.run)
    surveyed = time.perf_counter() - start
    print(f"{bench.name}: forward {forward:.0f} s, survey {surveyed:.0f} s", flush=True)
    timed: set[str] = set()
    for row, share in todo:
        start = time.perf_counter()
        plan, tensors = solve(found, PlanSettings(budget=budget(bench.sizes[share]), **settings, **rows[row]))
        taken, costs = surveyed + time.perf_counter() - start, {}
        if row not in timed:
            costs = {"time ratio": taken / forward, "memory ratio": peak_gigabytes() / forward_memory}
            timed.add(row)
        print(f"{plan.summary}; {[b.choice.describe() if b.choice else '-' for b in plan.blocks]}", flush=True)
        print(f"{taken:.0f} s, {peak_gigabytes():.2f} GB, forward {forward_memory:.2f} GB", flush=True)
        bench.record(row, share, bench.edited(planned_modules(bench, plan, tensors)), **costs)


def mixed(bench: Bench) -> None:
    """The same, fitted and chosen on web pages as well, half of the tokens each; those of the report are others."""
    _, fit, choose = (str(part) for part in thirds(bench.domains / "web.txt", bench.file.parent))
    data, choose_data = bench.settings["data"], bench.settings["choose_data"]
    rows = {f"{row}, fitted on both": changes for row, changes in (("ours", {}), (THOROUGH, {"thorough": True}))}
    planned(bench, rows, data=[*data, fit], choose_data=[*choose_data, choose])


def planned_modules(bench: Bench, plan: object, tensors: dict[str, Tensor]) -> dict[int, torch.nn.Module]:
    from ffncompress.checkpoint.patcher import replacement_modules

    by_path = replacement_modules(bench.model, plan, tensors)
    return {block.index: by_path[block.path] for block in bench.blocks if block.path in by_path}


def native(bench: Bench, row: str = "native", align: int | None = None) -> None:
    """One width for all blocks, refitted in order: what `plan --native` makes of a size, without its menus."""
    todo = bench.missing(row)
    if not todo:
        return
    metrics = loss_metrics(bench.model, bench.blocks, bench.fit[: GRADIENT_TOKENS // bench.context], bench.run)
    for share in todo:
        settings = PlanSettings(budget=budget(bench.sizes[share]), target="native", align=align, **bench.settings)
        width = width_within_size(bench.model, bench.blocks, settings)
        shapes = {block.index: Shape("neurons", width) for block in bench.blocks}
        modules = refit(
            bench.model, bench.blocks, shapes, bench.fit, bench.choose, bench.run, metrics=metrics, inner=True
        )
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
    fit = bench.fit[: bench.tokens.survey // bench.context]
    moments = collect_moments(bench.model, bench.blocks, fit, bench.choose, bench.run)
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


@torch.no_grad()
def peers(bench: Bench) -> None:
    todo = {name: bench.missing(name) for name in METHODS}
    if any(todo.values()):
        found = gather(bench.model, bench.fit, grams=any(todo[name] for name in NEED_GRAMS))
    for name, shares in todo.items():
        for share in shares:
            more = (bench.fit,) if name == "ReplaceMe" else ()
            bench.record(name, share, METHODS[name](bench.model, found, bench.sizes[share], *more))


def searched(bench: Bench) -> None:
    """The peer that searches, on the text that our choices are made on."""
    judge = bench.choose[: max(1, JUDGE_TOKENS // bench.context)]
    for share in bench.missing(TYR):
        start = time.perf_counter()
        model = tyr(bench.model, bench.sizes[share], bench.fit, judge)
        bench.record(TYR, share, model, seconds=time.perf_counter() - start)


PARTS = {
    "dense": dense, "ours": ours, "mixed": mixed, "native": native, "unrounded": unrounded, "peers": peers,
    "tyr": searched, "menu": menu_alone,
}  # fmt: skip
MODELS = ("stories15m", "smollm2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--tasks", type=int, help="examples of each; by default 100 for smollm2")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["dense", "ours", "native", "peers", "menu"])
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of ours")
    parser.add_argument("--also", nargs="+", choices=ALSO, default=[])
    parser.add_argument("--also-at", nargs="*", type=float, choices=SHARES, default=[ALSO_AT])
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--print", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.print:
        results = json.loads(options.print.read_text())
        print(f"{for_the_log(results)}\n\n{for_the_readme(results)}")
        return
    if not (options.models and options.data and options.results):
        parser.error("MODELS, DATA and --results, or --print FILE")
    asked = Asked(
        options.models, options.data, options.results, options.tasks, options.parts, options.shares, options.seeds,
        options.also, options.also_at, TRIAL if options.trial else Tokens(),
    )  # fmt: skip
    for name in [options.only] if options.only else MODELS:
        bench = Bench(name, asked)
        with fast_products(bench.run.workers.device):  # as the commands have them
            for part in asked.parts:
                PARTS[part](bench)
        print(f"\n{for_the_log(bench.read(), [name])}")


if __name__ == "__main__":
    main()
