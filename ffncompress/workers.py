"""One process or many: who does which batches, and how sums meet. Progress is passed in, never printed here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ffncompress.errors import FfncompressError
from ffncompress.words import in_short

T = TypeVar("T")


def rank() -> int:
    """Which of the processes that a launcher started this one is, by the launcher's own word.

    Raises:
        FfncompressError: the word is not a number.
    """
    word = os.environ.get("RANK", "0")
    if not word.isdecimal():
        raise FfncompressError(f"the environment says RANK={word}, which is no process's number; unset it")
    return int(word)


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


def usable_device(name: str) -> torch.device:
    """A device by its name, tried before anything is loaded onto it.

    Raises:
        FfncompressError: there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # torch has a kind for every backend
        raise FfncompressError(
            f"--device {name}: no such device here ({in_short(error)}); give cpu, cuda, cuda:1, or leave it out"
        ) from error
    return device


class Workers:
    """The processes of this run, as accelerate sees them.

    `Accelerator()` on a CPU-only machine under torchrun takes each rank for a run of its own, so the CPU is named.
    """

    def __init__(self, device: str = "auto") -> None:
        from accelerate import Accelerator

        use_cpu = device == "cpu" or not torch.cuda.is_available()
        try:
            self._accelerator = Accelerator(cpu=use_cpu)
        except (ValueError, RuntimeError, KeyError) as error:  # RANK, WORLD_SIZE, MASTER_ADDR and their like
            raise FfncompressError(
                f"the processes of this run cannot be set up ({in_short(error)}); "
                "start it with torchrun, or unset RANK and WORLD_SIZE"
            ) from error
        self.device = self._accelerator.device if device in ("auto", "cpu") else usable_device(device)

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
        return torch.arange(count)[self._accelerator.process_index :: self.count]

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
