"""A study into its folder: profile.json, tables, figures, and the page.

REPORT/report.html          the page: open it in a browser, mail it, print it
REPORT/profile.json         everything, versioned; profile.csv and profile.parquet: a row for each block
REPORT/figures/             PNG and SVG
REPORT/stages/              finished stages: with --overwrite, a study that asks for more goes on from them

While a study runs, its stages lie in REPORT.partial; a killed run leaves them there, and the next one goes on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ffncompress.profiling.figures import draw_all
from ffncompress.profiling.page import render
from ffncompress.profiling.records import STUDY_FILE, Study
from ffncompress.profiling.study import make_study
from ffncompress.profiling.tables import write_csv, write_parquet
from ffncompress.settings import ProfileSettings
from ffncompress.staging import check_free, staged_directory
from ffncompress.workers import Track, silent, stage

PAGE_FILE, STAGES = "report.html", "stages"


def write_report(
    models: list[str],
    output: str | Path,
    settings: ProfileSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    track: Track = silent,
) -> Study:
    """Make a study, or go on with one, and write its folder."""
    target = check_free(output, overwrite=overwrite)
    partial = target.with_name(f"{target.name}.partial")
    if (target / STAGES).is_dir():
        shutil.copytree(target / STAGES, partial, dirs_exist_ok=True)
    study = make_study(models, settings, partial, revision=revision, trust_remote_code=trust_remote_code, track=track)
    with stage(track, "drawing"), staged_directory(target, overwrite=overwrite) as folder:
        (folder / STUDY_FILE).write_text(study.model_dump_json(indent=1) + "\n", encoding="utf-8")
        write_csv(study, folder / "profile.csv")
        write_parquet(study, folder / "profile.parquet")
        (folder / "figures").mkdir()
        draw_all(study, folder / "figures")
        (folder / PAGE_FILE).write_text(render(study), encoding="utf-8")
        shutil.copytree(partial, folder / STAGES)
    shutil.rmtree(partial, ignore_errors=True)
    return study
