"""One process or many: who does which windows, and how sums meet. Progress is passed in, never printed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Track(Protocol):
    """Wraps a loop: yields the items, and may show how far it is."""

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]: ...


def silent(items: Sequence[T], _description: str, /) -> Iterable[T]:
    """The progress bar of a library call: none."""
    return items


class Loop(Protocol):
    """Wraps a loop that adds to tensors: yields the items that are still to be added."""

    def __call__(
        self, items: Sequence[T], sums: Sequence[Tensor], track: Track, description: str, /
    ) -> Iterable[T]: ...


def straight(items: Sequence[T], _sums: Sequence[Tensor], track: Track, description: str, /) -> Iterable[T]:
    """The loop from its beginning to its end."""
    return track(items, description)


@contextmanager
def stage(track: Track, description: str) -> Iterator[None]:
    """A loop of one: for work whose length is not known beforehand."""
    for _ in track((None,), description):
        yield


class Workers:
    """The processes of this run, as accelerate sees them.

    `Accelerator()` on a CPU-only machine under torchrun takes each rank for a run of its own, so the CPU is named.
    """

    def __init__(self, device: str = "auto") -> None:
        from accelerate import Accelerator

        use_cpu = device == "cpu" or not torch.cuda.is_available()
        self._accelerator = Accelerator(cpu=use_cpu)
        self.device = torch.device(device) if device not in ("auto", "cpu") else self._accelerator.device

    @property
    def count(self) -> int:
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self._accelerator.is_main_process)

    @property
    def device_map(self) -> Any:
        """Alone on GPUs, accelerate spreads the model over them; otherwise each process holds it whole."""
        return "auto" if self.count == 1 and self.device.type == "cuda" else {"": self.device}

    def dtype(self, asked: str) -> str:
        """What to compute in: on a CPU float32 is the fast and safe one, a GPU keeps what the weights are stored in."""
        return "float32" if asked == "auto" and self.device.type == "cpu" else asked

    def share(self, count: int) -> Tensor:
        """The indices out of `count` that are this process's to do."""
        return torch.arange(self._accelerator.process_index, count, self.count)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over the processes, in place."""
        if self.count > 1:
            for tensor in tensors:
                # gloo takes CPU tensors, NCCL the process's own device; reduce clones, so copy back
                summed = self._accelerator.reduce(tensor.to(self.device), "sum")
                tensor.copy_(summed)

    def from_main(self, value: T) -> T:
        """What the first process has, in all of them."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()
