"""What a person can ask for: the same settings from the command line, a recipe and Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ffncompress.errors import BudgetError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

DEFAULT_LIMIT = "5%"


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


def parse_speed(text: str) -> float:
    """`1.3x` as a factor."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x", text.strip().lower())
    if not match or float(match[1]) <= 1:
        raise BudgetError(f"{text!r} is not a speed; write a factor above 1 such as 1.3x")
    return float(match[1])


@dataclass(frozen=True)
class Limit:
    """How much perplexity may rise: `5%` of the base, or `1.0` absolute."""

    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Limit:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
        if not match:
            raise BudgetError(f"{text!r} is not a limit; write 5% of the base's perplexity, or 1.0 in perplexity")
        return cls(float(match[1]) / (100 if match[2] else 1), bool(match[2]))

    def allows(self, base: float, slimmed: float) -> bool:
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


def _is_budget(text: str) -> str:
    _as_value_error(Budget.parse, text)
    return text


def _is_speed(text: str) -> str:
    _as_value_error(parse_speed, text)
    return text


def _is_limit(text: str) -> str:
    _as_value_error(Limit.parse, text)
    return text


def _as_value_error(parse: object, text: str) -> None:
    try:
        parse(text)  # type: ignore[operator]
    except BudgetError as error:
        raise ValueError(str(error)) from error


MOST_TOKENS = 100_000_000  # more than any text that is read into memory here
Tokens = Annotated[int, Field(ge=256, le=MOST_TOKENS)]
Context = Annotated[int, Field(ge=16, le=2**20)]
Seed = Annotated[int, Field(ge=-(2**31), lt=2**32)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
BudgetText = Annotated[str, AfterValidator(_is_budget)]
SpeedText = Annotated[str, AfterValidator(_is_speed)]
LimitText = Annotated[str, AfterValidator(_is_limit)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlanSettings(_Settings):
    """How a plan is made. The text's defaults are the paper's setting."""

    budget: BudgetText | None = None
    max_delta: LimitText | None = None
    target_speed: SpeedText | None = None
    at: float | None = Field(None, gt=0, lt=1)
    blocks: str | None = None
    refit: bool = True
    refit_tokens: Tokens | None = None
    frontier: bool = False
    keep_moments: bool = False
    data: list[str] = []
    choose_data: list[str] = []
    tokens: Tokens = 30_720
    seq_len: int = Field(128, ge=8, le=2**20)
    context: Context | None = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: str = "auto"

    @property
    def limit(self) -> Limit | None:
        """The quality asked for; 5 % unless a size or a speed is."""
        if self.max_delta is not None:
            return Limit.parse(self.max_delta)
        return None if self._sized else Limit.parse(DEFAULT_LIMIT)

    @property
    def by_limit(self) -> bool:
        """Whether blocks are chosen by how much perplexity may rise, not for a size or a speed or by hand."""
        return not self._sized and not self.blocks

    @property
    def _sized(self) -> bool:
        budget = Budget.parse(self.budget)
        return bool(budget.share or budget.parameters or self.target_speed or self.at)

    def asks(self) -> str:
        """The budget in words."""
        wanted = {"budget": self.budget, "at": self.at, "speed": self.target_speed, "limit": self.limit}
        return ", ".join(f"{name} {value}" for name, value in wanted.items() if value)


class ProfileSettings(_Settings):
    """What a study measures. The text's defaults are the paper's setting."""

    data: list[str] = []
    tokens: Tokens = 30_720
    seq_len: int = Field(128, ge=8, le=2**20)
    seed: Seed = 0
    swaps: bool = True
    probe: bool = False
    pitfall: str | None = Field(None, pattern=r"^(worst|\d+)$")
    cross_feed: bool = False
    against_random: bool = False
    revisions: list[str] = []
    dtype: Dtype = "auto"
    device: str = "auto"


class ApplySettings(_Settings):
    """How a checkpoint is written."""

    dtype: Dtype = "auto"
    max_shard_size: str = Field("5GB", pattern=r"^[1-9]\d{0,5}(\.\d+)?([KMGT]i?)?B$")
    allow_empty: bool = False
    heal: float | None = Field(None, gt=0, le=100_000)
    data: list[str] = []


class EvalSettings(_Settings):
    """What the gate measures, and what it lets pass."""

    data: str | None = None
    also: list[str] = []
    max_delta: LimitText | None = None  # the plan's own
    context: Context | None = None
    tokens: Tokens = 16_384
    batch_size: int = Field(4, ge=1, le=4096)
    dtype: Dtype = "auto"
    device: str = "auto"
    repeats: int = Field(5, ge=1, le=1000)
    prompt: str | None = None


class PushSettings(_Settings):
    """Where a checkpoint is uploaded."""

    repo: Name
    private: bool = False
    force: bool = False
    message: str = "Upload a model slimmed by ffncompress"
