"""Replacement: what can take an FFN's place, how it is fitted from a block's moments, and the module that it becomes.

Does not know text, budgets or files. A new kind of replacement is a class in `modules.py` and a fit in `fitting.py`.
Public: `BlockMoments`, `Fitted`, `fit_block`, `build_replacement`, `build`, `parameters`, `matrix_weights`.
"""
