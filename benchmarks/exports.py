"""A slimmed model in other runtimes: size on disk, perplexity on the same tokens, speed beside the original's.

    python benchmarks/exports.py MODEL SLIMMED TEXT --results FILE [--tokens 4096] [--context 512] [--out FOLDER]

MODEL and SLIMMED are checkpoint folders of the same base. Each is run by transformers (float32), exported to GGUF (f16
and q8_0) for llama.cpp (xllamacpp), and exported to ONNX for ONNX Runtime; one thread each. Perplexity is
over the same windows and the same tokens everywhere: llama.cpp's server tells nothing of a token that is only part of
a character, so such tokens are left out for all. Speeds are of a prompt of CONTEXT/2 tokens and of what follows it,
original and slimmed in turn, five times; what counts is the ratio of each turn: its median, least and greatest. FILE
keeps each finished runtime: a killed run goes on from it.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ffncompress
from ffncompress.exporting import llama_cpp
from ffncompress.exporting.onnx_folder import OnnxModel

WRITTEN = 32  # tokens that follow the prompt
ROUNDS = 5  # original and slimmed in turn: the machine's speed changes within a run
MODELS = {"original": "model", "slimmed": "slimmed"}
RUNTIMES = ("transformers f32", "llama.cpp f16", "llama.cpp q8_0", "onnxruntime f32")
Speeds = tuple[float, float]  # tokens/s of the prompt, and of what follows it


@dataclass(frozen=True)
class Opened:
    """A model in a runtime: its size, the log-probability of every token of the text, and how to take its speed."""

    bytes: int
    told: list[list[float | None]]
    speeds: Callable[[], Speeds]


def timed(
    step: Callable[[torch.Tensor, object], tuple[torch.Tensor, object]], cache: object, prompt: torch.Tensor
) -> Speeds:
    """Read a prompt, then write on; a step takes ids and a cache, and gives logits and the next cache."""
    start = time.perf_counter()
    logits, cache = step(prompt, cache)
    middle = time.perf_counter()
    for _ in range(WRITTEN):
        logits, cache = step(logits[:, -1:].argmax(-1), cache)
    return prompt.shape[1] / (middle - start), WRITTEN / (time.perf_counter() - middle)


def in_transformers(folder: str, windows: torch.Tensor) -> Opened:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def step(ids: torch.Tensor, cache: object) -> tuple[torch.Tensor, object]:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values

    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    told = [_told(step(window[None], None)[0], window) for window in windows]
    return Opened(size, told, lambda: timed(step, None, prompt_of(windows)))


def in_llama_cpp(folder: str, windows: torch.Tensor, dtype: str, out: Path) -> Opened:
    file = out / f"{Path(folder).name}-{dtype}.gguf"
    made = ffncompress.export(folder, file, to="gguf", dtype=dtype, overwrite=True)
    print(made.summary, flush=True)
    context = windows.shape[1] + 8
    told = llama_cpp.ask(file, sequences=windows.tolist(), top=1, context=context, exact=False).log_probabilities
    prompt = prompt_of(windows)[0].tolist()

    def speeds() -> Speeds:
        answer = llama_cpp.ask(file, generate=[(prompt, WRITTEN)], context=context, exact=False).generated[0]
        return answer["timings"]["prompt_per_second"], answer["timings"]["predicted_per_second"]

    return Opened(made.bytes, [[place[0][1] if place else None for place in window] for window in told], speeds)


def in_onnx(folder: str, windows: torch.Tensor, out: Path) -> Opened:
    made = ffncompress.export(folder, out / f"{Path(folder).name}-onnx", to="onnx", overwrite=True)
    print(made.summary, flush=True)
    model = OnnxModel(out / f"{Path(folder).name}-onnx", AutoConfig.from_pretrained(folder), threads=1)
    told = [_told(model(window[None], model.empty_cache())[0], window) for window in windows]
    return Opened(made.bytes, told, lambda: timed(model, model.empty_cache(), prompt_of(windows)))


def prompt_of(windows: torch.Tensor) -> torch.Tensor:
    return windows[:1, : windows.shape[1] // 2]


def _told(logits: torch.Tensor, window: torch.Tensor) -> list[float]:
    found = logits[0, :-1].float().log_softmax(-1).gather(1, window[1:, None])[:, 0]
    return [float(value) for value in found]


def table(results: dict) -> str:
    """Original and slimmed side by side, over tokens that every runtime told."""
    rows = ["| runtime | MB | perplexity | prompt tokens/s | following tokens/s |", "| --- | --- | --- | --- | --- |"]
    everywhere = [[*zip(*windows, strict=True)] for windows in zip(*(r["told"] for r in results.values()), strict=True)]
    kept = [[all(value is not None for value in position) for position in window] for window in everywhere]

    def perplexity(result: dict) -> float:
        values = [
            v for window, good in zip(result["told"], kept, strict=True) for v, g in zip(window, good, strict=True) if g
        ]
        return math.exp(-sum(values) / len(values))

    for runtime in RUNTIMES:
        one, other = results.get(f"original, {runtime}"), results.get(f"slimmed, {runtime}")
        if one is None or other is None:
            continue
        cells = [f"{one['bytes'] / 1e6:.1f} to {other['bytes'] / 1e6:.1f} ({other['bytes'] / one['bytes']:.2f}x)"]
        cells.append(f"{perplexity(one):.2f} to {perplexity(other):.2f}")
        for before, after in zip(zip(*one["speeds"], strict=True), zip(*other["speeds"], strict=True), strict=True):
            ratios = sorted(y / x for x, y in zip(before, after, strict=True))
            cells.append(
                f"{median(before):.1f} to {median(after):.1f} "
                f"({median(ratios):.2f}x; {ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
        rows.append(f"| {runtime} | {' | '.join(cells)} |")
    count = sum(sum(window) for window in kept)
    return "\n".join([*rows, f"\n{count:,} tokens are scored in every row."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("slimmed")
    parser.add_argument("text", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text(encoding="utf-8")[: 20 * options.tokens]
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: options.tokens]
    windows = torch.tensor(ids).view(-1, options.context)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        runs: dict[str, Callable[[str], Opened]] = {
            "transformers f32": lambda folder: in_transformers(folder, windows),
            "llama.cpp f16": lambda folder: in_llama_cpp(folder, windows, "f16", out),
            "llama.cpp q8_0": lambda folder: in_llama_cpp(folder, windows, "q8_0", out),
            "onnxruntime f32": lambda folder: in_onnx(folder, windows, out),
        }
        for runtime in RUNTIMES:
            if f"slimmed, {runtime}" in results:
                continue
            opened = {name: runs[runtime](getattr(options, folder)) for name, folder in MODELS.items()}
            speeds: dict[str, list[Speeds]] = {name: [] for name in opened}
            for _ in range(ROUNDS):
                for name, model in opened.items():
                    speeds[name].append(model.speeds())
            for name, model in opened.items():
                results[f"{name}, {runtime}"] = {"bytes": model.bytes, "told": model.told, "speeds": speeds[name]}
            options.results.write_text(json.dumps(results))
            print(f"{runtime}: {speeds}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
