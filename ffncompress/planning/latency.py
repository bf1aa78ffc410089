"""How long blocks and their replacements take on this machine: what a budget in speed is spent by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from ffncompress.models import Block, context_of, embedding_rows, ffn_of, forward
from ffncompress.planning.search import SearchSpace
from ffncompress.records.plan import Shape
from ffncompress.replacement.modules import build
from ffncompress.runtime.progress import Progress, silent
from ffncompress.type_aliases import Model

REPEATS = 7
_What = tuple[tuple[int, int, int], Shape | None] | str  # a block of a size and its replacement, if any; or the model


@torch.inference_mode()
def time_blocks(model: Model, space: SearchSpace, progress: Progress = silent) -> SearchSpace:
    """The same space with the seconds of every block and option, and of the rest of the model.

    Blocks of one shape are timed once. Rounds are interleaved, so that a busy moment of the machine strikes all alike.
    """
    tokens = context_of(model, None)
    first = {_size(block): block for block in space.blocks}
    like = next(model.parameters())
    runs: dict[_What, Callable[[], object]] = {}
    for size, block in first.items():
        ffn = ffn_of(model, block)
        x = torch.randn(1, tokens, block.d_in, device=like.device, dtype=like.dtype)
        runs[size, None] = partial(ffn, x)
        for shape in {option.shape for option in space.menus[block.index]}:
            module = build(shape, block.layout, ffn).to(like)
            runs[size, shape] = partial(module, x)
    ids = torch.arange(tokens, device=like.device)[None] % embedding_rows(model)
    runs["model"] = partial(forward, model, ids)
    seconds = _timed(runs, progress)
    kept = [seconds[_size(block), None] for block in space.blocks]
    menus = [
        [option.model_copy(update={"seconds": seconds[_size(block), option.shape]}) for option in options]
        for block, options in zip(space.blocks, space.menus, strict=True)
    ]
    return replace(space, menus=menus, kept_seconds=kept, model_seconds=seconds["model"])


def _size(block: Block) -> tuple[int, int, int]:
    return block.d_in, block.d_inner, block.d_out


def _timed(runs: Mapping[_What, Callable[[], object]], progress: Progress) -> dict[_What, float]:
    taken: dict[_What, list[float]] = {name: [] for name in runs}
    for name, _ in progress([(name, i) for i in range(REPEATS + 1) for name in runs], "timing replacements"):
        start = time.perf_counter()
        runs[name]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken[name].append(time.perf_counter() - start)
    return {name: median(times[1:]) for name, times in taken.items()}  # the first warms up
