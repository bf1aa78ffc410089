"""Whether odd widths cost speed here: narrower FFNs beside the whole one, measured over what FLOPs or bytes predict.

    python benchmarks/speed.py MODEL [--rounds 7] [--sizes 896x4864] [--share 0.72] [--skip-model | --skip-blocks]

First FFNs of MODEL's own class, in its sizes and others, random, at five shares of their width, each a multiple of 1,
8, 16, 32 or 64 and of no more (1: odd); 512 rows at once (prefill), and one row (decode). All stand in the same
rounds, so no weights are still in a cache when their turn comes. Then the whole of MODEL with all its FFNs at a share
of their width, odd and a multiple of 16 and of 32, timed as `ffncompress eval` does it; and what `--target-speed`
would have said. One process, float32 and bfloat16; ratios alone, for other work may run beside it.
"""

import argparse
import copy
from contextlib import ExitStack
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import nn

from ffncompress.models import Block, Layout, ffn_of, find_blocks, find_model, install_, load_model
from ffncompress.passes.pace import (
    bytes_read,
    in_dtype,
    in_turns,
    operations,
    seconds_of,
    seconds_to_go_on,
    seconds_to_read,
)
from ffncompress.planning.latency import time_blocks
from ffncompress.planning.search import SearchSpace
from ffncompress.records.plan import Option, Shape
from ffncompress.replacement.modules import build
from ffncompress.runtime.progress import silent
from ffncompress.type_aliases import Model

ALIGNS = (1, 8, 16, 32, 64)
SHARES = (0.62, 0.7, 0.78, 0.86, 0.94)
ROWS = {"prefill": 512, "decode": 1}
DTYPES = (torch.float32, torch.bfloat16)


def width_at(share: float, inner: int, align: int) -> int:
    """The width nearest to a share that is a multiple of `align` and not of twice that."""
    odd = round((share * inner / align - 1) / 2) * 2 + 1
    return align * odd


def ffn_of_size(model: Model, block: Block, d: int, inner: int) -> nn.Module:
    """A random FFN of the model's own class in another size."""
    config = copy.deepcopy(model.config)
    config.hidden_size, config.intermediate_size = d, inner
    return type(ffn_of(model, block))(config)


@torch.inference_mode()
def of_blocks(ffn: nn.Module, layout: Layout, d: int, inner: int, rounds: int) -> None:
    """A table: for each dtype and way, measured over predicted by alignment; the median of shares, their extremes."""
    for dtype, (way, rows) in product(DTYPES, ROWS.items()):
        x = torch.randn(1, rows, d, dtype=dtype)
        widths = {(align, share): width_at(share, inner, align) for align, share in product(ALIGNS, SHARES)}
        modules = {
            key: build(Shape("neurons", width), layout, ffn).to(dtype) for key, width in widths.items()
        } | {(0, 1.0): copy.deepcopy(ffn).to(dtype)}  # fmt: skip
        for module in modules.values():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
        runs = {key: partial(seconds_of, partial(module, x)) for key, module in modules.items()}
        taken = in_turns(runs, rounds if way == "prefill" else 4 * rounds, silent, "")
        whole = taken.pop((0, 1.0))
        cells = []
        for align in ALIGNS:
            shown = [
                median(w / t for w, t in zip(whole, taken[align, share], strict=True)) * widths[align, share] / inner
                for share in SHARES
            ]
            cells.append(f"{median(shown):.2f} ({min(shown):.2f}-{max(shown):.2f})")
        print(f"| {d}x{inner} | {str(dtype).removeprefix('torch.')} | {way} | {' | '.join(cells)} |", flush=True)


def of_model(model: Model, share: float, rounds: int) -> None:
    """A table: the whole model at a share of its FFNs' width, odd and aligned, all in turns with the original."""
    blocks = find_blocks(model)
    models = {0: model} | {align: narrowed(model, blocks, share, align) for align in (1, 16, 32)}
    ids = torch.arange(512)[None]
    for dtype in DTYPES:
        with ExitStack() as stack:
            for each in models.values():
                stack.enter_context(in_dtype(each, dtype))
            runs = {("prefill", align): partial(seconds_to_read, each, ids) for align, each in models.items()}
            runs |= {
                ("decode", align): partial(seconds_to_go_on, each, ids[:, :64], 24) for align, each in models.items()
            }
            taken = in_turns(runs, rounds, silent, "")
            told = {
                "prefill": {align: operations(each, ids) for align, each in models.items()},
                "decode": {align: bytes_read(each) for align, each in models.items()},
            }
        for way, align in product(told, list(models)[1:]):
            ratios = [slow / fast for slow, fast in zip(taken[way, 0], taken[way, align], strict=True)]
            predicted = told[way][0] / told[way][align]
            width = width_at(share, blocks[0].d_inner, align)
            by_blocks = f"{told_by_blocks(model, blocks, width, way):.2f}" if (align, dtype) == (32, DTYPES[0]) else ""
            print(
                f"| {width} | {str(dtype).removeprefix('torch.')} | {way} | {predicted:.3f} | {median(ratios):.3f} "
                f"({min(ratios):.2f}-{max(ratios):.2f}) | {median(ratios) / predicted:.2f} | {by_blocks} |",
                flush=True,
            )


def narrowed(model: Model, blocks: list[Block], share: float, align: int) -> Model:
    """A copy with random FFNs of a share of the width."""
    slim = copy.deepcopy(model)
    for block in blocks:
        module = build(Shape("neurons", width_at(share, block.d_inner, align)), block.layout, ffn_of(model, block))
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        install_(slim, {block.path: module})
    return slim.eval()


def told_by_blocks(model: Model, blocks: list[Block], width: int, use: str) -> float:
    """The speed that a plan with a target speed expects."""
    option = Option(kind="neurons", width=width, rank=0, weighting="stream", parameters=1, predicted_loss=0.0)
    menus = [[option] for _ in blocks]
    space = time_blocks(model, SearchSpace(blocks, menus, [1.0] * len(blocks)), use)
    kept, menus = sum(space.kept_seconds or []), space.menus
    return space.model_seconds / (space.model_seconds - kept + sum(menu[0].seconds or 0 for menu in menus))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="896x4864")
    parser.add_argument("--share", type=float, default=0.72)
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--skip-blocks", action="store_true")
    asked = parser.parse_args()
    model = load_model(find_model(asked.model), dtype="float32")
    block = find_blocks(model)[0]
    sizes = [(block.d_in, block.d_inner), *(tuple(map(int, size.split("x"))) for size in asked.sizes.split(","))]
    if not asked.skip_blocks:
        print("| FFN | dtype | way |" + "".join(f" {align} |" for align in ALIGNS))
        for d, inner in sizes:
            of_blocks(ffn_of_size(model, block, d, inner), block.layout, d, inner, asked.rounds)
    if not asked.skip_model:
        print("| width | dtype | way | predicted | measured | measured / predicted | by blocks' times |")
        of_model(model, asked.share, asked.rounds)


if __name__ == "__main__":
    main()
