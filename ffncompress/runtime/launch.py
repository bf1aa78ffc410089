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
