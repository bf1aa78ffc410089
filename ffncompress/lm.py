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
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ffncompress import __version__, texts
from ffncompress.errors import ArtifactError, TextError
from ffncompress.notebook import cache_folder
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
    return Answer(
        tokens=sum(len(tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"]) for page in scored),
        log_likelihood=sum(sample["filtered_resps"][0] for sample in samples),
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


def facts_of(
    base: str, pieces: list[str] | None, context: int, device: str, dtype: str, settings: EvalSettings
) -> dict[str, Any]:
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


def _cache_file(facts: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "base" / f"{key}.json"


def cached(facts: dict[str, Any]) -> Answer | None:
    """An answer remembered with just these facts; one that cannot be read, or that does not carry them, is none."""
    try:
        entry = json.loads(_cache_file(facts).read_text(encoding="utf-8"))
        return Answer.model_validate(entry["answer"]) if entry["facts"] == facts else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remember(facts: dict[str, Any], answer: Answer) -> None:
    """A cache that cannot be written is no reason to fail."""
    file = _cache_file(facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"facts": facts, "answer": answer.model_dump()}))
    except (OSError, ArtifactError):
        pass
