"""Is a profile the model's own? Over texts, over models, over training: what can be said of several profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.stats import pearsonr, spearmanr

from ffncompress.profiling.records import Agreement, Probe, ProbeSummary, Profile

SAME = 0.8  # rank correlation between texts from which a profile counts as kept


def distance(one: Profile, other: Profile) -> float:
    """Mean |difference of R2_lin|; of models of another depth, at the same relative depth."""
    depth = np.linspace(0, 1, max(len(one.blocks), len(other.blocks)))
    lines = [np.interp(depth, np.linspace(0, 1, len(p.r2)), p.r2) for p in (one, other)]
    return float(np.abs(lines[0] - lines[1]).mean())


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; 1 for two profiles that are each constant."""
    value = float(spearmanr(one, other).statistic) if len(one) > 1 else 1.0
    return 1.0 if np.isnan(value) else value


def agreements(profiles: Sequence[Profile]) -> list[Agreement]:
    """For each model with several texts, how alike its profiles are, and how unlike those of the other models."""
    models = dict.fromkeys(profile.model for profile in profiles)
    found = []
    for model in models:
        own = [p for p in profiles if p.model == model]
        others = [p for p in profiles if p.model != model]
        if len(own) < 2:
            continue
        matrix = [[rank_correlation(a.r2, b.r2) for b in own] for a in own]
        pairs = [(i, j) for i in range(len(own)) for j in range(i)]
        apart = fmean(distance(own[i], own[j]) for i, j in pairs)
        nearest = min((distance(a, b) for a in own for b in others), default=None)
        least = min(matrix[i][j] for i, j in pairs)
        same, nearer = least >= SAME, nearest is None or apart < nearest
        words = f"over {len(own)} texts its blocks' ranks correlate by at least {least:.2f}"
        words += f" ({'at least' if same else 'below'} {SAME}), and R2_lin moves by {apart:.3f} on average"
        if nearest is not None:
            words += f" (to the nearest other model {nearest:.3f})"
        conclusion = "the profile is the model's own" if same and nearer else "the profile depends on the text"
        found.append(
            Agreement(
                model=model, texts=[Path(p.text).name for p in own], spearman=matrix, distance=apart,
                nearest_other=nearest, own=same and nearer, verdict=f"{conclusion}: {words}",
            )
        )  # fmt: skip
    return found


def summarise_probes(probes: Sequence[Probe], r2: Sequence[float]) -> ProbeSummary:
    """Over blocks: how much the probe gains, and whether it gains where linearity fails."""
    gains = [probe.gain for probe in probes]
    correlation = p_value = None
    if len(gains) > 2 and max(gains) > min(gains) and max(r2) > min(r2):
        result = pearsonr(gains, [1 - value for value in r2])
        correlation, p_value = float(result.statistic), float(result.pvalue)
    return ProbeSummary(median_gain=median(gains), largest_gain=max(gains), correlation=correlation, p_value=p_value)


def learned(profiles: Sequence[Profile]) -> list[str]:
    """What fresh weights and earlier checkpoints say of a model, a sentence each."""
    found = []
    for trained in (p for p in profiles if not p.variant):
        for other in profiles:
            if other.variant and (other.model, other.text) == (trained.model, trained.text):
                what = "freshly initialised" if other.variant == "random" else f"at {other.variant}"
                ranges = [f"{min(p.r2):.3f} to {max(p.r2):.3f}" for p in (trained, other)]
                found.append(
                    f"{trained.name} on {Path(trained.text).name}: R2_lin {ranges[0]} as it is, {ranges[1]} {what}; "
                    f"mean difference {distance(trained, other):.3f}, "
                    f"rank correlation {rank_correlation(trained.r2, other.r2):+.2f}"
                )
    return found
