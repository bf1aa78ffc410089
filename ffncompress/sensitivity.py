"""How much the loss minds an error in each block's output: one backward pass.

Let u = e / |s| be an error relative to the residual stream s that it is added to, and g the gradient of the loss with
respect to u. To second order, with the Fisher information for the Hessian, an error costs E[(g'u)^2] / 2 in loss.
Taking the directions of g and u to be unrelated,

    delta loss ~ 1/2 * E|g|^2 / d * E|u|^2

The second factor is the block's unrecovered part, which the moments give for every rank without another pass. The
first is the block's sensitivity. Relative units matter: next to a massive activation an absolute gradient says nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffncompress.calibration import first_tensor, own_batches
from ffncompress.models import Block
from ffncompress.workers import Track, Workers, silent


def measure_sensitivity(
    model: Any, blocks: list[Block], windows: Tensor, workers: Workers, seed: int = 0, track: Track = silent
) -> list[float]:
    """E|g|^2 / d of each block, labels drawn from the model itself (the Fisher, not the empirical Fisher)."""
    model.requires_grad_(False)
    sums = torch.zeros(len(blocks), dtype=torch.float64)
    rows = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for batch in track(own_batches(windows, workers), "measuring sensitivity"):
        probes, streams = _forward_with_probes(model, blocks, batch.to(workers.device), generator)
        for i, (probe, stream) in enumerate(zip(probes, streams, strict=True)):
            assert probe.grad is not None
            per_row = probe.grad.double().square().sum(-1) * stream.double().square().sum(-1).to(probe.device)
            sums[i] += per_row.sum().cpu()
        rows += batch.numel()
    workers.sum_([sums, rows])
    return [(total / rows / block.d_out).item() for total, block in zip(sums, blocks, strict=True)]


def predicted_delta(base_perplexity: float, sensitivity: float, relative_error: float) -> float:
    """The perplexity that an error of E|u|^2 = relative_error is predicted to add."""
    return base_perplexity * math.expm1(min(sensitivity * relative_error / 2, 50.0))


def _forward_with_probes(
    model: Any, blocks: list[Block], batch: Tensor, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Add a zero to each FFN's output and to nothing else, and take the loss's gradient with respect to it."""
    probes: list[Tensor] = []
    streams: list[Tensor] = []

    def at_ffn(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        probes.append(torch.zeros_like(output, requires_grad=True))
        return output + probes[-1]

    def at_layer(_module: nn.Module, _args: Any, output: Any) -> None:
        streams.append(first_tensor(output).detach())

    handles = [model.get_submodule(block.path).register_forward_hook(at_ffn) for block in blocks]
    handles += [model.get_submodule(block.layer_path).register_forward_hook(at_layer) for block in blocks]
    try:
        with torch.enable_grad():
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            chances = logits.detach().softmax(-1).cpu()
            labels = torch.multinomial(chances, 1, generator=generator).squeeze(1).to(logits.device)
            F.cross_entropy(logits, labels, reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return probes, streams
