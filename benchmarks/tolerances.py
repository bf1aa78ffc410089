"""What a sized plan promises against what the report text then shows, over many small plans.

    python benchmarks/tolerances.py MODELS DATA --results FILE [--only demo] [--gates 3] [--more FILE ...] [--table]

MODELS holds `stories15m` as a Hugging Face folder (the other model is the embedded one); DATA holds `wikitext2/` and
`domains/`. Long files are cut into several texts, because plans on one text share its surprises. Of each plan FILE
keeps the rise of the loss on every window, in nats: on the windows that the choose part's draw begins with (`near`), on
windows spread over all of the choose part (`spread`, and whether the plan had read them), and on the report part as the
gate reads it (`report`). A run that was stopped goes on where it was; --table only prints.
Texts named in LEARNED_ON are what rules were made from; the others check them.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from library.tolerance_rules import tables
from torch import Tensor

from ffncompress import api
from ffncompress.checkpoint.patcher import replacement_modules
from ffncompress.models import context_of, find_model, installed, load_tokenizer
from ffncompress.passes.losses import sequence_losses
from ffncompress.planning.measured_model import MeasuredModel
from ffncompress.planning.measuring import measure_model
from ffncompress.planning.planner import solve
from ffncompress.planning.saving import save_plan
from ffncompress.records.plan import Plan
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings
from ffncompress.text.parts import CHOOSE, REPORT, read_parts
from ffncompress.text.sources import PYTHON_DOCS, Text
from ffncompress.text.windows import joined_windows

SIZES = {"demo": ("-5%", "-15%", "-25%", "-40%"), "stories15m": ("-1%", "-2%", "-5%", "-15%")}
TOKENS = (4096, 8192, 4096)  # by seed
GATE_TOKENS = 16_384
NEAR, SPREAD = 32, 32  # windows
PARTS = {
    "wikitext2/wiki.train.prefix.raw": 3, "wikitext2/wiki.valid.raw": 3, "wikitext2/wiki.test.raw": 3,
    "domains/web.txt": 4, "domains/code.txt": 4, "domains/books.txt": 2, "domains/stories.txt": 1,
}  # fmt: skip


def lay_out_texts(data: Path, folder: Path) -> dict[str, str]:
    """Name and source of every text: python-docs, and the files in as many pieces as PARTS says."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = {PYTHON_DOCS: PYTHON_DOCS}
    for name, count in PARTS.items():
        whole = (data / name).read_text(encoding="utf-8")
        for i in range(count):
            file = folder / f"{Path(name).name.split('.raw')[0].removesuffix('.txt')}-{i}.txt"
            file.write_text(whole[len(whole) * i // count : len(whole) * (i + 1) // count], encoding="utf-8")
            sources[file.stem] = str(file)
    return sources


def spread(text: Text, tokenizer: object, length: int, count: int) -> Tensor:
    """Windows at even distances over all of a text."""
    joined = text.joined
    found = []
    for i in range(count):
        at = joined.find("\n", len(joined) * i // count) + 1
        near = Text(text.source, text.part, (joined[at : at + 16 * length],))
        found.append(joined_windows(near, tokenizer, length=length, count=1, seed=None))
    return torch.cat(found)


def overlap(windows: Tensor, others: Tensor, run: int = 8) -> list[float]:
    """The share of each window's runs of tokens that stand in other windows."""

    def runs(row: list[int]) -> list[tuple[int, ...]]:
        return [tuple(row[i : i + run]) for i in range(len(row) - run)]

    seen = {each for row in others for each in runs(row.tolist())}
    return [round(sum(each in seen for each in runs(row.tolist())) / (len(row) - run), 3) for row in windows]


class Bench:
    """A model on a text: one survey, several sizes."""

    def __init__(self, model: str, source: str, seed: int) -> None:
        self.settings = {"data": [source], "tokens": TOKENS[seed % len(TOKENS)], "seed": seed}
        self.found: MeasuredModel = measure_model(
            find_model(model), PlanSettings(**self.settings, budget="-5%"), Run(Workers("cpu"))
        )
        tokenizer = load_tokenizer(self.found.source)
        context = context_of(self.found.model, None)
        parts = read_parts(source)
        choose, report = parts[CHOOSE], parts[REPORT]
        corpus = self.found.corpus
        self.windows = {
            "near": joined_windows(choose, tokenizer, length=context, count=NEAR, seed=seed),
            "spread": spread(choose, tokenizer, context, SPREAD),
            "report": joined_windows(report, tokenizer, length=context, count=GATE_TOKENS // context, seed=None),
        }
        self.read = {
            name: [
                max(pair) for pair in zip(overlap(windows, corpus.choose), overlap(windows, corpus.verify), strict=True)
            ]
            for name, windows in self.windows.items()
        }
        self.base = {name: self.losses(windows) for name, windows in self.windows.items()}

    def losses(self, windows: Tensor) -> Tensor:
        return sequence_losses(self.found.model, windows, self.found.run)

    def measure(self, size: str) -> tuple[dict, Plan, dict[str, Tensor]]:
        """A plan of a size, and the rises that it shows everywhere."""
        plan, tensors = solve(self.found, PlanSettings(**self.settings, budget=size))
        check = plan.final_check
        at = replacement_modules(self.found.model, plan, tensors)
        with installed(self.found.model, at):
            rises = {name: self.losses(windows) - self.base[name] for name, windows in self.windows.items()}
        return {
            "tokens": self.settings["tokens"], "base": check.base_perplexity, "delta": check.delta,
            "error": check.delta_error, "promise": plan.tolerance.limit.value, "verify": len(self.found.corpus.verify),
            "read": self.read, "base_losses": {name: _short(losses) for name, losses in self.base.items()},
            "rises": {name: _short(each) for name, each in rises.items()},
        }, plan, tensors  # fmt: skip


def _short(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def gate(plan: Plan, tensors: dict[str, Tensor]) -> float:
    """What `ffncompress eval` says: the relative rise of perplexity."""
    with tempfile.TemporaryDirectory() as scratch:
        save_plan(plan, f"{scratch}/plan", tensors)
        api.compress(f"{scratch}/plan", f"{scratch}/slim")
        return api.evaluate(f"{scratch}/slim", tokens=GATE_TOKENS, repeats=1).main.relative


def line(key: str, entry: dict) -> str:
    report = torch.tensor(entry["rises"]["report"])
    gate_rise, error = report.mean(), report.std() / len(report) ** 0.5
    gates = f", lm-eval {100 * entry['gate']:+.1f} %" if "gate" in entry else ""
    return (
        f"{key}: plan {100 * entry['delta'] / entry['base']:+.1f} ± {100 * entry['error'] / entry['base']:.1f} %, "
        f"promise {100 * entry['promise']:.1f} %, report {100 * gate_rise.expm1():+.1f} ± {100 * error:.1f} %{gates}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--results", type=Path, default=Path("promises.json"))
    parser.add_argument("--only", choices=["demo", "stories15m"])
    parser.add_argument("--texts", nargs="+", help="only these, such as stories-0")
    parser.add_argument("--more", type=Path, nargs="+", default=[], help="further text files, instead of DATA's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--gates", type=int, default=0, help="how many plans lm-eval's gate measures too")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    sources = {file.stem: str(file) for file in options.more}
    sources = sources or lay_out_texts(options.data, options.results.parent / "texts")
    todo = [(m, s, t) for m in ("demo", "stories15m") for s in options.seeds for t in options.texts or sources]
    for model, seed, name in todo if not options.table else ():
        keys = {size: f"{model} | {name} | {size} | {seed}" for size in SIZES[model]}
        if (options.only or model) != model or all(key in results for key in keys.values()):
            continue
        bench = Bench(model if model == "demo" else str(options.models / model), sources[name], seed)
        for size, key in keys.items():
            if key in results:
                continue
            entry, plan, tensors = bench.measure(size)
            if sum("gate" in e for e in results.values()) < options.gates:
                entry["gate"] = gate(plan, tensors)
            results[key] = entry
            print(line(key, entry), flush=True)
            options.results.write_text(json.dumps(results) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
