"""A study for other tools and notebooks: one row for each block of each profile, with all that its numbers are of."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncompress.notebooks import Bar, table_html

if TYPE_CHECKING:
    from ffncompress.profiling.records import Profile, Study

_WHERE = ("model", "variant", "text", "fit_tokens", "held_out_tokens", "context", "seed", "base_perplexity")


def rows_of(study: Study) -> list[dict[str, Any]]:
    """Flat rows; what was not asked for is empty. The curve over ranks is in profile.json alone."""
    rows = []
    for profile in study.profiles:
        where = {name: getattr(profile, name) for name in _WHERE}
        for block in profile.blocks:
            scores = block.scores.model_dump(exclude={"r2_by_rank", "r2_quantiles"})
            quantiles = {f"r2_feature_{name}": value for name, value in block.scores.r2_quantiles.items()}
            swap, probe = block.swap, block.probe
            rows.append({
                **where,
                "block": block.index,
                "path": block.path,
                "parameters": block.parameters,
                "regime": block.regime,
                **scores,
                **quantiles,
                "swap_delta": swap.delta if swap else None,
                "swap_delta_error": swap.error if swap else None,
                "probe_gain": probe.gain if probe else None,
                "probe_gain_error": probe.gain_error if probe else None,
            })  # fmt: skip
    return rows


def study_html(study: Study) -> str:
    """What a notebook shows: a table for each profile, then what they say together."""
    verdicts = [agreement.verdict for agreement in study.agreements] + [feed.verdict for feed in study.cross_feeds]
    said = table_html("", (), (), (*verdicts, *study.learned))
    return "".join(map(_profile_html, study.profiles)) + said


def _profile_html(profile: Profile) -> str:
    swapped = any(block.swap for block in profile.blocks)
    rows: list[Sequence[str | Bar]] = [
        (
            str(block.index),
            Bar(block.scores.r2_lin),
            f"{block.scores.r2_median_feature:.2f}",
            *([f"{block.swap.delta:+.2f}" if block.swap else ""] if swapped else []),
            block.regime,
        )
        for block in profile.blocks
    ]
    columns = ("block", "R2_lin", "median feature", *["rise when swapped"] * swapped, "regime")
    note = f"base perplexity {profile.base_perplexity:.2f}; {profile.provenance}"
    return table_html(f"Profile: {profile.name} ({profile.family})", columns, rows, (note,))


def write_csv(study: Study, file: Path) -> None:
    """One row for each block, with a header."""
    rows = rows_of(study)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(study: Study, file: Path) -> bool:
    """Where pyarrow is installed (it comes with `ffncompress[eval]`); returns whether it was written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return False
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(study)), file)
    return True
