"""How far R2_lin moves with the ridge: the exact map's beside that of a ridge chosen on the rows that it is scored on.

    python benchmarks/exact_r2.py MODEL FIT HELD_OUT [--tokens 6144 --tokens 24576] [--context 512]

Both are of the same moments of the same rows: so many tokens of FIT, and a third as many of HELD_OUT.
"""

import argparse

import torch

from ffncompress import recovery
from ffncompress.models import find_blocks, find_model, load_model, load_tokenizer
from ffncompress.passes.calibration import collect_moments
from ffncompress.replacement.fitting import exact_map
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import read
from ffncompress.text.windows import joined_windows


def main() -> None:
    """A row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=3, metavar=("MODEL", "FIT", "HELD_OUT"))
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    source = find_model(options.files[0])
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    blocks = find_blocks(model)
    print("| fit tokens | exact R2_lin, by block | less the ridge's, mean | most | at block |\n" + "| --- " * 5 + "|")
    for tokens in options.tokens or [6144, 24_576]:
        windows = [
            joined_windows(read(file), tokenizer, length=options.context, count=count // options.context, seed=0)
            for file, count in zip(options.files[1:], (tokens, tokens // 3), strict=True)
        ]
        moments = collect_moments(model, blocks, *windows, Run(Workers("cpu")), inner=False)
        exact = torch.tensor([recovery.r2(exact_map(own), own.held_out) for own in moments])
        ridged = [recovery.r2(recovery.fit_linear(own.fit, own.held_out), own.held_out) for own in moments]
        moved = exact - torch.tensor(ridged)
        most = int(moved.abs().argmax())
        print(
            f"| {tokens:,} | {exact.min():.3f} to {exact.max():.3f}, mean {exact.mean():.3f} | {moved.mean():+.4f} | "
            f"{moved[most]:+.4f} | {most} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
