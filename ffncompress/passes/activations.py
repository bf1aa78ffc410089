"""What passes through a block while a model runs: hooks, rows, and the batches that a process runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ffncompress.models import Block
from ffncompress.runtime.workers import Workers
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Hook, LayerOutput

BATCH_TOKENS = 1024


def own_batches(windows: TokenWindows, workers: Workers) -> list[tuple[Tensor, Tensor]]:
    """This process's batches of about BATCH_TOKENS in windows of one length: (their indices, the batch).

    Whole batches are dealt out, so what is multiplied together does not depend on how many processes there are.
    """
    batches = Windows.of(windows).batches(BATCH_TOKENS)
    own = (batches[i] for i in workers.share(len(batches)).tolist())
    return [(at, batch.to(workers.device)) for at, batch in own]


def first_tensor(value: LayerOutput) -> Tensor:
    """The hidden state of a layer's output, which may be a tuple."""
    tensor: Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


@contextmanager
def hooked(model: nn.Module, hooks: Iterable[tuple[str, Hook]]) -> Iterator[None]:
    """Forward hooks at dotted paths, for the length of a `with`."""
    handles = [model.get_submodule(path).register_forward_hook(hook) for path, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Rows:
    """What passes through a block, a row for each token."""

    x: Tensor  # the FFN's input
    h: Tensor  # its inner activations
    y: Tensor  # its output
    stream: Tensor  # the residual stream after it


def row_hooks(block: Block, feed: Callable[[Rows], None]) -> list[tuple[str, Hook]]:
    """Hooks that call `feed` with a block's rows at every forward pass."""
    seen: dict[str, Tensor] = {}

    def at_out(_module: nn.Module, args: tuple[Tensor, ...], _output: object) -> None:
        seen["h"] = args[0].flatten(0, -2)

    def at_ffn(_module: nn.Module, args: tuple[Tensor, ...], output: LayerOutput) -> None:
        seen["x"], seen["y"] = args[0].flatten(0, -2), first_tensor(output).flatten(0, -2)

    def at_layer(_module: nn.Module, _args: object, output: LayerOutput) -> None:
        feed(Rows(stream=first_tensor(output).flatten(0, -2), **seen))
        seen.clear()

    return [(block.out_path, at_out), (block.path, at_ffn), (block.layer_path, at_layer)]


def stream_weights(stream: Tensor) -> Tensor:
    """1 / |s|^2 of each row, [rows]."""
    return 1 / stream.double().square().sum(-1).clamp_min(1e-30)
