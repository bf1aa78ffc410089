"""The plan: scores, options, choices and reasons, as a folder that a person can read.

PLAN/plan.json                   everything below, versioned
PLAN/replacements.safetensors    the fitted tensors of the replaced blocks, "<block>.<projection>.<weight|bias>"
PLAN/profile.png                 R2_lin and swap delta-PPL of each block
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ffncompress.errors import PlanError
from ffncompress.settings import PlanSettings
from ffncompress.staging import staged_directory

SCHEMA_VERSION = 1
PLAN_FILE, TENSOR_FILE, FIGURE_FILE = "plan.json", "replacements.safetensors", "profile.png"


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


class Option(_Record):
    """One way to treat a block, and what it is predicted to cost."""

    kind: Literal["dense", "low-rank"]
    rank: int
    parameters: int
    r2: float
    predicted_delta: float


class Swap(_Record):
    """The option within the budget, tried alone in the model."""

    kind: Literal["dense", "low-rank"]
    rank: int
    weighting: Literal["plain", "stream"]
    parameters: int
    ratio: float
    predicted_delta: float
    delta: float
    delta_error: float
    deltas: dict[str, float]  # of every weighting that was tried


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
    replace: bool
    reason: str


class JointCheck(_Record):
    """Several blocks replaced together: the perplexity on the choose text."""

    blocks: list[int]
    context: int
    base_perplexity: float
    perplexity: float
    delta: float
    delta_error: float
    within_limit: bool


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
    summary: str
    tensors_sha256: str

    @property
    def replaced(self) -> list[BlockPlan]:
        return [block for block in self.blocks if block.replace]

    @property
    def parameters_after(self) -> int:
        return self.base.parameters - sum(b.parameters - b.swap.parameters for b in self.replaced)

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
    def final_check(self) -> JointCheck | None:
        """The joint check of just the blocks that are replaced."""
        chosen = [b.index for b in self.replaced]
        return next((check for check in reversed(self.joint) if check.blocks == chosen), None)

    def save(self, directory: str | Path, tensors: dict[str, Any], *, overwrite: bool = False) -> Plan:
        """Write the plan folder, whole or not at all; returns the plan as it was written."""
        from safetensors.torch import save_file

        from ffncompress.figures import draw_profile

        with staged_directory(directory, overwrite=overwrite) as stage:
            save_file(tensors, stage / TENSOR_FILE, metadata={"format": "pt"})
            plan = self.model_copy(update={"tensors_sha256": _sha256(stage / TENSOR_FILE)})
            (stage / PLAN_FILE).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
            draw_profile(plan, stage / FIGURE_FILE)
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


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
