"""The gate's result as data: what was measured, of which text, and the verdict."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ffncompress.budgets import Use
from ffncompress.notebooks import frame_of
from ffncompress.records.showing import gate_html, gate_rows
from ffncompress.records.task import Task
from ffncompress.schema import Count, Positive, Record
from ffncompress.text.sources import Reading
from ffncompress.type_aliases import Frame


def _above_zero(perplexity: float) -> float:
    if perplexity <= 0:  # NaN and infinity are what ruined models have; this no model has, and shares are taken of it
        raise ValueError("a perplexity is above zero")
    return perplexity


Perplexity = Annotated[float, AfterValidator(_above_zero)]


Share = Annotated[float, Field(ge=0, le=1)]
Spread = Annotated[float, Field(ge=0)]
Failure = Literal["perplexity", "accuracy", "baseline"]


class Perplexities(Record):
    """One model on one text."""

    token: Perplexity
    word: Perplexity | None = None  # of what goes on with a text alone
    byte: Perplexity | None = None


class Agreement(Record):
    """How alike two models predict the next token of a text, where perplexity only looks at the true one.

    KL(base || slimmed) sees every change of the base's predictions; gains here and losses there do not cancel in it.
    """

    kl: float  # nats per token
    kl_error: float | None = None  # standard, over windows
    same_top: Share  # of tokens, at which both hold the same one for the likeliest
    tokens: Positive


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
    agreement: Agreement | None = None  # none: an encoder, or a result of a release that measured none

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


class TaskResult(Record):
    """Both models on one of lm-eval's tasks, or a local one; accuracies are shares."""

    task: str
    metric: str  # acc, or acc_norm: of answers by their likelihood for each byte
    examples: Positive
    base: Share
    base_error: Spread | None = None  # standard
    slimmed: Share
    slimmed_error: Spread | None = None
    drop_error: Spread | None = None  # of the drop, its examples paired: both models see the same ones
    majority: Share | None = None  # always the most frequent answer; none: its answers are no choices
    sha256: str = ""  # of its questions and answers

    @property
    def drop(self) -> float:
        """By how much accuracy fell."""
        return self.base - self.slimmed


class BaselineChange(Record):
    """What became of a model since a result that was kept, of the same base on the same text."""

    margin: str  # by how much perplexity may be above the baseline's
    perplexity: tuple[Perplexity, Perplexity]  # of the slimmed model: then, now
    parameters: tuple[Count, Count]
    accuracies: dict[str, tuple[Share, Share]] = Field({})  # of tasks with the same questions

    @property
    def relative(self) -> float:
        """By how much perplexity rose, as a share of the baseline's."""
        then, now = self.perplexity
        return now / then - 1


class Sizes(Record):
    """Parameters before and after, and weight bytes on disk."""

    replaced_ffns: tuple[Count, Count] | None = None  # of FFNs, where a plan knows them
    all_ffns: tuple[Count, Count] | None = None
    whole_model: tuple[Count, Count]
    bytes_on_disk: tuple[Count, Count]


class Pace(Record):
    """Tokens per second of both models in one use, in turns; medians over the repeats.

    Reading a prompt is bound by products of matrices, so FLOPs predict its ratio; going on by one token at a time is
    bound by the memory that the weights are read from, so their bytes do.
    """

    of: Use
    dtype: str
    batch: tuple[int, int]  # sequences, and tokens of each: that are read, or that follow a short prompt
    base: float
    slimmed: float
    ratio: float  # of each repeat, the median
    spread: tuple[float, float] | None = None  # the least and the greatest; none: of a release that kept none
    predicted: float | None = None  # the ratio by FLOPs for prefill, by bytes of weights for decode

    @property
    def what(self) -> str:
        """The use in words: sequences, and tokens of each at once."""
        rows, tokens = self.batch
        return f"{self.of} {rows} x {tokens if self.of == 'prefill' else 1}, {self.dtype}"

    @property
    def measured(self) -> str:
        """The ratio, and between which two those of the repeats lie."""
        return f"{self.ratio:.2f}x" + ("" if self.spread is None else " ({:.2f}-{:.2f})".format(*self.spread))

    @property
    def expected(self) -> str:
        """The predicted ratio, and what by; nothing, where nothing was predicted."""
        by = "FLOPs" if self.of == "prefill" else "bytes"
        return "" if self.predicted is None else f"{by} {self.predicted:.2f}x"


class Speed(Record):
    """Measured tokens per second of reading a batch, and, since 0.7, of other uses."""

    base: float
    slimmed: float
    ratio: float
    batch: tuple[int, int]
    repeats: int
    device: str
    paces: list[Pace] = Field([])  # the batch's first


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
    speed: Speed | None  # none: see UNTIMED
    prompt: str
    continuation_base: str
    continuation_slimmed: str
    task: Task = "causal"  # of the models, and so what the figures are
    limit_warning: str = ""  # where the limit is too wide to say much
    base_sha256: str = ""  # the base's fingerprint
    tasks: list[TaskResult] = Field([])
    max_drop: float | None = None  # in points of accuracy, the mean over tasks
    baseline: BaselineChange | None = None
    failures: list[Failure] = Field([])  # which limits were not met

    @property
    def failed(self) -> list[Failure]:
        """Which limits were not met; older results knew one alone."""
        return [] if self.passed else self.failures or ["perplexity"]

    @property
    def paces(self) -> list[Pace]:
        """How fast both are in each use, where that was measured; older results knew one alone."""
        if self.speed is None:
            return []
        old = {name: getattr(self.speed, name) for name in ("batch", "base", "slimmed", "ratio")}
        return self.speed.paces or [Pace(of="prefill", dtype=self.dtype, **old)]

    @property
    def mean_drop(self) -> tuple[float, float | None]:
        """(the mean drop of accuracy over tasks, its standard error) in points; tasks are independent."""
        count = len(self.tasks) or 1
        errors = [task.drop_error for task in self.tasks if task.drop_error is not None]
        drop = 100 * sum(task.drop for task in self.tasks) / count
        return drop, 100 * math.hypot(*errors) / count if len(errors) == count else None

    @property
    def drop_warning(self) -> str:
        """A sentence where the limit on accuracy says little: the base knows no answers, or chance could break it."""
        error, blind = self.mean_drop[1], [task for task in self.tasks if task.base <= (task.majority or 0)]
        if self.max_drop is not None and blind:
            names = ", ".join(task.task for task in blind)
            return f"the base is no better on {names} than always the same answer, so there is nothing there to lose"
        if self.max_drop is None or (error is not None and 2 * error <= self.max_drop):
            return ""
        spread = "of one example has no error" if error is None else f"has an error of {error:.1f} points"
        return f"the drop of accuracy {spread}, so a limit of {self.max_drop:g} says little; take more examples"

    def to_frame(self) -> Frame:
        """One row for each measure of both models, as a pandas DataFrame."""
        return frame_of(gate_rows(self))

    def _repr_html_(self) -> str:
        return gate_html(self)
