"""The plan: scores, options, choices and reasons, as a folder that a person can read.

PLAN/plan.json                   everything below, versioned
PLAN/replacements.safetensors    the fitted tensors of the replaced blocks, "<block>.<projection>.<weight|bias>"
PLAN/profile.png                 R2_lin and swap delta-PPL of each block, and what is kept of each
PLAN/frontier.png                size against perplexity, where it was asked for
PLAN/moments.safetensors         the moments of every block, where they were to be kept
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ffncompress.errors import PlanError
from ffncompress.manifest import Manifest, sha256_of
from ffncompress.outputs import staged_directory
from ffncompress.promise import Promise, Rise, promise_of
from ffncompress.settings import DEFAULT_LIMIT, Limit, PlanSettings
from ffncompress.texts import Reading, public_name
from ffncompress.words import in_short, parse_json

SCHEMA_VERSION = 2
PLAN_FILE, TENSOR_FILE, FIGURE_FILE = "plan.json", "replacements.safetensors", "profile.png"
FRONTIER_FILE, MOMENTS_FILE = "frontier.png", "moments.safetensors"
FEWEST_WINDOWS = 8  # of a check that does not say how many: none was ever made on fewer, where the text allowed
Kind = Literal["dense", "low-rank", "neurons", "hybrid", "constant"]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class BaseRef(_Record):
    """The model that a plan is for; known by its fingerprint, called by its name."""

    name: str
    revision: str | None
    fingerprint: str
    fingerprint_of: Literal["weights", "model"] = "weights"  # of the model: config and tokenizer too
    is_hub: bool | None = None  # none: a plan before 0.4 did not say
    family: str
    parameters: Positive
    ffn_parameters: Positive
    trust_remote_code: bool = False  # it needs its own code; whether that may run is not for a file to say


class Proof(_Record):
    """What the slimmed model answers: the loss of each token of a fixed sequence; every route proves itself by it."""

    dtype: str
    losses: list[float]


class TextRef(_Record):
    """A text that was used: enough to know it again."""

    source: str
    part: str
    documents: Count
    characters: Count
    sha256: str
    tokens: Count
    reading: Reading = "joined"


class Scores(_Record):
    """What was measured of a block; every figure is on held-out text."""

    r2_lin: float
    r2_lin_error: float
    r2_median_feature: float
    effective_rank_input: float
    effective_rank_output: float
    effective_rank_map: float
    condition_number: float
    ridge: float
    share_of_stream: float
    unrecovered_share: float


class StandIn(_Record):
    """What a block can become."""

    kind: Kind
    width: Count  # neurons that are kept
    rank: Count  # of the linear part
    weighting: Literal["plain", "stream"]
    parameters: Count

    def describe(self) -> str:
        parts = [f"{self.width} neurons"] * bool(self.width) + [f"rank {self.rank}"] * bool(self.rank)
        return self.kind if self.kind in ("dense", "constant") else " + ".join(parts)


class Option(StandIn):
    """One way to treat a block, and what it is predicted to cost."""

    predicted_loss: float
    r2: float | None = None  # of a linear stand-in, plain, on held-out rows
    seconds: float | None = None  # for one batch on this machine, where speed was asked for


class Swap(StandIn):
    """The best stand-in within the budget's factor, tried alone in the model."""

    ratio: float
    predicted_delta: float
    delta: float
    delta_error: float


class BlockPlan(_Record):
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
        return self.choice is not None

    @property
    def parameters_after(self) -> int:
        return self.parameters if self.choice is None else self.choice.parameters


class JointCheck(_Record):
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


class FrontierPoint(_Record):
    """A size, and the least perplexity that is expected there."""

    parameters: Count
    share: float
    predicted_loss: float  # as if costs added
    expected_perplexity: PositiveFloat  # with what joint checks showed of how they add
    measured_perplexity: float | None


class Plan(_Record):
    """A compression plan; `save` and `Plan.load` round-trip."""

    schema_version: int = SCHEMA_VERSION
    ffncompress_version: str
    base: BaseRef
    settings: PlanSettings
    fit_text: Annotated[list[TextRef], Field(min_length=1)]
    choose_text: Annotated[list[TextRef], Field(min_length=1)]
    base_perplexity: PositiveFloat
    blocks: list[BlockPlan]
    joint: list[JointCheck]
    frontier: list[FrontierPoint] = []
    summary: str
    doubt: str | None = None  # why its figures cannot be believed
    tensors_sha256: str
    proof: Proof | None = None  # none: a plan before 0.4

    @model_validator(mode="after")
    def _hangs_together(self) -> Plan:
        paths = {block.path for block in self.blocks}
        if [block.index for block in self.blocks] != list(range(len(self.blocks))) or len(paths) < len(self.blocks):
            raise ValueError("its blocks are not numbered in order, each with a path of its own")
        if any(block.parameters_after > block.parameters for block in self.blocks):
            raise ValueError("a stand-in is larger than its block")
        if not sum(block.parameters for block in self.blocks) <= self.base.ffn_parameters <= self.base.parameters:
            raise ValueError("its blocks have more parameters than its base")
        return self

    @property
    def replaced(self) -> list[BlockPlan]:
        return [block for block in self.blocks if block.replace]

    @property
    def parameters_after(self) -> int:
        return self.base.parameters - sum(b.parameters - b.parameters_after for b in self.replaced)

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
    def promise(self) -> Limit:
        """What the gate holds the result to: the limit asked for, or what the plan measured, with a margin, or 5 %."""
        return self.promised.limit

    @property
    def promised(self) -> Promise:
        """The promise, with what it rests on."""
        final = self.final_check
        if self.settings.limit is not None:
            return Promise(self.settings.limit)
        if final is None:
            return Promise(Limit.parse(DEFAULT_LIMIT))
        return promise_of(final.rise, final.context)

    @property
    def final_check(self) -> JointCheck | None:
        """The joint check of just what is replaced."""
        chosen = [b.index for b in self.replaced]
        same = (c for c in reversed(self.joint) if c.blocks == chosen and c.parameters == self.parameters_after)
        return next(same, None)

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

    def save(
        self,
        directory: str | Path,
        tensors: dict[str, Any],
        moments: dict[str, Any] | None = None,
        *,
        overwrite: bool = False,
        placing: Callable[[Manifest], None] = lambda _: None,
    ) -> Plan:
        """Write the plan folder, whole or not at all; returns the plan as it was written."""
        from safetensors.torch import save_file

        from ffncompress.figures import draw_frontier, draw_profile

        with staged_directory(directory, "plan", overwrite=overwrite, placing=placing) as stage:
            save_file(tensors, stage / TENSOR_FILE, metadata={"format": "pt"})
            if moments is not None:
                save_file(moments, stage / MOMENTS_FILE)
            plan = self.model_copy(update={"tensors_sha256": sha256_of(stage / TENSOR_FILE)})
            (stage / PLAN_FILE).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
            draw_profile(plan, stage / FIGURE_FILE)
            if plan.frontier:
                draw_frontier(plan, stage / FRONTIER_FILE)
        return plan

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
            content = parse_json(file.read_text(encoding="utf-8"))
            version = content.get("schema_version")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise PlanError(f"{file}: corrupted, not JSON ({in_short(error)}); make the plan again") from error
        if version != SCHEMA_VERSION:
            raise PlanError(f"{file}: schema version {version}, not {SCHEMA_VERSION}; make the plan again")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise PlanError(
                f"{file}: corrupted at {where or 'its top'} ({first['msg']}); make the plan again"
            ) from error

    def load_tensors(self, directory: str | Path) -> dict[str, Any]:
        """The fitted tensors, checked against the plan.

        Raises:
            PlanError: they are missing, or not the ones that the plan was saved with.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = Path(directory) / TENSOR_FILE
        if not file.is_file():
            raise PlanError(f"{directory}: {TENSOR_FILE} is missing; make the plan again")
        if sha256_of(file) != self.tensors_sha256:
            raise PlanError(f"{file}: corrupted, its checksum is not the plan's; make the plan again")
        try:
            tensors = load_file(file)
        except (SafetensorError, ValueError, OSError) as error:
            raise PlanError(f"{file}: not tensors ({in_short(error)}); make the plan again") from error
        return _finite(tensors, file)

    def load_moments(self, directory: str | Path, block: int) -> dict[str, Any]:
        """The kept moments of one block, by name.

        Raises:
            PlanError: they were not kept, or are not numbers.
        """
        from safetensors import SafetensorError, safe_open

        file, prefix = Path(directory) / MOMENTS_FILE, f"{block}."
        if not file.is_file():
            raise PlanError(f"{directory}: its moments were not kept; make the plan again with --keep-moments")
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118  # not a mapping
                found = {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
        except (SafetensorError, ValueError, OSError) as error:
            raise PlanError(f"{file}: corrupted ({in_short(error)}); make the plan again") from error
        return _finite(found, file)


def _finite(tensors: dict[str, Any], file: Path) -> dict[str, Any]:
    """The tensors of a file, all of them finite numbers.

    Raises:
        PlanError: they are not.
    """
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise PlanError(f"{file}: {name} is not made of finite numbers; make the plan again")
    return tensors
