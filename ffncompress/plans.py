"""The plan: scores, options, choices and reasons, as a folder that a person can read.

PLAN/plan.json                   everything below, versioned
PLAN/replacements.safetensors    the fitted tensors of the replaced blocks, "<block>.<projection>.<weight|bias>"
PLAN/profile.png                 R2_lin and swap delta-PPL of each block, and what is kept of each
PLAN/frontier.png                size against perplexity, where it was asked for
PLAN/moments.safetensors         the moments of every block, where they were to be kept
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ffncompress.errors import PlanError
from ffncompress.promise import Promise, Rise, promise_of
from ffncompress.settings import DEFAULT_LIMIT, Limit, PlanSettings
from ffncompress.staging import staged_directory

SCHEMA_VERSION = 2
PLAN_FILE, TENSOR_FILE, FIGURE_FILE = "plan.json", "replacements.safetensors", "profile.png"
FRONTIER_FILE, MOMENTS_FILE = "frontier.png", "moments.safetensors"
FEWEST_WINDOWS = 8  # of a check that does not say how many: none was ever made on fewer, where the text allowed
Kind = Literal["dense", "low-rank", "neurons", "hybrid", "constant"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class BaseRef(_Record):
    """The model that a plan is for."""

    name: str
    revision: str | None
    fingerprint: str
    family: str
    parameters: int
    ffn_parameters: int
    trust_remote_code: bool = False


class TextRef(_Record):
    """A text that was used: enough to know it again."""

    source: str
    part: str
    documents: int
    characters: int
    sha256: str
    tokens: int


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
    width: int  # neurons that are kept
    rank: int  # of the linear part
    weighting: Literal["plain", "stream"]
    parameters: int

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

    index: int
    path: str
    parameters: int
    d_in: int
    d_inner: int
    d_out: int
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

    blocks: list[int]
    parameters: int  # of the whole model
    refitted: bool  # on the slimmed model's own inputs
    context: int
    base_perplexity: float
    perplexity: float
    delta: float
    delta_error: float
    within_limit: bool | None  # none: there is no limit
    windows: int | None = None  # how many; plans before 0.4 do not say
    fresh: bool = False  # nothing was chosen on these windows

    @property
    def rise(self) -> Rise:
        """Of the mean loss: perplexities are its exponentials, and the error of one follows from the other's."""
        nats = math.log(self.perplexity / self.base_perplexity)
        error = self.delta_error / self.perplexity if math.isfinite(nats) else math.inf
        return Rise(nats, error, self.windows or FEWEST_WINDOWS)


class FrontierPoint(_Record):
    """A size, and the least perplexity that is expected there."""

    parameters: int
    share: float
    predicted_loss: float  # as if costs added
    expected_perplexity: float  # with what joint checks showed of how they add
    measured_perplexity: float | None


class Plan(_Record):
    """A compression plan; `save` and `Plan.load` round-trip."""

    schema_version: int = SCHEMA_VERSION
    ffncompress_version: str
    base: BaseRef
    settings: PlanSettings
    fit_text: list[TextRef]
    choose_text: list[TextRef]
    base_perplexity: float
    blocks: list[BlockPlan]
    joint: list[JointCheck]
    frontier: list[FrontierPoint] = []
    summary: str
    tensors_sha256: str

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

    def save(
        self,
        directory: str | Path,
        tensors: dict[str, Any],
        moments: dict[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> Plan:
        """Write the plan folder, whole or not at all; returns the plan as it was written."""
        from safetensors.torch import save_file

        from ffncompress.figures import draw_frontier, draw_profile

        with staged_directory(directory, overwrite=overwrite) as stage:
            save_file(tensors, stage / TENSOR_FILE, metadata={"format": "pt"})
            if moments is not None:
                save_file(moments, stage / MOMENTS_FILE)
            plan = self.model_copy(update={"tensors_sha256": _sha256(stage / TENSOR_FILE)})
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
            content = json.loads(file.read_text(encoding="utf-8"))
            version = content.get("schema_version")
        except (ValueError, AttributeError) as error:
            raise PlanError(f"{file}: corrupted, not JSON ({error}); make the plan again") from error
        if version != SCHEMA_VERSION:
            raise PlanError(f"{file}: schema version {version}, not {SCHEMA_VERSION}; make the plan again")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise PlanError(f"{file}: corrupted at {where} ({first['msg']}); make the plan again") from error

    def load_tensors(self, directory: str | Path) -> dict[str, Any]:
        """The fitted tensors, checked against the plan.

        Raises:
            PlanError: they are missing, or not the ones that the plan was saved with.
        """
        from safetensors.torch import load_file

        file = Path(directory) / TENSOR_FILE
        if not file.is_file():
            raise PlanError(f"{directory}: {TENSOR_FILE} is missing; make the plan again")
        if _sha256(file) != self.tensors_sha256:
            raise PlanError(f"{file}: corrupted, its checksum is not the plan's; make the plan again")
        return load_file(file)

    def load_moments(self, directory: str | Path, block: int) -> dict[str, Any]:
        """The kept moments of one block, by name.

        Raises:
            PlanError: they were not kept.
        """
        from safetensors import safe_open

        file, prefix = Path(directory) / MOMENTS_FILE, f"{block}."
        if not file.is_file():
            raise PlanError(f"{directory}: its moments were not kept; make the plan again with --keep-moments")
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118  # not a mapping
            return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
