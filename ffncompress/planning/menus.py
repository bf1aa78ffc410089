"""A block's menu: the replacements that its fits give, what each is predicted to cost, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ffncompress import recovery
from ffncompress.models import Block
from ffncompress.passes.losses import delta_perplexity, mean_and_error
from ffncompress.passes.swaps import SequenceErrors
from ffncompress.records.plan import Option, Scores, Shape, Swap
from ffncompress.replacement.fitting import EVERYTHING, PLAIN, STREAM, Fitted, Offer, fit_names, whole_map
from ffncompress.replacement.modules import matrix_weights, parameters


def score_block(fitted: Fitted, errors: SequenceErrors) -> Scores:
    """What is reported of a block."""
    error = recovery.r2_interval(errors.squared_errors, errors.rows, errors.sums, errors.squares)
    return Scores(**fitted.scores, r2_lin_error=error)


def make_menu(
    block: Block,
    fitted: Fitted,
    losses: Mapping[str, Tensor],
    offer: Offer = EVERYTHING,
    price: Callable[[Shape, Block], int] | None = None,
) -> list[Option]:
    """Every replacement that was fitted and is smaller than the block, with its predicted loss, largest first.

    Args:
        block: the block.
        fitted: its fits.
        losses: what each fit is predicted to cost at each rank.
        offer: what may take its place.
        price: the parameters of a shape where the model is to run; none: they are the replacement's own.
    """
    options = []
    for shape in menu_shapes(block, offer):
        names = [f"{shape.kind} {shape.width}"] if shape.width else [PLAIN, STREAM]
        if names[0] not in losses:  # a bypass that could not win was not fitted
            continue
        name = min(names, key=lambda n: losses[n][shape.rank].item())
        options.append(
            Option(
                kind=shape.kind,
                width=shape.width,
                rank=shape.rank,
                weighting=PLAIN if name == PLAIN else STREAM,
                parameters=parameters(shape, block),
                predicted_loss=losses[name][shape.rank].item(),
                r2=None if shape.width else fitted.r2_by_rank[shape.rank].item(),
                price=None if price is None else price(shape, block),
            )
        )
    options = [option for option in options if max(option.cost, option.parameters) < block.parameters]
    return sorted(options, key=lambda option: -option.parameters)


def menu_shapes(block: Block, offer: Offer = EVERYTHING) -> list[Shape]:
    """The menu's replacements: constant, linear at a ladder of ranks, dense, neurons, and neurons with a bypass."""
    full = min(block.d_in, block.d_out)
    useful = [2**k for k in range(full.bit_length()) if 2**k <= full // 2]  # above d/2 dense is smaller
    found = [Shape("constant"), *(Shape("low-rank", rank=r) for r in useful)]
    found.append(whole_map(block))
    for name in fit_names(block, offer)[2:]:
        kind, _, width = name.partition(" ")
        if kind == "neurons":
            found.append(Shape("neurons", int(width)))
        else:
            found += [Shape("hybrid", int(width), r) for r in useful if r >= 8]
    return [shape for shape in found if shape.kind in offer.kinds_for(block)]


def score_swap(block: Block, tried: Option, rises: Tensor, base: float, tokens: Tensor | None = None) -> Swap:
    """What an option did alone in the model.

    Args:
        block: the block.
        tried: the option.
        rises: measured rise in loss of each sequence.
        base: the perplexity that a rise is carried over to.
        tokens: that were scored of each sequence; none: the same number of each.
    """
    rise, spread = mean_and_error(rises, tokens)
    delta = delta_perplexity(base, rise)
    return Swap(
        kind=tried.kind,
        width=tried.width,
        rank=tried.rank,
        weighting=tried.weighting,
        parameters=tried.parameters,
        ratio=block.matrix_weights / max(1, matrix_weights(tried.shape, block)),
        predicted_delta=delta_perplexity(base, tried.predicted_loss),
        delta=delta,
        delta_error=(base + delta) * spread,
    )
