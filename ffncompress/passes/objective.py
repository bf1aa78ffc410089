"""What a model is held to: the loss that a change of it is judged by.

- A causal language model: the next token's, as always.
- A masked language model: that of tokens which are hidden from it, every seventh of a window, in one pass. Its
  exponential is a pseudo-perplexity: comparable between a model and its slimmed self, not between models.
- A sentence encoder, which has no language model on top: 1 - cos between the embedding of a window (the mean of its
  tokens) and that by the original model. The original's own is then 0, its "perplexity" 1, and a rise of that by 5 % is
  a cosine of 0.951.

Predictions take gradients of a loss whose labels are drawn from the model itself (forecast.py). An embedding's label is
a random direction r, and its loss r'e: for 1 - cos is half the squared step of e on the sphere, and the mean of
(r'de)^2 is that step's square.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ffncompress.errors import ModelError
from ffncompress.models import forward, task_of
from ffncompress.passes.heads import EVERY, Part, each_part, summed
from ffncompress.records.task import Task
from ffncompress.text.windows import TokenWindows, Windows
from ffncompress.type_aliases import LayerOutput, Model, Tokenizer

STRIDE = 7  # of hidden tokens: about the 15 % that masked models are trained with
LIKELIEST = 64  # tokens that a prediction is kept by; the chance of all others is kept as a whole
_LEAST = 1e-6  # of that chance: below it, it is rounding
Answers = tuple[Tensor, ...]  # of a model to a batch, as far as another is to come near to them


class Objective(Protocol):
    """A loss, for a batch of windows."""

    @property
    def task(self) -> Task:
        """What the model is for."""

    @property
    def draws(self) -> int:
        """How often labels are drawn anew where something is expected over them: the more, the fewer there are."""

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """The mean loss of each window, [batch], float64 in main memory."""

    def drawn(self, model: Model, batch: Tensor, seeds: Sequence[int]) -> Tensor:
        """The sum of all losses, their labels drawn from the model, a seed for each window."""

    def count(self, windows: TokenWindows) -> int:
        """How many losses `drawn` sums up over windows."""

    def expected(self, steps: Tensor, windows: int) -> Tensor:
        """What errors cost together, [...], from what each adds to a drawn loss, [rows, ...] of so many windows."""

    def answers(self, model: Model, batch: Tensor, likeliest: int = LIKELIEST) -> Answers:
        """What a model is known by on a batch, small enough to be kept, in main memory."""

    def distance(self, model: Model, batch: Tensor, answers: Answers) -> Tensor:
        """How far a model is from the answers of another: what distilling lowers; the head is held."""


def objective_of(model: Model) -> Objective:
    """What a model was set to, or the next token."""
    found: Objective = model.__dict__.get("_objective", CAUSAL)
    return found


def set_objective_(model: Model, tokenizer: Tokenizer, reference: Model | None = None) -> Model:
    """Hold a model to what it is for.

    Args:
        model: as it was loaded; a slimmed one with its reference.
        tokenizer: its own.
        reference: of a sentence encoder, the original; none: the model as it is now.

    Raises:
        ModelError: the tokenizer has no mask to hide tokens with.
    """
    task = task_of(model)
    objective: Objective = CAUSAL
    if task == "masked":
        if tokenizer.mask_token_id is None:
            raise ModelError("its tokenizer has no mask token, so there is nothing to hide words with; add one to it")
        objective = Masked(tokenizer.mask_token_id)
    elif task == "embedding":
        objective = Embedding(copy.deepcopy(model) if reference is None else reference)
    model.__dict__["_objective"] = objective  # no attribute of a module: a reference is not part of the model
    return model


@dataclass(frozen=True)
class Causal:
    """The next token."""

    task: Task = "causal"
    draws: int = 1

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """The mean loss of each window."""
        return _mean_losses(model, batch, slice(-1), batch[:, 1:])

    def drawn(self, model: Model, batch: Tensor, seeds: Sequence[int]) -> Tensor:
        """The sum of all losses, labels drawn."""
        return summed(model, batch, slice(-1), _Drawn(seeds))

    def count(self, windows: TokenWindows) -> int:
        """A loss for each token, but for the first of a window, which is a rounding."""
        return windows.numel()

    def expected(self, steps: Tensor, windows: int) -> Tensor:
        """Tokens have labels of their own, so what they share averages out."""
        return steps.square().sum(0) / 2

    def answers(self, model: Model, batch: Tensor, likeliest: int = LIKELIEST) -> Answers:
        """The likeliest next tokens, and the logarithms of their chances."""
        return _likeliest(model, batch, likeliest)

    def distance(self, model: Model, batch: Tensor, answers: Answers) -> Tensor:
        """The divergence of its predictions."""
        return _divergence(model, batch, answers)


CAUSAL = Causal()


@dataclass(frozen=True)
class Masked:
    """Tokens that are hidden."""

    mask: int
    task: Task = "masked"
    draws: int = 4

    def _hidden(self, batch: Tensor) -> tuple[Tensor, slice]:
        """The batch with some tokens hidden, and which: never the first, with which the tokenizer begins a text."""
        at = slice(STRIDE // 2, None, STRIDE)
        hidden = batch.clone()
        hidden[:, at] = self.mask
        return hidden, at

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """The mean loss of each window."""
        hidden, at = self._hidden(batch)
        return _mean_losses(model, hidden, at, batch[:, at])

    def drawn(self, model: Model, batch: Tensor, seeds: Sequence[int]) -> Tensor:
        """The sum of all losses, labels drawn."""
        hidden, at = self._hidden(batch)
        return summed(model, hidden, at, _Drawn(seeds))

    def count(self, windows: TokenWindows) -> int:
        """A loss for each hidden token."""
        return sum(len(range(STRIDE // 2, len(row), STRIDE)) for row in Windows.of(windows))

    expected = Causal.expected

    def answers(self, model: Model, batch: Tensor, likeliest: int = LIKELIEST) -> Answers:
        """The likeliest tokens at each place, hidden or not."""
        return _likeliest(model, self._hidden(batch)[0], likeliest)

    def distance(self, model: Model, batch: Tensor, answers: Answers) -> Tensor:
        """The divergence of its predictions, of hidden tokens and others."""
        return _divergence(model, self._hidden(batch)[0], answers)


@dataclass(frozen=True)
class Embedding:
    """The direction in which the original embeds a window."""

    reference: Model
    task: Task = "embedding"
    draws: int = 8

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """1 - cos of each window."""
        with torch.no_grad():
            expected = _embedded(self.reference, batch)
        return _apart(_embedded(model, batch), expected).cpu()

    def drawn(self, model: Model, batch: Tensor, seeds: Sequence[int]) -> Tensor:
        """The sum of steps along a random direction for each window."""
        found = embedding(forward(model, batch))
        directions = [torch.randn(found.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        total: Tensor = (found * torch.stack(directions).to(found)).sum()
        return total

    def count(self, windows: TokenWindows) -> int:
        """A loss for each window."""
        return len(windows)

    def expected(self, steps: Tensor, windows: int) -> Tensor:
        """A window has one label, and the errors of its tokens add up before they are felt."""
        together: Tensor = steps.unflatten(0, (windows, -1)).sum(1)
        return together.square().sum(0) / 2

    def answers(self, model: Model, batch: Tensor, likeliest: int = LIKELIEST) -> Answers:
        """The embedding of each window."""
        return (_embedded(model, batch).cpu(),)

    def distance(self, model: Model, batch: Tensor, answers: Answers) -> Tensor:
        """The mean of 1 - cos."""
        return _apart(_embedded(model, batch), answers[0]).mean()


def embedding(output: LayerOutput) -> Tensor:
    """The mean of the tokens' last hidden states, of length one, [batch, d]."""
    mean: Tensor = output.last_hidden_state.float().mean(1)
    return F.normalize(mean, dim=1)


def _embedded(model: Model, batch: Tensor) -> Tensor:
    return embedding(forward(model, batch)).double()


def _apart(found: Tensor, expected: Tensor) -> Tensor:
    """1 - cos of each window, without its rounding."""
    apart: Tensor = (found - expected.to(found)).square().sum(1) / 2
    return apart


@torch.no_grad()
def _likeliest(model: Model, batch: Tensor, count: int) -> Answers:
    """(the likeliest tokens at each place, the logarithms of their chances), [windows, length, count]."""
    tokens, chances = torch.empty(0), torch.empty(0)
    for part, logits in each_part(model, batch):
        found = logits.log_softmax(-1).topk(min(count, logits.shape[-1]))
        if not tokens.numel():
            shape = (*batch.shape, found.indices.shape[-1])
            tokens, chances = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        tokens[part], chances[part] = found.indices.int().cpu(), found.values.cpu()
    return tokens, chances


def _divergence(model: Model, batch: Tensor, answers: Answers) -> Tensor:
    """The mean divergence from known predictions, the tokens that they do not name taken for one."""
    tokens, chances = answers

    def of_part(part: Part, logits: Tensor) -> Tensor:
        named, wanted = tokens[part].to(logits.device, torch.long), chances[part].to(logits)
        found = logits.log_softmax(-1).gather(-1, named)
        others, own = _others(wanted), _others(found)
        apart: Tensor = (wanted.exp() * (wanted - found)).sum() + (others * (others.log() - own.log())).sum()
        return apart

    return summed(model, batch, EVERY, of_part) / batch.numel()


def _others(chances: Tensor) -> Tensor:
    """The chance of all tokens that are not named, from the logarithms of those that are."""
    return (1 - chances.exp().sum(-1)).clamp_min(_LEAST)


def _mean_losses(model: Model, batch: Tensor, at: slice, targets: Tensor) -> Tensor:
    """The mean loss of each window, [batch], float64 in main memory."""
    losses = torch.zeros(targets.shape, dtype=torch.float64)
    for part, logits in each_part(model, batch, at):
        wanted = targets[part].to(logits.device)
        found = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        losses[part] = found.view(wanted.shape).double().cpu()
    return losses.mean(1)


class _Drawn:
    """The loss of labels drawn from the predictions themselves, a seed for each window."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, part: Part, logits: Tensor) -> Tensor:
        below = logits.detach().softmax(-1).cumsum(-1)  # a number between 0 and 1 falls on a token by its chance
        drawn = [torch.rand(below.shape[1], 1, generator=own) for own in self._generators[part[0]]]
        labels = torch.searchsorted(below, torch.stack(drawn).to(below) * below[..., -1:])
        labels = labels.clamp_max(below.shape[-1] - 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
