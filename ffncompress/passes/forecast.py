"""What each replacement is predicted to cost in loss: one backward pass over a little held-out text.

A replacement errs by e at a token whose residual stream after the block is s. To second order, with the Fisher
information for the Hessian, an error costs E[(g'e)^2] / 2 in loss, where g is the gradient of the loss with respect to
s and its labels are drawn from the model itself. That is a local truth, and some errors are not small: a map that fails
to write a massive activation leaves a token with a stream a hundred times shorter, and every later norm divides by it.
What the rest of the model sees of s is its direction, so the step is taken there:

    delta loss ~ 1/2 E[(|s| g'u)^2],      u = (s + e) / |s + e| - s / |s|

For small e this is the same (g is orthogonal to s wherever only the direction counts); for large e it is right where
the local form is off by orders of magnitude. With v_j the map's output directions, u_j the readings dual to them and
c_j = u_j' W'(x - x0), the error of rank r is e = y0 - y + sum_{j <= r} v_j c_j; so g'e, s'e and |e|^2 are cumulative
sums, and all ranks cost as much as one. A bypass beside kept neurons is such a map too, of what the neurons leave of x
and y.

The same gradients say which directions of an error matter at all: the metric M = E[g g'], in which fits order neurons
and ranks. (Relative to the stream, |s|^2 g g', it would belong to the few tokens of massive activations.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffncompress.errors import ModelError, NumericsError
from ffncompress.models import Block, first_tensor, forward, is_streamed
from ffncompress.passes.activations import Rows, flat, gains, hooked, own_batches, pulled_back, row_hooks
from ffncompress.passes.handing import handing_on, kept_from
from ffncompress.passes.objective import objective_of
from ffncompress.passes.walking import layers_of, run_layers, with_leaf
from ffncompress.recovery import HybridFit, LinearFit, NeuronFit
from ffncompress.recovery.neurons import Fit
from ffncompress.runtime.memory import Halving
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import StageKey
from ffncompress.storage.working import spool
from ffncompress.text.windows import TokenWindows
from ffncompress.type_aliases import Hook, Model


def predict_losses(
    model: Model,
    blocks: list[Block],
    maps: Sequence[Mapping[str, Fit]],
    windows: TokenWindows,
    run: Run,
    seed: int = 0,
    key: StageKey | None = None,
) -> list[dict[str, Tensor]]:
    """The predicted rise in loss of each block's fits at rank 0, 1, ..., as far as `_ranks` goes."""
    model.requires_grad_(False)
    objective = objective_of(model)
    totals = [{name: torch.zeros(_ranks(fit), dtype=torch.float64) for name, fit in each.items()} for each in maps]
    sums = [total for each in totals for total in each.values()]
    halving = Halving()
    for at, batch, draw in run.loop(_drawn_batches(model, windows, run), sums, "predicting costs", key):
        for i, felt, count in felt_by_block(model, blocks, at, batch, halving, seed, draw):
            for name, fit in maps[i].items():
                totals[i][name] += objective.expected(steps_of(fit, felt), count).cpu()
    run.workers.sum_(sums)
    count = objective.draws * objective.count(windows)
    return [{name: total / count for name, total in each.items()} for each in totals]


def loss_metrics(model: Model, blocks: list[Block], windows: TokenWindows, run: Run, seed: int = 0) -> list[Tensor]:
    """What an error of each block costs by direction: E[g g'], [d_out, d_out]."""
    model.requires_grad_(False)
    metrics = [torch.zeros(block.d_out, block.d_out, dtype=torch.float64) for block in blocks]
    halving = Halving()
    for at, batch, draw in run.progress(_drawn_batches(model, windows, run), "asking what the loss feels"):
        for i, felt, _ in felt_by_block(model, blocks, at, batch, halving, seed, draw):
            gradient = felt.gradient.float()
            metrics[i] += (gradient.T @ gradient).cpu()  # a metric has a floor, far above single precision
    run.workers.sum_(metrics)
    for block, metric in zip(blocks, metrics, strict=True):
        if not metric.isfinite().all():
            raise NumericsError(
                f"block {block.index} ({block.path}): the loss has a NaN or infinite gradient there; "
                "try --dtype float32, or check the model's weights"
            )
    objective = objective_of(model)
    return [metric / (objective.draws * objective.count(windows)) for metric in metrics]


def _drawn_batches(model: Model, windows: TokenWindows, run: Run) -> list[tuple[Tensor, Tensor, int]]:
    """This process's batches, each as often as labels are drawn."""
    draws = range(objective_of(model).draws)
    return [(at, batch, draw) for at, batch in own_batches(windows, run.workers) for draw in draws]


def label_seeds(at: Tensor, seed: int, draw: int = 0) -> list[int]:
    """A seed for each window, so that the labels do not depend on how the windows are shared out."""
    return [seed + 7919 * index + 15_485_863 * draw for index in at.tolist()]


def _ranks(fit: Fit) -> int:
    """How many ranks are looked at: one of kept neurons, all of a linear map, of a bypass the half that can pay."""
    if isinstance(fit, NeuronFit):
        return 1
    return fit.max_rank + 1 if isinstance(fit, LinearFit) else fit.bypass.max_rank // 2 + 1


@dataclass(frozen=True)
class Felt:
    """A block's rows, and what the loss feels of an error of its output in each of them.

    Where a norm stands behind the FFN, an error e of y moves the stream by about J e, J the norm's slope at y. So
    products with what is behind it are taken with what was pulled back through it, and |J e|^2 is taken for the norm's
    gain on y times |e|^2.
    """

    rows: Rows
    gradient: Tensor  # of the loss with respect to y
    stream: Tensor  # s, as y feels it: s'J
    along: Tensor  # g's, g that of the stream, [rows]
    gain: Tensor  # |J e|^2 / |e|^2, [rows]

    @classmethod
    def directly(cls, rows: Rows, gradient: Tensor, scale: float = 1.0) -> Felt:
        """Where y is added to the stream as it is, times a scale."""
        along = (gradient.double() * rows.stream.double()).sum(1) / scale
        return cls(rows, gradient, scale * rows.stream, along, torch.full_like(along, scale**2))


def steps_of(fit: Fit, felt: Felt) -> Tensor:
    """By how much each row moves the loss that was drawn, at each rank of a fit, [rows, ranks]."""
    rows = felt.rows
    if isinstance(fit, LinearFit):
        return steps_by_rank(fit, rows.x, rows.y, felt)
    if isinstance(fit, HybridFit):
        h, x, y = (t.to(fit.out) for t in (rows.h, rows.x, rows.y))
        return steps_by_rank(fit.bypass, *fit.remainders(h, x, y), felt, _ranks(fit) - 1)
    out, y = fit.out.to(rows.h.device), rows.y.to(fit.out.dtype)
    error = rows.h[:, fit.kept].to(out) @ out - y
    error = error if fit.bias is None else error + fit.bias.to(out)
    along = (felt.gradient, felt.stream, error)  # single products, double sums
    ge, se, ee = ((t.to(error) * error).sum(1, keepdim=True, dtype=torch.float64) for t in along)
    return _step(ge, se, ee, felt)


def steps_by_rank(fit: LinearFit, x: Tensor, y: Tensor, felt: Felt, highest: int | None = None) -> Tensor:
    """The same of a linear map at rank 0 to `highest` (none: all), [rows, ranks]."""
    highest = fit.max_rank if highest is None else highest
    x, y, s, g = (t.float() for t in (x, y, felt.stream, felt.gradient))  # single products, double sums
    v = fit.directions[:, :highest].to(x)
    c = (x - fit.x0.to(x)) @ (fit.weight @ fit.readings[:, :highest]).to(x)  # [rows, highest]
    e0 = fit.y0.to(x) - y  # the error at rank 0

    def along(start: Tensor, steps: Tensor) -> Tensor:
        return torch.cat([start[:, None], steps], 1).double().cumsum(1)

    ge = along((g * e0).sum(1), (g @ v) * c)
    se = along((s * e0).sum(1), (s @ v) * c)
    # |e0 + sum_{i <= j} v_i c_i|^2 grows by the square of the new term and twice its product with all before it
    before = e0 @ v + c @ (v.T @ v).triu(1)
    ee = along((e0 * e0).sum(1), 2 * before * c + c * c * (v * v).sum(0))
    return _step(ge, se, ee, felt)


def _step(ge: Tensor, se: Tensor, ee: Tensor, felt: Felt) -> Tensor:
    """The step on the stream's direction, from inner products of g, s and e, [rows, ranks]."""
    gs = felt.along[:, None]
    ss = felt.rows.stream.double().square().sum(1, keepdim=True).clamp_min(1e-30)
    after = (ss + 2 * se + felt.gain[:, None] * ee).clamp_min(1e-12 * ss)  # |s + e|^2
    return (gs + ge) * (ss / after).sqrt() - gs


def felt_by_block(
    model: Model,
    blocks: list[Block],
    at: Tensor,
    batch: Tensor,
    halving: Halving,
    seed: int = 0,
    draw: int = 0,
) -> Iterator[tuple[int, Felt, int]]:
    """(a block, what the loss feels in it, in how many windows), block by block; of a streamed model the last first."""
    if is_streamed(model):
        for i, felt in _layer_by_layer(model, blocks, batch, label_seeds(at, seed, draw)):
            yield i, felt, len(batch)
        return

    def taken(at: Tensor, batch: Tensor) -> tuple[list[Felt], int]:
        return gradients(model, blocks, batch, label_seeds(at, seed, draw)), len(batch)

    for found, count in halving(taken, at, batch):
        for i, felt in enumerate(found):
            yield i, felt, count


def gradients(model: Model, blocks: list[Block], batch: Tensor, seeds: Sequence[int]) -> list[Felt]:
    """The rows of every block, and what the loss feels of errors in them, from one backward pass."""
    return _felt_during(lambda: _back_from_loss(model, batch, seeds), model, blocks)


def _layer_by_layer(
    model: Model, blocks: list[Block], batch: Tensor, seeds: Sequence[int]
) -> Iterator[tuple[int, Felt]]:
    """The same with one layer's weights and activations in memory: each is run again on the state that entered it."""
    layers, places = layers_of(model, blocks)
    with spool() as folder:
        states = [folder / f"{i}.pt" for i in range(len(blocks))]
        files = iter(states)
        with torch.no_grad(), kept_from([layers[at] for at in places], lambda state: torch.save(state, next(files))):
            forward(model.base_model, batch)
        state, leaf = with_leaf(torch.load(states[-1], weights_only=True))
        with handing_on(layers[: places[-1] + 1], lambda: state), torch.enable_grad():
            _back_from_loss(model, batch, seeds)
        for i, block in reversed([*enumerate(blocks)]):
            gradient, start, before = leaf.grad, 0, None
            if i:
                start = places[i - 1] + 1
                before, leaf = with_leaf(torch.load(states[i - 1], weights_only=True))

            def back() -> None:
                output = first_tensor(run_layers(model, layers, slice(start, places[i] + 1), batch, before)[0])  # noqa: B023
                if gradient is not None:  # noqa: B023
                    output.backward(gradient)  # type: ignore[no-untyped-call]  # noqa: B023

            yield i, _felt_during(back, model, [block])[0]


def _back_from_loss(model: Model, batch: Tensor, seeds: Sequence[int]) -> None:
    loss = objective_of(model).drawn(model, batch, seeds)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def _felt_during(back: Callable[[], None], model: Model, blocks: list[Block]) -> list[Felt]:
    """What is felt in blocks while something runs forward and backward.

    A zero is added to each FFN's output, and to what a norm behind it makes of that: the gradient with respect to it is
    that of the output, or of the stream.
    """
    found: list[Rows] = []
    probes: list[list[Tensor]] = [[] for _ in blocks]

    def probe(at: int) -> Hook:
        def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            probes[at].append(torch.zeros_like(output, requires_grad=True))
            return output + probes[at][-1]

        return hook

    hooks = [hook for block in blocks for hook in row_hooks(block, found.append)]
    places = [[b.out_path, *([b.after_path] if b.after_path else [])] for b in blocks]
    hooks += [(path, probe(at)) for at, own in enumerate(places) for path in own]
    with hooked(model, hooks), torch.enable_grad():
        back()
    if any(probe.grad is None for own in probes for probe in own):
        raise ModelError(
            f"{model.config.model_type}: the loss of this model has no gradient that reaches its FFNs (its layers run "
            "without one), and what a replacement costs cannot be predicted; give a model that can be trained"
        )
    return [_felt(model, *each) for each in zip(blocks, found, probes, strict=True)]


def _felt(model: Model, block: Block, rows: Rows, probes: list[Tensor]) -> Felt:
    gradients = [flat(p.grad) for p in probes if p.grad is not None]
    rows = rows.detached(gradients[0].device)
    direct = Felt.directly(rows, gradients[-1], block.scale)
    if rows.added is None:
        return direct
    gain = gains(rows.y, rows.added)
    # a probe behind a norm felt what the stream feels; one before a gate felt it by as much as the gate is open
    along = direct.along if block.after_path else direct.along / gain.sqrt().clamp_min(1e-30)
    return Felt(rows, gradients[0], pulled_back(model, block, rows, direct.stream), along, direct.gain * gain)
