"""The token windows of a plan: what is fitted on, what is chosen on, and what the two came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ffncompress.errors import TextError
from ffncompress.settings import PlanSettings
from ffncompress.storage.registry import record_place, recorded_place
from ffncompress.text.parts import CHOOSE, FIT, HALVES, read_parts
from ffncompress.text.sources import Reading, Text, TextRef, is_public, lasting_name, read
from ffncompress.text.windows import Windows, cut, document_windows, joined_windows
from ffncompress.type_aliases import Tokenizer

CHOOSE_SHARE, CHOOSE_TOKENS = 0.25, 8192  # of the tokens, up to so many: the paper holds out a fifth to a quarter
VERIFY_WINDOWS = 8  # at least: a spread over fewer says little
FRESH_WINDOWS, FRESH_TOKENS = 16, 8192  # at least both, where the text has them
_CHARACTERS, _LONGEST = 4, 24  # of a token: about, and generously
_RUN, _READ = 8, 0.3  # tokens; a window is read already if this share of its runs of tokens is


@dataclass(frozen=True)
class Corpus:
    """The windows of a plan and the records of the texts they came from."""

    fit: Windows
    refit: Windows  # of the same text, as many as were asked for
    choose: Windows
    verify: Windows  # of the choose text too, at the gate's context
    fresh: Windows  # likewise, where nothing above reads, of the text that the gate will report on: the first
    fit_text: list[TextRef]
    choose_text: list[TextRef]


def gather_text(
    settings: PlanSettings,
    default: str,
    tokenizer: Tokenizer,
    context: int,
    reading_of: Callable[[Text], Reading] = lambda _: "joined",
) -> Corpus:
    """Fit and choose windows from disjoint text; the part called report is left for the gate.

    Args:
        settings: which text, and how much of it.
        default: the source to read where the settings name none.
        tokenizer: the model's.
        context: of the windows to verify on.
        reading_of: says how a text is read; asked once for each source.
    """
    data = settings.data or [default]
    if settings.choose_data:
        fit = [read(name) for name in data]
        choose = [read_parts(name, HALVES)[CHOOSE] for name in settings.choose_data]
    else:
        parts = [read_parts(name) for name in data]
        fit, choose = [p[FIT] for p in parts], [p[CHOOSE] for p in parts]
    for text in (*fit, *choose):
        if not is_public(text.source):
            record_place(text.sha256, lasting_name(text.source))
    readings = {text.source: reading_of(text) for text in (*(fit if settings.choose_data else ()), *choose)}
    choose_tokens = min(settings.tokens * CHOOSE_SHARE, CHOOSE_TOKENS)
    choose_windows = max(1, round(choose_tokens / settings.seq_len))
    fit_windows = max(1, settings.tokens // settings.seq_len - choose_windows)
    fit_rows, fit_refs = _cut(fit, readings, fit_windows, settings, tokenizer)
    choose_rows, choose_refs = _cut(choose, readings, choose_windows, settings, tokenizer)
    refit_rows = fit_rows
    if settings.refit_tokens:
        refit_rows, _ = _cut(fit, readings, max(1, settings.refit_tokens // settings.seq_len), settings, tokenizer)
    share = max(VERIFY_WINDOWS, choose_rows.numel() // context) // len(choose) + 1
    verify_rows = Windows.mixed(
        [
            cut(text, tokenizer, readings[text.source], length=context, count=share, seed=settings.seed)
            for text in choose
        ]
    )
    if len(verify_rows) < VERIFY_WINDOWS:  # too little text for long windows: the short ones must serve
        verify_rows = choose_rows
    fresh_rows = verify_rows[:0]
    if settings.limit is None:  # a promise is needed only where no limit was asked for
        count = max(FRESH_WINDOWS, FRESH_TOKENS // context)
        fresh_rows = _unread(
            _spread(choose[0], tokenizer, readings[choose[0].source], context, count), [choose_rows, verify_rows]
        )
    return Corpus(fit_rows, refit_rows, choose_rows, verify_rows, fresh_rows, fit_refs, choose_refs)


def recorded_source(ref: TextRef) -> str:
    """What to read for a text that a plan names: the same everywhere, or a file that this machine's own runs read.

    Raises:
        TextError: this machine has not seen it.
    """
    if is_public(ref.source):
        return ref.source
    place = recorded_place(ref.sha256)
    if place is None:
        raise TextError(
            f"the plan was made on {ref.source}, a text that this machine has not seen; give one with --data"
        )
    return place


def _cut(
    sources: list[Text], readings: Mapping[str, Reading], count: int, settings: PlanSettings, tokenizer: Tokenizer
) -> tuple[Windows, list[TextRef]]:
    """About the same number of windows from each text, in turns: where a few serve, they are of all texts."""
    rows, refs = [], []
    for i, text in enumerate(sources):
        share, reading = count // len(sources) + (i < count % len(sources)), readings[text.source]
        own = cut(text, tokenizer, reading, length=settings.seq_len, count=share, seed=settings.seed)
        if not len(own):
            raise TextError(
                f"{text.source}: its {text.part} part is shorter than one window of {settings.seq_len} tokens; "
                "give a longer text, or lower --seq-len"
            )
        rows.append(own)
        refs.append(text.ref(own.numel(), reading))
    return Windows.mixed(rows), refs


def _spread(text: Text, tokenizer: Tokenizer, reading: Reading, length: int, count: int) -> Windows:
    """Windows at even distances over all of a text: neighbours are alike, and a few of them stand for one place."""
    if reading == "documents":
        stride = max(1, text.characters // (_CHARACTERS * count * length))
        some = Text(text.source, text.part, text.documents[::stride])
        return document_windows(some, tokenizer, length=length, tokens=count * length, seed=None)
    joined = text.joined
    stretch = len(joined) // count
    starts = [joined.find("\n", i * stretch, (i + 1) * stretch) + 1 or i * stretch for i in range(count)]
    ends = [min((i + 1) * stretch, at + _LONGEST * length) for i, at in enumerate(starts)]
    near = [Text(text.source, text.part, (joined[at:end],)) for at, end in zip(starts, ends, strict=True)]
    return Windows.cat(joined_windows(t, tokenizer, length=length, count=1, seed=None) for t in near)


def _unread(windows: Windows, others: list[Windows]) -> Windows:
    """Those that share few runs of tokens with any of the others."""

    def runs(row: list[int]) -> list[tuple[int, ...]]:
        return [tuple(row[i : i + _RUN]) for i in range(len(row) - _RUN + 1)]

    read = {run for rows in others for row in rows for run in runs(row.tolist())}
    shares = [sum(run in read for run in runs(row.tolist())) / max(1, len(row) - _RUN + 1) for row in windows]
    return windows[[i for i, share in enumerate(shares) if share < _READ]]
