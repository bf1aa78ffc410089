"""What a person can ask for: the same settings from the command line, a recipe and Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ffncompress.errors import BudgetError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Budget:
    """`8x`: a replaced FFN keeps at most 1/8 of its matrix weights (the paper's meaning)."""

    ratio: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)x", text.strip().lower())
        if not match or float(match[1]) <= 1:
            raise BudgetError(f"{text!r} is not a budget; write a factor above 1 such as 8x")
        return cls(float(match[1]))


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
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
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


def _is_limit(text: str) -> str:
    _as_value_error(Limit.parse, text)
    return text


def _as_value_error(parse: object, text: str) -> None:
    try:
        parse(text)  # type: ignore[operator]
    except BudgetError as error:
        raise ValueError(str(error)) from error


BudgetText = Annotated[str, AfterValidator(_is_budget)]
LimitText = Annotated[str, AfterValidator(_is_limit)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlanSettings(_Settings):
    """How a plan is made. The defaults are the paper's setting."""

    budget: BudgetText = "8x"
    max_delta: LimitText = "5%"
    blocks: str | None = None
    data: list[str] = []
    choose_data: list[str] = []
    tokens: int = Field(30_720, ge=256)
    seq_len: int = Field(128, ge=8)
    context: int | None = Field(None, ge=16)
    seed: int = 0
    dtype: Dtype = "auto"
    device: str = "auto"


class ApplySettings(_Settings):
    """How a checkpoint is written."""

    dtype: Dtype = "auto"
    max_shard_size: str = "5GB"
    allow_empty: bool = False


class EvalSettings(_Settings):
    """What the gate measures, and what it lets pass."""

    data: str | None = None
    also: list[str] = []
    max_delta: LimitText | None = None  # the plan's own
    context: int | None = Field(None, ge=16)
    tokens: int = Field(16_384, ge=256)
    batch_size: int = Field(4, ge=1)
    dtype: Dtype = "auto"
    device: str = "auto"
    repeats: int = Field(5, ge=1)
    prompt: str | None = None


class PushSettings(_Settings):
    """Where a checkpoint is uploaded."""

    repo: str
    private: bool = False
    force: bool = False
    message: str = "Upload a model slimmed by ffncompress"
