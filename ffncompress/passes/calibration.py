"""One forward pass over token windows fills the moments of every block.

For each block two sets are kept, over the fit windows and over the held-out ones: of its input and output (x, y),
plain, as R2_lin is defined; and of (z, y), z = [h, x] with the inner activations h, each row weighted by 1 / |s|^2,
where s is the residual stream after the block. The next norm divides by the stream's scale, so a weighted error is an
error as the rest of the model sees it; and the massive activations of a few tokens, which would otherwise own the fit,
count as one row each. The former are multiplied in float64, for inputs are ill-conditioned and R2_lin is exact; the
latter, much wider and never solved without a ridge, in float32 batch by batch, and summed in float64. And y is linear
in h, so of (z, y) only the Gram matrix of z is measured: the rest follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.errors import NumericsError, TextError
from ffncompress.models import Block, out_projection
from ffncompress.recovery import Moments
from ffncompress.windows import TokenWindows, Windows
from ffncompress.workers import Loop, Track, Workers, silent, straight

BATCH_TOKENS = 1024
MOMENT_BYTES = 8 * 2**30
ROWS_PER_FEATURE = 4  # below this a map of the block's width is mostly noise


@dataclass
class BlockMoments:
    """The four sets of one block, and what the loss feels of its errors."""

    neurons: int  # how many features of z are inner activations
    fit: Moments
    held_out: Moments
    fit_inner: Moments
    held_out_inner: Moments
    metric: Tensor | None = None  # what an error costs by direction, [d_out, d_out]

    @classmethod
    def zeros(cls, block: Block, device: torch.device, *, inner: bool = True) -> BlockMoments:
        """Nothing yet; without `inner`, z = x alone, which is all that linear maps need."""

        def zeros(d_in: int, d_out: int = block.d_out, full_yy: bool = False) -> Moments:
            return Moments.zeros(d_in, d_out, full_yy=full_yy, device=device)

        neurons, d_out = (block.d_inner, 0) if inner else (0, block.d_out)  # y of [h, x] follows from h
        fit, held_out = zeros(block.d_in), zeros(block.d_in, full_yy=True)
        fit_inner, held_out_inner = (zeros(neurons + block.d_in, d_out) for _ in range(2))
        return cls(neurons, fit, held_out, fit_inner, held_out_inner)

    def pair(self, held_out: bool) -> tuple[Moments, Moments]:
        return (self.held_out, self.held_out_inner) if held_out else (self.fit, self.fit_inner)

    def complete_(self, weight: Tensor, bias: Tensor | None) -> None:
        """Give the moments of (z, .) their y, where it was not measured."""
        if not self.neurons:
            return
        self.fit_inner = self.fit_inner.mapped(weight, bias)
        self.held_out_inner = self.held_out_inner.mapped(weight, bias)

    def weighted(self) -> tuple[Moments, Moments]:
        """(fit, held out) of (x, y) with each row weighted: a corner of the inner ones."""
        x = slice(self.neurons, None)
        return self.fit_inner.of_inputs(x), self.held_out_inner.of_inputs(x)

    def all(self) -> tuple[Moments, ...]:
        return self.fit, self.held_out, self.fit_inner, self.held_out_inner

    def named_tensors(self) -> dict[str, Tensor]:
        """All sums by name, for a file."""
        named = {
            f"{part}.{f.name}": getattr(getattr(self, part), f.name).cpu() for part in _PARTS for f in fields(Moments)
        }
        return named if self.metric is None else named | {"metric": self.metric.cpu()}

    @classmethod
    def named(cls, tensors: dict[str, Tensor]) -> BlockMoments:
        """From what `named_tensors` gave."""
        fit, held_out, fit_inner, held_out_inner = (
            Moments(*(tensors[f"{part}.{f.name}"] for f in fields(Moments))) for part in _PARTS
        )
        neurons = fit_inner.d_in - fit.d_in
        return cls(neurons, fit, held_out, fit_inner, held_out_inner, tensors.get("metric"))


_PARTS = ("fit", "held_out", "fit_inner", "held_out_inner")


def in_passes(blocks: list[Block], limit: int = MOMENT_BYTES, *, inner: bool = True) -> list[list[Block]]:
    """The blocks in groups whose moments fit in `limit` bytes, for a pass over the text each; mostly one group."""
    groups: list[list[Block]] = [[]]
    size = 0
    for block in blocks:
        wide = block.d_in + block.d_inner * inner
        own = 16 * (block.d_in * (block.d_in + block.d_out) + wide * (wide + block.d_out))
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += own
    return groups


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
    model: Any,
    blocks: list[Block],
    fit_windows: TokenWindows,
    held_out_windows: TokenWindows,
    workers: Workers,
    track: Track = silent,
    *,
    inner: bool = True,
    loop: Loop = straight,
) -> list[BlockMoments]:
    """Run the decoder once over all windows and return each block's moments, summed over processes.

    Without `inner` the inner activations are left out, and only linear maps can be fitted. `loop` may go on from the
    sums of a killed run.

    Raises:
        NumericsError: a block's activations are not finite.
    """
    moments = [BlockMoments.zeros(block, _device_of(model, block), inner=inner) for block in blocks]
    batches = [(batch, False) for _, batch in own_batches(fit_windows, workers)]
    batches += [(batch, True) for _, batch in own_batches(held_out_windows, workers)]
    decoder = model.base_model  # without the head: no logits are needed
    role = {"held_out": False}
    sums = [tensor for each in moments for part in each.all() for tensor in part.tensors()]
    with hooked(model, _taps(blocks, moments, role)):
        for batch, held_out in loop(batches, sums, track, "scoring blocks"):
            role["held_out"] = held_out
            decoder(input_ids=batch, use_cache=False)
    for block, each in zip(blocks, moments, strict=True):
        for part in each.all():
            workers.sum_(part.tensors())
        each.complete_(*out_projection(model, block))
        for part in each.all():
            if not (part.x.isfinite().all() and part.yy.isfinite().all() and part.weight.isfinite()):
                raise NumericsError(
                    f"block {block.index} ({block.path}) gives NaN or infinite activations; "
                    "try --dtype float32, or check the model's weights"
                )
    return moments


def own_batches(windows: TokenWindows, workers: Workers) -> list[tuple[Tensor, Tensor]]:
    """This process's batches of about BATCH_TOKENS in windows of one length: (their indices, the batch).

    Whole batches are dealt out, so what is multiplied together does not depend on how many processes there are.
    """
    batches = Windows.of(windows).batches(BATCH_TOKENS)
    own = (batches[i] for i in workers.share(len(batches)).tolist())
    return [(at, batch.to(workers.device)) for at, batch in own]


def first_tensor(value: Any) -> Tensor:
    tensor: Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


@contextmanager
def hooked(model: nn.Module, hooks: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Forward hooks at dotted paths, for the length of a `with`."""
    handles = [model.get_submodule(path).register_forward_hook(hook) for path, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _device_of(model: nn.Module, block: Block) -> torch.device:
    device = next(model.get_submodule(block.path).parameters()).device
    # Apple's GPU has no float64, and an offloaded block has no device at all
    return torch.device("cpu") if device.type in ("mps", "meta") else device


def _taps(blocks: list[Block], moments: list[BlockMoments], role: dict[str, bool]) -> Iterator[tuple[str, Any]]:
    """Hooks that feed the moments; `role["held_out"]` says which set the batch under way belongs to."""
    for block, own in zip(blocks, moments, strict=True):

        def feed(rows: Rows, own: BlockMoments = own) -> None:
            plain, inner = own.pair(role["held_out"])
            x, h, y, stream = (t.to(plain.x.device) for t in (rows.x, rows.h, rows.y, rows.stream))
            plain.update_(x.double(), y.double())
            if own.neurons:
                inner.update_(torch.cat([h, x.to(h)], 1), y[:, :0], stream_weights(stream), torch.float32)
            else:
                inner.update_(x.double(), y.double(), stream_weights(stream))

        yield from row_taps(block, feed)


@dataclass(frozen=True)
class Rows:
    """What passes through a block, a row for each token."""

    x: Tensor  # the FFN's input
    h: Tensor  # its inner activations
    y: Tensor  # its output
    stream: Tensor  # the residual stream after it


def row_taps(block: Block, feed: Callable[[Rows], None]) -> list[tuple[str, Any]]:
    """Hooks that call `feed` with a block's rows at every forward pass."""
    seen: dict[str, Tensor] = {}

    def at_out(_module: nn.Module, args: Any, _output: Any) -> None:
        seen["h"] = args[0].flatten(0, -2)

    def at_ffn(_module: nn.Module, args: Any, output: Any) -> None:
        seen["x"], seen["y"] = args[0].flatten(0, -2), first_tensor(output).flatten(0, -2)

    def at_layer(_module: nn.Module, _args: Any, output: Any) -> None:
        feed(Rows(stream=first_tensor(output).flatten(0, -2), **seen))
        seen.clear()

    return [(block.out_path, at_out), (block.path, at_ffn), (block.layer_path, at_layer)]


def stream_weights(stream: Tensor) -> Tensor:
    """1 / |s|^2 of each row, [rows]."""
    return 1 / stream.double().square().sum(-1).clamp_min(1e-30)
