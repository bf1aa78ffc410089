"""One forward pass over token windows fills the moments of every block.

For each block two sets are kept, over the fit windows and over the held-out ones: of its input and output (x, y),
plain, as R2_lin is defined; and of (z, y), z = [h, x] with the inner activations h, each row weighted by 1 / |s|^2,
where s is the residual stream after the block. The next norm divides by the stream's scale, so a weighted error is an
error as the rest of the model sees it; and the massive activations of a few tokens, which would otherwise own the fit,
count as one row each. The former are multiplied in float64, for inputs are ill-conditioned and R2_lin is exact; the
latter, much wider and never solved without a ridge, in float32 batch by batch, and summed in float64. And y is linear
in h, so of (z, y) only the Gram matrix of z is measured: the rest follows. Where that would fill more than moments may,
neurons are divided into runs (see replacement/moments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ffncompress.errors import BudgetError, NumericsError, TextError
from ffncompress.models import Block, oriented, out_projection
from ffncompress.passes.activations import Rows, hooked, own_batches, row_hooks
from ffncompress.passes.walking import Walk
from ffncompress.replacement.moments import BlockMoments, add_rows_, moment_bytes, runs_within
from ffncompress.runtime.memory import AddedOnce, Halving
from ffncompress.runtime.room import free_memory
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import StageKey
from ffncompress.text.windows import TokenWindows
from ffncompress.type_aliases import Hook, Model

FIT_SHARE = 2.5  # of a block's moments: what they and a fit from them fill together, at least
ROWS_PER_FEATURE = 4  # below this a map of the block's width is mostly noise


def group_by_memory(blocks: list[Block], limit: int, *, inner: bool = True) -> list[list[Block]]:
    """The blocks in groups whose moments fit in `limit` bytes, for a pass over the text each; mostly one group."""
    groups: list[list[Block]] = [[]]
    size = 0
    for block in blocks:
        own = moment_bytes(block, runs_within(block, limit), inner=inner)
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += own
    return groups


def check_memory(blocks: list[Block], run: Run) -> None:
    """Moments and a fit from them must find room, for what the kernel ends for want of memory says nothing.

    Raises:
        BudgetError: they do not; says how much is needed.
    """
    widest = max(blocks, key=lambda block: moment_bytes(block, runs_within(block, run.moment_bytes)))
    needed = FIT_SHARE * moment_bytes(widest, runs_within(widest, run.moment_bytes))
    free = free_memory(run.workers.device)
    if needed > free:
        raise BudgetError(
            f"block {widest.index}: to fit replacements of an FFN {widest.d_in} by {widest.d_inner} takes about "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free some, or take another --device or machine"
        )


def check_enough_rows(blocks: list[Block], rows: int) -> None:
    """A fit needs several rows for each input feature.

    Raises:
        TextError: there are too few; says how many are needed.
    """
    width = max(block.d_in for block in blocks)
    needed = ROWS_PER_FEATURE * width
    if rows < needed:
        raise TextError(
            f"{rows:,} fit tokens are too few for FFNs {width} wide: at least {needed:,} are needed; "
            "raise --tokens, or give more text with --data"
        )


@torch.inference_mode()
def collect_moments(
    model: Model,
    blocks: list[Block],
    fit_windows: TokenWindows,
    held_out_windows: TokenWindows,
    run: Run,
    *,
    inner: bool = True,
    key: StageKey | None = None,
    steps: Walk | None = None,
) -> list[BlockMoments]:
    """Run the decoder once over all windows and return each block's moments, summed over processes.

    Args:
        model: the model.
        blocks: those whose moments are wanted.
        fit_windows: what is fitted on.
        held_out_windows: what fits are judged on.
        run: the processes that share the windows.
        inner: also the inner activations; without them, only linear maps can be fitted.
        key: by which sums are kept on the way, so that a killed run goes on from them.
        steps: from one group of blocks to the next; none: the whole model runs.

    Raises:
        NumericsError: a block's activations are not finite.
    """
    places = [(block, _device_of(model, block), runs_within(block, run.moment_bytes)) for block in blocks]
    moments = [BlockMoments.zeros(block, device, inner=inner, runs=runs) for block, device, runs in places]
    batches = [(batch, False) for _, batch in own_batches(fit_windows, run.workers)]
    batches += [(batch, True) for _, batch in own_batches(held_out_windows, run.workers)]
    steps = steps or Walk(model, blocks, None)
    sums = [tensor for each in moments for part in each.all() for tensor in part.tensors()]
    halving, once = Halving(), AddedOnce(len(blocks))
    with hooked(model, _moment_hooks(blocks, moments, once, held_out := [False])):
        for at, (batch, held_out[0]) in run.loop([*enumerate(batches)], sums, "scoring blocks", key):
            once.begin()
            halving(partial(_score, steps, blocks, at, once), batch, range(len(batch)))
    for block, each in zip(blocks, moments, strict=True):
        for part in each.all():
            run.workers.sum_(part.tensors())
        each.complete_(*out_projection(model, block))
        for part in each.all():
            if not all(sums.isfinite().all() for sums in part.tensors()):
                raise NumericsError(
                    f"block {block.index} ({block.path}) gives NaN or infinite activations; "
                    "try --dtype float32, or check the model's weights"
                )
    return moments


def _device_of(model: nn.Module, block: Block) -> torch.device:
    device = oriented(model.get_submodule(block.out_path)).device
    # Apple's GPU has no float64, and an offloaded block has no device at all
    return torch.device("cpu") if device.type in ("mps", "meta") else device


def _score(steps: Walk, blocks: list[Block], at: int, once: AddedOnce, ids: Tensor, windows: Sequence[int]) -> None:
    """Some windows of a batch, past the hooks."""
    with once.part(windows[0], len(windows)):
        steps.forward(blocks, at, ids)


def _moment_hooks(
    blocks: list[Block], moments: list[BlockMoments], once: AddedOnce, held_out: list[bool]
) -> Iterator[tuple[str, Hook]]:
    """Hooks that feed the moments; `held_out[0]` says which set the batch under way belongs to."""
    for i, (block, own) in enumerate(zip(blocks, moments, strict=True)):

        def feed(rows: Rows, i: int = i, own: BlockMoments = own) -> None:
            plain, inner = own.pair(held_out[0])
            first = own.runs[0][held_out[0]] if own.runs else inner
            with once.adding(i, len(rows.x), first.rows) as new:  # what needs most memory comes first
                x, h, y, weights = (t[new].to(plain.x.device) for t in (rows.x, rows.h, rows.y, rows.weights()))
                if own.runs:
                    add_rows_(own.runs, h, weights, held_out[0])
                if own.neurons:
                    inner.update_(torch.cat([h, x.to(h)], 1), y[:, :0], weights, torch.float32)
                else:
                    inner.update_(x.double(), y.double(), weights)
                plain.update_(x.double(), y.double())

        yield from row_hooks(block, feed)
