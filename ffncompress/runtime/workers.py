"""One process or many: who does which batches, and how sums meet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from ffncompress.errors import FfncompressError, ProcessError
from ffncompress.runtime.launch import check_whole, processes
from ffncompress.runtime.room import BATCH_TOKENS, Memory, in_words
from ffncompress.sanitize import in_short
from ffncompress.type_aliases import DeviceMap

T = TypeVar("T")
R = TypeVar("R")
# A process that dies is noticed at once, by its closed connections and by the launcher. This is for one that hangs: it
# must be longer than anything that the others may have to wait for, such as a large plan on its way to a slow disk.
PATIENCE = timedelta(hours=3)


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


@contextmanager
def in_touch() -> Iterator[None]:
    """Where processes meet: the many ways in which torch says that another one is gone become one.

    Raises:
        ProcessError: it is gone.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo's own errors are of no narrower kind
        if "onnection" in str(error):  # closed by peer, reset, refused
            raise ProcessError from error
        raise ProcessError(
            f"the processes of this run lost touch with each other ({in_short(error)}); no output was written; "
            "look at what was said before this, and start it again"
        ) from error


def first_to_speak() -> bool:
    """Whether no other process of this run has said yet why it ends; where that cannot be found out, nobody has."""
    if processes() == 1:
        return True
    place, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "")
    try:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            place, int(port), is_master=False, timeout=timedelta(seconds=5)
        )
        turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"ffncompress spoke {turn}", 1)) == 1
    except (RuntimeError, ValueError):  # the launcher, or the process that kept the list, is gone too
        return True


def leave() -> None:
    """Part from the other processes; torch complains of those that just end."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Workers:
    """The processes of this run, as accelerate sees them.

    `Accelerator()` on a CPU-only machine under torchrun takes each rank for a run of its own, so the CPU is named.

    Args:
        device: where models are.
        memory: what all processes of this machine may take together; none: most of what is free.
        stream: whether weights stay on disk; none: where they do not fit.
    """

    def __init__(self, device: str = "auto", memory: str | None = None, stream: bool | None = None) -> None:
        check_whole()
        from accelerate import Accelerator, InitProcessGroupKwargs

        use_cpu = device == "cpu" or not torch.cuda.is_available()
        group = InitProcessGroupKwargs(timeout=PATIENCE)
        try:
            self._accelerator = Accelerator(cpu=use_cpu, kwargs_handlers=[group])
        except (ValueError, RuntimeError, KeyError) as error:  # RANK, WORLD_SIZE, MASTER_ADDR and their like
            raise FfncompressError(
                f"the processes of this run cannot be set up ({in_short(error)}); "
                "start it with torchrun, or unset RANK and WORLD_SIZE"
            ) from error
        self.device = self._accelerator.device if device in ("auto", "cpu") else usable_device(device)
        whole = Memory.of(memory, stream, self.device)
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.device.type == "cpu" else 1
        # what is free is another number a moment later: all processes go by the first one's
        self.memory = self.from_main(Memory(whole.limit // max(1, beside), stream))
        self.batch_tokens = BATCH_TOKENS  # that a model reads at once
        self._told: set[int] = set()

    @property
    def count(self) -> int:
        """How many processes there are."""
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this is the first, which alone writes."""
        return bool(self._accelerator.is_main_process)

    @property
    def device_map(self) -> DeviceMap:
        """Alone on GPUs, accelerate spreads the model over them; otherwise each process holds it whole."""
        return "auto" if self.count == 1 and self.device.type == "cuda" else {"": self.device}

    def streams(self, weights: int, token: int) -> bool:
        """Whether a model is streamed, of so many bytes of weights; how much it then reads at once is set with it.

        Args:
            weights: what all of them take.
            token: what passes through the widest layer for each token.
        """
        found = self.memory.streams(weights)
        if weights not in self._told and self.is_main:
            self._told.add(weights)
            self._tell(weights, found)
        self.batch_tokens = self.memory.tokens(token) if found else BATCH_TOKENS
        return found

    def _tell(self, weights: int, streamed: bool) -> None:
        """How a model is held, and whether the memory will do."""
        log, left = logging.getLogger("ffncompress"), in_words(self.memory.limit)
        if streamed and self.memory.stream is None:
            log.info("%s of weights, %s of memory left: read from disk, layer by layer", in_words(weights), left)
        if (needed := self.memory.least(weights, streamed)) > self.memory.limit:
            log.warning(
                "%s of memory are left beside the libraries, and a run needs up to %s: "
                "it may take more than it is given",
                left,
                in_words(needed),
            )

    def dtype(self, asked: str) -> str:
        """What to compute in: on a CPU float32 is the fast and safe one, a GPU keeps what the weights are stored in."""
        return "float32" if asked == "auto" and self.device.type == "cpu" else asked

    def share(self, count: int) -> Tensor:
        """The indices out of `count` that are this process's to do."""
        return torch.arange(count)[self._accelerator.process_index :: self.count]

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over the processes, in place: to the same bits in all of them, those of the first."""
        if self.count == 1:
            return
        from accelerate.utils import broadcast

        for tensor in tensors:
            # gloo takes CPU tensors, NCCL the process's own device; reduce clones, so copy back
            own = tensor.to(self.device)
            with in_touch():
                tensor.copy_(broadcast(self._accelerator.reduce(own, "sum")))

    def from_main(self, value: T) -> T:
        """What the first process has, in all of them."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        with in_touch():
            broadcast_object_list(box)
        return box[0]

    def once(self, work: Callable[[], T]) -> T:
        """What the first process finds, in all of them: for what would differ from one to the next.

        An error of ours that it meets, all of them meet.
        """
        if self.count == 1:
            return work()
        found: list[T] = []
        error: FfncompressError | None = None
        if self.is_main:
            try:
                found = [work()]
            except FfncompressError as met:
                error = met
        found, error = self.from_main((found, error))
        if error is not None:
            raise error
        return found[0]

    def deal(self, items: Sequence[T], work: Callable[[T], R]) -> Iterator[R]:
        """What `work` makes of each item, in order, in all of the processes: each item is one's to do.

        They go in rounds of an item each, so that what lies in memory between them is little.
        """
        if self.count == 1:
            yield from map(work, items)
            return
        from accelerate.utils import gather_object

        for start in range(0, len(items), self.count):
            at = start + self._accelerator.process_index
            own = [work(items[at])] if at < len(items) else []
            with in_touch():
                found: list[R] = gather_object(own)  # one list, in the order of the processes
            yield from found

    def wait(self) -> None:
        """Until all are here."""
        with in_touch():
            self._accelerator.wait_for_everyone()
