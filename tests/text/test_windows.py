"""Windows of unequal length: their algebra, how they are cut and batched, and means over tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncompress.modeling_ffncompress import LinearFFN
from ffncompress.models import find_blocks
from ffncompress.passes.activations import own_batches
from ffncompress.passes.calibration import collect_moments
from ffncompress.passes.forecast import loss_metrics
from ffncompress.passes.losses import mean_and_error, perplexity, sequence_losses
from ffncompress.passes.swaps import measure_swaps
from ffncompress.profiling.probing import captured
from ffncompress.runtime.room import BATCH_TOKENS
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.text.sources import Text
from ffncompress.text.windows import SHORTEST, STEP, Windows, document_windows

LENGTHS = [16, 40, 24, 40, 16, 16, 64, 24]


def uneven(lengths: list[int] = LENGTHS, seed: int = 0) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    return Windows(torch.randint(1, 3000, (length,), generator=generator) for length in lengths)


def one_of(count: int, index: int) -> Workers:
    """One of several processes, as far as dealing out goes."""
    workers = Workers("cpu")
    workers._accelerator = SimpleNamespace(num_processes=count, process_index=index)
    return workers


def test_their_algebra() -> None:
    windows = uneven()
    assert len(windows) == 8
    assert windows.numel() == sum(LENGTHS)
    assert windows.longest == 64
    assert windows.scored.tolist() == [length - 1 for length in LENGTHS]
    assert windows[1::2].lengths.tolist() == LENGTHS[1::2]
    assert torch.equal(windows[6], windows[[6]][0])
    assert torch.equal(windows[torch.tensor([3])][0], windows[3])
    both = Windows.cat([windows[:3], windows[3:]])
    assert all(torch.equal(a, b) for a, b in zip(both, windows, strict=True))
    assert windows.up_to(60).lengths.tolist() == [16, 40]
    assert len(windows.up_to(1)) == 1
    assert len(windows.up_to(1, least=2)) == 2
    assert Windows().numel() == Windows().longest == len(Windows().up_to(9)) == 0
    matrix = torch.arange(12).view(3, 4)
    assert torch.equal(torch.stack(list(Windows.of(matrix))), matrix)
    values = torch.arange(windows.numel(), dtype=torch.float64)[:, None]
    for at, part in windows.grouped(values):
        for i, own in zip(at.tolist(), part, strict=True):
            start = sum(LENGTHS[:i])
            assert own.flatten().tolist() == list(range(start, start + LENGTHS[i]))


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.sampled_from([16, 24, 40, 512, 2000]), min_size=1, max_size=60), count=st.integers(1, 3))
def test_batches_are_of_one_length_and_the_same_for_any_number_of_processes(lengths: list[int], count: int) -> None:
    windows = uneven(lengths)
    alone = own_batches(windows, one_of(1, 0))
    dealt = [own_batches(windows, one_of(count, i)) for i in range(count)]
    shared = [dealt[i % count][i // count] for i in range(len(alone))]
    assert sum(map(len, dealt)) == len(alone)
    for (at, batch), (same_at, same) in zip(alone, shared, strict=True):
        assert torch.equal(at, same_at)
        assert torch.equal(batch, same)
        assert batch.numel() <= max(BATCH_TOKENS, batch.shape[1])
        for i, row in zip(at.tolist(), batch, strict=True):
            assert torch.equal(row, windows[i])
    assert sorted(i for at, _ in alone for i in at.tolist()) == list(range(len(windows)))


def test_windows_of_one_length_are_batched_in_their_order() -> None:
    matrix = torch.arange(100 * 64).view(100, 64)
    batches = own_batches(matrix, one_of(1, 0))
    assert torch.equal(torch.cat([batch for _, batch in batches]), matrix)
    assert {len(batch) for _, batch in batches[:-1]} == {BATCH_TOKENS // 64}


@torch.inference_mode()
def test_perplexity_is_over_tokens() -> None:
    model, run, windows = tiny_model("gpt2"), Run(Workers("cpu")), uneven()
    losses = sequence_losses(model, windows, run)
    total, count = 0.0, 0
    for i, row in enumerate(windows):
        own = F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum").item()
        assert losses[i].item() == pytest.approx(own / (len(row) - 1), rel=1e-5)
        total, count = total + own, count + len(row) - 1
    assert perplexity(losses, windows.scored) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_the_error_is_that_of_a_mean_over_tokens() -> None:
    torch.manual_seed(0)
    values, same = torch.randn(20, dtype=torch.float64), torch.full((20,), 7.0, dtype=torch.float64)
    assert mean_and_error(values, same) == mean_and_error(values)
    assert mean_and_error(values)[1] == pytest.approx((values.std() / 20**0.5).item())
    assert mean_and_error(values[:1]) == (values[0].item(), 0.0)
    tokens = torch.randint(1, 40, (4000, 60)).double()
    drawn = 0.3 + torch.randn(4000, 60, dtype=torch.float64) / tokens.sqrt()
    found = [mean_and_error(*each) for each in zip(drawn, tokens, strict=True)]
    spread = torch.tensor([mean for mean, _ in found]).std().item()
    assert sum(error for _, error in found) / len(found) == pytest.approx(spread, rel=0.1)


@pytest.mark.slow
def test_what_passes_over_them_equals_window_by_window() -> None:
    """Moments, gradients, swaps and captured rows of uneven windows, against each window run by itself."""
    model, run, windows = tiny_model("llama"), Run(Workers("cpu")), uneven()
    blocks = find_blocks(model)
    moments = collect_moments(model, blocks, windows, windows, run)[1].fit
    alone = [collect_moments(model, blocks, windows[i][None], windows[i][None], run)[1].fit for i in range(8)]
    for ours, *others in zip(moments.tensors(), *(each.tensors() for each in alone), strict=True):
        torch.testing.assert_close(ours, sum(others), rtol=1e-4, atol=1e-4)
    assert loss_metrics(model, blocks, windows, run)[1].isfinite().all()

    torch.manual_seed(1)
    variants = [LinearFFN(b.layout.out, b.d_in, b.d_out) for b in blocks]
    rises = measure_swaps(model, blocks, variants, windows, run)
    by_itself = [measure_swaps(model, blocks, variants, windows[i][None], run)[2] for i in range(8)]
    torch.testing.assert_close(rises[2], torch.cat(by_itself), rtol=1e-4, atol=1e-4)

    ((_, [_, (x, _), _]),) = captured(model, blocks, windows, run)
    for i, own in enumerate(x.split(LENGTHS)):
        ((_, [_, (expected, _), _]),) = captured(model, blocks, windows[i : i + 1], run)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_no_window_runs_into_the_next_document(tokenizer) -> None:
    documents = tuple(f"Document {i} begins. " + f"It goes on about {i} things. " * (i % 9) for i in range(60))
    text = Text("t", "all", documents)
    ids = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in documents]
    expected = []
    for own in ids:
        expected += [own[at : at + 32] for at in range(0, len(own) - 31, 32)]
        tail = own[len(own) // 32 * 32 :]
        expected += [tail[: len(tail) // STEP * STEP]] * (len(tail) >= SHORTEST)
    found = document_windows(text, tokenizer, length=32, seed=None)
    assert [row.tolist() for row in found] == expected
    assert 1 < len(found.lengths.unique()) <= 3
    drawn = document_windows(text, tokenizer, length=32, tokens=400, seed=3)
    assert 400 - 32 < drawn.numel() <= 400
    assert {tuple(row.tolist()) for row in drawn} < {tuple(row) for row in expected}
    again = document_windows(text, tokenizer, length=32, tokens=400, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_a_long_document_is_drawn_from_all_over(tokenizer) -> None:
    long = "".join(f"line {i} of a document that is longer than all that is asked of it\n" for i in range(4000))
    drawn = document_windows(Text("t", "all", (long, "short")), tokenizer, length=64, tokens=64 * 40, seed=0)
    told = tokenizer.decode(torch.cat(list(drawn)))
    assert not told.startswith("line 0 of")
    assert 64 * 39 < drawn.numel() <= 64 * 40


def test_texts_are_mixed_in_turns() -> None:
    few, many = (Windows(torch.full((each, 4), value).unbind()) for each, value in ((2, 7), (6, 9)))
    mixed = Windows.mixed([many, few])
    assert sorted(int(row[0]) for row in mixed[:4]) == [7, 9, 9, 9]
    assert Windows.mixed([many]).rows == many.rows
