"""What healing is worth: a plan applied in closed form, and healed in each way for the same minutes.

    python benchmarks/healing.py MODEL PLAN_FOLDER... --minutes 10 --report TEXT... --results FILE
        [--data TEXT...] [--ways all lora] [--tokens 16384]

Each way is `apply` with `--heal MINUTES --heal-what WAY`, on the plan's own fit text or on --data; the original and the
closed form are the baselines. Perplexity is that of the folder as it was written, on the first tokens of each report
text, at context 512 or the model's own: give texts that nothing was fitted or chosen on. FILE collects the results as
they come: a run that was stopped goes on where it was.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from ffncompress import api, load
from ffncompress.checkpoint.origin import read_origin
from ffncompress.models import context_of, count_parameters, find_model, load_model, load_tokenizer
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.runtime.products import fast_products
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import read
from ffncompress.text.windows import Windows, joined_windows

CONTEXT = 512
WAYS = ("closed form", "replaced", "all", "lora")


def measured(model: torch.nn.Module, reports: dict[str, Windows]) -> dict[str, float]:
    """Perplexity on each text."""
    run = Run(Workers("cpu"))
    with fast_products(run.workers.device):
        return {name: perplexity(sequence_losses(model, rows, run), rows.scored) for name, rows in reports.items()}


def made(asked: argparse.Namespace, plan: str, way: str, reports: dict[str, Windows]) -> dict:
    """A plan applied in one way, and what became of it."""
    options = {} if way == "closed form" else {"heal": asked.minutes, "heal_what": way, "data": asked.data}
    with tempfile.TemporaryDirectory() as scratch:
        folder = api.compress(plan, Path(scratch) / "slim", model=asked.model, **options)
        model, healing = load(folder, dtype="float32"), read_origin(folder).healing
        entry: dict = {"parameters": count_parameters(model), **measured(model, reports)}
    if healing is not None:
        entry |= {
            "steps": healing.steps, "tokens": healing.tokens, "tokens/s": healing.pace, "rate": healing.rate,
            "choose before": healing.closed_form, "choose after": healing.healed, "kept": healing.kept,
        }  # fmt: skip
    return entry


def table(results: dict[str, dict], texts: list[str]) -> None:
    """A row for each way, as Markdown."""
    print(f"| plan, way | {' | '.join(texts)} | choose, before and after | steps | tokens | tokens/s | rate |")
    print("| --- |" + " --- |" * (len(texts) + 5))
    for name, entry in results.items():
        cells = [f"{entry[text]:.3f}" if text in entry else "-" for text in texts]
        if "steps" in entry:
            change = f"{entry['choose before']:.3f}, {entry['choose after']:.3f}" + ("" if entry["kept"] else " (no)")
            pace = f"{entry['tokens/s']:,.0f}" if entry["tokens/s"] else "-"
            cells += [change, f"{entry['steps']:,}", f"{entry['tokens']:,}", pace, f"{entry['rate']:g}"]
        else:
            cells += ["-"] * 5
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """All ways of all plans, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--report", nargs="+", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--data", nargs="*", default=[])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--tokens", type=int, default=16_384, help="of each report text")
    asked = parser.parse_args()
    results = json.loads(asked.results.read_text()) if asked.results.exists() else {}

    def record(name: str, entry: dict) -> None:
        results[name] = entry
        asked.results.write_text(json.dumps(results, indent=1) + "\n")
        print(
            name, {key: value if value is None else float(f"{value:.5g}") for key, value in entry.items()}, flush=True
        )

    source = find_model(asked.model)
    base, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    context = min(CONTEXT, context_of(base, None))
    reports = {
        Path(text).name: joined_windows(
            read(text), tokenizer, length=context, count=max(1, asked.tokens // context), seed=None
        )
        for text in asked.report
    }
    if (name := f"{Path(asked.model).name}, original") not in results:
        record(name, {"parameters": count_parameters(base), **measured(base, reports)})
    del base
    for plan in asked.plans:
        for way in asked.ways:
            text = f", on {' and '.join(Path(each).name for each in asked.data)}" if asked.data else ""
            name = f"{Path(plan).name}, {way}" + (f", {asked.minutes:g} min{text}" if way != WAYS[0] else "")
            if name not in results:
                record(name, made(asked, plan, way, reports))
    table(results, list(reports))


if __name__ == "__main__":
    main()
