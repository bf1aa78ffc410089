"""The gate: lm-eval's rolling perplexity of the base and the slimmed model in one run, a limit, and a verdict.

Text is cut into pieces of at most one context, so that every window begins with the model's opening token, as the
model was trained to see a text begin. Token perplexity is per token of this tokenizer (as papers give it); word and
byte perplexity are lm-eval's, and can be compared between tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ffncompress import __version__, texts
from ffncompress.artifact import GATE_FILE, META, base_source, load, read_origin, read_plan
from ffncompress.errors import ArtifactError, FfncompressError, TextError
from ffncompress.models import ModelSource, count_parameters, find_blocks, find_model, load_model, load_tokenizer
from ffncompress.plans import Plan
from ffncompress.settings import EvalSettings, Limit
from ffncompress.staging import write_file
from ffncompress.workers import Track, Workers, silent

STOCK_TASK = "wikitext"
DEFAULT_CONTEXT = 512
NEW_TOKENS = 24


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Perplexities(_Record):
    """One model on one text."""

    token: float | None
    word: float
    byte: float


class TextResult(_Record):
    """Both models on one text."""

    text: str
    part: str
    sha256: str
    tokens: int | None
    context: int
    base: Perplexities
    slimmed: Perplexities

    @property
    def headline(self) -> tuple[float, float]:
        """(base, slimmed) that the verdict is on: token perplexity, or word perplexity of a stock task."""
        if self.base.token is not None and self.slimmed.token is not None:
            return self.base.token, self.slimmed.token
        return self.base.word, self.slimmed.word

    @property
    def delta(self) -> float:
        base, slimmed = self.headline
        return slimmed - base

    @property
    def relative(self) -> float:
        return self.delta / self.headline[0]


class Sizes(_Record):
    """Parameters before and after, and weight bytes on disk."""

    replaced_ffns: tuple[int, int]
    all_ffns: tuple[int, int]
    whole_model: tuple[int, int]
    bytes_on_disk: tuple[int, int]


class Speed(_Record):
    """Measured tokens per second, base and slimmed interleaved; medians over the repeats."""

    base: float
    slimmed: float
    ratio: float
    batch: tuple[int, int]
    repeats: int
    device: str


class GateResult(_Record):
    """Everything that `ffncompress eval` reports."""

    ffncompress_version: str
    base_model: str
    weights_sha256: str
    dtype: str
    limit: str
    passed: bool
    main: TextResult
    also: list[TextResult]
    sizes: Sizes
    speed: Speed
    prompt: str
    continuation_base: str
    continuation_slimmed: str


def run_gate(
    directory: str | Path,
    settings: EvalSettings | None = None,
    *,
    model_name: str | None = None,
    track: Track = silent,
) -> GateResult:
    """Evaluate an emitted checkpoint beside its base, and record the result in the folder.

    Raises:
        FfncompressError: the checkpoint, its base or a text is missing, or lm-eval is not installed.
    """
    settings = settings or EvalSettings()
    if find_spec("lm_eval") is None:
        raise FfncompressError("evaluating needs lm-eval; install it with: pip install 'ffncompress[eval]'")
    directory = Path(directory)
    origin, plan = read_origin(directory), read_plan(directory)
    base_at, slim_at = base_source(plan, model_name), find_model(str(directory))
    workers = Workers(settings.device)
    dtype = "float32" if settings.dtype == "auto" and workers.device.type == "cpu" else settings.dtype
    tokenizer = load_tokenizer(slim_at)
    slimmed = load(directory, dtype=dtype, device_map={"": workers.device})
    context = _context(slimmed, settings)
    inputs = [_gate_text(plan, settings.data), *(_gate_text(plan, name) for name in settings.also)]
    base = load_model(base_at, dtype=dtype, device_map={"": workers.device})

    results = []
    for text in inputs:
        pieces = cut_pieces(text, tokenizer, context, settings.tokens) if text else None
        key = _cache_key(plan, text, pieces, context, dtype, settings)
        name = text.source if text else STOCK_TASK
        before = _cached(key)
        if before is None:
            before = _lm_eval(base, tokenizer, pieces, context, settings, track, f"lm-eval: base on {name}")
            _remember(key, before)
        after = _lm_eval(slimmed, tokenizer, pieces, context, settings, track, f"lm-eval: slimmed on {name}")
        results.append(_text_result(text, pieces, tokenizer, context, before, after))

    limit = Limit.parse(settings.max_delta)
    prompt = settings.prompt or _prompt(inputs[0], tokenizer)
    main = results[0]
    result = GateResult(
        ffncompress_version=__version__,
        base_model=plan.base.name,
        weights_sha256=slim_at.fingerprint(),
        dtype=dtype,
        limit=str(limit),
        passed=limit.allows(*main.headline),
        main=main,
        also=results[1:],
        sizes=_sizes(plan, origin, slimmed, slim_at),
        speed=_measure_speed(base, slimmed, context, settings, track),
        prompt=prompt,
        continuation_base=_continue(base, tokenizer, prompt),
        continuation_slimmed=_continue(slimmed, tokenizer, prompt),
    )
    write_file(directory / META / GATE_FILE, result.model_dump_json(indent=1) + "\n")
    return result


def _context(model: Any, settings: EvalSettings) -> int:
    longest = getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    if settings.context and settings.context > longest:
        raise TextError(f"a context of {settings.context} is more than the model's {longest}; lower --context")
    return settings.context or min(DEFAULT_CONTEXT, longest)


def _gate_text(plan: Plan, name: str | None) -> texts.Text | None:
    """The text to report on, free of what the plan was fitted or chosen on; None for lm-eval's stock task.

    Texts are known by their content, so a copy under another name is recognised too.
    """
    used = [ref.sha256 for ref in (*plan.fit_text, *plan.choose_text)]
    if name is None:
        name = (plan.settings.choose_data or [plan.fit_text[0].source])[0]
    if name == STOCK_TASK:
        return None
    text = texts.read(name)
    for shares in (texts.SHARES, texts.HALVES):
        try:
            parts = texts.read_parts(name, shares)
        except TextError:
            continue  # too short to have been divided
        if any(part.fingerprint().sha256 in used for part in parts.values()):
            return parts[texts.REPORT]
    if text.fingerprint().sha256 in used:
        raise TextError(f"{name}: the plan was fitted on this text; report on another with --data")
    return text


def cut_pieces(text: texts.Text, tokenizer: Any, context: int, tokens: int) -> list[str]:
    """The text's first `tokens` tokens in pieces of at most `context` tokens, cut at white space where there is any."""
    pieces: list[str] = []
    left = tokens
    rest = "\n\n".join(text.documents)
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


def _lm_eval(
    model: Any, tokenizer: Any, pieces: list[str] | None, context: int, settings: EvalSettings, track: Track, label: str
) -> dict[str, Any]:
    """Run lm-eval in process on a model object."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # ours is the progress bar
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # logits_cache scores a repetitive document wrongly at batch sizes above 1
    lm = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size, max_length=context,
        logits_cache=False, add_bos_token=False, backend="causal",
    )  # fmt: skip
    task: Any = STOCK_TASK
    total = 1
    if pieces is not None:
        task = _local_task(datasets.Dataset.from_dict({"page": pieces}))
        total = math.ceil(len(pieces) / settings.batch_size)
    steps = iter(track(range(total), label))
    handle = model.register_forward_hook(lambda *_: next(steps, None) and None)
    next(steps, None)
    try:
        answer = lm_eval.simple_evaluate(
            model=lm, tasks=[task], task_manager=TaskManager(include_defaults=pieces is None),
            bootstrap_iters=0, log_samples=True, verbosity="ERROR",
        )  # fmt: skip
    except (ConnectionError, OSError, ValueError) as error:
        if pieces is None:
            raise TextError(
                "lm-eval's wikitext task needs the Hub, which does not answer; "
                f"evaluate offline with --data FILE or --data {texts.PYTHON_DOCS}"
            ) from error
        raise
    finally:
        handle.remove()
        for _ in steps:
            pass
    name = next(iter(answer["results"]))
    scores = answer["results"][name]
    return {
        "log_likelihood": sum(sample["filtered_resps"][0] for sample in answer["samples"][name]),
        "word": scores["word_perplexity,none"],
        "byte": scores["byte_perplexity,none"],
    }


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


def _text_result(
    text: texts.Text | None, pieces: list[str] | None, tokenizer: Any, context: int, before: Any, after: Any
) -> TextResult:
    tokens = None
    if pieces is not None:
        tokens = sum(len(tokenizer(p, add_special_tokens=False, verbose=False)["input_ids"]) for p in pieces)

    def perplexities(answer: dict[str, Any]) -> Perplexities:
        token = math.exp(min(-answer["log_likelihood"] / tokens, 700)) if tokens else None
        return Perplexities(token=token, word=answer["word"], byte=answer["byte"])

    return TextResult(
        text=text.source if text else f"lm-eval {STOCK_TASK}",
        part=text.part if text else "test",
        sha256=_digest(pieces) if pieces else "",
        tokens=tokens,
        context=context,
        base=perplexities(before),
        slimmed=perplexities(after),
    )


def _digest(pieces: list[str]) -> str:
    return hashlib.sha256("\0".join(pieces).encode()).hexdigest()


def _cache_key(
    plan: Plan, text: texts.Text | None, pieces: list[str] | None, context: int, dtype: str, settings: EvalSettings
) -> str:
    import importlib.metadata

    facts = [
        plan.base.fingerprint, _digest(pieces) if pieces else STOCK_TASK, context, dtype, settings.batch_size,
        importlib.metadata.version("lm_eval"), importlib.metadata.version("transformers"), torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _cache_file(key: str) -> Path:
    home = os.environ.get("FFNCOMPRESS_CACHE") or Path.home() / ".cache" / "ffncompress"
    return Path(home) / "base" / f"{key}.json"


def _cached(key: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(_cache_file(key).read_text(encoding="utf-8"))
        return answer
    except (OSError, ValueError):
        return None


def _remember(key: str, answer: dict[str, Any]) -> None:
    """A cache that cannot be written is no reason to fail."""
    try:
        _cache_file(key).parent.mkdir(parents=True, exist_ok=True)
        write_file(_cache_file(key), json.dumps(answer))
    except (OSError, ArtifactError):
        pass


def _sizes(plan: Plan, origin: dict[str, Any], slimmed: Any, source: ModelSource) -> Sizes:
    before = sum(b.parameters for b in plan.replaced)
    after = sum(b.swap.parameters for b in plan.replaced)
    ffns = plan.base.ffn_parameters
    return Sizes(
        replaced_ffns=(before, after),
        all_ffns=(ffns, ffns - before + after),
        whole_model=(plan.base.parameters, count_parameters(slimmed)),
        bytes_on_disk=(origin["base_bytes"], source.bytes_on_disk()),
    )


@torch.inference_mode()
def _measure_speed(base: Any, slimmed: Any, context: int, settings: EvalSettings, track: Track) -> Speed:
    """Forward passes over the same batch, interleaved so that a noisy machine hits both alike."""
    ids = torch.randint(0, base.config.vocab_size, (settings.batch_size, context), generator=torch.manual_seed(0))
    ids = ids.to(base.device)
    times: dict[int, list[float]] = {id(base): [], id(slimmed): []}
    for round_ in track(range(settings.repeats + 1), "measuring speed"):
        for model in (base, slimmed):
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            if ids.is_cuda:
                torch.cuda.synchronize()
            if round_:  # the first round warms up
                times[id(model)].append(time.perf_counter() - start)
    slow, fast = times[id(base)], times[id(slimmed)]
    return Speed(
        base=ids.numel() / statistics.median(slow),
        slimmed=ids.numel() / statistics.median(fast),
        ratio=statistics.median(b / s for b, s in zip(slow, fast, strict=True)),
        batch=(settings.batch_size, context),
        repeats=settings.repeats,
        device=str(ids.device.type),
    )


def _prompt(text: texts.Text | None, tokenizer: Any) -> str:
    if text is None:
        return "The history of the city began"
    start = text.documents[0].strip()[:400]
    ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"][:16]
    return str(tokenizer.decode(ids))


@torch.inference_mode()
def _continue(model: Any, tokenizer: Any, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
