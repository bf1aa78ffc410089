"""What each choice is worth on held-out perplexity, by fit tokens: row weights, metric, ridge, allocation, refitting.

    python benchmarks/ablations.py MODEL FIT CHOOSE REPORT [--share 0.25] [--tokens 8192 --tokens 16384] [--context 512]

A quarter of the FFNs' parameters goes, by kept neurons. Each row changes one thing of the row in use; choices were made
by the choose column, the report column shows whether they hold. All rows of a table share the same fit tokens.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ffncompress import recovery
from ffncompress.models import (
    Block,
    ffn_of,
    find_blocks,
    find_model,
    installed,
    load_model,
    load_tokenizer,
    out_projection,
)
from ffncompress.passes import activations
from ffncompress.passes.activations import own_batches
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import gradients, label_seeds, loss_metrics, predict_losses
from ffncompress.passes.losses import perplexity, sequence_losses
from ffncompress.passes.refit import refit
from ffncompress.planning.search import SearchSpace
from ffncompress.records.plan import Option, Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import fit_some
from ffncompress.replacement.moments import BlockMoments
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import read
from ffncompress.text.windows import joined_windows

STEPS = 16
GRADIENT_TOKENS = 4096
RUN = Run(Workers("cpu"))


class Study:
    """A model, its windows, and the fits that all rows of a table share."""

    def __init__(self, model: nn.Module, fit: Tensor, held: Tensor, share: float) -> None:
        self.model, self.fit, self.held, self.share = model, fit, held, share
        self.blocks = find_blocks(model)
        self.ffns = [ffn_of(model, block) for block in self.blocks]
        few = max(1, GRADIENT_TOKENS // fit.shape[1])
        self.metrics = loss_metrics(model, self.blocks, fit[:few], RUN)
        self.relative = relative_metrics(model, self.blocks, fit[:few])
        self.moments = self.with_metrics(collect_moments(model, self.blocks, fit, held, RUN), self.metrics)
        names = [[f"neurons {b.d_inner * i // STEPS}" for i in range(1, STEPS)] for b in self.blocks]
        fits = [fit_some(*each) for each in zip(self.blocks, self.moments, self.ffns, names, strict=True)]
        self.losses = predict_losses(model, self.blocks, fits, held[:few], RUN)

    @staticmethod
    def with_metrics(moments: list[BlockMoments], metrics: list[Tensor] | None) -> list[BlockMoments]:
        return [replace(own, metric=metrics[i] if metrics else None) for i, own in enumerate(moments)]

    def widths(self, power: float) -> dict[int, int]:
        """Widths that minimise the sum of predicted losses raised to a power; power 0 is one width everywhere."""
        if not power:
            return {block.index: round((1 - self.share) * block.d_inner) for block in self.blocks}
        menus = [
            [
                Option(
                    kind="neurons", width=int(name.split()[1]), rank=0, weighting="stream",
                    parameters=int(name.split()[1]) * block.weights_per_neuron, predicted_loss=value.item() ** power,
                )
                for name, value in own.items()
            ]
            for block, own in zip(self.blocks, self.losses, strict=True)
        ]  # fmt: skip
        space = SearchSpace(self.blocks, menus, [1.0] * len(self.blocks))
        choice = space.choose(parameters=(1 - self.share) * space.full)
        return {i: option.width for i, option in enumerate(choice) if option is not None}

    def built(self, widths: dict[int, int], moments: list[BlockMoments]) -> dict[int, nn.Module]:
        made = {}
        for i, width in widths.items():
            name = f"neurons {width}"
            own = fit_some(self.blocks[i], moments[i], self.ffns[i], [name])[name]
            made[i] = build_replacement(self.blocks[i], self.ffns[i], Shape("neurons", width), own)
        return made

    def shrunk_to_zero(self, widths: dict[int, int]) -> dict[int, nn.Module]:
        """The same neurons, the ridge pulling towards zero."""
        made = {}
        for i, width in widths.items():
            block, moments, name = self.blocks[i], self.moments[i], f"neurons {width}"
            kept = fit_some(block, moments, self.ffns[i], [name])[name].kept
            none = torch.zeros_like(out_projection(self.model, block)[0])
            inner = (moments.fit_inner, moments.held_out_inner)
            own = recovery.fit_neurons(*inner, kept, none, biased=block.out_bias).cpu()
            made[i] = build_replacement(block, self.ffns[i], Shape("neurons", width), own)
        return made

    def in_order(self, widths: dict[int, int], undo_drift: bool) -> dict[int, nn.Module]:
        shapes = {i: Shape("neurons", width) for i, width in widths.items()}
        return refit(
            self.model, self.blocks, shapes, self.fit, self.held, RUN, metrics=self.metrics, undo_drift=undo_drift
        )

    def rows(self) -> Iterator[tuple[str, dict[int, nn.Module]]]:
        """Each row of the table: its name and its replacements."""
        best = self.widths(1.0)
        yield "in use: allocated by predicted loss", self.built(best, self.moments)
        yield "one width everywhere", self.built(self.widths(0.0), self.moments)
        yield "allocated by predicted loss ^ 1.5", self.built(self.widths(1.5), self.moments)
        yield "neurons ordered without a metric", self.built(best, self.with_metrics(self.moments, None))
        yield "the metric relative to the stream", self.built(best, self.with_metrics(self.moments, self.relative))
        yield "ridge towards zero", self.shrunk_to_zero(best)
        yield "rows not weighted", self.built(best, self.reweighted(lambda s: torch.ones(len(s), dtype=torch.float64)))
        yield "refitted in order", self.in_order(best, False)
        yield "refitted in order, undoing drift (in use)", self.in_order(best, True)
        yield "one width everywhere, refitted, undoing drift", self.in_order(self.widths(0.0), True)

    def reweighted(self, weigh: Callable[[Tensor], Tensor]) -> list[BlockMoments]:
        """Moments with other row weights."""
        before, activations.stream_weights = activations.stream_weights, weigh
        try:
            moments = collect_moments(self.model, self.blocks, self.fit, self.held, RUN)
        finally:
            activations.stream_weights = before
        return self.with_metrics(moments, self.metrics)


def relative_metrics(model: nn.Module, blocks: list[Block], windows: Tensor) -> list[Tensor]:
    """E[|s|^2 g g'] of each block: what an error relative to the stream costs, by direction."""
    metrics = [torch.zeros(b.d_out, b.d_out, dtype=torch.float64) for b in blocks]
    for at, ids in own_batches(windows, RUN):
        for total, felt in zip(metrics, gradients(model, blocks, ids, label_seeds(at, 0)), strict=True):
            scaled = (felt.gradient * felt.rows.stream.norm(dim=1, keepdim=True)).double()
            total += scaled.T @ scaled
    return metrics


def measure(model: nn.Module, ids: Tensor) -> float:
    return perplexity(sequence_losses(model, ids, RUN))


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

    def windows(file: Path, tokens: int, seed: int | None = 0) -> Tensor:
        count = tokens // options.context
        return joined_windows(read(str(file)), tokenizer, length=options.context, count=count, seed=seed)

    choose, report = windows(options.choose, 16_384), windows(options.report, 8_192, None)
    held, shown = choose[: len(choose) // 2], choose[len(choose) // 2 :]
    print(f"the original: choose {measure(model, shown):.2f}, report {measure(model, report):.2f}", flush=True)
    for tokens in options.tokens or [8192, 16_384]:
        print(f"\n| {tokens:,} fit tokens | choose | report |\n| --- | --- | --- |")
        study = Study(model, windows(options.fit, tokens), held, options.share)
        for name, modules in study.rows():
            with installed(model, {study.blocks[i].path: module for i, module in modules.items()}):
                print(f"| {name} | {measure(model, shown):.2f} | {measure(model, report):.2f} |", flush=True)


if __name__ == "__main__":
    main()
