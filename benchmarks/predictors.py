"""Which number, known before a swap is tried, ranks what swaps cost? Candidates side by side, on one model.

    python benchmarks/predictors.py MODEL FIT-TEXT CHOOSE-TEXT [--tokens 23040] [--swap-tokens 4096]

Every block is replaced by its dense stream-weighted map, alone, and the rise in loss measured on CHOOSE-TEXT. Printed
are the Spearman correlation of each candidate with it over blocks and, for those in units of loss, the median of
measured over predicted. With FIT-TEXT equal to CHOOSE-TEXT, the file's own fit and choose parts are used.
"""

import argparse
import statistics

import torch
from scipy.stats import spearmanr

from ffncompress.models import ffn_of, find_blocks, find_model, load_model, load_tokenizer
from ffncompress.passes.activations import own_batches
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import gradients, steps_by_rank
from ffncompress.passes.swaps import measure_swaps
from ffncompress.records.plan import Shape
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import STREAM, fit_block
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.parts import CHOOSE, FIT, read_parts
from ffncompress.text.sources import read
from ffncompress.text.windows import joined_windows

LOSS_UNITS = (
    "ours: 1/2 E(|s| g'u)^2",
    "local: 1/2 E(g'e)^2",
    "isotropic: 1/2 E|g|^2|e|^2/d",
    "1/2 E|s|^2|g|^2 E|u|^2/d",
)


def gradient_candidates(model, blocks, fits, windows, run) -> list[dict[str, float]]:
    """Candidates that need a backward pass, labels drawn from the model."""
    sums = [torch.zeros(6, dtype=torch.float64) for _ in blocks]
    for at, batch in own_batches(windows, run.workers):
        for i, felt in enumerate(gradients(model, blocks, batch, at.tolist())):
            rows = felt.rows
            x, y, s, g = (t.double() for t in (rows.x, rows.y, rows.stream, felt.gradient))
            e = x @ fits[i].weight + fits[i].bias - y
            gg, ee, ss = (t.square().sum(1) for t in (g, e, s))
            sums[i] += torch.stack(
                [
                    steps_by_rank(fits[i], x, y, felt)[:, -1].square().sum() / 2,
                    (g * e).sum(1).square().sum() / 2,
                    (gg * ee).sum() / g.shape[1] / 2,
                    (gg * ss).sum() / g.shape[1],
                    (ee / ss).sum(),
                    ee.sum(),
                ]
            )
    means = [total / windows.numel() for total in sums]
    return [
        dict(zip(LOSS_UNITS, [m[0].item(), m[1].item(), m[2].item(), (m[3] * m[4] / 2).item()], strict=True))
        for m in means
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("fit_text")
    parser.add_argument("choose_text")
    parser.add_argument("--tokens", type=int, default=23_040)
    parser.add_argument("--swap-tokens", type=int, default=4096)
    parser.add_argument("--gradient-tokens", type=int, default=2048)
    options = parser.parse_args()
    source, run = find_model(options.model), Run(Workers("cpu"))
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    blocks = find_blocks(model)
    if options.fit_text == options.choose_text:
        parts = read_parts(options.fit_text)
        fit_text, choose_text = parts[FIT], parts[CHOOSE]
    else:
        fit_text, choose_text = read(options.fit_text), read(options.choose_text)
    fit_ids = joined_windows(fit_text, tokenizer, length=128, count=options.tokens // 128)
    ids = joined_windows(choose_text, tokenizer, length=128, count=options.swap_tokens // 128)

    moments = collect_moments(model, blocks, fit_ids, ids, run)
    ffns = [ffn_of(model, block) for block in blocks]
    fitted = [fit_block(*each) for each in zip(blocks, moments, ffns, strict=True)]
    maps = [each.maps[STREAM] for each in fitted]
    dense = [Shape("dense", rank=block.d_in) for block in blocks]
    variants = [build_replacement(*each) for each in zip(blocks, ffns, dense, maps, strict=True)]
    model.requires_grad_(False)
    rows = gradient_candidates(model, blocks, maps, ids[: options.gradient_tokens // 128], run)
    measured = [r.mean().item() for r in measure_swaps(model, blocks, variants, ids, run)]
    for row, each in zip(rows, fitted, strict=True):
        row["1 - R2_lin"] = 1 - each.scores["r2_lin"]
        row["unrecovered: E|e|^2/|s|^2"] = each.scores["unrecovered_share"]
    print(
        f"{options.model}: {len(blocks)} blocks, {fit_ids.numel()} fit tokens, {ids.numel()} swap tokens, context 128"
    )
    print("block  measured  " + "  ".join(rows[0]))
    for i, row in enumerate(rows):
        print(f"{i:5d}  {measured[i]:8.4f}  " + "  ".join(f"{v:.4f}" for v in row.values()))
    for name in rows[0]:
        values = [row[name] for row in rows]
        line = f"Spearman {spearmanr(values, measured).statistic:+.3f}  {name}"
        if name in LOSS_UNITS:
            ratio = statistics.median(m / max(v, 1e-12) for m, v in zip(measured, values, strict=True))
            line += f"  (measured / predicted: median {ratio:.2f})"
        print(line)


if __name__ == "__main__":
    main()
