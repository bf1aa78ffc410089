"""By what a model is known again: the loss of each token of a fixed sequence, which every route to it must give."""

from __future__ import annotations

import math
from statistics import fmean

import torch
import torch.nn.functional as F

from ffncompress.errors import ModelError
from ffncompress.models import embedding_rows, forward, longest_of
from ffncompress.records.plan import Proof
from ffncompress.type_aliases import Model

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05  # of a loss: round-off of float32, and of 16 bits
TOKENS = 64  # that are read; up to 0.6 it was 16, on which some changes are hardly felt


@torch.inference_mode()
def proof_of(model: Model, tokens: int = TOKENS) -> Proof:
    """The loss of each token of a fixed sequence: what tells a model from any other."""
    rows = embedding_rows(model)
    tokens = max(2, min(tokens, TOKENS, longest_of(model.config) or TOKENS))
    ids = (torch.arange(3, 3 + tokens, device=model.device) % rows)[None]
    output = forward(model, ids)
    if "logits" in output:
        logits = output.logits[0, :-1].float()
        losses = F.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    else:  # no language model on top: how its last state lies, token by token
        losses = output.last_hidden_state[0].float().diff(dim=0).square().mean(-1)
    return Proof(dtype=str(model.dtype).removeprefix("torch."), losses=losses.tolist())


def prove(model: Model, expected: Proof | None) -> None:
    """Whether a model answers as was recorded; where nothing was (before 0.4), there is nothing to prove.

    Raises:
        ModelError: it does not.
    """
    if expected is None:
        return
    found = proof_of(model, len(expected.losses) + 1)
    misses = [abs(a - b) / (1 + abs(b)) for a, b in zip(found.losses, expected.losses, strict=False)]
    in_half = {"float16", "bfloat16"} & {found.dtype, expected.dtype}
    # in 16 bits single tokens stray; a NaN is never within
    near = fmean(misses or [math.inf]) <= HALF_TOLERANCE if in_half else max(misses, default=math.inf) <= TOLERANCE
    if len(found.losses) != len(expected.losses) or not near:
        raise ModelError(
            "the slimmed model does not answer as the plan's did: this is not the model that the plan was made for, or "
            "not as it was; load the base model afresh, or make a new plan"
        )
