"""On paper: what a plan of a large model takes, in products, bytes, disk and hours, from constants measured here.

    python benchmarks/on_paper.py --results FILE [--tokens 65536]

FILE is what cost_of_planning.py keeps. The stages of a plan are counted in multiplications and additions, by kind:
float32 products of the model, float32 products of moments, float64 products, float64 factorisations, and bytes that are
only moved. The rates of each kind are measured on this machine, in a few seconds, and the counts are checked against
the plans in FILE. For large models the same counts are divided by a GPU's rates: those of its data sheet (H100 SXM),
times the share of a plain product's rate that each kind reaches here. A model that does not fit the GPUs is read from
disk, once for every batch of tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cost_of_planning import GROWTH, HEADLINE

from ffncompress.runtime.products import fast_products

GRADIENT, SWAP, DRIFT, CHOOSE, WIDTHS = 4096, 1024, 16_384, 8192, 15
BACKWARD = 2.5  # forward passes that a gradient takes, weights at rest: attention's own takes more than its forward
LINEAR_FITS = 8  # of a block: two linear maps, and a bypass at six widths
BATCH, STREAMED_BATCH = 1024, 8192
# H100 SXM 80 GB by its data sheet, without sparsity; a disk of 5 GB/s
GPU = {"bf16": 989e12, "float32": 67e12, "float64": 67e12, "bytes": 3.35e12, "memory": 80e9, "disk": 5e9}


@dataclass(frozen=True)
class Shape:
    """What a decoder's cost depends on."""

    layers: int
    d: int
    inner: int
    attention: int  # weights of a layer's attention
    vocabulary: int
    context: int
    bytes: int = 4  # of a weight

    @property
    def ffn(self) -> int:
        """Weights of a gated FFN."""
        return 3 * self.d * self.inner

    @property
    def weights(self) -> int:
        """Of the whole model, its head tied."""
        return self.layers * (self.attention + self.ffn) + self.vocabulary * self.d

    @property
    def body(self) -> float:
        """Products of a token, without the head."""
        return self.layers * (2 * (self.attention + self.ffn) + 2 * self.context * self.d)

    @property
    def head(self) -> float:
        """Products of a token's logits."""
        return 2.0 * self.d * self.vocabulary


SHAPES = {
    "smollm2": Shape(30, 576, 1536, 576 * (2 * 576 + 2 * 192), 49_152, 512),
    "stories15m": Shape(6, 288, 768, 4 * 288**2, 32_000, 256),
}
LARGE = {
    "7 B (4,096 by 11,008, 32 layers)": Shape(32, 4096, 11_008, 4 * 4096**2, 32_000, 4096, 2),
    "70 B (8,192 by 28,672, 80 layers)": Shape(80, 8192, 28_672, 8192 * (2 * 8192 + 2 * 1024), 128_256, 4096, 2),
    "405 B (16,384 by 53,248, 126 layers)": Shape(126, 16_384, 53_248, 16_384 * (2 * 16_384 + 2048), 128_256, 4096, 2),
}


@dataclass(frozen=True)
class Counts:
    """What a stage does, by kind."""

    model: float = 0  # float32 (or the model's own) products
    sums: float = 0  # float32 products of moments and of replacements that are tried
    double: float = 0  # float64 products
    solving: float = 0  # of float64 factorisations
    moved: float = 0  # bytes
    passes: float = 0  # times that all weights are read, where they are streamed


def stages(s: Shape, tokens: int, refitted: int, replaced: int | None = None, runs: int = 1) -> dict[str, Counts]:
    """The counts of each stage of a sized plan with a refit; neurons in so many runs, so many blocks replaced."""
    choose = min(tokens // 4, CHOOSE)
    n, d, inner = s.layers, s.d, s.inner
    replaced = n if replaced is None else replaced
    verify = max(8 * s.context, choose)
    fresh = max(16 * s.context, CHOOSE)
    drift = min(DRIFT, refitted)
    loss = s.body + s.head
    logits = 20.0 * s.vocabulary  # bytes that a token's loss moves

    def once(count: int, each: float, moved: float = 0.0) -> Counts:
        return Counts(model=count * each, moved=count * moved, passes=count / STREAMED_BATCH)

    ladder = sum(2 * d * inner * i // 16 for i in range(1, WIDTHS + 1))  # every width of a menu on one row
    order = inner**2 * (inner / runs + 2 * d) / runs  # downdates while neurons go
    walked = refitted + choose
    return {
        "measuring the base": once(verify + fresh, loss, logits),
        "asking what the loss feels": Counts(
            BACKWARD * GRADIENT * loss, GRADIENT * n * 2 * d * d, 0, 0, GRADIENT * 2 * logits,
            3 * GRADIENT / STREAMED_BATCH,
        ),
        "scoring blocks": Counts(
            tokens * s.body, tokens * n * (inner + d) ** 2 / runs, tokens * n * 3 * d * d, 0,
            tokens * n * 16 * (inner + 3 * d), tokens / STREAMED_BATCH,
        ),
        "fitting replacements": Counts(
            double=n * (order + LINEAR_FITS * 30 * d**3 + 6 * inner * d * d),
            solving=n * (2 * inner**3 / runs**2 + LINEAR_FITS * 18 * d**3), moved=n * 160 * inner**2 / runs,
        ),
        "measuring errors": Counts(choose * s.body, 0, choose * n * 2 * d * d, 0, 0, choose / STREAMED_BATCH),
        "predicting costs": Counts(
            BACKWARD * GRADIENT * loss, GRADIENT * n * (ladder + LINEAR_FITS * 8 * d * d), 0, 0,
            GRADIENT * (2 * logits + n * (WIDTHS * 28 + LINEAR_FITS * 60) * d), 3 * GRADIENT / STREAMED_BATCH,
        ),
        "trying swaps": Counts(
            SWAP * n * (s.body / 2 + s.head), 0, 0, 0, SWAP * n * logits, n * SWAP / STREAMED_BATCH / 2
        ),
        "verifying": once(2 * verify + fresh, loss, logits),
        "refitting in order": Counts(
            (walked + drift + choose) * s.body, walked * replaced * (inner**2 / runs + 1.5 * inner * d),
            replaced * (order + 12 * inner**2 * d / runs), replaced * 3 * inner**3 / runs**2,
            walked * (replaced * 8 * (inner + 4 * d) + n * 16 * d), (walked + drift + choose) / STREAMED_BATCH,
        ),
    }  # fmt: skip


def total(found: dict[str, Counts]) -> Counts:
    """All stages together."""
    names = Counts.__dataclass_fields__
    return Counts(**{name: sum(getattr(each, name) for each in found.values()) for name in names})


Rates = dict[str, float]  # of each kind, in a second


def seconds(counts: Counts, rates: Rates) -> float:
    """How long that takes."""
    return sum(getattr(counts, kind) / rate for kind, rate in rates.items())


def rate_of(work: Callable[[], object], amount: float, least: float = 0.6) -> float:
    """How much of something is done in a second."""
    work()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < least:
        work()
        count += 1
    return count * amount / (time.perf_counter() - start)


@torch.inference_mode()
def measured_rates(s: Shape) -> tuple[Rates, Rates]:
    """(the rates of each kind at a model's widths, those of large plain products)."""
    from transformers import LlamaConfig, LlamaModel

    heads = max(1, s.d // 64)
    config = LlamaConfig(
        hidden_size=s.d, intermediate_size=s.inner, num_hidden_layers=4, vocab_size=1024, num_attention_heads=heads,
        max_position_embeddings=s.context,
    )  # fmt: skip
    model = LlamaModel(config).eval()
    ids = torch.randint(3, 1000, (BATCH // s.context, s.context))
    four = Shape(4, s.d, s.inner, 4 * s.d**2, 1024, s.context)
    x, y = torch.randn(BATCH, s.inner), torch.zeros(s.inner, s.inner, dtype=torch.float64)
    wide = torch.randn(s.inner, s.inner, dtype=torch.float64)
    right = torch.randn(s.inner, s.d, dtype=torch.float64)
    positive = wide @ wide.T + s.inner * torch.eye(s.inner, dtype=torch.float64)
    flat = torch.randn(2**24)
    rates = {
        "model": rate_of(lambda: model(input_ids=ids, use_cache=False), BATCH * four.body),
        "sums": rate_of(lambda: y.add_(x.T @ x), 2 * BATCH * s.inner**2),
        "double": rate_of(lambda: wide @ right, 2 * s.inner**2 * s.d),
        "solving": rate_of(lambda: torch.linalg.cholesky(positive), s.inner**3 / 3),
        "moved": rate_of(lambda: flat.add_(1.0), 8.0 * len(flat)),
    }
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048, dtype=torch.float64)
    plain = {"single": rate_of(lambda: a @ a, 2 * 2048**3), "double": rate_of(lambda: b @ b, 2 * 2048**3)}
    return rates, plain


def check(results: dict[str, dict]) -> None:
    """The counts at this machine's rates beside the plans that were measured."""
    print("| plan | counted, s | measured, s | ratio |\n| --- | --- | --- | --- |")
    rows = []
    for case, (name, layers, tokens, refitted) in (HEADLINE | GROWTH).items():
        if (found := results.get(f"{case} | after")) is None:
            continue
        shape = replace(SHAPES[name], layers=layers)
        with fast_products(torch.device("cpu")):
            rates, _ = measured_rates(shape)
        counted = stages(shape, tokens, refitted, found["replaced"])
        measured = {
            stage: sum(took for asked, took in found["stages"].items() if asked.startswith(stage)) for stage in counted
        }
        own = {stage: seconds(counts, rates) for stage, counts in counted.items()}
        whole, took = sum(own.values()), sum(measured.values())
        print(f"| {case} | {whole:.0f} | {took:.0f} | {whole / took:.2f} |")
        rows.append(f"{case}: " + ", ".join(f"{stage} {own[stage]:.0f} of {measured[stage]:.0f}" for stage in own))
    print("\nStage by stage, counted of measured: " + "; ".join(rows) + ".\n")


def project(tokens: int) -> None:
    """Large models on GPUs."""
    with fast_products(torch.device("cpu")):
        rates, plain = measured_rates(SHAPES["smollm2"])
    sheet = {"model": "bf16", "sums": "float32", "double": "float64", "solving": "float64"}
    own = {kind: GPU[at] * rates[kind] / plain["double" if at == "float64" else "single"] for kind, at in sheet.items()}
    own["moved"] = GPU["bytes"]
    shares = ", ".join(f"{kind} {own[kind] / GPU[at]:.2f}" for kind, at in sheet.items())
    print(f"Of a plain product's rate, as measured here at SmolLM2's widths: {shares}.\n")
    print("| model | PFLOP, the model | moments | float64 | weights, GB | moments of a block | spool | 1 GPU, h | 8 |")
    print("| --- |" + " --- |" * 8)
    for name, s in LARGE.items():
        count = max(tokens, 4 * s.d + CHOOSE)
        wide = 16.0 * (s.inner + s.d) ** 2
        runs = max(1, -int(-wide // (GPU["memory"] / 4)))
        every = stages(s, count, count, runs=runs)
        whole, serial = total(every), every["refitting in order"]
        weights = s.weights * s.bytes
        hours = []
        for gpus in (1, 8):
            read = 0.0 if weights < 0.6 * GPU["memory"] * gpus else whole.passes * weights / GPU["disk"]
            alone = seconds(Counts(double=serial.double, solving=serial.solving), own)  # the refit is solved by one
            hours.append(((seconds(whole, own) - alone) / gpus + alone + read) / 3600)
        spooled = (count + CHOOSE) * (s.inner + 3 * s.d) * 4
        works = " | ".join(f"{x / 1e15:,.1f}" for x in (whole.model, whole.sums, whole.double + whole.solving))
        sizes = " | ".join(f"{x / 1e9:,.0f}" for x in (weights, wide / runs, spooled))
        print(f"| {name}, {count:,} tokens, {runs} run(s) | {works} | {sizes} | {hours[0]:.2f} | {hours[1]:.2f} |")


def main() -> None:
    """Check, then project."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    asked = parser.parse_args()
    check(json.loads(asked.results.read_text()))
    project(asked.tokens)


if __name__ == "__main__":
    main()
