"""How fast a model reads a prompt and goes on after it, and what either should take by its products and its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ffncompress.models import forward, task_of
from ffncompress.runtime.progress import Progress
from ffncompress.type_aliases import Model

PROMPT, STEPS = 64, 24  # tokens read before the clock runs, and tokens that follow under it
K = TypeVar("K", bound=Hashable)


def in_turns(
    runs: Mapping[K, Callable[[], float]], rounds: int, progress: Progress, label: str
) -> dict[K, list[float]]:
    """What each run says that it took, in each round: interleaved, so that a busy moment strikes all alike."""
    taken: dict[K, list[float]] = {name: [] for name in runs}
    for round_, name in progress([(round_, name) for round_ in range(rounds + 1) for name in runs], label):
        seconds = runs[name]()
        if round_:  # the first warms up
            taken[name].append(seconds)
    return taken


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes, to the end of what it asked of a GPU."""
    _finish()
    start = time.perf_counter()
    work()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def seconds_to_read(model: Model, ids: Tensor) -> float:
    """Prefill: all tokens at once."""
    return seconds_of(lambda: forward(model, ids))


@torch.inference_mode()
def seconds_to_go_on(model: Model, prompt: Tensor, steps: int) -> float:
    """Decode: so many tokens after a prompt, one by one, with the cache that the model keeps of what was before."""
    state = _read(model, prompt, None)

    def go_on() -> None:
        nonlocal state
        for _ in range(steps):
            state = _read(model, prompt[:, -1:], state)

    return seconds_of(go_on)


@torch.inference_mode()
def keeps_cache(model: Model) -> bool:
    """Whether a model goes on from a cache in the form that transformers has for all; an encoder does not go on."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        return task_of(model) == "causal" and _read(model, ids, _read(model, ids, None)) is not None
    except Exception:  # a family whose cache does not work has its own words for it
        return False


def _read(model: Model, ids: Tensor, state: object) -> object:
    return getattr(model(input_ids=ids, past_key_values=state, use_cache=True), "past_key_values", None)


@torch.no_grad()  # not inference_mode, in which attention does not come apart into what is counted
def operations(model: Model, ids: Tensor) -> int:
    """FLOPs of reading tokens: every product of matrices, the head's and attention's too, as torch counts them."""
    with _Products() as products:  # type: ignore[no-untyped-call]
        forward(model, ids)
    flops: int = products.flops
    return flops


class _Products(TorchDispatchMode):
    """FlopCounterMode without its tree of modules, which not every family's code survives."""

    flops: int = 0

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        own, count = _COUNTS.get(op.overloadpacket.__name__), _TORCHS.get(op.overloadpacket)
        if own is not None:
            self.flops += own(*args)
        elif count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=made)
        return made


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Both products, of [batch, heads, tokens, d]; whole, as torch counts them, though half of it may be masked."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _routed(rows: Tensor, experts: Tensor, *_: object) -> int:
    """Each row, sorted by its expert, times that expert's matrix: [rows, d], [experts, d, out]."""
    return 2 * rows.numel() * experts.shape[-1]


_TORCHS: Mapping[Any, Callable[..., int]] = flop_registry  # type: ignore[assignment]
# what torch's own table lacks
_COUNTS: Mapping[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_grouped_mm": _routed,
}


def bytes_read(model: nn.Module) -> int:
    """Bytes of the weights that a single token needs: all but the tables of which it looks up one row.

    Routed experts count all together, though a token needs some of them alone.
    """
    looked_up: set[int] = set()
    applied: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        (looked_up if isinstance(module, nn.Embedding) else applied).update(own)
    needed = (p for p in model.parameters() if id(p) in applied or id(p) not in looked_up)
    return sum(p.numel() * p.element_size() for p in needed)


@contextmanager
def in_dtype(model: Model, dtype: torch.dtype) -> Iterator[Model]:
    """A model in another dtype for the length of a `with`; afterwards its weights are back, bit for bit."""
    state = model.state_dict(keep_vars=True).values()
    stored = {id(t): (t, t.data) for t in state if t.is_floating_point() and t.dtype != dtype}
    for tensor, data in stored.values():
        tensor.data = data.to(dtype)
    try:
        yield model
    finally:
        for tensor, data in stored.values():
            tensor.data = data
