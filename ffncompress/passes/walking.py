"""Layers of a model run by themselves, a few at a time, on states that lie on disk.

A pass that looks at some blocks needs no layer before or behind them: what entered the first of them was kept when the
blocks before were looked at. So passes over groups of blocks cost together what one pass over all does. And a gradient
needs one layer at a time: run again on the state that entered it, it hands the gradient on to the layer before. Within
the model's own forward, layers that are left out hand on a state, so that masks and positions are right in any family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ffncompress.errors import ModelError
from ffncompress.models import Block, first_tensor, forward
from ffncompress.passes.handing import Handed, handing_on, kept_from
from ffncompress.storage.working import spool
from ffncompress.type_aliases import Model


class Walk:
    """Passes over a model from one group of its blocks to the next.

    with walk(model, blocks) as steps:
        for group in groups:
            for at, batch in enumerate(batches):
                steps.forward(group, at, batch)  # the hooks on the group's blocks see what they would in a whole pass
    """

    def __init__(self, model: Model, blocks: Sequence[Block], folder: Path | None) -> None:
        self._model, self._folder = model, folder
        self._layers, self._places = layers_of(model, blocks)

    def forward(self, group: Sequence[Block], at: int, batch: Tensor) -> None:
        """Run the layers of a group on one batch; and those before it that nobody has run on it yet."""
        if self._folder is None:
            forward(self._model.base_model, batch)
            return
        first, last = group[0].index, self._places[group[-1].index]
        start, state = 0, None
        file = self._folder / f"{at}-{first}.pt"
        if first and file.exists():
            start, state = self._places[first - 1] + 1, torch.load(file, weights_only=True)
            file.unlink()
        output = run_layers(self._model, self._layers, slice(start, last + 1), batch, state)
        torch.save(output, self._folder / f"{at}-{group[-1].index + 1}.pt")


@contextmanager
def walk(model: Model, blocks: Sequence[Block], *, kept: bool) -> Iterator[Walk]:
    """Passes over groups of blocks; where states are not kept, each is a pass over the whole model."""
    if not kept:
        yield Walk(model, blocks, None)
        return
    with spool() as folder:
        yield Walk(model, blocks, folder)


def layers_of(model: nn.Module, blocks: Sequence[Block]) -> tuple[list[nn.Module], list[int]]:
    """The stack of layers that blocks are in, and the place of each block's."""
    stack, _, _ = blocks[0].layer_path.rpartition(".")
    layers = model.get_submodule(stack)
    assert isinstance(layers, nn.ModuleList)
    return list(layers), [int(block.layer_path.rpartition(".")[2]) for block in blocks]


def run_layers(model: Model, layers: Sequence[nn.Module], some: slice, batch: Tensor, state: Handed | None) -> Handed:
    """Some layers on the state before them (none: the embeddings); returns what the last of them hands on."""
    after: list[Handed] = []

    def before() -> Handed:
        assert state is not None  # only the first layers have none, and none is before them
        return state

    with (
        handing_on(list(layers[: some.start]), before),
        handing_on(list(layers[some.stop :]), lambda: after[-1]),
        kept_from([layers[some.stop - 1]], after.append),
    ):
        forward(model.base_model, batch)
    return after[0]


def with_leaf(state: Handed) -> tuple[Handed, Tensor]:
    """A state of which a gradient can be taken, and what it is taken of.

    Raises:
        ModelError: layers hand on more than that, and its gradient would be lost.
    """
    output, shared = state
    if any(shared):
        raise ModelError(
            "its layers share keys and values, so their gradients cannot be taken one layer at a time; "
            "pass --no-stream, on a machine that holds the model"
        )
    leaf = first_tensor(output).detach().requires_grad_()
    return ((leaf, *output[1:]) if isinstance(output, tuple) else leaf, []), leaf
