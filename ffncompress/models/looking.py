"""A layer without a row in the table, looked at: which of its matrices may form an FFN, and what stands behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product, takewhile

import torch
from torch import nn

from ffncompress.modeling_ffncompress import in_out
from ffncompress.models.families import Family, Layout
from ffncompress.models.layer_run import MATRICES, Call, LayerRun, rows
from ffncompress.models.trying import WHOLE, UnfitError, check_ffn, joined_scale, part


def look(run: LayerRun) -> tuple[Family, float]:
    """The description that is true of a layer, and the scale of what its FFN adds.

    Raises:
        UnfitError: none is; says what is there, and which part of the likeliest does not fit.
    """
    reasons: list[tuple[UnfitError, Family]] = []
    checked: dict[tuple[str, Layout, bool], bool] = {}  # an FFN is the same whatever stands behind it
    # rather one of which a part can be kept
    whole = (replace(each, tied=True) for each in _descriptions(run) if each.layout.activation is None)
    for family in chain(_descriptions(run), whole):
        ffn = (family.place, family.layout, family.tied)
        if checked.get(ffn) is False:
            continue
        try:
            if ffn not in checked:
                check_ffn(run, family)
            return family, joined_scale(run, family)
        except UnfitError as error:
            checked[ffn] = error.held == WHOLE
            reasons.append((error, family))
    raise _nearest(run, reasons)


def _nearest(run: LayerRun, reasons: list[tuple[UnfitError, Family]]) -> UnfitError:
    """The first of those of which most was true."""
    if not reasons:
        return UnfitError(_why_none(run))
    error, family = max(reasons, key=lambda each: each[0].held)
    out = part(run, family, family.layout.out).output
    if error.held == WHOLE and (streams := run.output.numel() // out.numel()) > 1:
        told = f"its layers hand on {streams} streams side by side, and what an FFN adds is spread over them"
        return UnfitError(told, WHOLE)
    return UnfitError(f"{family.layout.inner[0]} and {family.layout.out}: {error}", error.held)


def other_matrices(layer: nn.Module) -> str | None:
    """What a layer has in place of matrices that are known, as a reason to refuse it."""
    others = [m for m in layer.modules() if not isinstance(m, (*MATRICES, nn.Embedding))]
    kinds = sorted({type(m).__name__ for m in others for p in m.parameters(recurse=False) if p.dim() > 1})
    return f"its matrices are {', '.join(kinds)} modules, and only nn.Linear and Conv1D are known" if kinds else None


def _why_none(run: LayerRun) -> str:
    none = "it has no FFN of matrices that are known"
    others = other_matrices(run.layer)
    known = any(isinstance(call.module, MATRICES) for call in run.calls)
    return (f"{none}; {others}" if known else others) if others else none


def _descriptions(run: LayerRun) -> Iterator[Family]:
    """What might be, the likeliest first: the widest, of these the last of a layer; a gate and an up, before one."""
    tokens = run.tokens
    matrices = [call for call in run.calls if isinstance(call.module, MATRICES) and rows(call.input) == tokens]
    for at, out in sorted(enumerate(matrices), key=lambda each: (in_out(each[1].module)[0], each[0]), reverse=True):
        width = in_out(out.module)[0]
        earlier = matrices[:at][::-1]
        alike = [call for call in earlier if in_out(call.module)[1] == width]
        pairs = [(b, a) for a, b in combinations(alike, 2) if torch.equal(a.input, b.input)]
        fused = [(call,) for call in earlier if in_out(call.module)[1] == 2 * width]
        for leads in (*pairs, *fused, *((call,) for call in alike)):
            yield from _of_parts(run, leads, out, 2 if leads in fused else 1)


def _of_parts(run: LayerRun, leads: tuple[Call, ...], out: Call, fused: int) -> Iterator[Family]:
    """These matrices as an FFN: in a module of its own, or inline; with each thing that may stand behind it."""
    place = _common([call.name.split(".")[:-1] for call in (*leads, out)])

    def below(call: Call) -> str:
        return ".".join(call.name.split(".")[len(place) :])

    inner = tuple(map(below, leads))
    layouts = [Layout(inner, below(out), fused)] if place else []
    if len(leads) == fused == 1:
        lead, h = leads[0], out.input
        around = [c for c in run.calls if lead.name.startswith(f"{c.name}.") and torch.equal(c.input, lead.input)]
        between = [*(c for c in run.calls if torch.equal(c.input, lead.output)), *around]
        between = [c for c in between if torch.equal(c.output, h) and c.name.split(".")[: len(place)] == place]
        layouts += [Layout(inner, below(out), 1, below(call)) for call in between[:1]]
    behind = [call.name for call in run.calls[run.calls.index(out) + 1 :] if _has_weights(call)]
    # nothing behind it, then one thing, then two
    for after, stream in sorted(product([None, *behind], repeat=2), key=lambda pair: 2 - pair.count(None)):
        if after is None or after != stream:
            yield from (Family(".".join(place), layout, after, stream=stream) for layout in layouts)
    gates = [call.name for call in run.calls if isinstance(call.module, nn.Linear) and call.output.shape[-1] == 1]
    yield from (Family(".".join(place), layout, gate=gate) for layout in layouts for gate in gates)


def _has_weights(call: Call) -> bool:
    return next(call.module.parameters(), None) is not None


def _common(names: list[list[str]]) -> list[str]:
    """How dotted names begin, as far as they agree."""
    agreeing = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return [parts[0] for parts in agreeing]
