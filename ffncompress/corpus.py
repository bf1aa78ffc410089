"""The token windows of a plan: what is fitted on, what is chosen on, and what the two came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffncompress import texts
from ffncompress.errors import TextError
from ffncompress.models import ModelSource
from ffncompress.plans import TextRef
from ffncompress.settings import PlanSettings

CHOOSE_SHARE, CHOOSE_TOKENS = 0.25, 8192  # of the tokens, up to so many: the paper holds out a fifth to a quarter
VERIFY_WINDOWS = 8  # at least: a spread over fewer says little
FRESH_WINDOWS, FRESH_TOKENS = 16, 8192  # at least both, where the text has them
_LONGEST = 24  # characters of a token, generously
_RUN, _READ = 8, 0.3  # tokens; a window is read already if this share of its runs of tokens is


@dataclass(frozen=True)
class Corpus:
    """The windows of a plan and the records of the texts they came from."""

    fit: Tensor
    refit: Tensor  # of the same text, as many as were asked for
    choose: Tensor
    verify: Tensor  # of the choose text too, at the gate's context
    fresh: Tensor  # likewise, where nothing above reads, of the text that the gate will report on: the first
    fit_text: list[TextRef]
    choose_text: list[TextRef]


def gather_text(source: ModelSource, settings: PlanSettings, tokenizer: Any, context: int) -> Corpus:
    """Fit and choose windows from disjoint text; the part called report is left for the gate."""
    data = settings.data or ["wikitext" if source.is_hub else texts.PYTHON_DOCS]
    if settings.choose_data:
        fit = [texts.read(name) for name in data]
        choose = [texts.read_parts(name, texts.HALVES)[texts.CHOOSE] for name in settings.choose_data]
    else:
        parts = [texts.read_parts(name) for name in data]
        fit, choose = [p[texts.FIT] for p in parts], [p[texts.CHOOSE] for p in parts]
    choose_tokens = min(settings.tokens * CHOOSE_SHARE, CHOOSE_TOKENS)
    choose_windows = max(1, round(choose_tokens / settings.seq_len))
    fit_windows = max(1, settings.tokens // settings.seq_len - choose_windows)
    fit_rows, fit_refs = _cut(fit, fit_windows, settings.seq_len, settings.seed, tokenizer)
    choose_rows, choose_refs = _cut(choose, choose_windows, settings.seq_len, settings.seed, tokenizer)
    refit_rows = fit_rows
    if settings.refit_tokens:
        refit_rows, _ = _cut(
            fit, max(1, settings.refit_tokens // settings.seq_len), settings.seq_len, settings.seed, tokenizer
        )
    share = max(VERIFY_WINDOWS, choose_rows.numel() // context) // len(choose) + 1
    verify_rows = torch.cat(
        [texts.windows(text, tokenizer, length=context, count=share, seed=settings.seed) for text in choose]
    )
    if len(verify_rows) < VERIFY_WINDOWS:  # too little text for long windows: the short ones must serve
        verify_rows = choose_rows
    fresh_rows = verify_rows[:0]
    if settings.limit is None:  # a promise is needed only where no limit was asked for
        count = max(FRESH_WINDOWS, FRESH_TOKENS // context)
        fresh_rows = _unread(_spread(choose[0], tokenizer, context, count), [choose_rows, verify_rows])
    return Corpus(fit_rows, refit_rows, choose_rows, verify_rows, fresh_rows, fit_refs, choose_refs)


def _cut(sources: list[texts.Text], count: int, length: int, seed: int, tokenizer: Any) -> tuple[Tensor, list[TextRef]]:
    """About the same number of windows from each text."""
    rows, refs = [], []
    for i, text in enumerate(sources):
        share = count // len(sources) + (i < count % len(sources))
        own = texts.windows(text, tokenizer, length=length, count=share, seed=seed)
        if not len(own):
            raise TextError(
                f"{text.source}: its {text.part} part is shorter than one window of {length} tokens; "
                "give a longer text, or lower --seq-len"
            )
        rows.append(own)
        refs.append(TextRef(**text.fingerprint().as_dict(), tokens=own.numel()))
    return torch.cat(rows), refs


def _spread(text: texts.Text, tokenizer: Any, length: int, count: int) -> Tensor:
    """Windows at even distances over all of a text: neighbours are alike, and a few of them stand for one place."""
    joined = text.joined
    stretch = len(joined) // count
    starts = [joined.find("\n", i * stretch, (i + 1) * stretch) + 1 or i * stretch for i in range(count)]
    ends = [min((i + 1) * stretch, at + _LONGEST * length) for i, at in enumerate(starts)]
    near = [texts.Text(text.source, text.part, (joined[at:end],)) for at, end in zip(starts, ends, strict=True)]
    found = [texts.windows(each, tokenizer, length=length, count=1, seed=None) for each in near]
    return torch.cat([torch.empty(0, length, dtype=torch.long), *found])


def _unread(windows: Tensor, others: list[Tensor]) -> Tensor:
    """Those that share few runs of tokens with any of the others."""

    def runs(row: list[int]) -> list[tuple[int, ...]]:
        return [tuple(row[i : i + _RUN]) for i in range(len(row) - _RUN + 1)]

    read = {run for rows in others for row in rows.tolist() for run in runs(row)}
    shares = [sum(run in read for run in runs(row)) / max(1, len(row) - _RUN + 1) for row in windows.tolist()]
    return windows[[share < _READ for share in shares]]
