"""The results of frontier.py as the Markdown tables of LOG.md and README.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from library.baselines import METHODS

TYR = "Týr"
MENU = ("neurons", "hybrid", "dense", "low-rank", "constant", "paper's rule")
PEERS = (TYR, *METHODS)
THOROUGH = "ours, thorough"
OURS = ("ours", THOROUGH, "ours, fitted on both", f"{THOROUGH}, fitted on both", "native", "native, unrounded")
ORIGINAL = "dense model"
NAMED = {ORIGINAL: "the original"}
TEXTS = {
    "smollm2": "WikiText-2 test / web.txt, {tokens:,} tokens each, context {context}",
    "stories15m": "thirds of stories.txt, {tokens:,} tokens, context {context}",
}
REPORTS = ("in domain", "web")
COLUMNS = {  # figure, which is best, digits
    "long": ("long", min, 2),
    "code.txt": ("code", min, 2),
    "books.txt": ("books", min, 2),
    "KL": ("kl", min, 3),
    "same token": ("same top", max, 3),
    "LAMBADA": ("lambada", max, 3),
    "ARC-easy": ("arc_easy", max, 3),
    "what it writes": ("generated", min, 1),
}
EXPLAINED = {
    "long": "long: perplexity of the whole report text, {long tokens:,} tokens at context {long context:,}.",
    "code": "code.txt, books.txt: as the report text's first tokens.",
    "kl": "KL: original to slimmed, nats per token; same token: how often both hold the same for likeliest.",
    "lambada": "LAMBADA, ARC-easy: accuracy on the first {examples:,} examples of each.",
    "generated": "what it writes: the original's perplexity of 16 continuations of 64 tokens, at temperature 1.",
}
Entry = dict[str, float]


def row_of_seed(seed: int) -> str:
    return "ours" if seed == 0 else f"ours, seed {seed}"


def for_the_log(results: dict[str, Entry], names: Sequence[str] = ("smollm2", "stories15m")) -> str:
    """Every method that was measured, and all that is known of it."""
    parts = [_Table(name, results).whole() for name in names if f"{name} | about" in results]
    return "\n".join(["<!-- frontier -->", "\n\n".join(parts), "<!-- /frontier -->"])


def for_the_readme(results: dict[str, Entry]) -> str:
    """Ours and the peers, the best at a quarter first."""
    table = _Table("smollm2", results) if "smollm2 | about" in results else _Table("stories15m", results)
    methods = [*(m for m in ("ours", THOROUGH) if m in table.methods()), *table.ranked(PEERS)]
    lines = [
        "<!-- frontier -->",
        *table.by_size(methods),
        "",
        f"The original: {table.original()} with {millions(table.about['parameters'])}.",
    ]
    wide = table.more([ORIGINAL, *methods])
    return "\n".join([*lines, *(["", *wide] if wide else []), "<!-- /frontier -->"])


class _Table:
    """What is known of one model."""

    def __init__(self, name: str, results: dict[str, Entry]) -> None:
        self.name, self.about = name, results[f"{name} | about"]
        keys = [key.split(" | ") for key in results]
        self.entries = {
            (method, share): results[f"{name} | {method} | {share}"]
            for own, method, *rest in keys
            if own == name and rest
            for share in rest
        }
        self.shares = sorted({share for method, share in self.entries if method != ORIGINAL})
        self.texts = [text for text in REPORTS if any(text in entry for entry in self.entries.values())]

    def methods(self) -> list[str]:
        measured = {method for method, _ in self.entries}
        return [method for method in (*OURS, *MENU, *PEERS) if method in measured]

    def ranked(self, methods: Sequence[str]) -> list[str]:
        """By in-domain perplexity at a quarter, or at the size nearest to it that was measured."""
        if not self.shares:
            return []
        at = min(self.shares, key=lambda share: abs(float(share) - 0.25))
        measured = [method for method in methods if (method, at) in self.entries]
        return sorted(measured, key=lambda method: self.figure(method, at, "in domain") or math.inf)

    def figure(self, method: str, share: str, name: str) -> float | None:
        return self.entries.get((method, "0.0000" if method == ORIGINAL else share), {}).get(name)

    def size(self, share: str) -> str:
        return millions(self.about["sizes"][share])

    def original(self) -> str:
        return " / ".join(perplexity(self.figure(ORIGINAL, "", text)) for text in self.texts)

    def by_size(self, methods: Sequence[str]) -> list[str]:
        """Rows of methods, columns of sizes; the best of each column and text is bold."""
        best = {
            (share, text): min((f for m in methods if (f := self.figure(m, share, text)) is not None), default=None)
            for share in self.shares
            for text in self.texts
        }

        def cell(method: str, share: str) -> str:
            found = [(self.figure(method, share, text), best[share, text]) for text in self.texts]
            return " / ".join(bold(perplexity(value), value is not None and value == top) for value, top in found)

        rows = [[method, *(cell(method, share) for share in self.shares)] for method in methods]
        return markdown(["method", *map(self.size, self.shares)], rows)

    def more(self, methods: Sequence[str]) -> list[str]:
        """Rows of methods, columns of what else was measured: a table for each size at which it was."""
        lines: list[str] = []
        for share in self.shares:
            columns = [self.column(each, share, methods) for each in COLUMNS]
            there = [cells for cells in columns if any(cell != "-" for m, cell in cells.items() if m != ORIGINAL)]
            rows = [[NAMED.get(method, method), *(cells[method] for cells in there)] for method in methods]
            rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
            if rows:
                headings = [each for each, cells in zip(COLUMNS, columns, strict=True) if cells in there]
                lines += [*([""] if lines else []), *markdown([f"at {self.size(share)}", *headings], rows)]
        return lines

    def column(self, heading: str, share: str, methods: Sequence[str]) -> dict[str, str]:
        """A cell for each method; the best of the slimmed is bold."""
        name, best_of, digits = COLUMNS[heading]
        values = {m: v for m in methods if (v := self.figure(m, share, name)) is not None}
        best = best_of((v for m, v in values.items() if m != ORIGINAL), default=None)
        cells = dict.fromkeys(methods, "-")
        for method, value in values.items():
            error = self.figure(method, share, f"{name} error")
            off = "" if error is None or value >= 1000 else f" ± {error:.{digits}f}"
            shown = (f"{value:.{digits}f}" if value < 1000 else f"{value:.0e}") + off
            cells[method] = bold(shown, method != ORIGINAL and value == best)
        return cells

    def whole(self) -> str:
        methods = self.methods()
        lines = [f"#### {self.name}, {TEXTS[self.name].format(**self.about)}", "", *self.by_size(methods), ""]
        whole = self.about["parameters"]
        lines.append(f"- the original, {whole:,} parameters ({millions(whole)}): {self.original()}")
        lines += self.seeds()
        for (method, share), entry in self.entries.items():
            if "time ratio" in entry and "seed" not in method:
                ratios = f"time {entry['time ratio']:.1f}, memory {entry['memory ratio']:.2f} of a forward pass's"
                lines.append(f"- {method} at {self.size(share)}: {ratios}")
            if "seconds" in entry:
                lines.append(f"- {method} at {self.size(share)}: {entry['seconds']:,.0f} s")
        if wide := self.more([ORIGINAL, *methods]):
            lines += ["", f"#### {self.name}, more of each model", "", self.explained(), "", *wide]
        return "\n".join(lines)

    def explained(self) -> str:
        """What the columns that were measured are."""
        known = {name: value for entry in self.entries.values() for name, value in entry.items()} | self.about
        said = ["- " + words.format(**known) for figure, words in EXPLAINED.items() if figure in known]
        return "\n".join([*said, "- after ±: one standard error; bold: the best of the slimmed."])

    def seeds(self) -> list[str]:
        """Ours with several seeds: mean, and standard deviation over seeds."""
        rows = [method for method, _ in self.entries if method == "ours" or method.startswith("ours, seed ")]
        lines = []
        for share in self.shares:
            spreads = []
            for text in self.texts:
                values = [v for method in dict.fromkeys(rows) if (v := self.figure(method, share, text)) is not None]
                if len(values) > 1:
                    spreads.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
            if spreads:
                lines.append(f"- ours at {self.size(share)}, {len(values)} seeds: {' / '.join(spreads)}")
        return lines


def markdown(heading: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]


def millions(parameters: float) -> str:
    return f"{parameters / 1e6:.1f} M"


def perplexity(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0e}"


def bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text
