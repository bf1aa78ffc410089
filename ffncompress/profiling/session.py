"""One model on one text: every stage that a study asks of it, each from disk where it was finished before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ffncompress.errors import BudgetError
from ffncompress.models import count_parameters
from ffncompress.models.tasks import task_of
from ffncompress.profiling.agreement import summarise_probes
from ffncompress.profiling.measure import Linear, measure_blocks, regime_of, swap_linear
from ffncompress.profiling.pitfall import train_layers
from ffncompress.profiling.probing import captured, probe_blocks
from ffncompress.profiling.records import BlockProfile, Pitfall, Probe, Profile, StageTime, Swapped
from ffncompress.profiling.stages import StudyStages
from ffncompress.profiling.subjects import Subject
from ffncompress.text.sources import public_name
from ffncompress.type_aliases import TypeForm

T = TypeVar("T")


class Session:
    """A subject and a text."""

    def __init__(self, subject: Subject, text: str, stages: StudyStages) -> None:
        self.subject, self.text, self.stages = subject, text, stages
        self.settings, self.corpus = subject.settings, subject.corpus(text)
        self.facts = {
            **subject.facts,
            "fit": self.corpus.fit_text[0].sha256,
            "held_out": self.corpus.choose_text[0].sha256,
            "windows": [self.corpus.fit.lengths.tolist(), self.corpus.choose.lengths.tolist()],
            "reading": self.corpus.choose_text[0].reading,
            "window_seed": self.settings.seed,
            "dtype": self.settings.dtype,
            "streamed": subject.is_streamed,
        }
        self._linear: list[Linear] | None = None

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"{self.subject.name}, {public_name(self.text)}"

    @property
    def on_first_text(self) -> bool:
        """Whether this is the text that all models are compared on."""
        return self.text == self.subject.texts[0]

    @property
    def looked_at_closely(self) -> bool:
        """What costs more than a pass is done once for a model."""
        return self.on_first_text and not self.subject.variant

    def profile(self) -> Profile:
        """Every block of the model on this text."""
        subject, settings = self.subject, self.settings
        name = f"{self.label}: one forward pass"
        self.forward = self.stages.timed(name, self.facts, float, lambda: subject.forward_seconds(self.text))
        # the stage loaded the model too and timed only a part: what counts is what it found
        self.stages.times[-1] = StageTime(name=name, seconds=self.forward, forward_seconds=self.forward)
        first = self._do("scores", Profile, self._measure)
        swaps: list[Swapped | None] = [None] * len(first.blocks)
        probes: list[Probe | None] = [None] * len(first.blocks)
        if settings.swaps and self.looked_at_closely:
            swaps = [*self._do("swaps", list[Swapped], lambda: self._swap(first.base_perplexity))]
        summary = None
        if settings.probe and self.looked_at_closely:
            found = self._do("probe", list[Probe], self._probe)
            summary, probes = summarise_probes(found, first.r2), list(found)
        blocks = [
            block.model_copy(update={"swap": swap, "probe": probe})
            for block, swap, probe in zip(first.blocks, swaps, probes, strict=True)
        ]
        return first.model_copy(update={"blocks": blocks, "probe": summary})

    def pitfall(self, profile: Profile) -> Pitfall:
        """One block's linear map, trained and in closed form."""
        asked, count = self.settings.pitfall, len(profile.blocks)
        if asked == "worst":
            index = max(range(count), key=lambda i: profile.blocks[i].scores.condition_number)
        else:
            index = int(asked or 0)
        if index >= count:
            raise BudgetError(f"block {index} is not there: this model's blocks are 0 to {count - 1}")
        return self._do(f"pitfall of block {index}", Pitfall, lambda: self._train(profile, index))

    def linear(self) -> list[Linear]:
        """The linear maps: of this run, or of the one that was killed."""
        if self._linear is None:
            self._linear = self.stages.keep("maps", self.facts, self._maps)
        return self._linear

    def _do(self, what: str, kind: TypeForm, make: Callable[[], T]) -> T:
        """A stage of this model on this text, which takes so many of its forward passes."""
        return self.stages.timed(f"{self.label}: {what}", self.facts, kind, make, self.forward)

    def _maps(self) -> list[Linear]:
        subject = self.subject
        return measure_blocks(subject.model, subject.blocks, self.corpus, subject.run).linear

    def _measure(self) -> Profile:
        subject, corpus, settings = self.subject, self.corpus, self.settings
        found = measure_blocks(subject.model, subject.blocks, corpus, subject.run)
        self._linear = found.linear
        if self.on_first_text and (settings.swaps or settings.probe or settings.cross_feed):
            self.stages.put("maps", self.facts, found.linear)
            self.stages.flush()  # before the scores are: without the maps this pass would be run again
        blocks = []
        for block, scores in zip(subject.blocks, found.scores, strict=True):
            regime, rule = regime_of(scores, block.d_out)
            blocks.append(
                BlockProfile(
                    index=block.index, path=block.path, parameters=block.parameters, d_in=block.d_in,
                    d_inner=block.d_inner, d_out=block.d_out, scores=scores, regime=regime, rule=rule,
                )
            )  # fmt: skip
        return Profile(
            model=subject.source.label,
            variant=subject.variant,
            family=subject.model.config.model_type,
            fingerprint=subject.facts["weights"],
            parameters=count_parameters(subject.model),
            text=public_name(self.text),
            fit_tokens=corpus.fit.numel(),
            held_out_tokens=corpus.choose.numel(),
            context=settings.seq_len,
            seed=settings.seed,
            fit_text=corpus.fit_text[0],
            held_out_text=corpus.choose_text[0],
            base_perplexity=found.base_perplexity,
            task=task_of(subject.model),
            blocks=blocks,
        )

    def _swap(self, base: float) -> list[Swapped]:
        subject = self.subject
        return swap_linear(subject.model, subject.blocks, self.linear(), self.corpus.choose, base, subject.run)

    def _probe(self) -> list[Probe]:
        subject = self.subject
        return probe_blocks(subject.model, subject.blocks, self.linear(), self.corpus, subject.run, self.settings.seed)

    def _train(self, profile: Profile, index: int) -> Pitfall:
        subject, corpus = self.subject, self.corpus
        block = [subject.blocks[index]]
        rows: list[Tensor] = []
        for windows in (corpus.fit, corpus.choose):
            ((_, [pair]),) = captured(subject.model, block, windows, subject.run)
            rows += pair
        scores = profile.blocks[index].scores
        return Pitfall(
            model=profile.model,
            text=profile.text,
            block=index,
            condition_number=scores.condition_number,
            dynamic_range=scores.dynamic_range,
            closed_form=scores.r2_lin,
            fit_rows=len(rows[0]),
            held_out_rows=len(rows[2]),
            context=profile.context,
            seed=profile.seed,
            trained=train_layers(rows[0], rows[1], rows[2], rows[3], profile.seed, subject.run.workers),
        )
