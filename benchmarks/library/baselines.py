"""Peers' ideas, written from their papers' maths, so that all methods see the same tokens and are measured alike.

Every function takes a model and returns an edited copy with at most `size` parameters. They are ideas, not the peers'
code: what their tools do besides (search, healing, other defaults) is not here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffncompress.models import Block, count_parameters, find_blocks, first_tensor, install_, oriented
from ffncompress.passes.activations import hooked, row_hooks
from ffncompress.records.plan import Shape
from ffncompress.recovery import remove_neurons
from ffncompress.replacement.building import set_projection_
from ffncompress.replacement.modules import build

TEMPERATURE, MOST_GONE = 0.1, 0.8  # of MoDeGPT's allocation


@dataclass
class Statistics:
    """What the baselines need of the fit tokens, each block's; gathered in one pass."""

    rows: int
    xx: list[Tensor]  # Gram matrix of FFN inputs, plain
    hh: list[Tensor]  # of inner activations
    h: list[Tensor]  # sums of inner activations
    influence: Tensor  # 1 - cosine between the streams before and after each layer, mean over tokens
    distance: Tensor  # [i, j]: 1 - cosine between the streams after layers i and j


@torch.inference_mode()
def gather(model: Any, windows: Tensor, batch: int = 2, grams: bool = True) -> Statistics:
    """One pass over the fit tokens; the Gram matrices only where a method asks for them."""
    blocks = find_blocks(model)
    d, k, n = blocks[0].d_in, blocks[0].d_inner, len(blocks)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    found = Statistics(
        0,
        [zeros(d, d) for _ in blocks],
        [zeros(k, k) for _ in blocks],
        [zeros(k) for _ in blocks],
        zeros(n),
        zeros(n, n),
    )
    streams: list[Tensor] = []

    def hooks(block: Block) -> list[tuple[str, Any]]:
        def feed(rows: Any) -> None:
            i = block.index
            if grams:
                found.xx[i] += (rows.x.T @ rows.x).double()
                found.hh[i] += (rows.h.T @ rows.h).double()
                found.h[i] += rows.h.double().sum(0)
            streams.append(nn.functional.normalize(rows.stream, dim=1))

        return row_hooks(block, feed)

    embedded: list[Tensor] = []
    handle = model.get_submodule(blocks[0].layer_path).register_forward_pre_hook(
        lambda _m, args, kwargs: embedded.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with hooked(model, [hook for block in blocks for hook in hooks(block)]):
        for ids in windows.split(batch):
            model.base_model(input_ids=ids, use_cache=False)
            found.rows += ids.numel()
            all_ = torch.stack(streams)  # [n, tokens, d]
            first = nn.functional.normalize(embedded.pop().flatten(0, 1), dim=1)
            before = torch.cat([first[None], all_[:-1]])
            found.influence += (1 - (before * all_).sum(-1)).double().sum(1)
            for i in range(n):
                found.distance[i] += (1 - (all_[i] * all_).sum(-1)).double().sum(1)
            streams.clear()
    handle.remove()
    found.influence /= found.rows
    found.distance /= found.rows
    return found


def neurons_that_stay(model: Any, blocks: list[Block], size: int) -> float:
    """The share of the FFNs' neurons that may stay."""
    ffns = sum(block.parameters for block in blocks)
    return (size - (count_parameters(model) - ffns)) / ffns


def pruned(
    block: Block, ffn: nn.Module, kept: Tensor, bias: Tensor | None = None, weight: Tensor | None = None
) -> nn.Module:
    """The FFN with only the kept neurons, weights as they were, or another output matrix [d_out, kept]."""
    module = build(Shape("neurons", len(kept)), block.layout, ffn)
    out = module.get_submodule(block.layout.out)
    if bias is not None:
        out = nn.Linear(len(kept), block.d_out)
        module.add_module(block.layout.out, out)
    for name in block.layout.inner:
        set_projection_(module.get_submodule(name), oriented(ffn.get_submodule(name))[kept])
    set_projection_(out, oriented(ffn.get_submodule(block.layout.out))[:, kept] if weight is None else weight, bias)
    return module.requires_grad_(False)


def _edited(model: Any, blocks: list[Block], make: Callable[[Block, nn.Module], nn.Module]) -> Any:
    edited = copy.deepcopy(model)
    return install_(edited, {block.path: make(block, edited.get_submodule(block.path)) for block in blocks})


def magnitude(model: Any, _: Statistics, size: int) -> Any:
    """Neurons with the smallest weights go, the same share in every block."""
    blocks = find_blocks(model)
    share = neurons_that_stay(model, blocks, size)

    def make(block: Block, ffn: nn.Module) -> nn.Module:
        norms = sum(oriented(ffn.get_submodule(name)).square().sum(1) for name in block.layout.inner)
        norms = norms + oriented(ffn.get_submodule(block.layout.out)).square().sum(0)
        return pruned(block, ffn, norms.topk(int(share * block.d_inner)).indices.sort().values)

    return _edited(model, blocks, make)


def flap(model: Any, found: Statistics, size: int) -> Any:
    """FLAP's idea (An et al., 2024): fluctuation times output weight, standardised per block, ranked over all blocks;
    the mean of what goes is added to the output as a bias."""
    blocks = find_blocks(model)
    means = [h / found.rows for h in found.h]
    scores = []
    for block in blocks:
        fluctuation = found.hh[block.index].diagonal() / found.rows - means[block.index].square()
        raw = fluctuation * oriented(model.get_submodule(block.out_path)).double().square().sum(0)
        scores.append((raw - raw.mean()) / raw.std())
    biases = sum(block.d_out for block in blocks)
    keep = int(neurons_that_stay(model, blocks, size - biases) * sum(block.d_inner for block in blocks))
    bar = torch.cat(scores).topk(keep).values[-1]

    def make(block: Block, ffn: nn.Module) -> nn.Module:
        stays = scores[block.index] >= bar
        weight = oriented(ffn.get_submodule(block.layout.out)).double()
        bias = weight[:, ~stays] @ means[block.index][~stays]
        return pruned(block, ffn, stays.nonzero().flatten(), bias.float())

    return _edited(model, blocks, make)


def _loudest(model: Any, size: int, score: Callable[[Block, Tensor], Tensor]) -> Any:
    """The same share of neurons in every block, those of the highest score; a score sees the output matrix."""
    blocks = find_blocks(model)
    share = neurons_that_stay(model, blocks, size)

    def make(block: Block, ffn: nn.Module) -> nn.Module:
        found = score(block, oriented(ffn.get_submodule(block.layout.out)).double())
        return pruned(block, ffn, found.topk(int(share * block.d_inner)).indices.sort().values)

    return _edited(model, blocks, make)


def wanda_sp(model: Any, found: Statistics, size: int) -> Any:
    """Wanda's score for whole neurons, as FLAP's authors compare with it: |w| times the activation's norm, summed."""
    return _loudest(model, size, lambda block, out: out.abs().sum(0) * found.hh[block.index].diagonal().sqrt())


def two_ssp(model: Any, found: Statistics, size: int) -> Any:
    """2SSP's first stage (Sandri et al., 2025): the neurons whose activations have the largest norm stay."""
    return _loudest(model, size, lambda block, _: found.hh[block.index].diagonal())


def osscar(model: Any, found: Statistics, size: int) -> Any:
    """OSSCAR's and ZipLM's idea (Meng et al., 2024; Kurtic et al., 2023): one width, neurons go by the surgeon's
    saliency on plain rows, a few at a time, and the output matrix is refitted."""
    blocks = find_blocks(model)
    share = neurons_that_stay(model, blocks, size)

    def make(block: Block, ffn: nn.Module) -> nn.Module:
        weight = oriented(ffn.get_submodule(block.layout.out)).double().T
        width = int(share * block.d_inner)
        ((_, (kept, out)),) = remove_neurons(found.hh[block.index] / found.rows, weight, [width])
        return pruned(block, ffn, kept, weight=out.T.float())

    return _edited(model, blocks, make)


def modegpt(model: Any, found: Statistics, size: int) -> Any:
    """MoDeGPT's MLP (Lin et al., 2024): neurons of the highest ridge leverage stay, a Nystroem approximation gives the
    output matrix, and layers that turn the stream less lose more, by a softmax of their influence."""
    blocks = find_blocks(model)
    sparsity = torch.softmax(-found.influence / TEMPERATURE, 0)
    most = (1 - neurons_that_stay(model, blocks, size)) * len(blocks)
    gone = torch.zeros_like(sparsity)
    for _ in blocks:  # what a layer cannot lose, the others do
        free = gone < MOST_GONE
        gone = (gone + free * sparsity * (most - gone.sum()) / (free * sparsity).sum().clamp_min(1e-30)).clamp_max(
            MOST_GONE
        )

    def make(block: Block, ffn: nn.Module) -> nn.Module:
        gram = found.hh[block.index] / found.rows
        ridged = gram + 1e-2 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        leverage = torch.linalg.solve(ridged, gram).diagonal()
        width = max(1, int((1 - gone[block.index].item()) * block.d_inner))
        kept = leverage.topk(width).indices.sort().values
        weight = oriented(ffn.get_submodule(block.layout.out)).double()
        small = gram[kept][:, kept]
        small = small + 1e-6 * small.diagonal().mean() * torch.eye(width, dtype=gram.dtype)
        return pruned(block, ffn, kept, weight=torch.linalg.solve(small, gram[kept] @ weight.T).T.float())

    return _edited(model, blocks, make)


def slice_gpt(model: Any, found: Statistics, size: int) -> Any:
    """SliceGPT's idea (Ashkboos et al., 2024) on the FFN alone: inputs and outputs keep their leading principal
    directions. The rotations are kept as matrices: what absorbs them there, the rest of the model, stays as it is."""
    edited, blocks = copy.deepcopy(model), find_blocks(model)
    share = neurons_that_stay(model, blocks, size)
    for block in blocks:
        ffn = edited.get_submodule(block.path)
        out = oriented(ffn.get_submodule(block.layout.out)).double()
        inner = [oriented(ffn.get_submodule(name)).double() for name in block.layout.inner]
        whole = sum(weight.numel() for weight in (*inner, out))
        rank = int(share * whole / (whole / block.d_in + block.d_in + block.d_out))
        into = _leading(found.xx[block.index], rank)
        shared = nn.Parameter(into.T.float(), requires_grad=False)
        for name, weight in zip(block.layout.inner, inner, strict=True):
            ffn.add_module(name, _Factored((weight @ into).float(), shared))
        behind = _leading(out @ found.hh[block.index] @ out.T, rank)
        ffn.add_module(block.layout.out, _Factored(behind.float(), (behind.T @ out).float()))
    return edited


def _leading(gram: Tensor, rank: int) -> Tensor:
    """The principal directions of most energy, [d, rank]."""
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:]


class _Factored(nn.Module):
    """y = U (V x)."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up = nn.Parameter(up, requires_grad=False)
        self.down = down if isinstance(down, nn.Parameter) else nn.Parameter(down, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.T @ self.up.T


def svd_llm(model: Any, found: Statistics, size: int) -> Any:
    """SVD-LLM's idea (Wang et al., 2024): each FFN matrix truncated after whitening its input."""
    edited, blocks = copy.deepcopy(model), find_blocks(model)
    share = neurons_that_stay(model, blocks, size)
    for block in blocks:
        ffn = edited.get_submodule(block.path)
        for name in (*block.layout.inner, block.layout.out):
            gram = (found.hh if name == block.layout.out else found.xx)[block.index] / found.rows
            weight = oriented(ffn.get_submodule(name)).double()
            root = torch.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype))
            u, s, v = torch.linalg.svd(weight @ root, full_matrices=False)
            rank = int(share * weight.numel() / sum(weight.shape))
            down = torch.linalg.solve_triangular(root, v[:rank], left=False, upper=False)
            ffn.add_module(name, _Factored((u[:, :rank] * s[:rank]).float(), down.float()))
    return edited


def _layers_to_drop(model: Any, blocks: list[Block], size: int) -> int:
    layer = sum(p.numel() for p in model.get_submodule(blocks[0].layer_path).parameters())
    return -(-(count_parameters(model) - size) // layer)


def _without_layers(model: Any, blocks: list[Block], dropped: list[int]) -> Any:
    edited = copy.deepcopy(model)
    path = blocks[0].layer_path.rpartition(".")[0]
    layers = edited.get_submodule(path)
    parent, _, name = path.rpartition(".")
    kept = nn.ModuleList(layer for i, layer in enumerate(layers) if i not in dropped)
    for i, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = i  # its place in the key-value cache
    setattr(edited.get_submodule(parent), name, kept)
    edited.config.num_hidden_layers = len(kept)
    return edited


def shortgpt(model: Any, found: Statistics, size: int) -> Any:
    """ShortGPT's idea (Men et al., 2024): the layers that turn the stream least are dropped whole."""
    blocks = find_blocks(model)
    dropped = found.influence.argsort()[: _layers_to_drop(model, blocks, size)].tolist()
    return _without_layers(model, blocks, dropped)


@torch.inference_mode()
def replaceme(model: Any, found: Statistics, size: int, windows: Tensor) -> Any:
    """ReplaceMe's idea (Shopkhoev et al., 2025): a run of layers gives way to a least-squares map of the FFN output
    before it, merged into that FFN's output matrix."""
    blocks = find_blocks(model)
    count = _layers_to_drop(model, blocks, size)
    at = min(range(len(blocks) - count), key=lambda i: found.distance[i, i + count].item())
    d = blocks[at].d_out
    yy, yt = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    seen: list[Any] = []
    hooks = row_hooks(blocks[at], seen.append)
    hooks.append((blocks[at + count].layer_path, lambda _m, _a, out: seen.append(first_tensor(out).flatten(0, -2))))
    with hooked(model, hooks):
        for ids in windows.split(2):
            model.base_model(input_ids=ids, use_cache=False)
            rows, after = seen
            y, target = rows.y.double(), (after - (rows.stream - rows.y)).double()
            yy += y.T @ y
            yt += y.T @ target
            seen.clear()
    transform = torch.linalg.solve(yy + 1e-6 * yy.diagonal().mean() * torch.eye(d, dtype=yy.dtype), yt)
    edited = _without_layers(model, blocks, list(range(at + 1, at + count + 1)))
    out = edited.get_submodule(blocks[at].out_path)
    set_projection_(out, (transform.T @ oriented(out).double()).float())
    return edited


NEED_GRAMS = ("FLAP", "SVD-LLM", "OSSCAR", "MoDeGPT", "SliceGPT", "Wanda-sp", "2SSP")
METHODS = {
    "OSSCAR": osscar, "FLAP": flap, "MoDeGPT": modegpt, "ReplaceMe": replaceme, "ShortGPT": shortgpt,
    "SVD-LLM": svd_llm, "SliceGPT": slice_gpt, "Wanda-sp": wanda_sp, "2SSP": two_ssp, "magnitude": magnitude,
}  # fmt: skip
