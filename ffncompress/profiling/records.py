"""A study as data: profile.json, and what every table, figure and page is drawn from.

A *profile* is one model on one text. Each carries the text, its tokens, the context and the seed that its numbers are
of; nothing here is a number without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from ffncompress.errors import ArtifactError
from ffncompress.records.plan import Scores
from ffncompress.records.task import Task
from ffncompress.sanitize import parse_json
from ffncompress.schema import Record
from ffncompress.settings import ProfileSettings
from ffncompress.text.sources import TextRef
from ffncompress.type_aliases import Frame

SCHEMA_VERSION = 1
STUDY_FILE = "profile.json"
T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1)]
Regime = Literal["broadly linear", "outlier-dominated", "nonlinear"]


class BlockScores(Scores):
    """A plan's scores and what only a study asks for; every figure is on held-out rows."""

    r2_quantiles: dict[str, float]  # of the output features: 5, 25, 50, 75, 95 %
    r2_by_rank: list[float]  # of the linear map at rank 0, 1, ...
    participation_input: float
    participation_output: float
    participation_map: float
    dynamic_range: float  # of the input features' variances


class Swapped(Record):
    """The block replaced by its linear map, alone in the model."""

    delta: float
    error: float
    tokens: int


class Probe(Record):
    """A rank-16 bilinear layer on top of the linear map; measured on sequences that did not stop it."""

    rank: int
    r2_lin: float  # on the probe's own rows
    gain: float
    gain_error: float
    steps: int
    fit_tokens: int
    stop_tokens: int
    report_tokens: int


class BlockProfile(Record):
    """One FFN as it was found."""

    index: int
    path: str
    parameters: int
    d_in: int
    d_inner: int
    d_out: int
    scores: BlockScores
    regime: Regime
    rule: str  # that named the regime
    swap: Swapped | None = None
    probe: Probe | None = None


class ProbeSummary(Record):
    """What the probe found over all blocks: whether it helps where linearity fails."""

    median_gain: float
    largest_gain: float
    correlation: float | None  # Pearson, of the gain and 1 - R2_lin over blocks
    p_value: float | None


class Profile(Record):
    """One model on one text."""

    model: str
    variant: str  # "", "random", or a revision
    family: str
    fingerprint: str
    parameters: int
    text: str
    fit_tokens: int
    held_out_tokens: int
    context: int
    seed: int
    fit_text: TextRef
    held_out_text: TextRef
    base_perplexity: float  # or what its task has in its place, as MEASURES names it
    task: Task = "causal"
    blocks: Some[BlockProfile]
    probe: ProbeSummary | None = None

    @property
    def name(self) -> str:
        """What a legend says."""
        return Path(self.model).name + (f" ({self.variant})" if self.variant else "")

    @property
    def r2(self) -> list[float]:
        """R2_lin of each block."""
        return [block.scores.r2_lin for block in self.blocks]

    @property
    def provenance(self) -> str:
        """What its numbers are of."""
        return (
            f"{Path(self.text).name}, {self.fit_tokens:,} fit + {self.held_out_tokens:,} held-out tokens, "
            f"context {self.context}, seed {self.seed}"
            + ", each document by itself"
            * (self.held_out_text.reading == "documents")
        )


class Agreement(Record):
    """Whether a model keeps its profile from text to text."""

    model: str
    texts: list[str]
    spearman: list[list[float]]  # of R2_lin over blocks, text by text
    distance: float  # mean |difference of R2_lin| between its texts
    nearest_other: float | None  # the same to the most similar other model, blocks matched by depth
    own: bool
    verdict: str


class Trained(Record):
    """A linear layer trained by gradient descent, beside the closed form."""

    optimiser: str
    rate: float
    steps: Some[int]
    r2: Some[float]


class Pitfall(Record):
    """One block's linear map found three ways."""

    model: str
    text: str
    block: int
    condition_number: float
    dynamic_range: float
    closed_form: float
    fit_rows: int
    held_out_rows: int
    context: int
    seed: int
    trained: Some[Trained]


class CrossFed(Record):
    """One block of `model` fed another model's activations: R2_lin of each way."""

    block: int
    own: float
    raw: float
    matched: float
    giver: float  # the other model's own block on the same activations


class CrossFeed(Record):
    """One model's FFNs on another's activations."""

    model: str
    giver: str
    text: str
    fit_tokens: int
    held_out_tokens: int
    context: int
    seed: int
    blocks: list[CrossFed]
    verdict: str


class StageTime(Record):
    """What a stage took, beside one forward pass over the same tokens."""

    name: str
    seconds: float
    forward_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """How many forward passes it took."""
        return self.seconds / self.forward_seconds if self.forward_seconds else None


class Study(Record):
    """Everything that `ffncompress profile` reports."""

    schema_version: int = SCHEMA_VERSION
    ffncompress_version: str
    settings: ProfileSettings
    profiles: list[Profile]
    agreements: list[Agreement] = Field(default_factory=list)
    pitfalls: list[Pitfall] = Field(default_factory=list)
    cross_feeds: list[CrossFeed] = Field(default_factory=list)
    learned: list[str] = Field(default_factory=list)  # what random twins and revisions say, a sentence each
    stages: list[StageTime] = Field(default_factory=list)

    @property
    def trained(self) -> list[Profile]:
        """Profiles of models as they are: no random twin, no revision."""
        return [profile for profile in self.profiles if not profile.variant]

    def to_frame(self) -> Frame:
        """One row for each block of each profile, as in profile.csv, as a pandas DataFrame."""
        from ffncompress.notebooks import frame_of
        from ffncompress.profiling.tables import rows_of

        return frame_of(rows_of(self))

    def _repr_html_(self) -> str:
        from ffncompress.profiling.tables import study_html

        return study_html(self)

    @classmethod
    def load(cls, directory: str | Path) -> Study:
        """Read profile.json.

        Raises:
            ArtifactError: it is missing, corrupted, or of another schema.
        """
        file = Path(directory) / STUDY_FILE
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
            if content.get("schema_version") != SCHEMA_VERSION:
                raise ArtifactError(f"{file}: of another version; make it again: ffncompress profile MODEL")
            return cls.model_validate(content)
        except OSError as error:
            raise ArtifactError(
                f"{directory}: there is no {STUDY_FILE} in it; make one: ffncompress profile MODEL"
            ) from error
        except (ValueError, AttributeError, RecursionError, ValidationError) as error:
            raise ArtifactError(f"{file}: corrupted; make it again: ffncompress profile MODEL") from error
