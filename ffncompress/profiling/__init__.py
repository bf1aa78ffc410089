"""Profiling: a study of how linear FFNs are: its stages, its records, its figures, its page.

Does not know budgets or checkpoints.
Public: `write_report`, `make_study`, `Study`, `Profile`.
"""
