"""Perplexity by lm-eval, in process, on a model object; a base model's answers are remembered.

Text is cut into pieces of at most one context, so that every window begins with the model's opening token, as the
model was trained to see a text begin.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ffncompress import texts
from ffncompress.errors import ArtifactError, TextError
from ffncompress.settings import EvalSettings
from ffncompress.staging import write_file
from ffncompress.workers import Track

STOCK_TASK = "wikitext"


class Answer(BaseModel):
    """What lm-eval says of one model on one text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int
    log_likelihood: float
    word: float
    byte: float
    piece_log_likelihoods: list[float] = []
    piece_tokens: list[int] = []


def cut_pieces(text: texts.Text, tokenizer: Any, context: int, tokens: int) -> list[str]:
    """The text's first `tokens` tokens in pieces of at most `context` tokens, cut at white space where there is any."""
    pieces: list[str] = []
    left = tokens
    rest = text.joined
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
        pieces.append(rest[:end])
        left -= min(len(offsets), want)
        rest = rest[end:]
    if not pieces:
        raise TextError(f"{text.source}: there is no text to evaluate on; give another with --data")
    return pieces


def lm_eval_perplexity(
    model: Any, tokenizer: Any, pieces: list[str] | None, context: int, settings: EvalSettings, track: Track, label: str
) -> Answer:
    """Run lm-eval in process on a model object."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    steps = iter(track(range(math.ceil(len(pieces or [0]) / settings.batch_size)), label))
    next(steps, None)
    handle = model.register_forward_hook(lambda *_: next(steps, None) and None)
    try:
        with redirect_stderr(io.StringIO()):  # lm-eval's own bars; ours is already open
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            # logits_cache scores a repetitive document wrongly at batch sizes above 1
            lm = HFLM(
                pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size, max_length=context,
                logits_cache=False, add_bos_token=False, backend="causal",
            )  # fmt: skip
            answer = lm_eval.evaluate(lm=lm, task_dict=_task_dict(pieces), bootstrap_iters=0, log_samples=True)
    finally:
        handle.remove()
        for _ in steps:
            pass
    assert answer is not None
    name = next(iter(answer["results"]))
    scores, samples = answer["results"][name], answer["samples"][name]
    scored = [sample["arguments"][0][0] for sample in samples]
    piece_tokens = [len(tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]) for page in scored]
    log_likelihoods = [float(sample["filtered_resps"][0]) for sample in samples]
    return Answer(
        tokens=sum(piece_tokens),
        log_likelihood=sum(log_likelihoods),
        piece_log_likelihoods=log_likelihoods,
        piece_tokens=piece_tokens,
        word=scores["word_perplexity,none"],
        byte=scores["byte_perplexity,none"],
    )


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
            f"evaluate offline with --data FILE or --data {texts.PYTHON_DOCS}"
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
    return hashlib.sha256("\0".join(pieces).encode()).hexdigest()


def cache_key(base: str, pieces: list[str] | None, context: int, dtype: str, settings: EvalSettings) -> str:
    """What a base model's perplexity depends on: its weights, the text, and the software that measures."""
    facts = [
        base, digest(pieces) if pieces else STOCK_TASK, context, dtype, settings.batch_size,
        importlib.metadata.version("lm_eval"), importlib.metadata.version("transformers"), torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _cache_file(key: str) -> Path:
    home = os.environ.get("FFNCOMPRESS_CACHE") or Path.home() / ".cache" / "ffncompress"
    return Path(home) / "base" / f"{key}.json"


def cached(key: str) -> Answer | None:
    """An answer remembered under this key; one that cannot be read is none."""
    try:
        return Answer.model_validate_json(_cache_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def remember(key: str, answer: Answer) -> None:
    """A cache that cannot be written is no reason to fail."""
    try:
        _cache_file(key).parent.mkdir(parents=True, exist_ok=True)
        write_file(_cache_file(key), answer.model_dump_json())
    except (OSError, ArtifactError):
        pass
