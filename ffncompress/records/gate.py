"""The gate's result as data: what was measured, of which text, and the verdict."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from ffncompress.notebooks import frame_of
from ffncompress.records.showing import gate_html, gate_rows
from ffncompress.records.task import Task
from ffncompress.schema import Count, Record
from ffncompress.text.sources import Reading
from ffncompress.type_aliases import Frame


def _above_zero(perplexity: float) -> float:
    if perplexity <= 0:  # NaN and infinity are what ruined models have; this no model has, and shares are taken of it
        raise ValueError("a perplexity is above zero")
    return perplexity


Perplexity = Annotated[float, AfterValidator(_above_zero)]


class Perplexities(Record):
    """One model on one text."""

    token: Perplexity
    word: Perplexity | None = None  # of what goes on with a text alone
    byte: Perplexity | None = None


class TextResult(Record):
    """Both models on one text."""

    text: str
    part: str
    sha256: str
    tokens: int
    context: int
    base: Perplexities
    slimmed: Perplexities
    reading: Reading = "joined"
    rise_error: float | None = None  # standard, of `relative`: the text's own windows differ

    @property
    def headline(self) -> tuple[float, float]:
        """(base, slimmed) that the verdict is on: token perplexity, as the plan's own check."""
        return self.base.token, self.slimmed.token

    @property
    def delta(self) -> float:
        """By how much perplexity rose."""
        base, slimmed = self.headline
        return slimmed - base

    @property
    def relative(self) -> float:
        """The same as a share of the base's."""
        return self.delta / self.headline[0]


class Sizes(Record):
    """Parameters before and after, and weight bytes on disk."""

    replaced_ffns: tuple[Count, Count] | None = None  # of FFNs, where a plan knows them
    all_ffns: tuple[Count, Count] | None = None
    whole_model: tuple[Count, Count]
    bytes_on_disk: tuple[Count, Count]


class Speed(Record):
    """Measured tokens per second, base and slimmed interleaved; medians over the repeats."""

    base: float
    slimmed: float
    ratio: float
    batch: tuple[int, int]
    repeats: int
    device: str


class GateResult(Record):
    """Everything that `ffncompress eval` reports."""

    ffncompress_version: str
    base_model: str
    weights_sha256: str
    dtype: str
    limit: str
    passed: bool
    doubt: str | None = None  # why the main text's figures cannot be believed; then it has not passed
    main: TextResult
    also: list[TextResult]
    sizes: Sizes
    speed: Speed
    prompt: str
    continuation_base: str
    continuation_slimmed: str
    task: Task = "causal"  # of the models, and so what the figures are
    limit_warning: str = ""  # where the limit is too wide to say much

    def to_frame(self) -> Frame:
        """One row for each measure of both models, as a pandas DataFrame."""
        return frame_of(gate_rows(self))

    def _repr_html_(self) -> str:
        return gate_html(self)
