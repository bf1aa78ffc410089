"""The chosen stand-ins, fitted anew block by block on what the slimmed model itself feeds them.

Stand-ins fitted on the original model's activations meet others once the blocks before them have changed. So the
layers are walked in order with two residual streams, the original's and the slimmed model's. At each replaced block the
moments are those of the slimmed stream, and the target is the FFN's output there plus the drift: what would bring the
stream back to the original's. How much of the drift to undo is not a knob: it has a ridge of its own, chosen like the
other on held-out rows, which may as well say "none of it".

A layer is run by itself inside the model's own forward, so that masks and positions are right in any family: those
before it hand on a kept state, those after it pass its output through. States lie on disk, so memory does not grow with
the tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.calibration import Rows, first_tensor, hooked, own_batches, row_taps, stream_weights
from ffncompress.forecast import Fit
from ffncompress.models import Block
from ffncompress.modules import Shape, oriented
from ffncompress.recovery import Moments, NeuronFit
from ffncompress.scoring import replacement
from ffncompress.swaps import handing_on
from ffncompress.workers import Track, Workers, silent

DRIFT_RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)


@torch.no_grad()  # not inference mode: its tensors could not be trained on, or loaded, later
def refit(
    model: Any,
    blocks: list[Block],
    shapes: Mapping[int, Shape],
    fit_windows: Tensor,
    held_out_windows: Tensor,
    workers: Workers,
    track: Track = silent,
    *,
    undo_drift: bool = True,
) -> dict[int, nn.Module]:
    """Stand-ins of these shapes for these blocks, each fitted behind the ones before it.

    Args:
        model: the original model; it is left as it is.
        blocks: all of its blocks.
        shapes: the stand-ins, by block.
        fit_windows: token windows to fit on.
        held_out_windows: token windows to choose ridges on.
        workers: the processes that share the work.
        track: wraps the walk over layers, for a progress bar.
        undo_drift: aim at the original's stream, not only at the block's own output.
    """
    batches = [(batch, False) for _, batch in own_batches(fit_windows, workers)]
    batches += [(batch, True) for _, batch in own_batches(held_out_windows, workers)]
    made: dict[int, nn.Module] = {}
    last = max(shapes, default=-1)
    with tempfile.TemporaryDirectory(prefix="ffncompress-") as folder:
        shelf = _Shelf(Path(folder))
        for block in track(blocks[: last + 1], "refitting in order"):
            shape = shapes.get(block.index)
            sums = None if shape is None else _Sums(model, block, shape, undo_drift)
            drifted = bool(made)
            for at, (batch, held_out) in enumerate(batches):
                original, output = run_layer(model, blocks, block.index, batch, shelf.get("original", at))
                shelf.put("original", at, output)
                rows = original
                if drifted:
                    rows, output = run_layer(model, blocks, block.index, batch, shelf.get("slimmed", at))
                if sums is not None:
                    sums.update_(rows, original.stream, held_out)
                    shelf.put("rows", at, (rows.x, rows.stream - block.scale * rows.y))
                if drifted or sums is not None:
                    shelf.put("slimmed", at, output)  # its form is right; a new stand-in's stream comes below
            if shape is not None and sums is not None:
                module = replacement(block, model.get_submodule(block.path), shape, sums.solve(workers))
                for at in range(len(batches)):
                    x, before = shelf.get("rows", at)
                    y = module.to(x)(x)
                    shelf.put("slimmed", at, _with_stream(shelf.get("slimmed", at), before + block.scale * y))
                made[block.index] = module.float().cpu()
    return made


def run_layer(model: Any, blocks: list[Block], index: int, batch: Tensor, state: Any) -> tuple[Rows, Any]:
    """One layer of the model on the state before it (none: the embeddings): its block's rows, and its output."""
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    rows: list[Rows] = []
    outputs: list[Any] = []
    taps = [*row_taps(blocks[index], rows.append), (blocks[index].layer_path, lambda _m, _a, out: outputs.append(out))]
    with (
        handing_on(layers[:index], lambda: state),
        handing_on(layers[index + 1 :], lambda: outputs[-1]),
        hooked(model, taps),
    ):
        model.base_model(input_ids=batch, use_cache=False)
    return rows[0], outputs[0]


def _with_stream(output: Any, stream: Tensor) -> Any:
    """A layer's output, tensor or tuple, with another residual stream in it."""
    stream = stream.view_as(first_tensor(output))
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


class _Shelf:
    """Tensors of each batch, on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, at: int, value: Any) -> None:
        torch.save(value, self._folder / f"{name}-{at}.pt")

    def get(self, name: str, at: int) -> Any:
        file = self._folder / f"{name}-{at}.pt"
        return torch.load(file, weights_only=True) if file.exists() else None


class _Sums:
    """The moments that a stand-in of a shape is fitted from, and the fit."""

    def __init__(self, model: nn.Module, block: Block, shape: Shape, undo_drift: bool) -> None:
        self.block, self.shape, self.undo_drift = block, shape, undo_drift
        self.weight = oriented(model.get_submodule(block.out_path)).T
        inner = block.d_inner if shape.width else 0
        outer = 0 if shape.kind == "neurons" else block.d_in
        device = "cpu" if self.weight.device.type in ("mps", "meta") else self.weight.device
        targets = 2 * block.d_out if shape.kind == "neurons" else block.d_out
        self.fit, self.held_out = (
            Moments.zeros(inner + outer, targets, full_yy=False, device=device) for _ in range(2)
        )

    def update_(self, rows: Rows, original_stream: Tensor, held_out: bool) -> None:
        device = self.fit.x.device
        h, x, y, stream, original = (
            t.to(device).double() for t in (rows.h, rows.x, rows.y, rows.stream, original_stream)
        )
        drift = (original - stream) / self.block.scale * self.undo_drift
        if self.shape.kind == "neurons":
            features, targets = h, torch.cat([y, drift], 1)
        else:
            features, targets = (torch.cat([h, x], 1) if self.shape.width else x), y + drift
        (self.held_out if held_out else self.fit).update_(features, targets, stream_weights(original))

    def solve(self, workers: Workers) -> Fit:
        for moments in (self.fit, self.held_out):
            workers.sum_(moments.tensors())
        if not self.shape.width:
            return recovery.fit_linear(self.fit, self.held_out).cpu()
        inner = self.fit.of_inputs(slice(self.block.d_inner))
        gram = inner.covariance_x() if self.block.out_bias else inner.xx / inner.weight
        order = recovery.removal_order(gram, self.weight.to(gram))
        kept = order[len(order) - self.shape.width :].sort().values
        if self.shape.kind == "hybrid":
            return recovery.fit_hybrid(self.fit, self.held_out, kept, self.block.d_inner).cpu()
        return self._solve_neurons(kept).cpu()

    def _solve_neurons(self, kept: Tensor) -> NeuronFit:
        """The output matrix for the block's own output, plus what it can undo of the drift."""
        d_out, biased = self.block.d_out, self.block.out_bias
        z0, t0 = self.fit.means if biased else (torch.zeros_like(self.fit.x), torch.zeros_like(self.fit.y))
        gram, cross, _ = self.fit.of_inputs(kept).centred_on(z0[kept], t0)
        held_gram, held_cross, _ = self.held_out.of_inputs(kept).centred_on(z0[kept], t0)
        out, ridge = recovery.solve_ridged(gram, cross[:, :d_out], held_gram, held_cross[:, :d_out])
        left = held_cross[:, :d_out] + held_cross[:, d_out:] - held_gram @ out
        step, _ = recovery.solve_ridged(gram, cross[:, d_out:], held_gram, left, DRIFT_RIDGES)
        if ((step * (held_gram @ step)).sum() < 2 * (step * left).sum()).item():
            out = out + step
        bias = t0[:d_out] + t0[d_out:] - out.T @ z0[kept] if biased else None
        return NeuronFit(kept, out, bias, ridge)
