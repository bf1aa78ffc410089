"""The plan as data: plan.json, which a person can read. For each block its scores, its options, the choice and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from ffncompress.budgets import DEFAULT_LIMIT, Limit
from ffncompress.errors import PlanError
from ffncompress.notebooks import frame_of
from ffncompress.records.knee import knee_of
from ffncompress.records.migrations import read_migrated
from ffncompress.records.showing import plan_html, plan_rows
from ffncompress.records.task import Task
from ffncompress.records.tolerance import Rise, Tolerance, tolerance_of
from ffncompress.schema import Count, Positive, PositiveFloat, Record, first_fault
from ffncompress.settings import PlanSettings
from ffncompress.text.sources import Reading, TextRef, public_name
from ffncompress.type_aliases import Frame

SCHEMA_VERSION = 3
PLAN_FILE = "plan.json"
FEWEST_WINDOWS = 8  # of a check that does not say how many: none was ever made on fewer, where the text allowed
Kind = Literal["dense", "low-rank", "neurons", "hybrid", "constant"]


class BaseRef(Record):
    """The model that a plan is for; known by its fingerprint, called by its name."""

    name: str
    revision: str | None
    fingerprint: str
    fingerprint_of: Literal["weights", "model"] = "weights"  # of the model: config and tokenizer too
    is_hub: bool | None = None  # none: a plan before 0.4 did not say
    family: str
    parameters: Positive
    ffn_parameters: Positive
    task: Task = "causal"  # what it is for, and so what it is judged by
    trust_remote_code: bool = False  # it needs its own code; whether that may run is not for a file to say


class Proof(Record):
    """What the slimmed model answers: the loss of each token of a fixed sequence; every route proves itself by it."""

    dtype: str
    losses: list[float]


class Scores(Record):
    """What was measured of a block; every figure is on held-out text."""

    r2_lin: float
    r2_lin_error: float
    r2_median_feature: float
    effective_rank_input: float
    effective_rank_output: float
    effective_rank_map: float
    condition_number: float
    ridge: float  # of the linear map that may replace it; R2_lin's has none
    share_of_stream: float
    unrecovered_share: float


@dataclass(frozen=True)
class Shape:
    """The form of a replacement: so many of the FFN's neurons, and a linear map of so high a rank."""

    kind: Kind
    width: int = 0
    rank: int = 0


class Replacement(Record):
    """What a block can become."""

    kind: Kind
    width: Count  # neurons that are kept
    rank: Count  # of the linear part
    weighting: Literal["plain", "stream"]
    parameters: Count

    @property
    def shape(self) -> Shape:
        """Its form, without what it costs."""
        return Shape(self.kind, self.width, self.rank)

    def describe(self) -> str:
        """Its form in words, such as "96 neurons + rank 32"."""
        parts = [f"{self.width} neurons"] * bool(self.width) + [f"rank {self.rank}"] * bool(self.rank)
        return self.kind if self.kind in ("dense", "constant") else " + ".join(parts)


class Option(Replacement):
    """One way to treat a block, and what it is predicted to cost."""

    predicted_loss: float
    r2: float | None = None  # of a linear replacement, plain, on held-out rows
    seconds: float | None = None  # for one batch on this machine, where speed was asked for
    price: Count | None = None  # parameters where the model is to run, where they are not its own

    @property
    def cost(self) -> int:
        """The parameters that a budget counts."""
        return self.parameters if self.price is None else self.price


class Swap(Replacement):
    """The best replacement within the budget's factor, tried alone in the model."""

    ratio: float
    predicted_delta: float
    delta: float
    delta_error: float


class BlockPlan(Record):
    """A block: what it is, what was measured, what is done with it, and why."""

    index: Count
    path: str
    parameters: Positive
    d_in: Positive
    d_inner: Positive
    d_out: Positive
    scores: Scores
    options: list[Option]
    swap: Swap
    choice: Option | None  # none: the block is kept
    reason: str

    @property
    def replace(self) -> bool:
        """Whether it is replaced at all."""
        return self.choice is not None

    @property
    def chosen_shape(self) -> Shape:
        """The form of its replacement; only of a block that is replaced."""
        assert self.choice is not None
        return self.choice.shape

    @property
    def parameters_after(self) -> int:
        """What is left of it."""
        return self.parameters if self.choice is None else self.choice.parameters


class JointCheck(Record):
    """Several blocks replaced together: the perplexity on windows of the choose text."""

    blocks: list[Count]
    parameters: Count  # of the whole model
    refitted: bool  # on the slimmed model's own inputs
    context: Positive
    base_perplexity: PositiveFloat
    perplexity: float
    delta: float
    delta_error: float
    within_limit: bool | None  # none: there is no limit
    windows: Count | None = None  # how many; plans before 0.4 do not say
    fresh: bool = False  # nothing was chosen on these windows

    @property
    def rise(self) -> Rise:
        """Of the mean loss: perplexities are its exponentials, and the error of one follows from the other's."""
        ratio = self.perplexity / self.base_perplexity
        nats = math.log(ratio) if ratio > 0 else math.nan  # no model has such a perplexity; a file may say so
        error = self.delta_error / self.perplexity if math.isfinite(nats) else math.inf
        return Rise(nats, error, self.windows or FEWEST_WINDOWS)


class FrontierPoint(Record):
    """A size, and the least perplexity that is expected there."""

    parameters: Count
    share: float
    predicted_loss: float  # as if costs added
    expected_perplexity: PositiveFloat  # with what joint checks showed of how they add
    measured_perplexity: float | None


class Plan(Record):
    """A compression plan.

    plan = Plan.load("gpt2-plan")
    [(block.index, block.scores.r2_lin, block.reason) for block in plan.replaced]
    """

    schema_version: int = SCHEMA_VERSION
    ffncompress_version: str
    base: BaseRef
    settings: PlanSettings
    fit_text: Annotated[list[TextRef], Field(min_length=1)]
    choose_text: Annotated[list[TextRef], Field(min_length=1)]
    base_perplexity: PositiveFloat
    blocks: list[BlockPlan]
    joint_checks: list[JointCheck]
    frontier: list[FrontierPoint] = Field(default_factory=list)
    summary: str
    doubt: str | None = None  # why its figures cannot be believed
    kept_layers: dict[int, str] = Field(default_factory=dict)  # those without a block, and why
    replacements_sha256: str
    proof: Proof | None = None  # none: a plan before 0.4

    @model_validator(mode="after")
    def _hangs_together(self) -> Plan:
        paths = {block.path for block in self.blocks}
        if [block.index for block in self.blocks] != list(range(len(self.blocks))) or len(paths) < len(self.blocks):
            raise ValueError("its blocks are not numbered in order, each with a path of its own")
        if any(block.parameters_after > block.parameters for block in self.blocks):
            raise ValueError("a replacement is larger than its block")
        if not sum(block.parameters for block in self.blocks) <= self.base.ffn_parameters <= self.base.parameters:
            raise ValueError("its blocks have more parameters than its base")
        shapes = {block.choice and block.choice.shape for block in self.blocks}
        if self.native and not (len(shapes) == 1 and self.blocks[0].chosen_shape.kind == "neurons"):
            raise ValueError("it is native, and its blocks are not all of one width")
        return self

    @property
    def native(self) -> bool:
        """Whether what it makes is a stock checkpoint of the family; one that replaces nothing needs no such word."""
        return self.settings.target == "native" and any(block.replace for block in self.blocks)

    @property
    def replaced(self) -> list[BlockPlan]:
        """The blocks that are replaced."""
        return [block for block in self.blocks if block.replace]

    @property
    def parameters_after(self) -> int:
        """The parameters of the slimmed model."""
        return self.base.parameters - sum(b.parameters - b.parameters_after for b in self.replaced)

    @property
    def parameters_at_target(self) -> int | None:
        """The parameters where the slimmed model is to run, where they are not its own."""
        choices = [block.choice for block in self.replaced if block.choice is not None]
        if all(choice.price is None for choice in choices):
            return None
        return self.parameters_after + sum(choice.cost - choice.parameters for choice in choices)

    @property
    def ratios(self) -> dict[str, float]:
        """Parameters after over before: of the replaced FFNs, of all FFNs, of the whole model."""
        saved = self.base.parameters - self.parameters_after
        before = sum(b.parameters for b in self.replaced)
        return {
            "replaced_ffns": 1 - saved / before if before else 1.0,
            "all_ffns": 1 - saved / self.base.ffn_parameters,
            "whole_model": self.parameters_after / self.base.parameters,
        }

    @property
    def tolerance(self) -> Tolerance:
        """What the gate holds the result to: the limit asked for, or what the plan measured, with a margin, or 5 %."""
        final = self.final_check
        if self.settings.limit is not None:
            return Tolerance(self.settings.limit)
        if final is None:
            return Tolerance(Limit.parse(DEFAULT_LIMIT))
        return tolerance_of(final.rise, final.context)

    @property
    def final_check(self) -> JointCheck | None:
        """The joint check of just what is replaced."""
        chosen = [b.index for b in self.replaced]
        same = (c for c in reversed(self.joint_checks) if c.blocks == chosen and c.parameters == self.parameters_after)
        return next(same, None)

    @property
    def knee(self) -> FrontierPoint | None:
        """The point of the frontier where it bends."""
        points = self.frontier
        place = knee_of([p.parameters for p in points], [p.expected_perplexity for p in points])
        return None if place is None else points[place]

    def public(self) -> Plan:
        """The plan as it may leave this machine: plans before 0.4 named models and texts by their paths."""
        base, settings = self.base, self.settings
        is_hub = base.revision is not None if base.is_hub is None else base.is_hub
        texts = {
            name: [text.model_copy(update={"source": public_name(text.source)}) for text in getattr(self, name)]
            for name in ("fit_text", "choose_text")
        }
        names = {name: [public_name(text) for text in getattr(settings, name)] for name in ("data", "choose_data")}
        own = {"is_hub": is_hub, "name": base.name if is_hub else Path(base.name).name}
        return self.model_copy(
            update={**texts, "base": base.model_copy(update=own), "settings": settings.model_copy(update=names)}
        )

    def reading_of(self, source: str) -> Reading | None:
        """How a text that the plan knows by name is read."""
        name = public_name(source)
        return next((ref.reading for ref in (*self.choose_text, *self.fit_text) if ref.source == name), None)

    def to_frame(self) -> Frame:
        """One row for each block, as a pandas DataFrame."""
        return frame_of(plan_rows(self))

    def _repr_html_(self) -> str:
        return plan_html(self)

    @classmethod
    def load(cls, directory: str | Path) -> Plan:
        """Read plan.json.

        Raises:
            PlanError: it is missing, corrupted, or of another schema.
        """
        file = Path(directory) / PLAN_FILE
        if (file.parent / "ffncompress" / PLAN_FILE).is_file():
            raise PlanError(f"{directory}: a slimmed checkpoint, not a plan; try: ffncompress eval {directory}")
        if not file.is_file():
            missing = f"there is no {PLAN_FILE} in it" if file.parent.is_dir() else "no such folder"
            raise PlanError(f"{directory}: {missing}; make a plan with: ffncompress plan MODEL")
        try:
            return cls.model_validate(read_migrated(file, SCHEMA_VERSION))
        except ValidationError as error:
            where, what = first_fault(error)
            raise PlanError(f"{file}: corrupted at {where} ({what}); make the plan again") from error
