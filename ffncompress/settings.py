"""What a person can ask for: the same settings from the command line, a recipe and Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ffncompress.budgets import BASELINE_MARGIN, DEFAULT_LIMIT, Budget, Limit, parse_kinds, parse_size, parse_speed
from ffncompress.errors import BudgetError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TargetName = Literal["native", "gguf", "vllm"]
HealWhat = Literal["replaced", "all", "lora"]
TARGET_ALIGN = 32  # what quantised kernels want of a width


def _is_budget(text: str) -> str:
    _as_value_error(Budget.parse, text)
    return text


def _is_speed(text: str) -> str:
    _as_value_error(parse_speed, text)
    return text


def _is_limit(text: str) -> str:
    _as_value_error(Limit.parse, text)
    return text


def _is_size(text: str) -> str:
    _as_value_error(parse_size, text)
    return text


def _are_kinds(text: str) -> str:
    _as_value_error(parse_kinds, text)
    return text


def _as_value_error(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
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
SizeText = Annotated[str, AfterValidator(_is_size)]
KindsText = Annotated[str, AfterValidator(_are_kinds)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlanSettings(_Settings):
    """How a plan is made. The text's defaults are the paper's setting."""

    budget: BudgetText | None = None
    max_delta: LimitText | None = None
    target_speed: SpeedText | None = None
    at: float | None = Field(None, gt=0, lt=1)
    blocks: str | None = None
    kinds: KindsText | None = None
    target: TargetName | None = None  # where it is to run; --for
    native: bool = False  # another way to name that target
    align: int | None = Field(None, ge=1, le=4096)
    refit: bool = True
    refit_tokens: Tokens | None = None
    thorough: bool = False  # the refit moves the matrices that lead into kept neurons too
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
    memory: SizeText | None = None  # of the whole run; none: most of what is free
    stream: bool | None = None  # weights stay on disk; none: where they do not fit

    @model_validator(mode="before")
    @classmethod
    def _native_is_a_target(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        native, target = content.get("native", False), content.get("target")
        if native is True and target not in (None, "native"):
            raise ValueError(f"native and for {target} are two targets; give one")
        return {**content, "native": True, "target": "native"} if native is True or target == "native" else content

    @property
    def alignment(self) -> int:
        """What numbers of neurons are multiples of."""
        return self.align or (TARGET_ALIGN if self.target else 1)

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
        wanted = {
            "budget": self.budget, "at": self.at, "speed": self.target_speed, "limit": self.limit, "kinds": self.kinds,
            "for": self.target,
        }  # fmt: skip
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
    memory: SizeText | None = None  # of the whole run; none: most of what is free
    stream: bool | None = None  # weights stay on disk; none: where they do not fit


class ApplySettings(_Settings):
    """How a checkpoint is written."""

    dtype: Dtype = "auto"
    memory: SizeText | None = None
    stream: bool | None = None
    max_shard_size: str = Field("5GB", pattern=r"^[1-9]\d{0,5}(\.\d+)?([KMGT]i?)?B$")
    allow_empty: bool = False
    heal: float | None = Field(None, gt=0, le=100_000)  # minutes
    heal_what: HealWhat | None = None  # what moves: the replacements (none), all weights, or adapters beside the rest
    device: str = "auto"  # where it is healed
    data: list[str] = []

    @model_validator(mode="after")
    def _it_is_healed_for_a_time(self) -> ApplySettings:
        if self.heal_what is not None and self.heal is None:
            raise ValueError("heal_what is about healing; say for how many minutes with --heal")
        return self


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
    memory: SizeText | None = None  # of the whole run; none: most of what is free
    stream: bool | None = None  # weights stay on disk; none: where they do not fit
    repeats: int = Field(5, ge=1, le=1000)
    speed_dtypes: list[Literal["float32", "bfloat16", "float16"]] = []  # to time both in, beside the one they run in
    prompt: str | None = None
    tasks: list[Name] = []  # names of lm-eval's own, and local YAML files
    limit: int | None = Field(None, ge=1, le=10_000_000)  # examples of each task
    max_drop: float | None = Field(None, ge=0, le=100)  # points of accuracy, the mean over tasks
    baseline: Name | None = None  # a gate.json to compare with
    baseline_margin: LimitText = BASELINE_MARGIN

    @model_validator(mode="after")
    def _a_drop_is_of_tasks(self) -> EvalSettings:
        if self.max_drop is not None and not self.tasks:
            raise ValueError("max_drop is about the accuracy on tasks; name some with --tasks")
        if self.limit is not None and not self.tasks:
            raise ValueError("limit is about the examples of tasks; name some with --tasks")
        return self


class PushSettings(_Settings):
    """Where a checkpoint is uploaded."""

    repo: Name
    private: bool = False
    force: bool = False
    message: str = "Upload a model slimmed by ffncompress"


class ExportSettings(_Settings):
    """Which runtime a checkpoint is written for, and how."""

    to: Literal["gguf", "hf", "merged", "onnx", "vllm"]
    dtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None  # none: f16 for gguf, f32 otherwise
    align: int = Field(32, ge=1, le=4096)
    verify: bool = True
