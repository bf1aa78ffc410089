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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.models import Block, ffn_of, first_tensor, forward, installed, is_streamed, on_rows, shelved
from ffncompress.passes.activations import Rows, gains, hooked, own_batches, pulled_back, row_hooks, stream_weights
from ffncompress.passes.handing import Handed, handing_on, kept_from, together, windows_of
from ffncompress.passes.inner import AimedRows, inner_rows, refit_inner
from ffncompress.passes.refit_sums import Sums
from ffncompress.passes.spool import Spool
from ffncompress.passes.wide import WideSums
from ffncompress.records.plan import Shape
from ffncompress.recovery import NeuronFit
from ffncompress.recovery.inner import InnerRows
from ffncompress.recovery.neurons import Fit
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.moments import moment_bytes, runs_within
from ffncompress.runtime.memory import Halving
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Facts
from ffncompress.runtime.workers import Workers
from ffncompress.storage.working import spool
from ffncompress.text.windows import TokenWindows
from ffncompress.type_aliases import Model

TOGETHER = 2  # batches that are read at once, for one layer runs at a time
SHARED = 16  # of them at least are to be left, for processes to share


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
    batches = _batches(fit_windows, held_out_windows, run.workers, streamed=is_streamed(model))
    pass_layer = _Layers(model, blocks)
    made: dict[int, nn.Module] = {}
    last = max(shapes, default=-1)
    with spool() as folder:
        states = Spool(folder, _room(blocks, run))
        for block in run.progress(blocks[: last + 1], "refitting in order"):
            shape = shapes.get(block.index)
            if shape is None:
                _walk_on(pass_layer, block, batches, states, drifted=bool(made))
                continue
            metric = None if metrics is None else metrics[block.index]
            up_to_here = {i: asdict(each) for i, each in sorted(shapes.items()) if i <= block.index}
            facts: Facts = {"shapes": up_to_here, "undo_drift": undo_drift, "inner": inner}
            fit: Fit | None = run.stages.find(f"refit of block {block.index}", facts)
            runs = runs_within(block, run.moment_bytes) if shape.kind == "neurons" else 1
            sums = _sums(model, block, shape, metric, runs, states) if fit is None else None
            moves = inner and _inner_can_move(block, shape)
            keeps_h = shape.kind == "neurons" and runs == 1 and not moves and not _goes_on(block)
            for at, batch in enumerate(batches):
                entering = states.get("slimmed", at)
                rows, output = pass_layer.watched(block.index, batch.ids, entering)
                states.put("slimmed", at, output)  # its form is right; the replacement's stream comes below
                original, behind = rows, output
                if made:
                    original, behind = pass_layer.watched(block.index, batch.ids, states.get("original", at))
                states.put("original", at, behind)
                drift, weights = aim(model, block, rows, original, undo_drift)
                if sums is not None:
                    sums.update_(rows, drift, weights, held_out=batch.held_out)
                before = rows.stream - block.scale * (rows.y if rows.added is None else rows.added)
                if moves:
                    states.put("aimed", at, (rows.x, rows.y + drift, weights))
                if _goes_on(block):
                    states.put("entering", at, entering)
                else:
                    states.put("rows", at, (rows.h if keeps_h else rows.x, before))
            if sums is not None:
                fit = run.stages.put(f"refit of block {block.index}", facts, sums.fitted(run.workers))
            assert fit is not None
            module = build_replacement(block, ffn_of(model, block), shape, fit)
            if moves:
                _refit_inner_(module, block, states, batches, run, facts)
            for at, batch in enumerate(batches):
                if _goes_on(block):
                    with installed(model, {block.path: module}):
                        output = pass_layer(block.index, batch.ids, states.get("entering", at))
                else:
                    fed, before = states.get("rows", at)
                    y = _of_kept(module, block, fit, fed) if keeps_h else on_rows(module.to(fed), fed)
                    added = model.get_submodule(block.after_path)(y) if block.after_path else y
                    output = _with_stream(states.get("slimmed", at), before + block.scale * added)
                states.put("slimmed", at, output)
            made[block.index] = shelved(module.float().cpu(), model)
    return made


@dataclass(frozen=True)
class _Batch:
    """Windows of one length, and what their rows are for."""

    ids: Tensor
    held_out: bool


def _batches(fit: TokenWindows, held_out: TokenWindows, workers: Workers, *, streamed: bool) -> list[_Batch]:
    """This process's batches."""
    times = 1 if streamed else min(TOGETHER, max(1, fit.numel() // (SHARED * workers.batch_tokens)))
    roles = ((fit, False), (held_out, True))
    return [_Batch(ids, held) for windows, held in roles for _, ids in own_batches(windows, workers, times)]


def _inner_can_move(block: Block, shape: Shape) -> bool:
    """Whether what leads in leads to neurons alone: inline, a bypass is rows of the same matrices."""
    return shape.width > 0 and (shape.kind == "neurons" or block.layout.activation is None)


def _goes_on(block: Block) -> bool:
    """Whether more happens in the layer before the stream leaves it."""
    return bool(block.stream_path or block.gate_path)


def _room(blocks: list[Block], run: Run) -> int:
    """What states may fill in memory: moments are of one block at a time here, and leave the rest of theirs."""
    largest = max(moment_bytes(block, runs_within(block, run.moment_bytes)) for block in blocks)
    return run.moment_bytes - 2 * largest


def _walk_on(pass_layer: _Layers, block: Block, batches: list[_Batch], states: Spool, *, drifted: bool) -> None:
    """The streams through a layer whose block is kept."""
    for at, batch in enumerate(batches):
        for name in ("slimmed", "original") if drifted else ("slimmed",):
            states.put(name, at, pass_layer(block.index, batch.ids, states.get(name, at)))


def _of_kept(module: nn.Module, block: Block, fit: Fit, h: Tensor) -> Tensor:
    """What kept neurons give, from the activations that the whole FFN had: theirs are among them."""
    assert isinstance(fit, NeuronFit)
    out = module.get_submodule(block.layout.out).to(h)
    return on_rows(out, h[:, fit.kept.to(h.device)])


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
    module: nn.Module, block: Block, states: Spool, batches: list[_Batch], run: Run, facts: Facts
) -> None:
    """Refit the matrices that lead into kept neurons, and the one that leads out after them, where that helps."""

    def aimed() -> Iterator[AimedRows]:
        for at, batch in enumerate(batches):
            yield (*states.get("aimed", at), batch.held_out)

    def make() -> dict[str, Tensor]:
        for at, rows in enumerate(aimed()):
            states.put("inner", at, asdict(inner_rows(module.to(rows[0]), block, rows)))

        def spooled() -> Iterator[InnerRows]:
            return (InnerRows(**states.get("inner", at)) for at in range(len(batches)))

        runs = runs_within(block, run.moment_bytes)
        return refit_inner(module, block, spooled, aimed, run.workers, runs) or {}

    module.load_state_dict(run.stages.keep(f"inner refit of block {block.index}", facts, make), strict=False)


class _Layers:
    """One layer of a model, on the state before it; of a batch that does not fit, some windows after others."""

    def __init__(self, model: Model, blocks: list[Block]) -> None:
        self._model, self._blocks, self._halving = model, blocks, Halving()

    def __call__(self, index: int, ids: Tensor, state: Handed | None) -> Handed:
        """The state after a block's layer."""
        return self._run(index, ids, state, _pass_layer)

    def watched(self, index: int, ids: Tensor, state: Handed | None) -> tuple[Rows, Handed]:
        """A block's rows too."""
        rows: list[Rows] = []

        def run(*layer: Any) -> Handed:
            found, output = run_layer(*layer)
            rows.append(found)
            return output

        output = self._run(index, ids, state, run)
        return Rows.together(rows), output

    def _run(self, index: int, ids: Tensor, state: Handed | None, run: Callable[..., Handed]) -> Handed:
        def part(own: Tensor, windows: range) -> Handed:
            return run(self._model, self._blocks, index, own, windows_of(state, windows, len(ids)))

        return together(self._halving(part, ids, range(len(ids))))


def run_layer(
    model: Model, blocks: list[Block], index: int, batch: Tensor, state: Handed | None
) -> tuple[Rows, Handed]:
    """One layer of the model on the state before it (none: the embeddings): its block's rows, and the state after."""
    rows: list[Rows] = []
    with hooked(model, row_hooks(blocks[index], rows.append)):
        output = _pass_layer(model, blocks, index, batch, state)
    return rows[0], output


def _pass_layer(model: Model, blocks: list[Block], index: int, batch: Tensor, state: Handed | None) -> Handed:
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    after: list[Handed] = []

    def before() -> Handed:
        assert state is not None  # only the first layer has none, and none is before it
        return state

    with (
        handing_on(layers[:index], before),
        handing_on(layers[index + 1 :], lambda: after[-1]),
        kept_from([layers[index]], after.append),
    ):
        forward(model.base_model, batch)
    return after[0]


def _with_stream(state: Handed, stream: Tensor) -> Handed:
    """A state with another residual stream in it; a layer's output is a tensor, or a tuple."""
    output, shared = state
    stream = stream.view_as(first_tensor(output))
    return (stream, *output[1:]) if isinstance(output, tuple) else stream, shared


def _sums(
    model: nn.Module, block: Block, shape: Shape, metric: Tensor | None, runs: int, states: Spool
) -> Sums | WideSums:
    """What a replacement of a shape is fitted from."""
    if runs > 1:
        return WideSums(model, block, shape.width, metric, runs, states)
    return Sums(model, block, shape, metric)
