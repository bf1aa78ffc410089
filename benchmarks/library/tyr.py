"""Týr-the-Pruner's idea (Li et al., 2025) for FFNs: local pruning at several widths, and a search for who gets which.

A round prunes every FFN to widths around a centre, a step apart, each FFN behind those before it as the centre has
them, so that errors add up as they will. Then widths are exchanged between layers at the same total: children of the
best are judged by KL to the original on a little text, the best of them on more. The next round takes the best for its
centre, and half the step.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.models import Block, find_blocks, install_, oriented
from ffncompress.passes.activations import hooked
from ffncompress.passes.heads import each_part
from ffncompress.passes.walking import layers_of, run_layers
from ffncompress.recovery import remove_neurons
from library.baselines import neurons_that_stay, pruned

# The budget: 3 x (1 + 6 x 2) readings of 4,096 tokens and 3 x 6 x 8 of 1,024, as many tokens as 75 readings of 4,096.
# The paper has four rounds, 50 generations of 128 children, and up to 131,072 tokens.
ROUNDS, GENERATIONS, CHILDREN, SURVIVORS = 3, 6, 8, 2
FEW_TOKENS, JUDGE_TOKENS = 1_024, 4_096
FIRST_STEP = 1 / 8  # of a layer's neurons
REACH = 4  # steps from the centre, either way: nine widths, as the paper has
EXCHANGES = 4  # at most, between a parent and its child; fewer are likelier
LIKELIEST = 1_024  # tokens of the original's that KL is taken over

Widths = tuple[int, ...]  # of every layer
Choices = list[dict[int, nn.Module]]  # of every layer, what it may be, by width


def tyr(model: Any, size: int, fit: Tensor, judge: Tensor) -> Any:
    """The best of a search over widths at one size; `fit` is what is pruned on, `judge` what is searched on."""
    blocks, edited, chance = find_blocks(model), copy.deepcopy(model), random.Random(0)
    width = int(neurons_that_stay(model, blocks, size) * blocks[0].d_inner)
    widths: Widths = (width,) * len(blocks)
    step = min(int(FIRST_STEP * blocks[0].d_inner), blocks[0].d_inner - width)  # one up is at most the whole layer
    likeness = _Likeness(model, judge)
    choices: Choices = []
    for _ in range(ROUNDS):
        choices = _prune(model, edited, blocks, widths, step, fit)
        widths = _search(edited, blocks, choices, widths, step, likeness, chance)
        step = max(1, step // 2)
    return _take(edited, blocks, choices, widths)


@torch.inference_mode()
def _prune(model: Any, edited: Any, blocks: list[Block], centre: Widths, step: int, fit: Tensor) -> Choices:
    """Every FFN of the original at widths around the centre's, and the centre's in the edited model."""
    install_(edited, {block.path: model.get_submodule(block.path) for block in blocks})
    layers, places = layers_of(edited, blocks)
    batches = list(fit.split(2))
    states: list[Any] = [None] * len(batches)  # what enters the next layers
    start, choices = 0, []
    for block, place, width in zip(blocks, places, centre, strict=True):
        here = slice(start, place + 1)
        gram = torch.zeros(block.d_inner, block.d_inner, dtype=torch.float64)

        def add(_module: nn.Module, args: tuple[Tensor, ...], _output: Tensor, gram: Tensor = gram) -> None:
            rows = args[0].flatten(0, -2)
            gram += (rows.T @ rows).double()

        with hooked(edited, [(block.out_path, add)]):
            for batch, state in zip(batches, states, strict=True):
                run_layers(edited, layers, here, batch, state)
        ffn = model.get_submodule(block.path)
        weight = oriented(ffn.get_submodule(block.layout.out)).double().T
        asked = [width + by * step for by in range(-REACH, REACH + 1)]
        found = remove_neurons(gram / fit.numel(), weight, [each for each in asked if 0 < each <= block.d_inner])
        choices.append({each: pruned(block, ffn, kept, weight=out.T.float()) for each, (kept, out) in found})
        install_(edited, {block.path: choices[-1][width]})
        states = [run_layers(edited, layers, here, *each) for each in zip(batches, states, strict=True)]
        start = place + 1
    return choices


def _search(
    edited: Any,
    blocks: list[Block],
    choices: Choices,
    parent: Widths,
    step: int,
    likeness: _Likeness,
    chance: random.Random,
) -> Widths:
    """The best widths that an evolution from the parent finds; never worse than the parent on the text judged by."""

    def judged(widths: Widths, tokens: int) -> float:
        return likeness(_take(edited, blocks, choices, widths), tokens)

    best, seen = judged(parent, JUDGE_TOKENS), {parent}
    for _ in range(GENERATIONS):
        children = _children(parent, choices, step, chance) - seen
        seen |= children
        ranked = sorted(children, key=lambda child: (judged(child, FEW_TOKENS), child))
        for child in ranked[:SURVIVORS]:
            if (found := judged(child, JUDGE_TOKENS)) < best:
                best, parent = found, child
    print(f"Týr's search, steps of {step}: KL {best:.4f}, widths {list(parent)}", flush=True)
    return parent


def _children(parent: Widths, choices: Choices, step: int, chance: random.Random) -> set[Widths]:
    """Widths with a few steps taken from some layers and given to others."""
    children: set[Widths] = set()
    for _ in range(10 * CHILDREN):  # where few are possible, some come twice
        child = list(parent)
        for _ in range(min(chance.randint(1, EXCHANGES), chance.randint(1, EXCHANGES))):
            narrower = [i for i, width in enumerate(child) if width - step in choices[i]]
            wider = [i for i, width in enumerate(child) if width + step in choices[i]]
            if not narrower or not wider:
                break
            child[chance.choice(narrower)] -= step
            child[chance.choice(wider)] += step
        if len(children) < CHILDREN and tuple(child) != parent:
            children.add(tuple(child))
    return children


def _take(edited: Any, blocks: list[Block], choices: Choices, widths: Widths) -> Any:
    return install_(edited, {block.path: own[width] for block, own, width in zip(blocks, choices, widths, strict=True)})


class _Likeness:
    """KL(original || edited) over the original's likeliest tokens: all of its logits would fill memory."""

    def __init__(self, model: Any, windows: Tensor) -> None:
        self.windows, self.known = windows, [self._read(model, window) for window in windows]

    @staticmethod
    @torch.inference_mode()
    def _read(model: Any, window: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(log-probabilities among them, which they are) of each part of a window."""
        found = []
        for _, logits in each_part(model, window[None]):
            values, which = logits.topk(min(LIKELIEST, logits.shape[-1]))
            found.append((values.log_softmax(-1), which))
        return found

    @torch.inference_mode()
    def __call__(self, edited: Any, tokens: int) -> float:
        count = max(1, tokens // self.windows.shape[1])
        total = 0.0
        for window, known in zip(self.windows[:count], self.known, strict=False):
            for (_, logits), (log_p, which) in zip(each_part(edited, window[None]), known, strict=True):
                log_q = logits.gather(-1, which).log_softmax(-1)
                total += float((log_p.exp() * (log_p - log_q)).sum())
        return total / self.windows[:count].numel()
