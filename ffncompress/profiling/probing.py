"""What needs rows and not just their moments: captured activations, and the probe fitted to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ffncompress import recovery
from ffncompress.calibration import Rows, hooked, own_batches, row_taps
from ffncompress.corpus import Corpus
from ffncompress.models import Block
from ffncompress.profiling.bilinear import RANK, fit_bilinear
from ffncompress.profiling.measure import Linear
from ffncompress.profiling.records import Probe
from ffncompress.recovery import LinearFit
from ffncompress.workers import Track, Workers, silent

FIT_TOKENS, HELD_OUT_TOKENS = 12_288, 8_192
ROW_BYTES = 2 * 2**30  # of captured rows at a time


def probe_blocks(
    model: Any,
    blocks: list[Block],
    linear: Sequence[Linear],
    corpus: Corpus,
    workers: Workers,
    seed: int,
    track: Track = silent,
) -> list[Probe]:
    """The bilinear probe of every block; half of the held-out sequences stop it, the others measure it."""
    length = corpus.fit.shape[1]
    fit = corpus.fit[: max(2, FIT_TOKENS // length)]
    held_out = corpus.choose[: max(4, HELD_OUT_TOKENS // length)]
    stop, report = held_out[0::2], held_out[1::2]
    windows = torch.cat([fit, stop, report])
    probes = []
    for group, rows in captured(model, blocks, windows, workers, track):
        for block, (x, y) in zip(track(group, "probing residuals"), rows, strict=True):
            sizes = [len(fit), len(stop), len(report)]
            probes.append(_probe(linear[block.index].fit, x.split(sizes), y.split(sizes), seed))
    return probes


def _probe(fit: LinearFit, x: Sequence[Tensor], y: Sequence[Tensor], seed: int) -> Probe:
    """One probe from [fit, stop, report] parts, each [sequences, length, features]."""
    fit_x, stop_x, fit_y, stop_y = (part.flatten(0, 1) for part in (*x[:2], *y[:2]))
    bilinear = fit_bilinear(fit, fit_x, fit_y, stop_x, stop_y, seed)
    own = fit.to(x[2].dtype)
    before, after = (
        (y[2] - predicted).double().square().sum((1, 2)) for predicted in (x[2] @ own.weight + own.bias, bilinear(x[2]))
    )
    shown = y[2].double()
    sums, squares = shown.sum(1), shown.square().sum((1, 2))
    rows = torch.full((len(shown),), shown.shape[1], dtype=torch.float64)
    total = squares.sum() - sums.sum(0).square().sum() / rows.sum()
    return Probe(
        rank=RANK,
        r2_lin=1 - (before.sum() / total).item(),
        gain=((before - after).sum() / total).item(),
        gain_error=recovery.r2_interval(after - before, rows, sums, squares),
        steps=bilinear.steps,
        fit_tokens=len(fit_x),
        stop_tokens=len(stop_x),
        report_tokens=int(rows.sum()),
    )


def captured(
    model: Any, blocks: list[Block], windows: Tensor, workers: Workers, track: Track = silent
) -> Iterator[tuple[list[Block], list[tuple[Tensor, Tensor]]]]:
    """Groups of blocks with their rows (x, y), each [windows, length, features] in float32; memory is bounded."""
    size = 4 * windows.numel() * max(block.d_in + block.d_out for block in blocks)
    count = max(1, ROW_BYTES // size)
    for start in range(0, len(blocks), count):
        group = blocks[start : start + count]
        rows = [(torch.empty(*windows.shape, b.d_in), torch.empty(*windows.shape, b.d_out)) for b in group]
        for at, batch in track(own_batches(windows, workers), "capturing activations"):
            taps = [tap for b, own in zip(group, rows, strict=True) for tap in row_taps(b, _keeper(own, at))]
            with torch.no_grad(), hooked(model, taps):
                model.base_model(input_ids=batch, use_cache=False)
        yield group, rows


def _keeper(own: tuple[Tensor, Tensor], at: Tensor) -> Any:
    def keep(rows: Rows) -> None:
        for kept, seen in zip(own, (rows.x, rows.y), strict=True):
            kept[at] = seen.detach().float().cpu().view(len(at), -1, seen.shape[-1])

    return keep
