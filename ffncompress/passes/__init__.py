"""Passes: running a model over windows: activations into moments, losses, gradients, swaps, the refit in order.

Does not know budgets, plans' folders or checkpoints.
Public: `collect_moments`, `sequence_losses`, `measure_swaps`, `predict_losses`, `refit`, `heal_`, `prove`.
"""
