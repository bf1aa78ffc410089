"""Perplexity by lm-eval, in process, on a model object; a base model's answers are remembered.

Text is cut into pieces of at most one context, so that every window begins as the tokenizer begins a text, which is
how a plan's windows begin. Where it puts nothing there, a piece's first token is given and not scored.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import io
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ffncompress import __version__
from ffncompress.errors import ArtifactError, TextError
from ffncompress.models import DEFAULT_CONTEXT, embedding_rows, is_streamed, longest_of
from ffncompress.passes.heads import NUMBERS
from ffncompress.passes.losses import sequence_losses
from ffncompress.runtime.progress import Progress
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Facts
from ffncompress.settings import EvalSettings
from ffncompress.storage.files import write_file
from ffncompress.storage.registry import cache_folder
from ffncompress.text.sources import PYTHON_DOCS, Reading, Text
from ffncompress.text.windows import SHORTEST, document_windows, opening_tokens
from ffncompress.type_aliases import Model, Tokenizer

STOCK_TASK = "wikitext"


class Answer(BaseModel):
    """What lm-eval says of one model on one text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int
    log_likelihood: float
    word: float | None
    byte: float | None
    piece_log_likelihoods: list[float]
    piece_tokens: list[int]  # that were scored
    pages: list[str] = Field([], exclude=True)  # what was read; not remembered

    @property
    def losses(self) -> tuple[Tensor, Tensor]:
        """(the mean loss, the tokens) of each piece that has scored tokens."""
        tokens = torch.tensor(self.piece_tokens, dtype=torch.float64)
        some = tokens > 0
        return -torch.tensor(self.piece_log_likelihoods, dtype=torch.float64)[some] / tokens[some], tokens[some]


def cut_pieces(text: Text, tokenizer: Tokenizer, context: int, tokens: int, reading: Reading = "joined") -> list[str]:
    """The text's first `tokens` tokens in pieces of at most `context` tokens, cut at white space where there is any.

    Read as documents, no piece runs from one into the next, and what is as short as windows leave out is left out.
    """
    room = context + 1 - max(1, len(opening_tokens(tokenizer)))  # the last token is scored, not read
    least, documents = (SHORTEST, text.documents) if reading == "documents" else (0, (text.joined,))
    pieces: list[str] = []
    left = tokens
    for document in documents:
        for piece, size in _cut_document(document, tokenizer, room, left):
            if size >= least:
                pieces.append(piece)
                left -= size
    if not pieces:
        raise TextError(f"{text.source}: there is no text to evaluate on; give another with --data")
    return pieces


def _cut_document(rest: str, tokenizer: Tokenizer, context: int, left: int) -> Iterator[tuple[str, int]]:
    """(a piece, its tokens) until `left` tokens are used up."""
    while rest.strip() and left > 0:
        # a window's worth of characters, generously; offsets say where the tokens end
        head = rest[: context * 24]
        offsets = tokenizer(head, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]
        want = min(context, left)
        end = offsets[want - 1][1] if len(offsets) >= want else len(head)
        space = max(head.rfind(" ", 0, end), head.rfind("\n", 0, end))
        end = space if end < len(head) and space > end // 2 else end
        size = min(len(offsets), want)
        yield rest[:end], size
        left -= size
        rest = rest[end:]


def lm_eval_perplexity(
    model: Model,
    tokenizer: Tokenizer,
    pieces: list[str] | None,
    context: int,
    settings: EvalSettings,
    progress: Progress,
    label: str,
) -> Answer:
    """Run lm-eval in process on a model object."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    stock_way = pieces is None and (tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None)
    opened = None if stock_way else partial(opened_pairs, tokenizer=tokenizer, context=context)
    steps = iter(progress(range(math.ceil(len(pieces or [0]) / settings.batch_size)), label))
    next(steps, None)
    handle = model.register_forward_hook(lambda *_: next(steps, None) and None)
    try:
        with redirect_stderr(io.StringIO()):  # lm-eval's own bars; ours is already open
            import lm_eval

            lm = make_lm(model, tokenizer, settings.batch_size, opened, max_length=context, add_bos_token=False)
            answer = lm_eval.evaluate(lm=lm, task_dict=_task_dict(pieces), bootstrap_iters=0, log_samples=True)
    finally:
        handle.remove()
        for _ in steps:
            pass
    assert answer is not None
    name = next(iter(answer["results"]))
    scores, samples = answer["results"][name], answer["samples"][name]
    pages = [sample["arguments"][0][0] for sample in samples]
    if opened:
        scored = [sum(len(own) for _, own in opened(page)) for page in pages]
    else:
        scored = [len(ids) for ids in tokenizer(pages, add_special_tokens=False, verbose=False)["input_ids"]]
    if not any(scored):
        raise TextError("the text is a token long, and the first is not scored; give a longer one with --data")
    found = [float(sample["filtered_resps"][0]) for sample in samples]
    return Answer(
        tokens=sum(scored),
        log_likelihood=sum(found),
        word=scores["word_perplexity,none"],
        byte=scores["byte_perplexity,none"],
        piece_log_likelihoods=found,
        piece_tokens=scored,
        pages=pages,
    )


def make_lm(
    model: Model,
    tokenizer: Tokenizer,
    batch_size: int,
    opened: Callable[[str], list[tuple[list[int], list[int]]]] | None = None,
    **options: Any,
) -> Any:
    """lm-eval's coat around a model object.

    Its logits_cache scores a repetitive document wrongly at batch sizes above 1; and a tokenizer without a pad token is
    given one, which ours is not to have. Of a streamed model it reads as many windows at once as have room for logits.
    """
    if is_streamed(model):
        length = options.get("max_length") or longest_of(model.config) or DEFAULT_CONTEXT
        batch_size = max(1, min(batch_size, NUMBERS // (length * embedding_rows(model))))
    return _kind_of_lm(opened)(
        pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size, logits_cache=False,
        backend="causal", **options,
    )  # fmt: skip


def own_loss(model: Model, tokenizer: Tokenizer, pieces: list[str], context: int, run: Run, label: str) -> Answer:
    """The loss of a model that lm-eval has no measure for, on the same pieces: of hidden words, or of embeddings."""
    windows = document_windows(Text("", "", tuple(pieces)), tokenizer, length=context, seed=None)
    if not len(windows):
        raise TextError("the text is shorter than a window; give a longer one with --data")
    losses, tokens = sequence_losses(model, windows, run, label), windows.scored
    return Answer(
        tokens=int(tokens.sum()),
        log_likelihood=-float((losses * tokens).sum()),
        word=None,
        byte=None,
        piece_log_likelihoods=(-losses * tokens).tolist(),
        piece_tokens=tokens.long().tolist(),
    )


def opened_pairs(page: str, tokenizer: Tokenizer, context: int) -> list[tuple[list[int], list[int]]]:
    """(what is given, what is scored) of a text, begun as the tokenizer begins one; mostly one pair."""
    start = opening_tokens(tokenizer)
    ids = tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]
    size = context + 1 - len(start)
    cuts = [ids[at : at + size] for at in range(0, len(ids), size)]
    pairs = [(start, each) if start else (each[:1], each[1:]) for each in cuts]
    return [(given, scored) for given, scored in pairs if scored]


def _kind_of_lm(opened: Callable[[str], list[tuple[list[int], list[int]]]] | None) -> Any:
    """lm-eval's model class, or one that begins a text as `opened` says instead of with a prefix token."""
    from lm_eval.models.huggingface import HFLM

    if opened is None:
        return HFLM

    begin = opened

    class OpenedLM(HFLM):  # type: ignore[misc]
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            parts = [(i, pair) for i, request in enumerate(requests) for pair in begin(request.args[0])]
            found = self._loglikelihood_tokens([(None, *pair) for _, pair in parts], disable_tqdm=disable_tqdm)
            totals = [0.0] * len(requests)
            for (i, _), (log_likelihood, _) in zip(parts, found, strict=True):
                totals[i] += log_likelihood
            return totals

    return OpenedLM


def _task_dict(pieces: list[str] | None) -> Any:
    """lm-eval's stock wikitext task, or a local one over our pieces."""
    import datasets
    from lm_eval.tasks import TaskManager

    if pieces is not None:
        task = _local_task(datasets.Dataset.from_dict({"page": pieces}))
        return TaskManager(include_defaults=False).load([task])
    try:
        return TaskManager().load([STOCK_TASK])
    except Exception as error:  # datasets, huggingface_hub and the socket each have their own
        raise TextError(
            "lm-eval's wikitext task needs the Hub, which does not answer; "
            f"evaluate offline with --data FILE or --data {PYTHON_DOCS}"
        ) from error


def _local_task(rows: Any) -> dict[str, Any]:
    def metric(name: str) -> dict[str, Any]:
        return {"metric": name, "aggregation": "weighted_perplexity", "higher_is_better": False}

    return {
        "task": "ffncompress_text",
        "custom_dataset": lambda **_: {"test": rows},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [metric("word_perplexity"), metric("byte_perplexity")],
    }


def digest(pieces: list[str]) -> str:
    """What identifies the pieces of a text."""
    return hashlib.sha256("\0".join(pieces).encode()).hexdigest()


def facts_of(
    base: str, pieces: list[str] | None, context: int, device: str, dtype: str, settings: EvalSettings
) -> Facts:
    """All that a base model's perplexity depends on: the model, the text, and how and by what it is measured."""
    software = ("lm_eval", "transformers", "tokenizers", "torch", "datasets")
    return {
        "base": base,
        "text": digest(pieces) if pieces else STOCK_TASK,
        "context": context,
        "device": device,
        "dtype": dtype,
        "batch_size": settings.batch_size,
        "threads": torch.get_num_threads(),
        "ffncompress": __version__,
        **{name: importlib.metadata.version(name) for name in software},
    }


def _cache_file(facts: Facts) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "base" / f"{key}.json"


def cached(facts: Facts) -> Answer | None:
    """An answer remembered with just these facts; one that cannot be read, or that does not carry them, is none."""
    try:
        entry = json.loads(_cache_file(facts).read_text(encoding="utf-8"))
        return Answer.model_validate(entry["answer"]) if entry["facts"] == facts else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remember(facts: Facts, answer: Answer) -> None:
    """A cache that cannot be written is no reason to fail."""
    file = _cache_file(facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"facts": facts, "answer": answer.model_dump()}))
    except (OSError, ArtifactError):
        pass
