"""One option for every block so that the predicted loss is least under a budget: exact for costs that add.

Choosing one of several options per block under caps on their sums is a multiple-choice knapsack; HiGHS, through scipy,
solves it to optimality in well under a second for models of any depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ffncompress.errors import BudgetError

_WORST = 1e4  # a loss that stands for "never": finite, so that the solver's arithmetic stays sound


@dataclass(frozen=True)
class Entry:
    """What an option of a block takes and costs."""

    parameters: int
    loss: float
    seconds: float = 0.0


def allocate(
    menus: Sequence[Sequence[Entry]], *, parameters: float | None = None, seconds: float | None = None
) -> list[int]:
    """The index of the chosen entry of each block.

    Args:
        menus: the entries of each block; to keep a block is an entry like any other.
        parameters: the most that all chosen entries may have together.
        seconds: the most that they may take together.

    Raises:
        BudgetError: not even the smallest, or the fastest, entries are within the cap.
    """
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_matrix

    entries = [entry for menu in menus for entry in menu]
    block_of = np.repeat(np.arange(len(menus)), [len(menu) for menu in menus])
    ones = np.ones(len(entries))
    one_each = csr_matrix((ones, (block_of, np.arange(len(entries)))), shape=(len(menus), len(entries)))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for name, cap in (("parameters", parameters), ("seconds", seconds)):
        if cap is None:
            continue
        amounts = np.array([getattr(entry, name) for entry in entries], dtype=float)
        least = sum(min(getattr(entry, name) for entry in menu) for menu in menus)
        if least > cap:
            raise BudgetError(f"the FFNs would have to get by with {cap:,.4g} {name}; the menu's least is {least:,.4g}")
        constraints.append(LinearConstraint(csr_matrix(amounts / cap), -np.inf, 1))  # of order one, as solvers like it
    losses = np.array([min(entry.loss, _WORST) if math.isfinite(entry.loss) else _WORST for entry in entries])
    solved = milp(
        losses,
        constraints=constraints,
        integrality=ones,
        bounds=(0, 1),
        options={"mip_rel_gap": 1e-6, "time_limit": 60},
    )
    if solved.x is None:  # both caps can be met, each alone
        raise BudgetError("no choice of options meets the size and the speed together; relax one of them")
    starts = np.cumsum([0, *(len(menu) for menu in menus)])
    return [int(np.argmax(solved.x[a:b])) for a, b in pairwise(starts)]
