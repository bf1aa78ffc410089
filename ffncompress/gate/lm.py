"""lm-eval's coat around a model object: it counts what is read, and halves batches that memory is too short for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ffncompress.models import DEFAULT_CONTEXT, embedding_rows, forward, is_streamed, longest_of
from ffncompress.passes.heads import NUMBERS
from ffncompress.runtime.memory import shrinking
from ffncompress.runtime.progress import Progress
from ffncompress.type_aliases import Model, Tokenizer

Opened = Callable[[str], list[tuple[list[int], list[int]]]]  # (what is given, what is scored) of a text, in windows
Counting = Callable[[int], AbstractContextManager[None]]  # while so many questions are answered


def make_lm(
    model: Model,
    tokenizer: Tokenizer,
    batch_size: int,
    opened: Opened | None = None,
    counting: Counting = lambda _: nullcontext(),
    **options: Any,
) -> Any:
    """lm-eval's coat around a model object, in which a batch that memory is too short for is halved.

    Its logits_cache scores a repetitive document wrongly at batch sizes above 1; and a tokenizer without a pad token is
    given one, which ours is not to have. Of a streamed model it reads as many windows at once as have room for logits.
    """
    if is_streamed(model):
        length = options.get("max_length") or longest_of(model.config) or DEFAULT_CONTEXT
        batch_size = max(1, min(batch_size, NUMBERS // (length * embedding_rows(model))))
    return _kind_of_lm(opened, counting)(
        pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size, logits_cache=False,
        backend="causal", **options,
    )  # fmt: skip


@contextmanager
def counted(model: Model, rows: int, progress: Progress, label: str) -> Iterator[None]:
    """A loop over rows that the model is about to read, for the length of a `with`: it moves as the model runs."""
    steps = iter(progress(range(rows), label))
    next(steps, None)
    rest = islice(steps, rows - 1)  # it ends with the `with`, even if there are more rows than were foreseen

    def count(_model: Model, _args: object, given: Mapping[str, Any], _output: object) -> None:
        for _ in zip(given["input_ids"], rest, strict=False):
            pass

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    for _ in steps:  # what was not foreseen: fewer rows
        pass


def _kind_of_lm(opened: Opened | None, counting: Counting) -> Any:
    """lm-eval's model class, or one that begins a text as `opened` says instead of with a prefix token."""
    from lm_eval.models.huggingface import HFLM

    class HalvingLM(HFLM):  # type: ignore[misc]
        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            """Without a cache: nothing goes on from it, and that of all layers may be larger than a streamed model."""
            with torch.inference_mode():
                logits: Tensor = forward(self.model, inps).logits
            return logits

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            def answers(size: int) -> Any:
                self.batch_size_per_gpu = size  # the longest come first: what does not fit is met at once
                return as_they_are(requests, *args, **options)

            as_they_are = super()._loglikelihood_tokens
            with counting(len(requests)):
                return shrinking(answers, self.batch_size_per_gpu)[0]

    if opened is None:
        return HalvingLM

    begin = opened

    class OpenedLM(HalvingLM):
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            parts = [(i, pair) for i, request in enumerate(requests) for pair in begin(request.args[0])]
            found = self._loglikelihood_tokens([(None, *pair) for _, pair in parts], disable_tqdm=disable_tqdm)
            totals = [0.0] * len(requests)
            for (i, _), (log_likelihood, _) in zip(parts, found, strict=True):
                totals[i] += log_likelihood
            return totals

    return OpenedLM
