"""One model's activations through another's FFNs: is a profile the learned map's, or its inputs'?

FFN i of one model is fed what enters FFN i of the other, of the same width: as it is, and moved and stretched so
that its mean and covariance are those of the inputs that the FFN knows,

    x' = m + C^1/2 D^-1/2 (x - n)

with (m, C) of the FFN's own inputs and (n, D) of the giver's. R2_lin of these outputs is then fitted as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.models import Block, ffn_of, forward
from ffncompress.passes.activations import Rows, hooked, own_batches, row_hooks
from ffncompress.profiling.measure import Linear
from ffncompress.recovery import Moments
from ffncompress.runtime.run import Run
from ffncompress.text.corpus import Corpus
from ffncompress.type_aliases import Model

FLOOR = 1e-6  # of the mean eigenvalue: what the giver's inputs never do is not blown up


@torch.inference_mode()
def cross_feed(
    giver: Model,
    giver_blocks: Sequence[Block],
    given: Sequence[Linear],
    taker: Model,
    taker_blocks: Sequence[Block],
    known: Sequence[Linear],
    corpus: Corpus,
    run: Run,
) -> list[tuple[float, float]]:
    """(raw, matched) R2_lin of each of the taker's FFNs on the giver's activations."""
    pairs = list(zip(giver_blocks, given, taker_blocks, known, strict=False))
    feeds = []
    for block, source, own, target in pairs:
        sets = [[Moments.zeros(own.d_in, own.d_out, full_yy=False) for _ in range(2)] for _ in range(2)]
        feeds.append((block, ffn_of(taker, own, whole=False), sets, source, matching(source, target), target.mean))
    for held_out, windows in enumerate((corpus.fit, corpus.choose)):
        for _, batch in run.progress(own_batches(windows, run.workers), "cross-feeding"):
            hooks = [hook for feed in feeds for hook in row_hooks(feed[0], _feeder(held_out, *feed[1:]))]
            with hooked(giver, hooks):
                forward(giver.base_model, batch)
    for _, _, sets, *_ in feeds:
        run.workers.sum_(tensor for pair in sets for moments in pair for tensor in moments.tensors())
    return [(_r2(*sets[0]), _r2(*sets[1])) for _, _, sets, *_ in feeds]


def matching(source: Linear, target: Linear) -> Tensor:
    """The matrix T with x' - m = T (x - n): it gives the source's inputs the target's covariance."""
    return _power(target.covariance, 0.5) @ _power(source.covariance, -0.5)


def _power(covariance: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(FLOOR * values.mean())
    result: Tensor = vectors * values**power @ vectors.T
    return result


def _feeder(
    held_out: int, ffn: nn.Module, sets: list[list[Moments]], source: Linear, matrix: Tensor, mean: Tensor
) -> Callable[[Rows], None]:
    def feed(rows: Rows) -> None:
        weight = next(ffn.parameters())
        x = rows.x.double().cpu()
        for own, inputs in zip(sets, (x, mean + (x - source.mean) @ matrix.T), strict=True):
            y = ffn(inputs.to(weight)[None])[0]
            own[held_out].update_(inputs, y.double().cpu())

    return feed


def _r2(fit: Moments, held_out: Moments) -> float:
    return recovery.r2(recovery.fit_linear(fit, held_out, recovery.EXACT), held_out)


def verdict(own: Sequence[float], raw: Sequence[float], matched: Sequence[float], giver: Sequence[float]) -> str:
    """Whether R2_lin goes with the map or with its inputs: which of the two profiles a cross-fed one is near.

    Near is less than a third of the way between the two.
    """

    def apart(a: Sequence[float], b: Sequence[float]) -> float:
        return fmean(abs(p - q) for p, q in zip(a, b, strict=True))

    sentences = []
    for name, fed in (("raw", raw), ("matched", matched)):
        to_own, to_giver = apart(fed, own), apart(fed, giver)
        if min(to_own, to_giver) > apart(own, giver) / 3:
            side = "near neither profile"
        else:
            side = (
                "near its own profile, so the map decides"
                if to_own < to_giver
                else "near the giver's, so the inputs decide"
            )
        sentences.append(
            f"fed {name} activations it is {side} ({to_own:.3f} from its own, {to_giver:.3f} from the giver's)"
        )
    return "; ".join(sentences)
