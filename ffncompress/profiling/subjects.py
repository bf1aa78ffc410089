"""What a study looks at: models as they are, their random twins, and their checkpoints along training."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ffncompress.errors import FfncompressError
from ffncompress.models import (
    Block,
    Footprint,
    ModelSource,
    find_blocks,
    find_model,
    forward,
    load_config,
    load_model,
    load_random,
    load_tokenizer,
)
from ffncompress.passes.calibration import check_enough_rows
from ffncompress.passes.objective import set_objective_
from ffncompress.passes.reading import better_reading, check_ids, check_length
from ffncompress.runtime.progress import step
from ffncompress.runtime.run import Run
from ffncompress.settings import PlanSettings, ProfileSettings
from ffncompress.text.corpus import Corpus, gather_text
from ffncompress.text.sources import Reading, Text, default_text, public_name
from ffncompress.text.windows import Windows
from ffncompress.type_aliases import Config, Model, Tokenizer

RANDOM = "random"
FORWARD_BATCHES = 6  # that a bare forward pass is timed on, after one to warm up


@dataclass
class Subject:
    """One model under study; loaded when a stage first needs it."""

    source: ModelSource
    variant: str
    settings: ProfileSettings
    run: Run
    original: Subject | None = None  # of a random twin or a checkpoint
    _corpora: dict[str, Corpus] = field(default_factory=dict)
    _readings: dict[Text, Reading] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a legend says."""
        return Path(self.source.label).name + (f" ({self.variant})" if self.variant else "")

    @cached_property
    def facts(self) -> dict[str, str | int]:
        """What this model is, for a stage's key."""
        seed = {"seed": self.settings.seed} if self.variant == RANDOM else {}
        return {"weights": self.source.fingerprint(), "variant": self.variant, **seed}

    @cached_property
    def config(self) -> Config:
        """Its config, which needs no weights."""
        return load_config(self.source)

    @cached_property
    def model(self) -> Model:
        """The model, loaded when it is first asked for."""
        with step(self.run.progress, f"loading {self.name}"):
            dtype, where = self.run.workers.dtype(self.settings.dtype), self.run.workers.device_map
            if self.variant == RANDOM:
                model = load_random(self.source, seed=self.settings.seed, dtype=dtype).to(self.run.workers.device)
            else:
                model = load_model(self.source, dtype=dtype, device_map=where, stream=self.is_streamed)
            return set_objective_(model, self.tokenizer)

    @property
    def is_streamed(self) -> bool:
        """Whether its weights stay on disk; told from its files, for stages depend on it that need no model."""
        if self.variant == RANDOM:
            return False
        return self.run.workers.streams(*Footprint.of(self.source, self.run.workers.dtype(self.settings.dtype)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return load_tokenizer(self.source)

    @cached_property
    def blocks(self) -> list[Block]:
        """Its FFNs."""
        return find_blocks(self.model)

    def unload(self) -> None:
        """Let the model go; it is loaded again where a later stage needs it."""
        self.__dict__.pop("model", None)

    @property
    def texts(self) -> list[str]:
        """What it is profiled on; what a model is compared with sees the first text only."""
        texts = self.settings.data or [default_text(on_hub=self.source.is_hub, embedded=self.source.is_embedded)]
        return texts[:1] if self.variant else texts

    def corpus(self, text: str) -> Corpus:
        """The windows of one text."""
        if text not in self._corpora:
            wanted = self.settings
            check_length(self.name, self.config, wanted.seq_len)
            plan = PlanSettings(data=[text], tokens=wanted.tokens, seq_len=wanted.seq_len, seed=wanted.seed)
            with step(self.run.progress, f"reading {text}"):
                self._corpora[text] = gather_text(plan, text, self.tokenizer, wanted.seq_len, self.reading_of)
        return self._corpora[text]

    def reading_of(self, text: Text) -> Reading:
        """How the model reads a text; what it is compared with reads as the model itself does."""
        if self.original is not None:
            return self.original.reading_of(text)
        if text not in self._readings:
            length = self.settings.seq_len
            several = len(text.documents) > 1  # or the model need not be loaded to tell
            self._readings[text] = (
                better_reading(self.model, self.tokenizer, text, length, self.run, seed=self.settings.seed)
                if several
                else "joined"
            )
        return self._readings[text]

    @torch.inference_mode()
    def forward_seconds(self, text: str) -> float:
        """One bare forward pass over all windows of a text by all processes, measured on some of them."""
        corpus = self.corpus(text)
        check_ids(self.model, Windows.cat([corpus.fit, corpus.choose]))
        check_enough_rows(self.blocks, corpus.fit.numel())
        some = corpus.fit.batches(self.run.workers.batch_tokens)[
            : FORWARD_BATCHES + 1
        ]  # a process may have none of its own
        batches = [batch.to(self.run.workers.device) for _, batch in some]
        forward(self.model, batches[0])
        timed = batches[1:] or batches
        start = time.perf_counter()
        for batch in self.run.progress(timed, "timing a forward pass"):
            forward(self.model, batch)
        seconds = time.perf_counter() - start
        tokens = corpus.fit.numel() + corpus.choose.numel()
        return seconds * tokens / sum(batch.numel() for batch in timed) / self.run.workers.count


def find_subjects(
    models: list[str],
    settings: ProfileSettings,
    run: Run,
    *,
    revision: str | None,
    trust_remote_code: bool,
) -> list[Subject]:
    """The models, each followed by what it is compared with.

    Raises:
        FfncompressError: a model is missing, or two of the wishes do not go together.
    """
    if settings.revisions and len(models) > 1:
        raise FfncompressError("--revisions are of one model; give one, or each model a run of its own")

    def subject(source: ModelSource, variant: str = "", original: Subject | None = None) -> Subject:
        return Subject(source, variant, settings, run, original)

    found = []
    for name in models:
        source = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
        original = subject(source)
        for revision_name in settings.revisions:
            folder = Path(revision_name)
            at = find_model(folder) if folder.is_dir() else find_model(name, revision=revision_name)
            own = ModelSource(source.name, at.directory, at.gguf_file, at.revision, at.is_hub, trust_remote_code)
            found.append(subject(own, folder.name, original))
        found.append(original)
        if settings.against_random:
            found.append(subject(source, RANDOM, original))
    for kind, names in (("models", [each.name for each in found]), ("texts", [*map(public_name, settings.data)])):
        if len(set(names)) < len(names):
            raise FfncompressError(f"two {kind} are called {max(names, key=names.count)}; rename one of them")
    if settings.cross_feed:
        _check_widths(found)
    return found


def _check_widths(subjects: list[Subject]) -> None:
    widths = {each.name: each.config.hidden_size for each in fed(subjects)}
    if len(widths) < 2:
        raise FfncompressError("--cross-feed needs two models of one width; give another, or add --against-random")
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise FfncompressError(f"--cross-feed needs models of one width, and these are {told} wide; leave some out")


def fed(subjects: list[Subject]) -> list[Subject]:
    """Those that are cross-fed: models as they are, and random twins."""
    return [each for each in subjects if each.variant in ("", RANDOM)]
