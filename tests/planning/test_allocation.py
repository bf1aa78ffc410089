"""The choice under a budget against trying everything."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncompress.errors import BudgetError
from ffncompress.planning.allocation import Entry, allocate

ENTRY = st.builds(
    Entry, parameters=st.integers(1, 50), loss=st.floats(0, 5), seconds=st.floats(0.01, 2, allow_subnormal=False)
)
MENUS = st.lists(st.lists(ENTRY, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(menus=MENUS, share=st.floats(0, 1), fast=st.booleans())
def test_it_is_the_best_of_all_choices(menus: list[list[Entry]], share: float, fast: bool) -> None:
    def total(choice: tuple[Entry, ...], name: str) -> float:
        return sum(getattr(entry, name) for entry in choice)

    every = list(product(*menus))
    least, most = (f(total(c, "parameters") for c in every) for f in (min, max))
    size = least + share * (most - least)
    seconds = max(total(c, "seconds") for c in every if total(c, "parameters") <= size) if fast else None
    picked = [menu[at] for menu, at in zip(menus, allocate(menus, parameters=size, seconds=seconds), strict=True)]
    assert total(tuple(picked), "parameters") <= size + 1e-6
    best = min(
        total(c, "loss")
        for c in every
        if total(c, "parameters") <= size and (seconds is None or total(c, "seconds") <= seconds)
    )
    assert total(tuple(picked), "loss") == pytest.approx(best, abs=1e-4)


def test_what_cannot_be_met_says_so() -> None:
    menus = [[Entry(10, 0.0, 1.0), Entry(5, 1.0, 2.0)]] * 2
    with pytest.raises(BudgetError, match="the menu's least is 10"):
        allocate(menus, parameters=9)
    with pytest.raises(BudgetError, match="size and the speed together"):
        allocate(menus, parameters=10, seconds=2)


def test_a_loss_without_bounds_is_never_taken_freely() -> None:
    menus = [[Entry(10, 0.0), Entry(1, float("inf")), Entry(2, 3.0)], [Entry(10, 0.0), Entry(2, float("nan"))]]
    assert allocate(menus, parameters=12) == [2, 0]
