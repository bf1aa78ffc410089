"""The chosen replacements, fitted anew block by block on what the slimmed model itself feeds them.

Replacements fitted on the original model's activations meet others once the blocks before them have changed. So the
layers are walked in order with two residual streams, the original's and the slimmed model's. At each replaced block the
moments are those of the slimmed stream, and the target is the FFN's output there plus the drift: what would bring the
stream back to the original's. How much of the drift to undo is not a knob: it has a ridge of its own, chosen like the
other on held-out rows, which may as well say "none of it".

A layer is run by itself inside the model's own forward, so that masks and positions are right in any family: those
before it hand on a kept state, those after it pass its output through. States lie on disk, so memory does not grow with
the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.models import (
    Block,
    ffn_of,
    first_tensor,
    forward,
    handing_on,
    installed,
    on_rows,
    out_projection,
    shelved,
)
from ffncompress.passes.activations import Rows, gains, hooked, own_batches, pulled_back, row_hooks, stream_weights
from ffncompress.passes.inner import AimedRows, inner_rows, refit_inner
from ffncompress.records.plan import Shape
from ffncompress.recovery import Metric, Moments, NeuronFit
from ffncompress.recovery.inner import InnerRows
from ffncompress.recovery.neurons import Fit
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import prune_neurons
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Facts
from ffncompress.runtime.workers import Workers
from ffncompress.storage.working import spool
from ffncompress.text.windows import TokenWindows
from ffncompress.type_aliases import LayerOutput, Model

DRIFT_RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)


@torch.no_grad()  # not inference mode: its tensors could not be trained on, or loaded, later
def refit(
    model: Model,
    blocks: list[Block],
    shapes: Mapping[int, Shape],
    fit_windows: TokenWindows,
    held_out_windows: TokenWindows,
    run: Run,
    *,
    metrics: Sequence[Tensor] | None = None,
    undo_drift: bool = True,
    inner: bool = False,
) -> dict[int, nn.Module]:
    """Replacements of these shapes for these blocks, each fitted behind the ones before it.

    Args:
        model: the original model; it is left as it is.
        blocks: all of its blocks.
        shapes: the replacements, by block.
        fit_windows: token windows to fit on.
        held_out_windows: token windows to choose ridges on.
        run: the processes that share the work, and where fits are kept: a block whose fit is there is only run, for
            the sake of those behind it.
        metrics: what the loss feels of each block's errors, by direction; none: all directions alike.
        undo_drift: aim at the original's stream, not only at the block's own output.
        inner: refit the matrices that lead into kept neurons too, not only the one that leads out.
    """
    batches = [(batch, False) for _, batch in own_batches(fit_windows, run.workers)]
    batches += [(batch, True) for _, batch in own_batches(held_out_windows, run.workers)]
    made: dict[int, nn.Module] = {}
    last = max(shapes, default=-1)
    with spool() as folder:
        states = _Spool(folder)
        for block in run.progress(blocks[: last + 1], "refitting in order"):
            shape = shapes.get(block.index)
            metric = None if metrics is None else metrics[block.index]
            up_to_here = {i: asdict(each) for i, each in sorted(shapes.items()) if i <= block.index}
            facts: Facts = {"shapes": up_to_here, "undo_drift": undo_drift, "inner": inner}
            fit: Fit | None = None if shape is None else run.stages.find(f"refit of block {block.index}", facts)
            sums = None if shape is None or fit is not None else _Sums(model, block, shape, metric)
            drifted = bool(made)
            for at, (batch, held_out) in enumerate(batches):
                entering = states.get("original", at)
                original, output = run_layer(model, blocks, block.index, batch, entering)
                states.put("original", at, output)
                rows = original
                if drifted:
                    entering = states.get("slimmed", at)
                    rows, output = run_layer(model, blocks, block.index, batch, entering)
                whole = block.stream_path or block.gate_path  # more happens in the layer before the stream leaves it
                if shape is not None and whole:
                    states.put("entering", at, entering)
                if shape is not None:
                    drift, weights = aim(model, block, rows, original, undo_drift)
                    if sums is not None:
                        sums.update_(rows, drift, weights, held_out)
                    before = rows.stream - block.scale * (rows.y if rows.added is None else rows.added)
                    states.put("rows", at, (rows.x, before, rows.y + drift, weights))
                if drifted or shape is not None:
                    states.put("slimmed", at, output)  # its form is right; a new replacement's stream comes below
            if shape is not None:
                if sums is not None:
                    fit = run.stages.put(f"refit of block {block.index}", facts, sums.fitted(run.workers))
                assert fit is not None
                module = build_replacement(block, ffn_of(model, block), shape, fit)
                if shape.kind == "neurons" and inner:
                    _refit_inner_(module, block, states, batches, run, facts)
                for at, (batch, _) in enumerate(batches):
                    if whole:
                        with installed(model, {block.path: module}):
                            output = _pass_layer(model, blocks, block.index, batch, states.get("entering", at))
                    else:
                        x, before, *_ = states.get("rows", at)
                        y = on_rows(module.to(x), x)
                        added = model.get_submodule(block.after_path)(y) if block.after_path else y
                        output = _with_stream(states.get("slimmed", at), before + block.scale * added)
                    states.put("slimmed", at, output)
                made[block.index] = shelved(module.float().cpu(), model)
    return made


def aim(model: Model, block: Block, rows: Rows, original: Rows, undo_drift: bool) -> tuple[Tensor, Tensor]:
    """(what a replacement should add to the FFN's output, what an error of it weighs) in each row.

    Behind a norm, what would bring the stream back is pulled through it: J'd over its gain, which is J's inverse
    wherever it stretches all directions alike.
    """
    drift = (original.stream - rows.stream) / block.scale * undo_drift
    weights = stream_weights(original.stream)
    if rows.added is None:
        return drift, weights
    gain = gains(rows.y, rows.added)
    drift = pulled_back(model, block, rows, drift)
    return drift / gain.clamp_min(1e-30)[:, None].to(drift), weights * gain


def _refit_inner_(
    module: nn.Module, block: Block, states: _Spool, batches: list[tuple[Tensor, bool]], run: Run, facts: Facts
) -> None:
    """Refit the matrices that lead into kept neurons, and the one that leads out after them, where that helps."""

    def aimed() -> Iterator[AimedRows]:
        for at, (_, held_out) in enumerate(batches):
            x, _, target, weights = states.get("rows", at)
            yield x, target, weights, held_out

    def make() -> dict[str, Tensor]:
        for at, rows in enumerate(aimed()):
            states.put("inner", at, asdict(inner_rows(module.to(rows[0]), block, rows)))

        def spooled() -> Iterator[InnerRows]:
            return (InnerRows(**states.get("inner", at)) for at in range(len(batches)))

        return refit_inner(module, block, spooled, aimed, run.workers) or {}

    module.load_state_dict(run.stages.keep(f"inner refit of block {block.index}", facts, make), strict=False)


def run_layer(
    model: Model, blocks: list[Block], index: int, batch: Tensor, state: LayerOutput
) -> tuple[Rows, LayerOutput]:
    """One layer of the model on the state before it (none: the embeddings): its block's rows, and its output."""
    rows: list[Rows] = []
    with hooked(model, row_hooks(blocks[index], rows.append)):
        output = _pass_layer(model, blocks, index, batch, state)
    return rows[0], output


def _pass_layer(model: Model, blocks: list[Block], index: int, batch: Tensor, state: LayerOutput) -> LayerOutput:
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    outputs: list[LayerOutput] = []
    with (
        handing_on(layers[:index], lambda: state),
        handing_on(layers[index + 1 :], lambda: outputs[-1]),
        hooked(model, [(blocks[index].layer_path, lambda _m, _a, out: outputs.append(out))]),
    ):
        forward(model.base_model, batch)
    return outputs[0]


def _with_stream(output: LayerOutput, stream: Tensor) -> LayerOutput:
    """A layer's output, tensor or tuple, with another residual stream in it."""
    stream = stream.view_as(first_tensor(output))
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


class _Spool:
    """Tensors of each batch, on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, at: int, value: Any) -> None:
        """Keep a value under a name for one batch."""
        torch.save(value, self._folder / f"{name}-{at}.pt")

    def get(self, name: str, at: int) -> Any:
        """What was kept, or none."""
        file = self._folder / f"{name}-{at}.pt"
        return torch.load(file, weights_only=True) if file.exists() else None


class _Sums:
    """The moments that a replacement of a shape is fitted from, and the fit.

    With neurons, the inputs are h, or [h, x], and only the drift is summed as an output: the FFN's own is linear in h,
    so its moments follow (see `Moments.mapped`). A linear map of x has both in one.
    """

    def __init__(self, model: nn.Module, block: Block, shape: Shape, metric: Tensor | None) -> None:
        self.block, self.shape = block, shape
        weight, self.bias = out_projection(model, block)
        device = "cpu" if weight.device.type in ("mps", "meta") else weight.device
        self.weight = weight.to(device, torch.float64)
        self.metric = None if metric is None else Metric.of(metric.to(device))
        inputs = {"neurons": block.d_inner, "hybrid": block.d_inner + block.d_in}.get(shape.kind, block.d_in)
        self.fit, self.held_out = (Moments.zeros(inputs, block.d_out, full_yy=False, device=device) for _ in range(2))

    def update_(self, rows: Rows, drift: Tensor, weights: Tensor, held_out: bool) -> None:
        """Add the rows of one batch, with what is to be added to their outputs and what errors weigh."""
        device = self.fit.x.device
        h, x, y, drift, weights = (t.to(device) for t in (rows.h, rows.x, rows.y, drift, weights))
        sums = self.held_out if held_out else self.fit
        if self.shape.kind == "neurons":
            sums.update_(h, drift, weights, torch.float32)
        elif self.shape.kind == "hybrid":
            sums.update_(torch.cat([h, x], 1), drift, weights, torch.float32)
        else:
            sums.update_(x, y + drift, weights)

    def fitted(self, workers: Workers) -> Fit:
        """The fit from the rows of all processes, the same in each: they run it, and what comes behind it, together."""
        for moments in (self.fit, self.held_out):
            workers.sum_(moments.tensors())
        return workers.once(self._solve)

    def _solve(self) -> Fit:
        drifts = (self.fit, self.held_out)
        if not self.shape.width:
            return recovery.fit_linear(*drifts, metric=self.metric).cpu()
        fit, held_out = (moments.mapped(self.weight, self.bias) for moments in drifts)
        widths = [self.shape.width]
        kept = prune_neurons(self.block, fit, held_out, self.weight, self.metric, widths)[self.shape.width].kept
        if self.shape.kind == "hybrid":
            fit, held_out = (moments.mapped(self.weight, self.bias, added=True) for moments in drifts)
            return recovery.fit_hybrid(fit, held_out, kept, self.weight, metric=self.metric).cpu()
        plain = recovery.fit_neurons(fit, held_out, kept, self.weight, biased=self.block.out_bias)
        return self._undoing(plain, held_out).cpu()

    def _undoing(self, plain: NeuronFit, held_out: Moments) -> NeuronFit:
        """The fit, and on top of it what these neurons can undo of the drift, as far as held-out rows bear it out."""
        kept, biased = plain.kept, self.block.out_bias
        fit = self.fit.of_inputs(kept)
        h0, d0 = fit.means if biased else (torch.zeros_like(fit.x), torch.zeros_like(fit.y))
        gram, cross, _ = fit.centred_on(h0, d0)
        held_gram, held_cross, _ = self.held_out.of_inputs(kept).centred_on(h0, d0)
        y0 = h0 @ plain.out + (0 if plain.bias is None else plain.bias)
        _, own_cross, _ = held_out.of_inputs(kept).centred_on(h0, y0)
        left = held_cross + own_cross - held_gram @ plain.out
        step, _ = recovery.solve_ridged(gram, cross, held_gram, left, DRIFT_RIDGES)
        if ((step * (held_gram @ step)).sum() >= 2 * (step * left).sum()).item():
            step = torch.zeros_like(step)
        bias = None if plain.bias is None else plain.bias + d0 - step.T @ h0
        return NeuronFit(kept, plain.out + step, bias, plain.ridge)
