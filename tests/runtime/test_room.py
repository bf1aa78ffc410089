"""How much memory a run may take, as asked and as found, and what follows from it."""

from __future__ import annotations

import logging

import pytest
import torch

from ffncompress.budgets import parse_size
from ffncompress.errors import BudgetError
from ffncompress.runtime import room
from ffncompress.runtime.room import Memory, free_memory
from ffncompress.runtime.workers import Workers


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4e9), ("500MB", 5e8), ("1.5GiB", 1.5 * 2**30), (" 64k ", 64e3), ("2 TB", 2e12)]
)
def test_sizes_are_read(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "G", "-4G", "0G", "4GG", "four", "1e9G", "4 G B", "0.0001k"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(BudgetError, match="4G or 500MB"):
        parse_size(text)


def test_half_of_it_is_for_weights() -> None:
    room = Memory(1000)
    assert [room.streams(weights) for weights in (500, 501)] == [False, True]
    assert [Memory(1000, asked).streams(1) for asked in (True, False)] == [True, False]
    assert not Memory(1000, False).streams(10**9)


def test_a_streamed_model_reads_as_many_tokens_as_have_room() -> None:
    assert Memory(2**33).tokens(2**18) == 4096
    assert Memory(2**33).tokens(2**18 + 1) == 2048
    assert (Memory(1).tokens(2**18), Memory(2**50).tokens(1)) == room.STREAMED_TOKENS
    assert Memory(2**50).tokens(0) == room.STREAMED_TOKENS[1]


def test_streaming_by_itself_says_so_once(caplog) -> None:
    workers = Workers("cpu", "1M")
    with caplog.at_level(logging.INFO, "ffncompress"):
        assert [workers.streams(10**6, 1000), workers.streams(10**6, 1000), workers.streams(10, 10)] == [
            True,
            True,
            False,
        ]
    too_little = (
        "0 MB of memory are left beside the libraries, and a run needs up to {} MB: it may take more than it is given"
    )
    assert [record.getMessage() for record in caplog.records] == [
        "1 MB of weights, 0 MB of memory left: read from disk, layer by layer",
        too_little.format(240),
        too_little.format(550),
    ]
    assert workers.batch_tokens == room.BATCH_TOKENS


def test_the_smallest_control_group_counts(tmp_path, monkeypatch) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    for folder, limit, used in ((group, "max", 10), (group.parent, 1000, 300)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    left = [room._left_in(folder, "memory.max", "memory.current") for folder in (group, group.parent)]
    assert left == [[], [800]]
    monkeypatch.setattr(room, "_left_in_groups", lambda: [5, 7])
    assert free_memory(torch.device("cpu")) == 5


def test_what_a_process_holds_already_is_taken_off(monkeypatch) -> None:
    monkeypatch.setattr(room, "held_already", lambda: 300)
    assert Memory.of("1k", None, torch.device("cpu")).limit == 700
    monkeypatch.setattr(room, "held_already", lambda: 10**9)
    assert Memory.of("1k", None, torch.device("cpu")).limit == 250
    assert 0 < Memory.of(None, None, torch.device("cpu")).limit <= room.SHARE * free_memory(torch.device("cpu")) * 1.2
