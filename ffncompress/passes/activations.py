"""What passes through a block while a model runs: hooks, rows, and the batches that a process runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ffncompress.models import Block, first_tensor
from ffncompress.runtime.workers import Workers
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import Hook, LayerOutput


def own_batches(windows: TokenWindows, workers: Workers, times: int = 1) -> list[tuple[Tensor, Tensor]]:
    """This process's batches of about `workers.batch_tokens` in windows of one length: (their indices, the batch).

    Whole batches are dealt out, so what is multiplied together does not depend on how many processes there are.

    Args:
        windows: those of all processes.
        workers: the processes.
        times: how many batches' tokens are read at once, where one layer runs at a time.
    """
    batches = Windows.of(windows).batches(times * workers.batch_tokens)
    own = (batches[i] for i in workers.share(len(batches)).tolist())
    return [(at, batch.to(workers.device)) for at, batch in own]


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
    added: Tensor | None = None  # what a norm behind the FFN, or a gate of it, makes of y; none: y itself is added

    def weights(self) -> Tensor:
        """What an error of y weighs: as a share of the stream that it is added to, by what a norm makes of it."""
        weights = stream_weights(self.stream)
        return weights if self.added is None else weights * gains(self.y, self.added)

    @classmethod
    def together(cls, parts: Sequence[Rows]) -> Rows:
        """The rows of one part after the other."""
        if len(parts) == 1:
            return parts[0]
        found = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        return cls(*(None if each[0] is None else torch.cat(each) for each in found))  # type: ignore[arg-type]

    def detached(self, device: torch.device) -> Rows:
        """The same rows on a device, without a graph behind them."""
        x, h, y, stream = (t.detach().to(device) for t in (self.x, self.h, self.y, self.stream))
        return Rows(x, h, y, stream, None if self.added is None else self.added.detach().to(device))


def row_hooks(block: Block, feed: Callable[[Rows], None]) -> list[tuple[str, Hook]]:
    """Hooks that call `feed` with a block's rows at every forward pass."""
    seen: dict[str, Tensor] = {}

    def at_lead(_module: nn.Module, args: tuple[Tensor, ...], _output: object) -> None:
        seen["x"] = flat(args[0])

    def at_out(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["h"], seen["y"] = flat(args[0]), flat(output).clone()  # some families add to it in place

    def at_after(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen["added"] = flat(output).clone()

    def at_gate(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen["gate"] = flat(output).sigmoid()

    def at_end(_module: nn.Module, args: tuple[Tensor, ...], output: LayerOutput) -> None:
        if "y" not in seen:  # what the stream enters may run at other times too
            return
        if block.gate_path:
            seen["added"] = seen.pop("gate") * seen["y"]
        feed(Rows(stream=flat(args[0] if block.stream_path else first_tensor(output)), **seen))
        seen.clear()

    hooks: list[tuple[str, Hook]] = [(block.lead_path, at_lead), (block.out_path, at_out)]
    hooks += [(block.after_path, at_after)] if block.after_path else []
    hooks += [(block.gate_path, at_gate)] if block.gate_path else []
    return [*hooks, (block.stream_path or block.layer_path, at_end)]


def flat(tensor: Tensor) -> Tensor:
    """A row for each token, whatever a family makes of batch and length."""
    return tensor.flatten(0, -2)


def stream_weights(stream: Tensor) -> Tensor:
    """1 / |s|^2 of each row, [rows]."""
    return 1 / stream.double().square().sum(-1).clamp_min(1e-30)


def gains(y: Tensor, added: Tensor) -> Tensor:
    """By how much a norm stretches each row, squared, [rows]."""
    return added.double().square().sum(-1) / y.double().square().sum(-1).clamp_min(1e-30)


def pulled_back(model: nn.Module, block: Block, rows: Rows, direction: Tensor) -> Tensor:
    """J'v of each row, J how what is added moves with y: what a direction behind a norm, or a gate, is before it."""
    if rows.added is None:
        return direction
    if block.after_path is None:  # a gate scales all directions alike
        return gains(rows.y, rows.added).sqrt()[:, None].to(direction) * direction
    with torch.enable_grad():
        inputs = rows.y.detach().requires_grad_()
        behind = model.get_submodule(block.after_path)(inputs)
        (found,) = torch.autograd.grad(behind, inputs, direction.to(inputs))
    return found
