"""A slimmed model in other runtimes: size on disk, perplexity on the same tokens, speed beside the original's.

    python benchmarks/exports.py MODEL SLIMMED TEXT --results FILE [--tokens 4096] [--context 512] [--out FOLDER]

MODEL and SLIMMED are checkpoint folders of the same base. Each is run by transformers (float32), exported to GGUF (f16
and q8_0) for llama.cpp (xllamacpp), and exported to ONNX for ONNX Runtime; one thread each. Perplexity is
over the same windows and the same tokens everywhere: llama.cpp's server tells nothing of a token that is only part of
a character, so such tokens are left out for all. Speeds are of a prompt of CONTEXT/2 tokens and of what follows it, the
best of three; what counts is their ratio, slimmed to original, in one run. FILE keeps each finished row: a killed run
goes on from it.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ffncompress
from ffncompress.exporting import llama_cpp
from ffncompress.exporting.onnx_folder import OnnxModel

WRITTEN = 32  # tokens that follow the prompt
REPEATS = 3
RUNTIMES = ("transformers f32", "llama.cpp f16", "llama.cpp q8_0", "onnxruntime f32")


def best(measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """(prompt, following) tokens/s, each the best of a few."""
    found = [measure() for _ in range(REPEATS)]
    return max(one for one, _ in found), max(other for _, other in found)


def timed(read: Callable[[], object], write: Callable[[], object], prompt: int) -> tuple[float, float]:
    start = time.perf_counter()
    read()
    middle = time.perf_counter()
    write()
    return prompt / (middle - start), WRITTEN / (time.perf_counter() - middle)


@torch.inference_mode()
def in_transformers(folder: str, windows: torch.Tensor) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told = [_told(model(input_ids=window[None], use_cache=False).logits, window) for window in windows]
    prompt = windows[:1, : windows.shape[1] // 2]

    def speeds() -> tuple[float, float]:
        state: dict = {}

        def read() -> None:
            state["out"] = model(input_ids=prompt, use_cache=True)

        def write() -> None:
            for _ in range(WRITTEN):
                following = state["out"].logits[:, -1:].argmax(-1)
                state["out"] = model(input_ids=following, past_key_values=state["out"].past_key_values, use_cache=True)

        return timed(read, write, prompt.shape[1])

    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return {"bytes": size, "told": told, "speeds": best(speeds)}


def in_llama_cpp(folder: str, windows: torch.Tensor, dtype: str, out: Path) -> dict:
    file = out / f"{dtype}.gguf"
    made = ffncompress.export(folder, file, to="gguf", dtype=dtype, overwrite=True)
    print(made.summary, flush=True)
    context = windows.shape[1] + 8
    told = llama_cpp.ask(file, sequences=windows.tolist(), top=1, context=context, exact=False).log_probabilities
    prompt = windows[0, : windows.shape[1] // 2].tolist()
    generated = llama_cpp.ask(file, generate=[(prompt, WRITTEN)] * REPEATS, context=context, exact=False).generated
    speeds = [(each["timings"]["prompt_per_second"], each["timings"]["predicted_per_second"]) for each in generated]
    taken = iter(speeds)
    return {
        "bytes": made.bytes,
        "told": [[position[0][1] if position else None for position in window] for window in told],
        "speeds": best(lambda: next(taken)),
        "verified": made.verified.max_difference,
    }


def in_onnx(folder: str, windows: torch.Tensor, out: Path) -> dict:
    made = ffncompress.export(folder, out / "onnx", to="onnx", overwrite=True)
    print(made.summary, flush=True)
    config = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).config
    model = OnnxModel(out / "onnx", config, threads=1)
    told = [_told(model(window[None], model.empty_cache())[0], window) for window in windows]
    prompt = windows[:1, : windows.shape[1] // 2]

    def speeds() -> tuple[float, float]:
        state: dict = {}

        def read() -> None:
            state["out"] = model(prompt, model.empty_cache())

        def write() -> None:
            for _ in range(WRITTEN):
                logits, cache = state["out"]
                state["out"] = model(logits[:, -1:].argmax(-1), cache)

        return timed(read, write, prompt.shape[1])

    return {"bytes": made.bytes, "told": told, "speeds": best(speeds), "verified": made.verified.max_difference}


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
        for before, after in zip(one["speeds"], other["speeds"], strict=True):
            cells.append(f"{before:.1f} to {after:.1f} ({after / before:.2f}x)")
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
        runs: dict[str, Callable[[str], dict]] = {
            "transformers f32": lambda folder: in_transformers(folder, windows),
            "llama.cpp f16": lambda folder: in_llama_cpp(folder, windows, "f16", out),
            "llama.cpp q8_0": lambda folder: in_llama_cpp(folder, windows, "q8_0", out),
            "onnxruntime f32": lambda folder: in_onnx(folder, windows, out),
        }
        for runtime in RUNTIMES:
            for name, folder in (("original", options.model), ("slimmed", options.slimmed)):
                key = f"{name}, {runtime}"
                if key not in results:
                    start = time.perf_counter()
                    results[key] = runs[runtime](folder)
                    options.results.write_text(json.dumps(results))
                    print(f"{key}: {time.perf_counter() - start:.0f} s, speeds {results[key]['speeds']}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
