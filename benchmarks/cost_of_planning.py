"""What scoring costs: time as a ratio to a bare forward pass, and peak memory at 8x the tokens as a ratio.

    python benchmarks/cost_of_planning.py MODEL TEXT [--tokens 4096] [--repeats 3]

The bare pass is the model's own forward over the same windows in the same batches. Both are timed in turn, in one
process, after a warm-up. Memory is the peak resident size of a fresh process each, that loads the model and scores.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

from ffncompress.models import find_blocks, find_model, load_model, load_tokenizer
from ffncompress.passes.activations import own_batches
from ffncompress.passes.calibration import collect_moments
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import read
from ffncompress.text.windows import joined_windows


def prepare(options: argparse.Namespace, tokens: int):
    source = find_model(options.model)
    model = load_model(source, dtype="float32")
    ids = joined_windows(read(options.text), load_tokenizer(source), length=128, count=tokens // 128)
    if ids.numel() < tokens - 128:
        sys.exit(f"{options.text} gives only {ids.numel()} tokens, {tokens} are needed")
    return model, find_blocks(model), ids, Run(Workers("cpu"))


def score(model, blocks, ids, run) -> None:
    held_out = len(ids) // 4
    collect_moments(model, blocks, ids[held_out:], ids[:held_out], run)


@torch.inference_mode()
def bare(model, ids, run) -> None:
    for _, batch in own_batches(ids, run.workers):
        model(input_ids=batch, use_cache=False)


def timed(work, *arguments) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        score(*prepare(options, options.memory_of))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    model, blocks, ids, run = prepare(options, options.tokens)
    bare(model, ids[:8], run)
    score(model, blocks, ids[:8], run)
    pairs = [(timed(bare, model, ids, run), timed(score, model, blocks, ids, run)) for _ in range(options.repeats)]
    ratios = [scored / plain for plain, scored in pairs]
    print(
        f"tokens {ids.numel()}, bare forward {[round(p, 2) for p, _ in pairs]} s, "
        f"scoring {[round(s, 2) for _, s in pairs]} s"
    )
    print(f"time ratio: median {statistics.median(ratios):.3f}, all {[round(r, 3) for r in ratios]}")
    peaks = {}
    for factor in (1, 8):
        command = [sys.executable, __file__, options.model, options.text, "--memory-of", str(factor * options.tokens)]
        peaks[factor] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    print(
        f"peak memory: {peaks[1] / 1024:.0f} MB, at 8x the tokens {peaks[8] / 1024:.0f} MB, "
        f"ratio {peaks[8] / peaks[1]:.3f}"
    )


if __name__ == "__main__":
    main()
