"""On paper: what a plan of a large model takes, in products, bytes, disk and hours, from constants measured here.

    python benchmarks/on_paper.py --results FILE [--tokens 65536]

FILE is what cost_of_planning.py keeps. The stages of a plan are counted in multiplications and additions, by kind: float32
products of the model, float32 products of moments, float64 products, float64 factorisations, and bytes that are only
moved. The rates of each kind are measured on this machine, in seconds, and the count is checked against the plans in
FILE. For large models the same counts are divided by a GPU's rates: those of its data sheet, times the share of a
plain product's rate that each kind reaches here. A model that does not fit the GPUs is read from disk, once for every
batch of tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ffncompress.runtime.products import fast_products

GRADIENT, SWAP, DRIFT, CHOOSE, WIDTHS = 4096, 1024, 16_384, 8192, 15
BATCH, STREAMED_BATCH = 1024, 8192


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


def stages(s: Shape, tokens: int, refitted: int) -> dict[str, Counts]:
    """The counts of each stage of a sized plan with a refit."""
    choose = min(tokens // 4, CHOOSE)
    n, d, inner = s.layers, s.d, s.inner
    verify = max(8 * s.context, choose)
    fresh = max(16 * s.context, CHOOSE)
    drift = min(DRIFT, refitted)
    loss = s.body + s.head
    logits = 20.0 * s.vocabulary  # bytes that a token's loss moves

    def once(count: int, each: float, moved: float = 0.0) -> Counts:
        return Counts(model=count * each, moved=count * moved, passes=count / STREAMED_BATCH)

    ladder = sum(2 * d * inner * i // 16 for i in range(1, WIDTHS + 1))  # every width of a menu on one row
    return {
        "measuring the base": once(verify + fresh, loss, logits),
        "asking what the loss feels": Counts(
            2 * GRADIENT * loss, 0, GRADIENT * n * 2 * d * d, 0, GRADIENT * 2 * logits, 3 * GRADIENT / STREAMED_BATCH
        ),
        "scoring blocks": Counts(
            tokens * s.body, tokens * n * (inner + d) ** 2, tokens * n * 3 * d * d, 0, 0, tokens / STREAMED_BATCH
        ),
        "fitting replacements": Counts(double=n * 15 * inner**2 * d, solving=n * (3 * inner**3 + 60 * d**3)),
        "measuring errors": Counts(choose * s.body, 0, choose * n * 2 * d * d, 0, 0, choose / STREAMED_BATCH),
        "predicting costs": Counts(
            2 * GRADIENT * loss, GRADIENT * n * (ladder + 8 * d * d), 0, 0,
            GRADIENT * (2 * logits + n * (WIDTHS * 28 * d + 200 * d)), 3 * GRADIENT / STREAMED_BATCH,
        ),
        "trying swaps": Counts(
            SWAP * n * (s.body / 2 + s.head), 0, 0, 0, SWAP * n * logits, n * SWAP / STREAMED_BATCH / 2
        ),
        "verifying": once(2 * verify + fresh, loss, logits),
        "refitting in order": Counts(
            (refitted + drift + 2 * choose) * s.body, (refitted + choose) * n * (inner**2 + 1.5 * inner * d),
            n * 20 * inner**2 * d, n * 3 * inner**3, (refitted + choose) * n * 4 * (6 * inner + 8 * d),
            (refitted + drift + 2 * choose) / STREAMED_BATCH,
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
