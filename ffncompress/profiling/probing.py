"""What needs rows and not just their moments: captured activations, and the probe fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ffncompress import recovery
from ffncompress.models import Block, forward
from ffncompress.passes.activations import Rows, hooked, own_batches, row_hooks
from ffncompress.profiling.measure import Linear
from ffncompress.profiling.records import Probe
from ffncompress.recovery import LinearFit
from ffncompress.recovery.bilinear import RANK, fit_bilinear
from ffncompress.runtime.run import Run
from ffncompress.text.corpus import Corpus
from ffncompress.text.windows import Windows
from ffncompress.type_aliases import Model

FIT_TOKENS, HELD_OUT_TOKENS = 12_288, 8_192
ROW_BYTES = 2 * 2**30  # of captured rows at a time


def probe_blocks(
    model: Model, blocks: list[Block], linear: Sequence[Linear], corpus: Corpus, run: Run, seed: int
) -> list[Probe]:
    """The bilinear probe of every block; half of the held-out sequences stop it, the others measure it."""
    fit, held_out = corpus.fit.up_to(FIT_TOKENS, least=2), corpus.choose.up_to(HELD_OUT_TOKENS, least=4)
    stop, report = held_out[0::2], held_out[1::2]
    windows = Windows.cat([fit, stop, report])
    sizes = [part.numel() for part in (fit, stop, report)]
    probes = []
    for group, rows in captured(model, blocks, windows, run):

        def probe(at: int, group: list[Block] = group, rows: list[tuple[Tensor, Tensor]] = rows) -> Probe:
            x, y = rows[at]
            return _probe(linear[group[at].index].fit, x.split(sizes), y.split(sizes), report, seed)

        places = range(len(group))
        dealt = zip(run.progress(places, "probing residuals"), run.workers.deal(places, probe), strict=True)
        probes += [found for _, found in dealt]
    return probes


def _probe(fit: LinearFit, x: Sequence[Tensor], y: Sequence[Tensor], report: Windows, seed: int) -> Probe:
    """One probe from the rows of [fit, stop, report] windows, each [rows, features]."""
    bilinear = fit_bilinear(fit, x[0], y[0], x[1], y[1], seed)
    own = fit.to(x[2].dtype)
    before, after = (_squares(y[2] - predicted, report) for predicted in (x[2] @ own.weight + own.bias, bilinear(x[2])))
    squares = _squares(y[2], report)
    sums = torch.zeros(len(report), y[2].shape[1], dtype=torch.float64)
    for at, part in report.grouped(y[2]):
        sums[at] = part.double().sum(1)
    rows = report.lengths.double()
    total = squares.sum() - sums.sum(0).square().sum() / rows.sum()
    return Probe(
        rank=RANK,
        r2_lin=1 - (before.sum() / total).item(),
        gain=((before - after).sum() / total).item(),
        gain_error=recovery.r2_interval(after - before, rows, sums, squares),
        steps=bilinear.steps,
        fit_tokens=len(x[0]),
        stop_tokens=len(x[1]),
        report_tokens=int(rows.sum()),
    )


def _squares(values: Tensor, windows: Windows) -> Tensor:
    """The sum of squares over each window, [n]."""
    total = torch.zeros(len(windows), dtype=torch.float64)
    for at, part in windows.grouped(values):
        total[at] = part.double().square().sum((1, 2))
    return total


def captured(
    model: Model, blocks: list[Block], windows: Windows, run: Run
) -> Iterator[tuple[list[Block], list[tuple[Tensor, Tensor]]]]:
    """Groups of blocks with their rows (x, y), each [tokens, features] in float32, in the windows' order.

    Memory is bounded. Every process has the rows of all.
    """
    begins = windows.lengths.cumsum(0) - windows.lengths
    size = 4 * windows.numel() * max(block.d_in + block.d_out for block in blocks)
    count = max(1, ROW_BYTES // size)
    for start in range(0, len(blocks), count):
        group = blocks[start : start + count]
        rows = [(torch.zeros(windows.numel(), b.d_in), torch.zeros(windows.numel(), b.d_out)) for b in group]
        for at, batch in run.progress(own_batches(windows, run.workers), "capturing activations"):
            places = (begins[at][:, None] + torch.arange(batch.shape[1])).flatten()
            hooks = [hook for b, own in zip(group, rows, strict=True) for hook in row_hooks(b, _keeper(own, places))]
            with torch.no_grad(), hooked(model, hooks):
                forward(model.base_model, batch)
        run.workers.sum_(part for own in rows for part in own)  # a row is one process's, and zero in the others
        yield group, rows


def _keeper(own: tuple[Tensor, Tensor], at: Tensor) -> Callable[[Rows], None]:
    def keep(rows: Rows) -> None:
        for kept, seen in zip(own, (rows.x, rows.y), strict=True):
            kept[at] = seen.detach().float().cpu()

    return keep
