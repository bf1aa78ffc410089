"""What is shown beside the figures: the speed of both models, and how each goes on with a prompt."""

from __future__ import annotations

import statistics
import time

import torch

from ffncompress.models import embedding_rows, forward, is_streamed
from ffncompress.records.gate import Speed
from ffncompress.records.task import Task
from ffncompress.runtime.progress import Progress
from ffncompress.settings import EvalSettings
from ffncompress.text.sources import Text
from ffncompress.type_aliases import Model, Tokenizer

NEW_TOKENS, STREAMED_TOKENS = 48, 8  # all weights are read for each


@torch.inference_mode()
def measure_speed(base: Model, slimmed: Model, context: int, settings: EvalSettings, progress: Progress) -> Speed:
    """Forward passes over the same batch, interleaved so that a noisy machine hits both alike."""
    ids = torch.randint(0, embedding_rows(base), (settings.batch_size, context), generator=torch.manual_seed(0))
    ids = ids.to(base.device)
    times: dict[int, list[float]] = {id(base): [], id(slimmed): []}
    for round_ in progress(range(settings.repeats + 1), "measuring speed"):
        for model in (base, slimmed):
            start = time.perf_counter()
            forward(model, ids)
            if ids.is_cuda:
                torch.cuda.synchronize()
            if round_:  # the first round warms up
                times[id(model)].append(time.perf_counter() - start)
    slow, fast = statistics.median(times[id(base)]), statistics.median(times[id(slimmed)])
    return Speed(
        base=ids.numel() / slow,
        slimmed=ids.numel() / fast,
        ratio=slow / fast,
        batch=(settings.batch_size, context),
        repeats=settings.repeats,
        device=str(ids.device.type),
    )


def first_words(text: Text | None) -> str:
    """The first words of the text's first paragraph of prose."""
    if text is None:
        return "The history of the city began"
    paragraphs = [" ".join(p.split()) for document in text.documents[:20] for p in document.split("\n\n") if p.strip()]
    prose = (p for p in paragraphs if len(p) > 120 and sum(c.isalpha() or c == " " for c in p) > 0.9 * len(p))
    return " ".join(next(prose, paragraphs[0]).split()[:10])


@torch.inference_mode()
def go_on(model: Model, tokenizer: Tokenizer, prompt: str, task: Task) -> str:
    """What a model makes of a prompt: how it goes on, or what it puts in the place of its last word."""
    if task == "embedding":
        return ""
    if task == "masked":
        hidden = tokenizer(f"{prompt} {tokenizer.mask_token}.", return_tensors="pt").to(model.device)["input_ids"]
        logits = forward(model, hidden).logits[0, (hidden[0] == tokenizer.mask_token_id).nonzero()[-1, 0]]
        return ", ".join(tokenizer.decode(each).strip() for each in logits.topk(5).indices)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=STREAMED_TOKENS if is_streamed(model) else NEW_TOKENS, do_sample=False, pad_token_id=pad,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
