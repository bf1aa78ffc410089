"""What a launcher such as torchrun says of this process. Light: the command line asks before torch is there."""

from __future__ import annotations

import os

from ffncompress.errors import FfncompressError


def rank() -> int:
    """Which of the processes that a launcher started this one is, by the launcher's own word.

    Raises:
        FfncompressError: the word is not a number.
    """
    word = os.environ.get("RANK", "0")
    if not word.isdecimal():
        raise FfncompressError(f"the environment says RANK={word}, which is no process's number; unset it")
    return int(word)


def processes() -> int:
    """How many processes a launcher started; what is no number is left for `Workers` to complain of."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() and os.environ.get("RANK", "").isdecimal() else 1


def alone(what: str) -> None:
    """For what one process does, and several would do over again.

    Raises:
        FfncompressError: a launcher started several.
    """
    if processes() > 1:
        raise FfncompressError(
            f"{what} runs in one process; start it without torchrun (plan and profile are shared out, nothing else)"
        )


def check_whole() -> None:
    """What a launcher says is whole, or nothing.

    Raises:
        FfncompressError: it says how many processes there are and not which one this is; joining them would wait for
            hours for some that may never come.
    """
    if _more_than_one("WORLD_SIZE") and "RANK" not in os.environ and not _has_mpi():
        count = os.environ["WORLD_SIZE"]
        raise FfncompressError(
            f"the environment says WORLD_SIZE={count} and no RANK, so this is none of {count} processes; "
            f"start them with {_torchrun(count)}, or unset WORLD_SIZE"
        )


def note_if_alone() -> str | None:
    """A sentence for whoever asked for several processes and got one; none if nobody did."""
    if "RANK" in os.environ or _has_mpi() or os.environ.get("SLURM_PROCID", "0") != "0":
        return None
    if _more_than_one("SLURM_NTASKS"):
        count = os.environ["SLURM_NTASKS"]
        return f"one process runs, although SLURM_NTASKS={count}; what shares the work out is {_torchrun(count)}"
    # for several processes on a CPU, accelerate's launcher sets an address to meet at, and starts one
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
        return (
            "one process runs, although accelerate launch was asked for several, which without --multi_gpu it does "
            f"not start; what shares the work out is {_torchrun('N')}"
        )
    return None


def _more_than_one(name: str) -> bool:
    count = os.environ.get(name, "")
    return count.isdecimal() and int(count) > 1


def _has_mpi() -> bool:
    """Whether MPI started this process; accelerate asks it who the others are."""
    return any(map(_more_than_one, ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")))


def _torchrun(count: str) -> str:
    return f"torchrun --nproc_per_node {count} -m ffncompress ..."
