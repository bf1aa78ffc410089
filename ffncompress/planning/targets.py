"""Where a slimmed model is to run: what can be expressed there, and what it costs.

Runtimes with a width for each layer have no linear maps. Beside gated neurons, a linear bypass can be folded into
neurons whose gate is held open by a bias: each rank takes a neuron's three rows, and a dense map as many neurons as the
model is wide. Widths are padded, for the sake of quantised kernels. Where every layer has the same width, only a native
checkpoint serves: kept neurons of one common width, a stock model in all but a number in its config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ffncompress.budgets import LINEAR_KINDS, parse_kinds
from ffncompress.errors import BudgetError
from ffncompress.modeling_ffncompress import guardable
from ffncompress.models import Block, width_key
from ffncompress.models.families import GATED
from ffncompress.records.plan import Shape
from ffncompress.replacement.fitting import Offer
from ffncompress.settings import PlanSettings
from ffncompress.type_aliases import Config

Price = Callable[[Shape, Block], int]
NEURONS = frozenset({"neurons"})
ALL_FOLDED = frozenset({"neurons", "hybrid", *LINEAR_KINDS})
# the families that a runtime takes with a width for each layer, and the kinds that it takes of them
RUNTIMES: dict[str, dict[str, frozenset[str]]] = {
    "gguf": {"llama": ALL_FOLDED, "mistral": ALL_FOLDED, "qwen2": ALL_FOLDED, "qwen3": NEURONS},
    "vllm": {"llama": ALL_FOLDED, "mistral": ALL_FOLDED, "qwen2": ALL_FOLDED},
}


@dataclass(frozen=True)
class Terms:
    """What is on offer under some settings, and what it costs where the model is to run."""

    offer: Offer
    price: Price | None = None  # none: a replacement's own parameters


def terms_of(config: Config, blocks: list[Block], settings: PlanSettings) -> Terms:
    """What the settings leave of the menu.

    Raises:
        BudgetError: the target does not take this model, or none of the kinds asked for; says what would serve.
    """
    wanted, align = parse_kinds(settings.kinds), settings.alignment
    # a constant has no tensor of another shape than the FFN's own, at which a load without this package would stop
    if not (guardable(config) or getattr(getattr(config, "quantization_config", None), "activations", None)):
        wanted -= {"constant"}
    if settings.target is None:
        return Terms(Offer(wanted, align))
    if settings.target == "native":
        _check_native(config, blocks, settings)
        kinds, price = NEURONS, None
    else:
        kinds = _kinds_of(settings.target, config, blocks)
        # vLLM has biases in all layers or in none, and a plan of neurons alone may still get a bypass elsewhere
        biased = settings.target == "vllm" and not wanted <= NEURONS
        price = partial(folded_parameters, align=align, biased=biased)
    if not wanted & kinds:
        raise BudgetError(
            f"for {settings.target} there are no replacements of the kinds {settings.kinds}; "
            f"leave out --kinds, or name some of {', '.join(sorted(kinds))}"
        )
    return Terms(Offer(wanted & kinds, align), price)


def folded_parameters(shape: Shape, block: Block, align: int, biased: bool = False) -> int:
    """The parameters of a replacement as neurons of a gated FFN, its width padded.

    Args:
        shape: the replacement.
        block: what it replaces.
        align: what widths are padded to.
        biased: the runtime gives every projection a bias, not just those that need one.
    """
    rank = min(block.d_in, block.d_out) if shape.kind == "dense" else shape.rank
    width = max(1, -(-(shape.width + rank) // align)) * align
    biases = 0 if shape.kind == "neurons" else width + block.d_out  # of the gates, and of the output
    if biased:
        biases = block.layout.leads * width + block.d_out
    return width * block.weights_per_neuron + biases


def _kinds_of(target: str, config: Config, blocks: list[Block]) -> frozenset[str]:
    """The kinds that a runtime takes of a model with a width for each layer.

    Raises:
        BudgetError: it takes none.
    """
    family = config.model_type
    kinds = RUNTIMES[target].get(family)
    why = None
    if kinds is None or any(block.layout != GATED for block in blocks):
        why = f"{target} has one width for all layers of a {family} model"
    elif getattr(config, "sliding_window", None):
        why = f"{target} takes a {family} model with a sliding window only with one width for all layers"
    elif family == "qwen3" and not config.tie_word_embeddings:
        why = f"{target} takes a width for each layer of a {family} model only where its embeddings are tied"
    elif len(kinds) > 1 and getattr(config, "hidden_act", None) != "silu":
        why = f"{target} takes a width for each layer of a {family} model only where its activation is silu"
    if kinds is None or why:
        raise BudgetError(f"{why}: plan with --native")
    return kinds


def _check_native(config: Config, blocks: list[Block], settings: PlanSettings) -> None:
    for name in ("blocks", "frontier"):
        if getattr(settings, name):
            raise BudgetError(f"--native gives all blocks one width: leave out --{name}")
    tied = [block.index for block in blocks if block.tied]
    if tied:
        raise BudgetError(
            f"--native keeps neurons, and those of block {tied[0]} are tied together: none can be kept without the "
            "others; plan without --native"
        )
    key = width_key(config, blocks)
    if key is None:
        raise BudgetError(
            f"{config.model_type}: its config does not name the one width of its FFNs, so there is no native "
            "checkpoint; plan without --native"
        )
