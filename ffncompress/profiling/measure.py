"""One model on one text: every block's profile from one forward pass, and what needs another look.

Moments give R2_lin at every rank, feature by feature, and all spectra. The interval of R2_lin leaves out whole
sequences, so it takes a second pass over the held-out quarter, which measures the base's perplexity too; swaps re-run
a few of its windows from the swapped layer on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ffncompress import recovery
from ffncompress.models import Block, ffn_of, is_streamed, shelved
from ffncompress.passes.calibration import collect_moments, group_by_memory
from ffncompress.passes.losses import delta_perplexity, mean_and_error, perplexity
from ffncompress.passes.swaps import measure_base, measure_swaps
from ffncompress.passes.walking import walk
from ffncompress.profiling.records import BlockScores, Regime, Swapped
from ffncompress.recovery import LinearFit
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import exact_map, linear_scores, whole_map
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import on_disk
from ffncompress.text.corpus import Corpus
from ffncompress.text.windows import Windows
from ffncompress.type_aliases import Model

LINEAR = 0.7  # R2_lin from which a block is called linear at all
FEW, NEAR_ONE = 64, 2.0  # an effective rank is few below d_out / 64, and in a narrow model below 2
GAP = 0.25  # the median feature's R2 so far below the pooled one is far below
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SWAP_TOKENS = 4096


@dataclass(frozen=True)
class Linear:
    """A block's linear map and the statistics of its input."""

    fit: LinearFit
    mean: Tensor  # [d_in]
    covariance: Tensor  # [d_in, d_in]


@dataclass(frozen=True)
class BlockMeasurements:
    """What the passes over a model gave."""

    scores: list[BlockScores]
    linear: list[Linear]
    base_perplexity: float


def measure_blocks(model: Model, blocks: list[Block], corpus: Corpus, run: Run) -> BlockMeasurements:
    """The scores of every block, its linear map, and the model's perplexity on the held-out windows."""
    found: list[dict[str, object]] = []
    linear: list[Linear] = []
    with walk(model, blocks, kept=is_streamed(model)) as steps:
        for group in group_by_memory(blocks, run.workers.memory.for_moments, inner=False):
            moments = collect_moments(model, group, corpus.fit, corpus.choose, run, inner=False, steps=steps)
            for block in run.progress(group, "fitting linear maps"):
                own = moments.pop(0)
                plain, stream = exact_map(own), recovery.fit_linear(*own.weighted())
                by_rank, scores = linear_scores(block, own, plain, stream)
                covariance = own.fit.covariance_x()
                features = recovery.feature_r2(plain, own.held_out)
                outputs = recovery.spectrum_of(own.held_out.covariance_y())
                more = {
                    "r2_by_rank": by_rank.tolist(),
                    "r2_quantiles": {f"{100 * q:g}%": features.quantile(q).item() for q in QUANTILES},
                    "participation_input": recovery.participation_ratio(recovery.spectrum_of(covariance)),
                    "participation_output": recovery.participation_ratio(outputs),
                    "participation_map": recovery.participation_ratio(plain.energies),
                    "dynamic_range": recovery.dynamic_range(covariance),
                }
                found.append(scores | more)
                maps = Linear(plain.cpu(), own.fit.means[0].cpu(), covariance.cpu())
                linear.append(on_disk(maps, Linear, LinearFit) if is_streamed(model) else maps)
    losses, errors = measure_base(model, blocks, [each.fit for each in linear], corpus.choose, run)
    bars = [recovery.r2_interval(e.squared_errors, e.rows, e.sums, e.squares) for e in errors]
    complete = [
        BlockScores.model_validate({**each, "r2_lin_error": bar}) for each, bar in zip(found, bars, strict=True)
    ]
    return BlockMeasurements(complete, linear, perplexity(losses, corpus.choose.scored))


def regime_of(scores: BlockScores, d_out: int) -> tuple[Regime, str]:
    """Which of the three regimes a block is in, and the rule that says so."""
    pooled, median, rank = scores.r2_lin, scores.r2_median_feature, scores.effective_rank_output
    if not pooled >= LINEAR:
        return "nonlinear", f"R2_lin {pooled:.3f} is below {LINEAR}"
    high = f"R2_lin {pooled:.3f} is at least {LINEAR}"
    few = max(NEAR_ONE, d_out / FEW)
    if rank < few:
        return (
            "outlier-dominated",
            f"{high}, but the output's effective rank {rank:.1f} is below d_out/{FEW} = {few:.1f}",
        )
    if pooled - median > GAP:
        return "outlier-dominated", f"{high}, but the median feature's {median:.3f} is more than {GAP} below it"
    return (
        "broadly linear",
        f"{high}, so is the median feature's {median:.3f} (within {GAP}), and the rank is {rank:.0f}",
    )


def swap_linear(
    model: Model, blocks: list[Block], linear: Sequence[Linear], windows: Windows, base: float, run: Run
) -> list[Swapped]:
    """Each FFN replaced by its linear map, alone: the perplexity that this adds to the base."""
    windows = windows.up_to(SWAP_TOKENS, least=2)
    maps = [
        shelved(build_replacement(block, ffn_of(model, block), whole_map(block), each.fit), model)
        for block, each in zip(blocks, linear, strict=True)
    ]
    found = []
    for rises in measure_swaps(model, blocks, maps, windows, run):
        rise, spread = mean_and_error(rises, windows.scored)
        delta = delta_perplexity(base, rise)
        error = (base + delta) * spread
        found.append(Swapped(delta=delta, error=error, tokens=windows.numel()))
    return found
