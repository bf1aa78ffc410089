"""What is shown beside the figures: the speed of both models, and how each goes on with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor

from ffncompress.budgets import Use
from ffncompress.models import embedding_rows, forward, is_streamed
from ffncompress.passes.pace import (
    PROMPT,
    STEPS,
    bytes_read,
    in_dtype,
    in_turns,
    keeps_cache,
    operations,
    seconds_to_go_on,
    seconds_to_read,
)
from ffncompress.records.gate import Pace, Speed
from ffncompress.records.task import Task
from ffncompress.runtime.memory import shrinking
from ffncompress.runtime.progress import Progress
from ffncompress.settings import EvalSettings
from ffncompress.text.sources import Text
from ffncompress.type_aliases import Model, Tokenizer

NEW_TOKENS, STREAMED_TOKENS = 48, 8  # all weights are read for each


def measure_speed(base: Model, slimmed: Model, context: int, settings: EvalSettings, progress: Progress) -> Speed:
    """Both models in turns: a batch that is read, one prompt, and one token after another, where they have a cache.

    Where memory runs out, both are timed on a smaller batch.
    """
    shape = (settings.batch_size, context)
    ids = torch.randint(0, embedding_rows(base), shape, generator=torch.manual_seed(0)).to(base.device)
    pair = {"base": base, "slimmed": slimmed}
    told = _predicted(pair, ids[:1])
    dtypes = dict.fromkeys([base.dtype, *(getattr(torch, name) for name in settings.speed_dtypes)])
    paces: list[Pace] = []
    for dtype in dtypes:
        with in_dtype(base, dtype), in_dtype(slimmed, dtype):
            own, _ = shrinking(
                lambda rows: _paces(pair, ids[:rows], told, dtype, settings.repeats, progress),  # noqa: B023
                len(ids),
            )
            paces += own
    first = paces[0].model_dump(include={"base", "slimmed", "ratio", "batch"})
    return Speed(**first, repeats=settings.repeats, device=str(ids.device.type), paces=paces)


def _predicted(pair: Mapping[str, Model], prompt: Tensor) -> dict[str, float]:
    """By how much the slimmed model should be faster: by its products, and by the weights that a token reads."""
    told = {"prefill": operations(pair["base"], prompt) / operations(pair["slimmed"], prompt)}
    if all(keeps_cache(model) for model in pair.values()):
        told["decode"] = bytes_read(pair["base"]) / bytes_read(pair["slimmed"])
    return told


def _paces(
    pair: Mapping[str, Model], ids: Tensor, told: Mapping[str, float], dtype: torch.dtype, repeats: int,
    progress: Progress,
) -> list[Pace]:  # fmt: skip
    """Of each use, in a dtype that both models are in."""
    rows, context = ids.shape
    prompt = min(PROMPT, context // 2)
    steps = min(STEPS, context - prompt)
    uses: dict[tuple[Use, tuple[int, int]], Callable[[Model], float]] = {
        ("prefill", (rows, context)): lambda model: seconds_to_read(model, ids),
        ("prefill", (1, context)): lambda model: seconds_to_read(model, ids[:1]),
    }
    if "decode" in told:
        uses["decode", (1, steps)] = lambda model: seconds_to_go_on(model, ids[:1, :prompt], steps)
    runs = {(use, name): partial(how, model) for use, how in uses.items() for name, model in pair.items()}
    taken = in_turns(runs, repeats, progress, "measuring speed")
    return [_pace(use, dtype, taken[use, "base"], taken[use, "slimmed"], told[use[0]]) for use in uses]


def _pace(
    use: tuple[Use, tuple[int, int]], dtype: torch.dtype, slow: list[float], fast: list[float], predicted: float
) -> Pace:
    of, batch = use
    ratios = [before / after for before, after in zip(slow, fast, strict=True)]
    tokens = batch[0] * batch[1]
    return Pace(
        of=of, dtype=str(dtype).removeprefix("torch."), batch=batch, base=tokens / median(slow),
        slimmed=tokens / median(fast), ratio=median(ratios), spread=(min(ratios), max(ratios)), predicted=predicted,
    )  # fmt: skip


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
