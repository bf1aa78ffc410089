"""What is measured of a slimmed model besides perplexity on the report text: each answers with figures by name."""

from __future__ import annotations

import io
import json
import logging
import math
from contextlib import redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncompress.gate.agreement import agreement
from ffncompress.passes.losses import mean_and_error
from ffncompress.runtime.progress import silent

BATCH_TOKENS = 2_048  # that lm-eval's questions are read by together
SAMPLES, PROMPT_TOKENS, NEW_TOKENS, SEED = 16, 32, 64, 0
Figures = dict[str, float]


def likeness(base: Any, model: Any, windows: Tensor, batch_tokens: int) -> Figures:
    """KL(base || model) in nats per token with its standard error, and how often both hold the same for likeliest."""
    pairs = [(ids[:1], ids[1:]) for ids in windows.tolist()]
    found = agreement(base, model, pairs, batch_tokens, silent, "")
    assert found is not None
    return {"kl": found.kl, "kl error": found.kl_error or 0.0, "same top": found.same_top}


def accuracies(model: Any, tokenizer: Any, folder: Path, count: int, context: int) -> Figures:
    """LAMBADA and ARC-easy through lm-eval, on the first `count` examples of each, with standard errors."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    def rows(name: str) -> list[dict]:
        with (folder / name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in islice(file, count)]

    cut = [row["text"].rsplit(" ", 1) for row in rows("lambada_test.jsonl")]
    lambada = datasets.Dataset.from_list([{"context": before, "last": after} for before, after in cut])
    arc = datasets.Dataset.from_list(rows("arc_easy.test.jsonl"))
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    tasks = [
        {"task": "lambada", "custom_dataset": lambda **_: {"test": lambada}, "test_split": "test",
         "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{' ' + last}}",
         "metric_list": [accuracy]},
        {"task": "arc_easy", "custom_dataset": lambda **_: {"test": arc}, "test_split": "test",
         "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
         "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [accuracy]},
    ]  # fmt: skip
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()):  # its bars
        loaded = TaskManager(include_defaults=False).load(tasks)
        answer = lm_eval.evaluate(lm=_quick_lm(model, tokenizer, context), task_dict=loaded, bootstrap_iters=0)
    found = {"examples": count}
    for name, texts in (("lambada", lambada), ("arc_easy", arc)):
        share = answer["results"][name]["acc,none"]
        found |= {name: share, f"{name} error": math.sqrt(share * (1 - share) / max(1, len(texts) - 1))}
    return found


def _quick_lm(model: Any, tokenizer: Any, context: int) -> Any:
    """lm-eval's coat around a model, which takes logits of the scored tokens alone: it halves the time."""
    from lm_eval.models.huggingface import HFLM

    class QuickLM(HFLM):
        @torch.inference_mode()
        def _loglikelihood_tokens(self, requests: Any, *_args: Any, **_options: Any) -> list[tuple[float, bool]]:
            rows = [(torch.tensor((given + scored)[-context - 1 :]), len(scored)) for _, given, scored in requests]
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
            answers: dict[int, tuple[float, bool]] = {}
            while order:
                count = max(1, BATCH_TOKENS // len(rows[order[0]][0]))
                some, order = order[:count], order[count:]
                # padded behind: a causal model's earlier tokens do not see it
                batch = torch.nn.utils.rnn.pad_sequence([rows[i][0][:-1] for i in some], batch_first=True)
                states = model.base_model(input_ids=batch, use_cache=False).last_hidden_state
                for i, own in zip(some, states, strict=True):
                    ids, scored = rows[i]
                    logits = model.get_output_embeddings()(own[len(ids) - 1 - scored : len(ids) - 1]).float()
                    found = logits.log_softmax(-1).gather(1, ids[-scored:, None])
                    answers[i] = found.double().sum().item(), bool((logits.argmax(-1) == ids[-scored:]).all())
            return [answers[i] for i in range(len(rows))]

    return QuickLM(pretrained=model, tokenizer=tokenizer, max_length=context, backend="causal")


@torch.inference_mode()
def generated(base: Any, model: Any, windows: Tensor) -> Figures:
    """The base's perplexity of what the model writes after the beginnings of some windows, as likely as it holds it."""
    prompts = windows[:SAMPLES, :PROMPT_TOKENS]
    chance = torch.Generator().manual_seed(SEED)
    written, step, cache = prompts, prompts, None
    for _ in range(NEW_TOKENS):
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        step = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=chance)
        written = torch.cat([written, step], 1)
    losses = []
    for ids in written:  # one at a time: logits of all would be large
        logits = base(input_ids=ids[None], use_cache=False).logits[0, PROMPT_TOKENS - 1 : -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[PROMPT_TOKENS:]).double())
    mean, error = mean_and_error(torch.stack(losses))
    return {"generated": math.exp(mean), "generated error": math.exp(mean) * error}
