"""Where memory runs out, the work is done in halves: with errors made up, and with a real limit."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from conftest import tiny_model
from fresh_process import run_python
from torch import Tensor

from ffncompress.errors import FfncompressError
from ffncompress.gate.agreement import agreement
from ffncompress.gate.beside import measure_speed
from ffncompress.gate.lm import make_lm
from ffncompress.models import find_blocks
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.losses import batch_losses, sequence_losses
from ffncompress.passes.refit import refit
from ffncompress.passes.swaps import measure_errors, measure_swaps
from ffncompress.records.plan import Shape
from ffncompress.recovery import fit_linear
from ffncompress.runtime.memory import AddedOnce, Halving, ran_out, shrinking
from ffncompress.runtime.progress import silent
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import EvalSettings

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def hungry(model: Any, rows: int) -> list[int]:
    """Make a model run out of memory above so many rows; returns the sizes that it is asked to read from now on."""
    asked: list[int] = []

    def refuse(_model: Any, args: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        size = len(args[0] if args else given["input_ids"])
        asked.append(size)
        if size > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return asked


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError(ALLOCATOR), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.1 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, is_memory: bool) -> None:
    assert ran_out(error) is is_memory


def test_a_batch_is_halved_and_what_fitted_is_remembered() -> None:
    tried: list[int] = []

    def work(at: list[int], rows: Tensor) -> list[tuple[int, int]]:
        tried.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError
        return list(zip(at, rows.tolist(), strict=True))

    halving = Halving()
    for count in (11, 7):
        found = halving(work, list(range(count)), torch.arange(count) * 2)
        assert [pair for part in found for pair in part] == [(i, 2 * i) for i in range(count)]
    assert tried == [11, 6, 3, 3, 3, 2, 3, 3, 1]


def test_sums_count_every_row_once_when_they_are_added_to_last() -> None:
    total = torch.zeros(2)

    def work(rows: Tensor) -> None:
        part = rows.sum(0)  # what asks for memory, and may fail
        if len(rows) > 2:
            raise MemoryError
        total.add_(part)

    rows = torch.arange(18.0).view(9, 2)
    Halving()(work, rows)
    assert torch.equal(total, rows.sum(0))


def test_a_single_window_that_does_not_fit_names_the_way_out() -> None:
    def work(_size: object) -> None:
        raise RuntimeError(ALLOCATOR)

    with pytest.raises(FfncompressError, match=r"--seq-len or --context.*--dtype bfloat16.*--device"):
        Halving()(work, torch.zeros(2, 8))
    with pytest.raises(FfncompressError, match="single window"):
        shrinking(work, 1)


def test_another_error_is_left_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        Halving()(lambda rows: 1 // 0, [1, 2])
    with pytest.raises(RuntimeError, match="shapes"):
        shrinking(lambda _: torch.ones(2, 3) @ torch.ones(2, 3), 4)


@pytest.mark.slow
def test_losses_of_a_model_that_runs_out_of_memory() -> None:
    model = tiny_model("gpt2")
    windows = torch.randint(0, 3072, (9, 32), generator=torch.manual_seed(0))
    with torch.inference_mode():
        expected = batch_losses(model, windows)
        asked = hungry(model, 2)
        assert torch.allclose(batch_losses(model, windows), expected)
        asked.clear()
        assert torch.allclose(sequence_losses(model, windows, Run(Workers("cpu"))), expected)
    assert asked == [9, 5, 3, 2, 2, 2, 2, 1]


def starved(model: Any, path: str, tokens: int) -> None:
    """Make one module of a model run out of memory above so many tokens: what is before it has seen the whole batch."""

    def refuse(_module: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].flatten(0, -2).shape[0] > tokens:
            raise torch.OutOfMemoryError

    model.get_submodule(path).register_forward_pre_hook(refuse)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_moments_swaps_and_refits_of_a_model_that_runs_out_of_memory(family: str) -> None:
    model, run = tiny_model(family).requires_grad_(False), Run(Workers("cpu"))
    blocks = find_blocks(model)
    windows = torch.randint(3, 3000, (9, 32), generator=torch.manual_seed(0))
    shapes = {i: Shape("neurons", block.d_inner // 2) for i, block in enumerate(blocks)}

    def measured() -> list[Tensor]:
        moments = collect_moments(model, blocks, windows, windows[:3], run)
        made = refit(model, blocks, shapes, windows, windows[:3], run)
        errors = measure_errors(model, blocks, [fit_linear(m.fit, m.held_out) for m in moments], windows, run)
        return [
            *(tensor for each in moments for tensor in each.named_tensors().values()),
            *measure_swaps(model, blocks, [*made.values()], windows, run),
            *(tensor for module in made.values() for tensor in module.state_dict().values()),
            *(each.squared_errors for each in errors),
        ]

    expected = measured()
    starved(model, blocks[1].out_path, 100)
    starved(model, blocks[-1].out_path, 40)
    for found, whole in zip(measured(), expected, strict=True):
        assert (found - whole).abs().max() <= 1e-4 * whole.abs().max()


def test_sums_that_broke_off_in_the_middle_are_not_believed() -> None:
    once, total = AddedOnce(2), torch.zeros(())
    once.begin()
    with once.part(0, 4):
        with pytest.raises(MemoryError), once.adding(0, 8, total):
            raise MemoryError  # nothing was added: it can be done again
        with once.adding(0, 8, total) as new:
            assert new == slice(0, None)
    with once.part(0, 2), once.adding(0, 4, total) as new:  # again, in halves: this place has seen them
        assert new == slice(4, None)
    with once.part(2, 2), once.adding(1, 4, total) as new:
        assert new == slice(0, None)

    def break_off() -> None:
        with once.adding(1, 4, total):
            total.add_(1)
            raise MemoryError

    with pytest.raises(FfncompressError, match="while sums were added to"):
        break_off()


def test_predictions_are_compared_in_halves() -> None:
    base, slimmed = tiny_model("gpt2"), tiny_model("llama")
    ids = torch.randint(0, 3072, (6, 24), generator=torch.manual_seed(0)).tolist()
    pairs = [(row[:5], row[5:]) for row in ids]
    expected = agreement(base, slimmed, pairs, 8 * 24, silent, "")
    asked = hungry(slimmed, 2)
    found = agreement(base, slimmed, pairs, 8 * 24, silent, "")
    assert asked == [6, 3, 2, 2, 2]
    assert expected is not None
    assert found is not None
    assert found.same_top == expected.same_top
    assert found.kl == pytest.approx(expected.kl)


def test_speed_is_measured_on_a_batch_that_fits_both() -> None:
    base, slimmed = tiny_model("gpt2"), tiny_model("gpt2")
    asked = hungry(slimmed, 3)
    speed = measure_speed(base, slimmed, 16, EvalSettings(batch_size=8, repeats=1), silent)
    assert speed.batch == (2, 16)
    assert asked[asked.index(8) :][:3] == [8, 4, 2]  # the first pass counts products, on one row
    assert set(asked[asked.index(8) + 3 :]) <= {1, 2}


def test_lm_eval_goes_on_with_smaller_batches(tokenizer) -> None:
    model = tiny_model("gpt2")
    requests = [(None, [5, 6, 7 + i], [8 + i, 9]) for i in range(7)]
    expected = make_lm(model, tokenizer, 4)._loglikelihood_tokens(requests, disable_tqdm=True)
    asked = hungry(model, 2)
    found = make_lm(model, tokenizer, 4)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert asked == [4, 2, 2, 2, 1]
    assert [right for _, right in found] == [right for _, right in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected])


LIMITED = """
import resource, torch
from ffncompress.runtime.memory import Halving
def used():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
asked = []
def work(rows):
    asked.append(len(rows))
    wide = rows[:, :, None].expand(-1, -1, 2**20).contiguous()  # 8 MiB for each row
    return wide.sum((1, 2))
rows = torch.ones(32, 2)
work(rows[:1])  # what torch needs once
asked.clear()
limit = used() + 100 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = torch.cat(Halving()(work, rows))
assert torch.equal(found, torch.full((32,), 2.0**21)), found
print(asked)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts private memory on Linux alone")
def test_a_real_limit() -> None:
    """Of 256 MiB that the whole batch needs, 100 are there: eight rows fit."""
    done = run_python(LIMITED, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[32, 16, 8, 8, 8, 8]"
