"""How long blocks and their replacements take on this machine: what a budget in speed is spent by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from ffncompress.budgets import Use
from ffncompress.models import Block, context_of, embedding_rows, ffn_of
from ffncompress.passes.pace import PROMPT, in_turns, seconds_of, seconds_to_go_on, seconds_to_read
from ffncompress.planning.search import SearchSpace
from ffncompress.records.plan import Shape
from ffncompress.replacement.modules import build
from ffncompress.runtime.products import usual_products
from ffncompress.runtime.progress import Progress, silent
from ffncompress.type_aliases import Model

REPEATS: dict[Use, int] = {"prefill": 7, "decode": 31}  # one row takes little time, and is told from noise by more
_What = tuple[tuple[int, int, int], Shape | None] | str  # a block of a size and its replacement, if any; or the model


@torch.inference_mode()
def time_blocks(model: Model, space: SearchSpace, use: Use = "prefill", progress: Progress = silent) -> SearchSpace:
    """The same space with the seconds of every block and option, and of the rest of the model.

    Of a context that is read, or of one token that follows. Blocks of one shape are timed once. Rounds are interleaved,
    so that a busy moment of the machine strikes all alike, and so that weights come from memory, as they do in the
    model, and not from a cache that the last round left warm.
    """
    tokens = context_of(model, None)
    rows = tokens if use == "prefill" else 1
    first = {_size(block): block for block in space.blocks}
    like = next(model.parameters())
    runs: dict[_What, Callable[[], float]] = {}
    for size, block in first.items():
        ffn = ffn_of(model, block)
        x = torch.randn(1, rows, block.d_in, device=like.device, dtype=like.dtype)
        runs[size, None] = partial(seconds_of, partial(ffn, x))
        for shape in {option.shape for option in space.menus[block.index]}:
            module = build(shape, block.layout, ffn).to(like)
            runs[size, shape] = partial(seconds_of, partial(module, x))
    ids = torch.arange(tokens, device=like.device)[None] % embedding_rows(model)
    if use == "prefill":
        runs["model"] = partial(seconds_to_read, model, ids)
    else:
        runs["model"] = partial(seconds_to_go_on, model, ids[:, : min(PROMPT, tokens - 1)], 1)
    with usual_products():
        taken = in_turns(runs, REPEATS[use], progress, "timing replacements")
    seconds = {what: median(times) for what, times in taken.items()}
    kept = [seconds[_size(block), None] for block in space.blocks]
    menus = [
        [option.model_copy(update={"seconds": seconds[_size(block), option.shape]}) for option in options]
        for block, options in zip(space.blocks, space.menus, strict=True)
    ]
    return replace(space, menus=menus, kept_seconds=kept, model_seconds=seconds["model"])


def _size(block: Block) -> tuple[int, int, int]:
    return block.d_in, block.d_inner, block.d_out
