"""The plan's folder: the names of its files, and its tensors, which are checked before anybody uses them.

PLAN/plan.json                   the plan, versioned
PLAN/plan.html                   the same to look at: open it in a browser; it fetches nothing
PLAN/timings.json                seconds of each stage, of the run that finished the plan
PLAN/replacements.safetensors    the fitted tensors of the replaced blocks, "<block>.<projection>.<weight|bias>"
PLAN/profile.png                 R2_lin and swap delta-PPL of each block, and what is kept of each
PLAN/frontier.png                size against perplexity, where it was asked for
PLAN/moments.safetensors         the moments of every block, where they were to be kept
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ffncompress.errors import PlanError
from ffncompress.records.plan import Plan
from ffncompress.sanitize import in_short
from ffncompress.storage.manifest import sha256_of

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_FILE, FIGURE_FILE = "replacements.safetensors", "profile.png"
FRONTIER_FILE, MOMENTS_FILE, PAGE_FILE = "frontier.png", "moments.safetensors", "plan.html"
TIMINGS_FILE = "timings.json"


def load_tensors(plan: Plan, directory: str | Path) -> dict[str, Tensor]:
    """The fitted tensors of a plan's folder.

    Raises:
        PlanError: they are missing, or not the ones that the plan was saved with.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / TENSOR_FILE
    if not file.is_file():
        raise PlanError(f"{directory}: {TENSOR_FILE} is missing; make the plan again")
    if sha256_of(file) != plan.replacements_sha256:
        raise PlanError(f"{file}: corrupted, its checksum is not the plan's; make the plan again")
    try:
        tensors = load_file(file)
    except (SafetensorError, ValueError, OSError) as error:
        raise PlanError(f"{file}: not tensors ({in_short(error)}); make the plan again") from error
    return _finite(tensors, file)


def load_moments(directory: str | Path, block: int) -> dict[str, Tensor]:
    """The kept moments of one block, by name.

    Raises:
        PlanError: they were not kept, or are not numbers.
    """
    from safetensors import SafetensorError, safe_open

    file, prefix = Path(directory) / MOMENTS_FILE, f"{block}."
    if not file.is_file():
        raise PlanError(f"{directory}: its moments were not kept; make the plan again with --keep-moments")
    try:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118  # not a mapping
            found = {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, OSError) as error:
        raise PlanError(f"{file}: corrupted ({in_short(error)}); make the plan again") from error
    return _finite(found, file)


def _finite(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of a file, all of them finite numbers.

    Raises:
        PlanError: they are not.
    """
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise PlanError(f"{file}: {name} is not made of finite numbers; make the plan again")
    return tensors
