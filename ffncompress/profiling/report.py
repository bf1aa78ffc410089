"""A study into its folder: profile.json, tables, figures, and the page.

REPORT/report.html          the page: open it in a browser, mail it, print it
REPORT/profile.json         everything, versioned; profile.csv and profile.parquet: a row for each block
REPORT/figures/             PNG and SVG
REPORT/stages/              finished stages: with --overwrite, a study that asks for more goes on from them

While a study runs, its stages lie in REPORT.partial; a killed run leaves them there, and the next one goes on.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from ffncompress.models.sources import EMBEDDED
from ffncompress.profiling.figures import draw_all
from ffncompress.profiling.page import render
from ffncompress.profiling.records import STUDY_FILE, Study
from ffncompress.profiling.stages import StudyStages
from ffncompress.profiling.study import make_study
from ffncompress.profiling.tables import write_csv, write_parquet
from ffncompress.runtime.products import fast_products
from ffncompress.runtime.progress import Progress, silent, step
from ffncompress.runtime.run import Run
from ffncompress.runtime.workers import Workers
from ffncompress.settings import ProfileSettings
from ffncompress.storage.manifest import MANIFEST_FILE
from ffncompress.storage.outputs import claimed, staged_directory
from ffncompress.storage.places import check_place
from ffncompress.storage.working import check_working, open_working, remove_working, working_folder

PAGE_FILE, STAGES = "report.html", "stages"


def write_report(
    models: list[str],
    output: str | Path,
    settings: ProfileSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Study:
    """Make a study, or go on with one, and write its folder; of several processes, the first writes."""
    inputs = [*(name for name in models if name != EMBEDDED), *settings.data, *settings.revisions]
    workers = Workers(settings.device, settings.memory, settings.stream)
    partial = working_folder(check_place(output, inputs))
    with ExitStack() as claims:
        target = Path(output)
        if workers.is_main:
            target = claims.enter_context(claimed(output, "report", overwrite=overwrite, inputs=inputs))
            check_working(partial)
            if (target / STAGES).is_dir():
                _take_up(target / STAGES, partial)
        claims.enter_context(fast_products(workers.device))
        stages = StudyStages(partial, workers)
        run = Run(workers, progress, stages)
        study = make_study(models, settings, stages, run, revision=revision, trust_remote_code=trust_remote_code)
        if workers.is_main:
            with (
                step(progress, "drawing"),
                staged_directory(target, "report", overwrite=overwrite, inputs=inputs) as folder,
            ):
                _write(study, folder)
                (folder / STAGES).mkdir()
                for file in partial.glob("*.json"):
                    if file.name != MANIFEST_FILE:
                        shutil.copyfile(file, folder / STAGES / file.name)
            remove_working(partial)
    study = workers.from_main(study)
    workers.wait()
    return study


def _take_up(stages: Path, partial: Path) -> None:
    """Go on from the stages of a finished report."""
    open_working(partial)
    for file in stages.glob("*.json"):
        shutil.copyfile(file, partial / file.name)


def _write(study: Study, folder: Path) -> None:
    (folder / STUDY_FILE).write_text(study.model_dump_json(indent=1) + "\n", encoding="utf-8")
    write_csv(study, folder / "profile.csv")
    write_parquet(study, folder / "profile.parquet")
    (folder / "figures").mkdir()
    draw_all(study, folder / "figures")
    (folder / PAGE_FILE).write_text(render(study), encoding="utf-8")
