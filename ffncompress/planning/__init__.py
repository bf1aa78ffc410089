"""Planning: menus, budgets, the search, and the plan: which block becomes what, and why.

Does not know checkpoints or lm-eval. A new kind of budget is read in `budgets.py` and spent in `spending.py`.
Public: `make_plan`, `measure_model`, `solve`, `replan`, `save_plan`, `SearchSpace`, `allocate`.
"""
