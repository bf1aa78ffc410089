"""Recovery: pure algebra. Moments of (x, y) rows in, fitted maps and scores out.

Does not know models, files or the CLI: tensors in, tensors out. A new score is a function in `scores.py`.
"""

from ffncompress.recovery.linear import EXACT, LinearFit, Metric, errors_by_rank, feature_errors, fit_linear
from ffncompress.recovery.moments import Moments
from ffncompress.recovery.neurons import HybridFit, NeuronFit, fit_hybrid, fit_neurons, remove_neurons, solve_ridged
from ffncompress.recovery.scores import (
    condition_number,
    dynamic_range,
    effective_rank,
    feature_r2,
    participation_ratio,
    r2,
    r2_interval,
    spectrum_of,
)

__all__ = [
    "EXACT",
    "HybridFit",
    "LinearFit",
    "Metric",
    "Moments",
    "NeuronFit",
    "condition_number",
    "dynamic_range",
    "effective_rank",
    "errors_by_rank",
    "feature_errors",
    "feature_r2",
    "fit_hybrid",
    "fit_linear",
    "fit_neurons",
    "participation_ratio",
    "r2",
    "r2_interval",
    "remove_neurons",
    "solve_ridged",
    "spectrum_of",
]
