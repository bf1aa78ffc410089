"""Whether a description of a layer's FFN is true, tried on a forward pass.

Three things are asked of it. Its neurons stand each for itself: with what leads in shuffled over tokens and over
neurons, and some of it spoilt here and there, the inner activations are the same, shuffled and spoilt in just those
places; so a neuron can go, and what it does at a token is a function of its own rows at that token alone. Its module
gives what its output matrix gives, and wants nothing but its input. And its output reaches the residual stream:
silence it, and what leaves the layer loses just that, times a scale, or behind the norm that the description names.

Of an FFN whose neurons are tied together the first is asked in another way: that what its module gives for a token is a
function of what it is given for that token alone. Then it can go as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffncompress.models.families import Family
from ffncompress.models.layer_run import Call, LayerRun, rows

NEURONS, WHOLE = 1, 2  # how much of a description held: its neurons; and that they are a module, or all its parts


class UnfitError(Exception):
    """A description that a layer does not bear out; says which part of it, and how many parts were true."""

    def __init__(self, reason: str, held: int = 0) -> None:
        super().__init__(reason)
        self.held = held


def try_family(run: LayerRun, family: Family) -> float:
    """By what the layer multiplies the FFN's contribution before it is added to the stream.

    Raises:
        UnfitError: the description is not true of this layer.
    """
    check_ffn(run, family)
    return joined_scale(run, family)


def check_ffn(run: LayerRun, family: Family) -> None:
    """Whether the neurons stand each for itself, if they are said to, and the module is theirs alone.

    Raises:
        UnfitError: they do not, or it is not.
    """
    held = 0
    try:
        if not family.tied:
            _check_neurons(run, family)
            held = NEURONS
        _check_module(run, family)
        if family.tied:
            _check_tokens(run, family)
    except UnfitError as error:
        error.held = held
        raise


def below(family: Family, name: str) -> str:
    """The name of one of the FFN's parts in its layer; of no part: its own."""
    return f"{family.place}.{name}".strip(".")


def part(run: LayerRun, family: Family, name: str) -> Call:
    """What a part of the FFN did.

    Raises:
        UnfitError: there is none of that name, or it did not run once for every token.
    """
    call = run.call(below(family, name))
    if call is None:
        raise UnfitError(f"there is no {below(family, name)} that runs once in it")
    if rows(call.input) != run.tokens:
        raise UnfitError(f"its {below(family, name)} does not see every token")
    return call


def _check_neurons(run: LayerRun, family: Family) -> None:
    layout = family.layout
    leads = [part(run, family, name) for name in layout.inner]
    h = part(run, family, layout.out).input
    if any(not torch.equal(lead.input, leads[0].input) for lead in leads):
        raise UnfitError("the matrices that lead into its FFN have different inputs")
    if any(lead.output.shape[:-1] != h.shape[:-1] for lead in leads) or any(
        lead.output.shape[-1] != layout.fused * h.shape[-1] for lead in leads
    ):
        raise UnfitError("the matrices of its FFN do not fit each other")
    generator = torch.Generator().manual_seed(0)
    tokens, width = h.shape[-2:]
    tokens_at, columns = (torch.randperm(size, generator=generator).to(h.device) for size in (tokens, width))
    spoilt = (torch.rand(tokens, width, generator=generator) < 0.25).to(h.device)

    def shuffled(z: Tensor) -> Tensor:
        parts = z.index_select(-2, tokens_at).unflatten(-1, (layout.fused, width))[..., columns]
        return torch.where(spoilt[:, None], 1.5 - parts, parts).flatten(-2)

    found = part(run.changed({lead.name: shuffled for lead in leads}), family, layout.out).input
    expected = h.index_select(-2, tokens_at)[..., columns]
    if not _near(torch.where(spoilt, 0, found), torch.where(spoilt, 0, expected)):
        raise UnfitError(_tied_by(run, family) or "the neurons of its FFN do not stand each for itself")
    if torch.equal(found, expected):
        raise UnfitError("the neurons of its FFN are not fed by the matrices that seem to lead in")


def _tied_by(run: LayerRun, family: Family) -> str | None:
    """A norm over all neurons of an FFN: with fewer of them, the others would not be what they were."""
    out = part(run, family, family.layout.out)
    norms = [call.name for call in run.calls if torch.equal(call.output, out.input)
             and [p.shape for p in call.module.parameters()][:1] == [out.input.shape[-1:]]]  # fmt: skip
    return f"a norm ({norms[0]}) stands among its neurons and ties them together" if norms else None


def _check_tokens(run: LayerRun, family: Family) -> None:
    """What the module gives for a token is a function of what it is given for that token alone."""
    whole = part(run, family, "")
    generator = torch.Generator().manual_seed(0)
    x, y = whole.input, whole.output
    order = torch.randperm(x.shape[-2], generator=generator).to(x.device)
    spoilt = (torch.rand(len(order), 1, generator=generator) < 0.5).to(x.device)
    try:
        with torch.inference_mode():
            found = whole.module(torch.where(spoilt, 1.5 - x, x).index_select(-2, order))
    except Exception as error:  # whatever a family's own code says of it
        raise UnfitError("its FFN does not run by itself") from error
    if not _near(torch.where(spoilt, 0, y).index_select(-2, order), torch.where(spoilt[order], 0, found)):
        raise UnfitError("what its FFN gives for a token depends on other tokens")


def _check_module(run: LayerRun, family: Family) -> None:
    layout = family.layout
    x, y = part(run, family, layout.inner[0]).input, part(run, family, layout.out).output
    if layout.activation is not None:
        z, between = part(run, family, layout.inner[0]).output, run.call(below(family, layout.activation))
        fed = x if layout.inner[0].startswith(f"{layout.activation}.") else z
        if between is None or not torch.equal(between.input, fed):
            raise UnfitError("its activation is no module of its own that runs once in it")
        if not torch.equal(between.output, part(run, family, layout.out).input):
            raise UnfitError("something stands between its activation and its output matrix")
        return
    whole = run.call(family.place)
    if whole is None:
        raise UnfitError(f"{family.place} does not run once and give one tensor")
    if not whole.alone or not torch.equal(whole.input, x):
        raise UnfitError("its FFN is given more than what leads into it")
    if whole.output.shape != y.shape or not _near(whole.output, y):
        raise UnfitError("its FFN goes on after its output projection")


def joined_scale(run: LayerRun, family: Family) -> float:
    """By what the contribution is multiplied where it is added.

    Raises:
        UnfitError: it is not added as the description says.
    """
    try:
        return _joined_scale(run, family)
    except UnfitError as error:
        error.held = WHOLE
        raise


def _joined_scale(run: LayerRun, family: Family) -> float:
    y = part(run, family, family.layout.out)
    source = y if family.after is None else run.call(family.after)
    if source is None or (source is not y and not _near(source.input, y.output)):
        raise UnfitError(f"{family.after} is not what its FFN's output goes through")
    added = source.output
    if family.gate is not None:
        gate = run.call(family.gate)
        if gate is None or gate.output.numel() != added.numel() // added.shape[-1]:
            raise UnfitError(f"{family.gate} is no gate of its FFN's output")
        added = added * gate.output.reshape(*added.shape[:-1], 1).sigmoid()
    silent = run.silenced(source.name)
    with_it, without = run.output, silent.output
    if family.stream is not None:
        entered, entered_without = (each.call_after(family.stream, source) for each in (run, silent))
        if entered is None or entered_without is None:
            raise UnfitError(f"there is no {family.stream} that runs after it")
        with_it, without = entered.input, entered_without.input
    if not without.any():
        raise UnfitError("its FFNs are in a list of their own, and the residual stream is outside of it")
    scale = _scale(added, with_it, without)
    if scale is None:
        raise UnfitError("its FFN's output does not reach the residual stream as it is")
    return scale


def _scale(added: Tensor, with_it: Tensor, without: Tensor) -> float | None:
    """By what a contribution was multiplied before it was added, from the sum with and without it; none: otherwise."""
    rounding = 4 * torch.finfo(added.dtype).eps  # of the stream, which may be a thousand times as long as it
    if added.numel() != with_it.numel():
        return None
    c, with_it, without = (t.double().flatten() for t in (added, with_it, without))
    slack, rounded = 1e-2 * (c.abs() + c.abs().max()), rounding * (with_it.abs() + without.abs())
    energy = (c @ c).clamp_min(1e-300)
    for scale in (1.0, float(c @ (with_it - without) / energy)):  # some families scale what they add
        if ((with_it - without - scale * c).abs() <= abs(scale) * slack + rounded).all():
            return scale if scale != 0 else None
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    """Equal to round-off of their precision."""
    if a.shape != b.shape and a.numel() == b.numel():
        a = a.reshape(b.shape)
    loose = a.dtype in (torch.float16, torch.bfloat16)
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), 1e-2 if loose else 1e-4, 1e-3 if loose else 1e-6)
