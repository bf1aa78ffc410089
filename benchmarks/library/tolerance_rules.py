"""Candidate rules for what a plan may promise, judged by what `tolerances.py` measured."""

import math
from collections.abc import Callable

import numpy as np
from scipy.special import stdtrit

from ffncompress.records.tolerance import CHANCE, Rise, Tolerance, tolerance_of

LEARNED_ON = ("python-docs", "web", "wiki.train")  # with the embedded model; the rest checks
CONTEXT = 256  # of both models

Entry = dict
Array = np.ndarray


def rises(entry: Entry, name: str) -> Array:
    return np.array(entry["rises"][name])


def old(entry: Entry) -> Array:
    """The windows that the old promise was measured on."""
    return rises(entry, "near")[: entry["verify"]]


def unread(entry: Entry) -> Array:
    """Spread windows that the plan had not read."""
    return rises(entry, "spread")[np.array(entry["read"]["spread"]) < 0.3]


def student(windows: Callable[[Entry], Array], *, gate: bool = True, texts: float = 0.0) -> Callable[[Entry], float]:
    """A limit in nats: the mean, and Student's margin on as much of the variance as the rule knows of."""

    def limit(entry: Entry) -> float:
        found, count = windows(entry), len(entry["rises"]["report"])
        share = 1 / len(found) + gate / count + texts
        return float(found.mean() + stdtrit(len(found) - 1, 1 - CHANCE) * found.std(ddof=1) * math.sqrt(share))

    return limit


def proportional(windows: Callable[[Entry], Array], share: float) -> Callable[[Entry], float]:
    """Instead of the windows' spread, another text moves the rise by a share of itself."""

    def limit(entry: Entry) -> float:
        found, count = windows(entry), len(entry["rises"]["report"])
        sampled = found.var(ddof=1) * (1 / len(found) + 1 / count)
        total = sampled + (share * found.mean()) ** 2
        freedom = (len(found) - 1) * (total / sampled) ** 2
        return float(found.mean() + stdtrit(min(freedom, 1e6), 1 - CHANCE) * math.sqrt(total))

    return limit


def three_sigma(entry: Entry) -> float:
    """As it was: three standard errors in perplexity."""
    found = old(entry)
    rise = math.expm1(found.mean()) + 3 * math.exp(found.mean()) * found.std(ddof=1) / len(found) ** 0.5
    return math.log1p(round(max(rise, 0.001), 3))


def shipped(entry: Entry) -> Tolerance:
    """The package's own promise, from the windows that it takes."""
    found = unread(entry)
    return tolerance_of(Rise(float(found.mean()), float(found.std(ddof=1)) / len(found) ** 0.5, len(found)), CONTEXT)


def misses(
    entries: list[Entry],
    windows: Callable[[Entry], Array],
    against: Callable[[Entry], Array] = lambda entry: rises(entry, "report"),
) -> Array:
    """By how many standard errors of the difference the report text's rise, or another's, is above the plan's."""
    found = []
    for entry in entries:
        plan, report = windows(entry), against(entry)
        error = math.sqrt(plan.var(ddof=1) / len(plan) + report.var(ddof=1) / len(report))
        found.append((report.mean() - plan.mean()) / error)
    return np.array(found)


def within_one_text(entries: list[Entry], draws: int = 200, count: int = 8) -> dict[str, float]:
    """How often three standard errors of a few windows miss the mean of the same text's other windows, upwards."""
    chance = np.random.default_rng(0)
    broken = {"apart": 0, "neighbours": 0}
    long = [found for entry in entries if len(found := rises(entry, "report")) >= 6 * count]
    for found in long:
        for _ in range(draws):
            start = chance.integers(len(found) - count)
            orders = {"apart": chance.permutation(len(found)), "neighbours": np.roll(np.arange(len(found)), -start)}
            for name, order in orders.items():
                few, rest = found[order[:count]], found[order[count:]]
                broken[name] += rest.mean() > few.mean() + 3 * few.std(ddof=1) / count**0.5
    return {name: times / (draws * len(long)) for name, times in broken.items()}


def text_share(entries: list[Entry], windows: Callable[[Entry], Array]) -> float:
    """The variance of the difference of two parts of a text, less both errors, over the variance of windows."""
    excess = []
    for entry in entries:
        plan, report = windows(entry), rises(entry, "report")
        pooled = (plan.var(ddof=1) + report.var(ddof=1)) / 2
        sampled = plan.var(ddof=1) / len(plan) + report.var(ddof=1) / len(report)
        excess.append(((report.mean() - plan.mean()) ** 2 - sampled) / pooled)
    return float(np.mean(excess))


def rule_table(entries: dict[str, Entry], rules: dict[str, Callable[[Entry], float]]) -> str:
    lines = ["| rule | broken | of | by chance | texts with one broken | median limit / rise | median margin |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rule in rules.items():
        limits = {key: max(rule(entry), math.log1p(0.001)) for key, entry in entries.items()}
        report = {key: float(rises(entry, "report").mean()) for key, entry in entries.items()}
        broken = [key for key in entries if report[key] > limits[key]]
        where = {tuple(key.split(" | ")[:2]) for key in broken}
        grown = [k for k in entries if report[k] > 0.005]  # below it a ratio says nothing
        ratio = np.median([math.expm1(limits[k]) / math.expm1(report[k]) for k in grown])
        margin = np.median([math.expm1(limits[k]) - math.expm1(report[k]) for k in entries])
        lines.append(
            f"| {name} | {len(broken)} | {len(entries)} | {CHANCE * len(entries):.1f} | {len(where)} | {ratio:.2f} | "
            f"{100 * margin:.1f} % |"
        )
    return "\n".join(lines)


def causes(entries: list[Entry]) -> str:
    """Each suspect by itself."""
    lines = []
    sources = {
        "the old windows": old, "32 neighbouring": lambda e: rises(e, "near"),
        "8 spread": lambda e: rises(e, "spread")[::4], "32 spread": lambda e: rises(e, "spread"), "unread": unread,
    }  # fmt: skip
    for name, windows in sources.items():
        z = misses(entries, windows)
        mean = np.mean([windows(e).mean() for e in entries])
        lines.append(
            f"{name}: mean rise {mean:.4f} nats; the report text's is above it by {z.mean():+.2f} standard errors on "
            f"average, spread {z.std():.2f}; above 2: {(z > 2).sum()}, above 3: {(z > 3).sum()} of {len(z)}"
        )
    for name, share in within_one_text(entries).items():
        lines.append(
            f"three standard errors of 8 windows, {name}, broken by the same text's others: {100 * share:.1f} %"
        )
    chosen = misses(entries, old, unread)
    lines.append(f"unread windows above the old ones: {chosen.mean():+.2f} standard errors, spread {chosen.std():.2f}")
    blocks = []
    for entry in entries:
        report = rises(entry, "report")
        means = report[: len(report) // 8 * 8].reshape(-1, 8).mean(1)
        if len(means) > 1:
            blocks.append(means.var(ddof=1) * 8 / report.var(ddof=1))
    lines.append(f"variance of the mean of 8 neighbouring windows over that of 8 apart: {np.mean(blocks):.2f}")
    lines.append(f"rise of the report text: {np.mean([rises(e, 'report').mean() for e in entries]):.4f} nats")
    lines.append(
        f"variance of the difference of two parts of a text over that of windows: {text_share(entries, unread):.3f}"
    )
    return "\n".join(lines)


def tables(results: dict[str, Entry]) -> str:
    """Everything: the suspects, then the rules, on the texts that they come from and on the others."""
    learned = {k: e for k, e in results.items() if k.startswith("demo") and k.split(" | ")[1].startswith(LEARNED_ON)}
    others = {k: e for k, e in results.items() if k not in learned}
    texts = text_share(list(learned.values()), unread) if learned else 0.1
    rules = {
        "three standard errors, old windows": three_sigma,
        "Student, old windows": student(old, gate=False),
        "Student and the gate's error, old windows": student(old),
        "the same, 8 spread windows": student(lambda e: rises(e, "spread")[::4]),
        "the same, unread spread windows": student(unread),
        "and a share of the rise (0.25)": proportional(unread, 0.25),
        f"and {texts:.3f} of the windows' variance": student(unread, texts=texts),
        "and 0.1 of the windows' variance": student(unread, texts=0.1),
        "as ffncompress has it": lambda entry: math.log1p(shipped(entry).limit.value),
    }
    parts = []
    for title, entries in (("texts that the rule was made from", learned), ("other texts and models", others)):
        if entries:
            wide = sum(shipped(entry).wide for entry in entries.values())
            parts.append(
                f"## {title}\n{causes(list(entries.values()))}\n\n{rule_table(entries, rules)}\n\nwide: {wide}"
            )
    return "\n\n".join(parts)
