"""What each choice is worth: fits, neuron order, allocation and refitting, on held-out perplexity, by fit tokens.

    python benchmarks/ablations.py MODEL FIT CHOOSE REPORT [--share 0.25] [--tokens 8192 --tokens 16384] [--context 512]

A quarter of the FFNs' parameters goes, by kept neurons. Each row changes one thing; choices were made by the choose
column, the report column shows that they hold. All rows share the same fit tokens.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from ffncompress import recovery, texts
from ffncompress.calibration import BlockMoments, collect_moments
from ffncompress.forecast import gradients, predict_losses
from ffncompress.models import Block, find_blocks, find_model, installed, load_model, load_tokenizer, oriented
from ffncompress.modules import Shape
from ffncompress.plans import Option
from ffncompress.refit import refit
from ffncompress.scoring import fit_one, removal_order, replacement
from ffncompress.selection import Market
from ffncompress.swaps import perplexity, sequence_losses
from ffncompress.workers import Workers

STEPS = 16
FORECAST_TOKENS = 4096


def allocation(
    blocks: list[Block], losses: list[dict[str, torch.Tensor]], share: float, power: float
) -> dict[int, int]:
    """Widths that minimise the sum of predicted losses raised to a power; power 0 is the same width everywhere."""
    if not power:
        return {block.index: round((1 - share) * block.d_inner) for block in blocks}
    menus = [
        [
            Option(
                kind="neurons", width=int(name.split()[1]), rank=0, weighting="stream",
                parameters=int(name.split()[1]) * block.weights_per_neuron, predicted_loss=value.item() ** power,
            )
            for name, value in own.items()
        ]
        for block, own in zip(blocks, losses, strict=True)
    ]  # fmt: skip
    market = Market(blocks, menus, [1.0] * len(blocks))
    choice = market.choose(parameters=(1 - share) * market.full)
    return {i: option.width for i, option in enumerate(choice) if option is not None}


def metric_order(block: Block, moments: BlockMoments, ffn: torch.nn.Module, metric: torch.Tensor) -> torch.Tensor:
    """The order of removal when errors are measured by the gradient's covariance."""
    inner = moments.fit_inner.of_inputs(slice(block.d_inner))
    values, vectors = torch.linalg.eigh(metric)
    root = vectors * values.clamp_min(0).sqrt()
    weight = oriented(ffn.get_submodule(block.layout.out)).T.double() @ root
    return recovery.removal_order(inner.xx / inner.weight, weight)


def gradient_metrics(model: torch.nn.Module, blocks: list[Block], windows: torch.Tensor) -> list[torch.Tensor]:
    """E[|s|^2 g g'] of each block: what an error relative to the stream costs, by direction."""
    metrics = [torch.zeros(b.d_out, b.d_out, dtype=torch.float64) for b in blocks]
    for at, ids in enumerate(windows.split(2)):
        for total, (rows, g) in zip(metrics, gradients(model, blocks, ids, [2 * at, 2 * at + 1]), strict=True):
            scaled = (g * rows.stream.norm(dim=1, keepdim=True)).double()
            total += scaled.T @ scaled
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "fit", "choose", "report"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    source = find_model(str(options.model))
    model, tokenizer = load_model(source).requires_grad_(False), load_tokenizer(source)
    blocks = find_blocks(model)

    def windows(file: Path, tokens: int, seed: int | None = 0) -> torch.Tensor:
        count = tokens // options.context
        return texts.windows(texts.read(str(file)), tokenizer, length=options.context, count=count, seed=seed)

    choose, report = windows(options.choose, 16_384), windows(options.report, 8_192, None)
    held, shown = choose[: len(choose) // 2], choose[len(choose) // 2 :]
    some = held[: FORECAST_TOKENS // options.context]
    print(f"the original: choose {measure(model, shown):.2f}, report {measure(model, report):.2f}")
    metrics = gradient_metrics(model, blocks, some)
    for tokens in options.tokens or [8192, 16_384]:
        print(f"\n| {tokens:,} fit tokens | choose | report |\n| --- | --- | --- |")
        for name, modules in variants(model, blocks, windows(options.fit, tokens), held, some, metrics, options.share):
            with installed(model, {blocks[i].path: module for i, module in modules.items()}):
                print(f"| {name} | {measure(model, shown):.2f} | {measure(model, report):.2f} |", flush=True)


def variants(
    model: torch.nn.Module,
    blocks: list[Block],
    fit: torch.Tensor,
    held: torch.Tensor,
    some: torch.Tensor,
    metrics: list[torch.Tensor],
    share: float,
) -> Iterator[tuple[str, dict[int, torch.nn.Module]]]:
    """Each row of the table: its name and its stand-ins."""
    workers = Workers("cpu")
    ffns = [model.get_submodule(block.path) for block in blocks]
    moments = collect_moments(model, blocks, fit, held, workers)
    orders = [removal_order(*each) for each in zip(blocks, moments, ffns, strict=True)]
    names = [[f"neurons {b.d_inner * i // STEPS}" for i in range(1, STEPS)] for b in blocks]
    fits = [
        {name: fit_one(b, m, f, name, order) for name in own}
        for b, m, f, order, own in zip(blocks, moments, ffns, orders, names, strict=True)
    ]
    losses = predict_losses(model, blocks, fits, some, workers)
    uniform, best, spread = (allocation(blocks, losses, share, power) for power in (0.0, 1.0, 1.5))

    def built(widths: dict[int, int], by: list[torch.Tensor], which: list[BlockMoments]) -> dict[int, torch.nn.Module]:
        made = {}
        for i, width in widths.items():
            own = fit_one(blocks[i], which[i], ffns[i], f"neurons {width}", by[i])
            made[i] = replacement(blocks[i], ffns[i], Shape("neurons", width), own)
        return made

    def in_order(widths: dict[int, int], undo_drift: bool) -> dict[int, torch.nn.Module]:
        shapes = {i: Shape("neurons", width) for i, width in widths.items()}
        return refit(model, blocks, shapes, fit, held, workers, undo_drift=undo_drift)

    by_metric = [metric_order(*each) for each in zip(blocks, moments, ffns, metrics, strict=True)]
    yield "one width everywhere", built(uniform, orders, moments)
    yield "allocated by predicted loss", built(best, orders, moments)
    yield "allocated by predicted loss ^ 1.5", built(spread, orders, moments)
    yield "allocated, neurons ordered in the gradient's metric", built(best, by_metric, moments)
    yield "allocated, rows not weighted", built(best, orders, unweighted(model, blocks, fit, held, workers))
    yield "allocated, refitted in order", in_order(best, False)
    yield "allocated, refitted in order, undoing drift", in_order(best, True)
    yield "one width everywhere, refitted in order, undoing drift", in_order(uniform, True)


def measure(model: torch.nn.Module, ids: torch.Tensor) -> float:
    return perplexity(sequence_losses(model, ids, Workers("cpu")))


def unweighted(
    model, blocks: list[Block], fit: torch.Tensor, held: torch.Tensor, workers: Workers
) -> list[BlockMoments]:
    """Moments in which every row counts alike."""
    from ffncompress import calibration

    weights, calibration.stream_weights = calibration.stream_weights, lambda s: torch.ones(len(s), dtype=torch.float64)
    try:
        return collect_moments(model, blocks, fit, held, workers)
    finally:
        calibration.stream_weights = weights


if __name__ == "__main__":
    main()
