"""One plan into its folder, begun or gone on with: the verb that takes hours must survive a kill at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ffncompress.errors import FfncompressError
from ffncompress.journal import Journal
from ffncompress.models import EMBEDDED
from ffncompress.planning.planner import make_plan
from ffncompress.planning.replan import replan
from ffncompress.planning.saving import save_plan
from ffncompress.records.plan import PLAN_FILE, Plan
from ffncompress.runtime.products import fast_products
from ffncompress.runtime.progress import Progress, Timed
from ffncompress.runtime.run import Run
from ffncompress.runtime.stages import Stages
from ffncompress.runtime.workers import Workers
from ffncompress.settings import PlanSettings
from ffncompress.storage.manifest import Manifest
from ffncompress.storage.outputs import claimed
from ffncompress.storage.places import check_place
from ffncompress.storage.working import working_folder


def plan_into(
    model: str,
    output: str | Path,
    settings: PlanSettings,
    *,
    revision: str | None,
    trust_remote_code: bool,
    overwrite: bool,
    progress: Progress,
    placing: Callable[[Manifest], None] = lambda _: None,
) -> Plan:
    """Make a plan, or go on with one, and put its folder in place; of several processes, the first writes.

    Args:
        model: as a person names it; or a plan whose moments were kept.
        output: the plan folder.
        settings: how the plan is made.
        revision: a Hub revision.
        trust_remote_code: run code that comes with the model.
        overwrite: replace an existing plan folder.
        progress: wraps each long loop.
        placing: called with the manifest just before the folder is put in place.
    """
    replans = _is_plan(model)
    inputs = [local_path(model), *settings.data, *settings.choose_data]
    workers = Workers(settings.device, settings.memory, settings.stream)
    working = working_folder(check_place(output, inputs))
    with ExitStack() as claims:
        done, journal = False, None
        if workers.is_main:
            journal = Journal(working, json.dumps([model, revision, trust_remote_code, settings.model_dump()]))
            known = partial(journal.has, "plan")
            target = claims.enter_context(claimed(output, "plan", overwrite=overwrite, inputs=inputs, known=known))
            done = journal.has("plan", target)
        claims.enter_context(fast_products(workers.device))
        stages = claims.enter_context(Stages(working, workers))
        if workers.from_main(done):  # its last run was killed after that
            return Plan.load(output)
        moments, timed = None, Timed(progress)
        if replans:
            again = partial(replan, model, settings, timed, trust_remote_code=trust_remote_code)
            made, tensors = workers.once(again)
        else:
            run = Run(workers, timed, stages)
            made, tensors, moments = make_plan(
                model, settings, run, revision=revision, trust_remote_code=trust_remote_code
            )
        if journal is not None:
            note = journal.placing("plan")

            def both(manifest: Manifest) -> None:
                placing(manifest)
                note(manifest)

            made = save_plan(made, output, tensors, moments, timings=timed.seconds, overwrite=overwrite, placing=both)
    made = workers.from_main(made)
    workers.wait()
    return made


def _is_plan(model: str) -> bool:
    try:
        return (Path(model) / PLAN_FILE).is_file()
    except (TypeError, ValueError, OSError) as error:
        raise FfncompressError("give the model by its name: a Hub id, a folder or a .gguf file") from error


def local_path(model: str | None) -> str | None:
    """Where a model may lie here; the embedded one is called by no path."""
    return None if model == EMBEDDED else model
