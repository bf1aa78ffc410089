"""What a person may ask for, read from a few characters: a budget, a limit, a speed, a list of blocks or kinds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ffncompress.errors import BudgetError

DEFAULT_LIMIT = "5%"
BASELINE_MARGIN = "1%"
LINEAR_KINDS = ("dense", "low-rank", "constant")
Use = Literal["prefill", "decode"]  # what of a model is fast: it reads a prompt, or goes on by one token at a time
KINDS = (*LINEAR_KINDS, "neurons", "hybrid")


@dataclass(frozen=True)
class Budget:
    """What may remain. Items of `8x,-20%,100M`, in any combination:

    `8x`: a replaced FFN keeps at most 1/8 of its matrix weights (the paper's meaning).
    `-20%`: the whole model loses at least a fifth of its parameters.
    `100M` (or 1.2B, 950K): the whole model has at most so many.
    """

    ratio: float | None = None
    share: float | None = None
    parameters: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> Budget:
        """Read `8x,-20%,100M`; nothing at all is a budget without caps."""
        found: dict[str, float] = {}
        for item in (text or "").lower().split(","):
            if not item.strip() and text is None:
                continue
            name, value = cls._item(item.strip(), text or "")
            if name in found:
                raise BudgetError(f"{text!r} is not a budget: {item.strip()!r} repeats what is said before it")
            found[name] = value
        return cls(**found)

    @staticmethod
    def _item(item: str, text: str) -> tuple[str, float]:
        number = r"(\d+(?:\.\d+)?)"
        if (match := re.fullmatch(number + "x", item)) and float(match[1]) > 1:
            return "ratio", float(match[1])
        if (match := re.fullmatch("-" + number + "%", item)) and 0 < float(match[1]) < 100:
            return "share", 1 - float(match[1]) / 100
        if (match := re.fullmatch(number + "([kmb])", item)) and float(match[1]) > 0:
            return "parameters", float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]]
        raise BudgetError(f"{text!r} is not a budget; write a factor above 1 such as 8x, or -20%, 100M, or 8x,-20%")

    def size(self, whole: int) -> int | None:
        """The most parameters that a model of `whole` may have, or none."""
        caps = [self.parameters, None if self.share is None else self.share * whole]
        return min((int(cap) for cap in caps if cap is not None), default=None)


@dataclass(frozen=True)
class TargetSpeed:
    """How many times as fast, and at what: reading a prompt (prefill), or going on after it (decode)."""

    factor: float
    of: Use


def parse_speed(text: str) -> TargetSpeed:
    """`1.3x` or `prefill:1.3x`, and `decode:1.2x`."""
    match = re.fullmatch(r"(?:(prefill|decode):)?(\d+(?:\.\d+)?)x", text.strip().lower())
    if not match or not 1 < float(match[2]) < math.inf:
        raise BudgetError(
            f"{text!r} is not a speed; write a factor above 1 such as 1.3x, or decode:1.2x for one token after another"
        )
    return TargetSpeed(float(match[2]), "decode" if match[1] == "decode" else "prefill")


def parse_size(text: str) -> int:
    """`4G`, `500MB` or `1.5GiB` as bytes; without an i, by thousands."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([kmgt])(i?)b?", text.strip().lower())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** ("kmgt".index(match[2]) + 1)) if match else 0
    if not size:
        raise BudgetError(f"{text!r} is not a size of memory; write a number and a unit such as 4G or 500MB")
    return size


@dataclass(frozen=True)
class Limit:
    """How much perplexity may rise: `5%` of the base, or `1.0` absolute."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read `5%` or `1.0`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
        if not match:
            raise BudgetError(f"{text!r} is not a limit; write 5% of the base's perplexity, or 1.0 in perplexity")
        return cls(float(match[1]) / (100 if match[2] else 1), bool(match[2]))

    def allows(self, base: float, slimmed: float) -> bool:
        """Whether a slimmed model's perplexity is within the limit of its base's."""
        return slimmed - base <= self.allowance(base)

    def allowance(self, base: float) -> float:
        """The increase that is allowed, in perplexity."""
        return self.value * base if self.relative else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g} %" if self.relative else f"{self.value:g}"


def parse_blocks(text: str, count: int) -> list[int]:
    """`0,3,7-9` as sorted indices below `count`."""
    indices: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", item)
        if not match:
            raise BudgetError(f"{text!r} is not a list of blocks; write indices and ranges such as 0,3,7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= count:
            raise BudgetError(f"block {item.strip()} is not there: this model's blocks are 0 to {count - 1}")
        indices.update(range(first, last + 1))
    return sorted(indices)


def parse_kinds(text: str | None) -> frozenset[str]:
    """`linear,neurons` as kinds of replacements; linear is every map without neurons, nothing at all is every kind."""
    if text is None:
        return frozenset(KINDS)
    named = {"linear": LINEAR_KINDS} | {kind: (kind,) for kind in KINDS}
    items = [item.strip().lower() for item in text.split(",")]
    unknown = [item for item in items if item not in named]
    if unknown:
        raise BudgetError(f"{unknown[0]!r} is not a kind of replacement; write some of {', '.join(named)}, by commas")
    return frozenset(kind for item in items for kind in named[item])
