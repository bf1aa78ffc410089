"""What it costs to keep Gram matrices of runs of neurons, and not of all of them: perplexity of one plan each.

    python benchmarks/wide.py MODEL FIT CHOOSE REPORT [--runs 1 --runs 2] [--share 0.15] [--tokens 8192] [--context 256]
    python benchmarks/wide.py --synthetic 28672 [--width 512] [--gigabytes 4]

A share of the model's parameters goes, by kept neurons alone; one run is the full way. "As surveyed" has the output
matrices of the survey, which leave out what neurons of different runs have in common, and "refitted" those of the refit
in order, which is exact up to where its steps end. The second form needs no model: one random FFN so wide, its rows
streamed, fitted at half its width within so many gigabytes of moments, and its peak memory.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ffncompress.models import (
    Block,
    count_parameters,
    ffn_of,
    find_blocks,
    find_model,
    installed,
    load_model,
    load_tokenizer,
)
from ffncompress.passes.calibration import collect_moments, group_by_memory
from ffncompress.passes.forecast import loss_metrics, predict_losses
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.refit import refit
from ffncompress.planning.search import SearchSpace
from ffncompress.records.plan import Option, Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import fit_some
from ffncompress.replacement.moments import moment_bytes, runs_within
from ffncompress.runtime.products import fast_products
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import read
from ffncompress.text.windows import Windows, joined_windows

MOMENT_BYTES = 8 * 2**30
STEPS = 16
GRADIENT_TOKENS = 4096


def limit_for(block: Block, runs: int) -> int:
    """A limit under which a block's neurons are divided into so many runs."""
    if runs == 1:
        return MOMENT_BYTES
    grams, of_x = 16 * block.d_inner**2 // runs + 1, 32 * block.d_in * (block.d_in + block.d_out)
    return grams + min(grams, of_x)


def plan(model: nn.Module, blocks: list[Block], fit: Windows, held: Windows, run: Run, share: float) -> Iterator[dict]:
    """The replacements of one plan as surveyed, and then refitted."""
    metrics = loss_metrics(model, blocks, fit.up_to(GRADIENT_TOKENS), run)
    fits = []
    for group in group_by_memory(blocks, MOMENT_BYTES):  # what is forced is the runs, not a pass for each block
        for block, own in zip(group, collect_moments(model, group, fit, held, run), strict=True):
            names = [f"neurons {block.d_inner * i // STEPS}" for i in range(1, STEPS)]
            moments = replace(own, metric=metrics[block.index])
            fits.append(fit_some(block, moments, ffn_of(model, block), names))
    losses = predict_losses(model, blocks, fits, held.up_to(GRADIENT_TOKENS), run)
    menus = [
        [
            Option(
                kind="neurons", width=(width := int(name.split()[1])), rank=0, weighting="stream",
                parameters=width * block.weights_per_neuron, predicted_loss=value.item(),
            )
            for name, value in own.items()
        ]
        for block, own in zip(blocks, losses, strict=True)
    ]  # fmt: skip
    space = SearchSpace(blocks, menus, [1.0] * len(blocks))
    choice = space.choose(parameters=space.full - share * count_parameters(model))
    shapes = {i: Shape("neurons", option.width) for i, option in enumerate(choice) if option is not None}
    yield {
        i: build_replacement(blocks[i], ffn_of(model, blocks[i]), shape, fits[i][f"neurons {shape.width}"])
        for i, shape in shapes.items()
    }
    yield refit(model, blocks, shapes, fit, held, run, metrics=metrics)


def compare(options: argparse.Namespace) -> None:
    """The table."""
    source = find_model(options.texts[0])
    model, tokenizer = load_model(source, dtype="float32").requires_grad_(False), load_tokenizer(source)
    blocks = find_blocks(model)

    def windows(file: str, tokens: int, seed: int | None = 0) -> Windows:
        count = tokens // options.context
        return joined_windows(read(file), tokenizer, length=options.context, count=count, seed=seed)

    fit, held, report = (
        windows(file, tokens, seed)
        for file, tokens, seed in zip(options.texts[1:], (options.tokens, 4096, 8192), (0, 0, None), strict=True)
    )
    print(f"the original: {perplexity(sequence_losses(model, report, Run(Workers('cpu')))):.2f}")
    print("| neurons in a run | as surveyed | refitted | seconds |\n| --- | --- | --- | --- |", flush=True)
    for runs in options.runs or [1, 2, 4, 8]:
        run = Run(Workers("cpu"), moment_bytes=limit_for(blocks[0], runs))
        assert runs_within(blocks[0], run.moment_bytes) == runs
        found, start = [], time.perf_counter()
        for modules in plan(model, blocks, fit, held, run, options.share):
            with installed(model, {blocks[i].path: module for i, module in modules.items()}):
                found.append(perplexity(sequence_losses(model, report, run)))
        seconds = time.perf_counter() - start
        print(f"| {blocks[0].d_inner // runs} | {found[0]:.2f} | {found[1]:.2f} | {seconds:.0f} |", flush=True)


def reach(inner: int, width: int, limit: int) -> None:
    """One random FFN through moments, order, fit and refit, and what memory that took."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    (block,) = find_blocks(model)
    runs = runs_within(block, limit)
    full, own = (moment_bytes(block, n) / 1e9 for n in (1, runs))
    print(f"{inner} neurons in {runs} runs: moments of {own:.1f} GB; with one Gram matrix {full:.1f} GB")
    fit, held = (torch.randint(0, 512, (count, 256)) for count in (8, 4))
    run, start = Run(Workers("cpu"), moment_bytes=limit), time.perf_counter()
    said("the model alone", start)
    moments = collect_moments(model, [block], fit, held, run)[0]
    said("moments", start)
    fits = fit_some(block, moments, ffn_of(model, block), [name := f"neurons {inner // 2}"])
    said(f"order and fits: {len(fits[name].kept)} neurons kept", start)
    del moments, fits
    refit(model, [block], {0: Shape("neurons", inner // 2)}, fit, held, run)
    said("refit", start)


def said(what: str, start: float) -> None:
    """How far it is, and the most memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{what}: peak {peak:.1f} GB after {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="MODEL FIT CHOOSE REPORT")
    parser.add_argument("--runs", type=int, action="append")
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--synthetic", type=int)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--gigabytes", type=float, default=4)
    options = parser.parse_args()
    with fast_products(torch.device("cpu")):
        if options.synthetic:
            reach(options.synthetic, options.width, int(options.gigabytes * 1e9))
        else:
            compare(options)


if __name__ == "__main__":
    main()
