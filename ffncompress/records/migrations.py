"""Plans of earlier releases in the words of this one: a file that somebody holds keeps loading.

A new schema adds one function here, from the schema before it; they are applied in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ffncompress.errors import PlanError
from ffncompress.sanitize import in_short, parse_json
from ffncompress.type_aliases import Json


def read_migrated(file: Path, current: int) -> Json:
    """The content of a plan.json in the words of this release.

    Raises:
        PlanError: it is not JSON, or of a schema that this release does not know.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        version = content.get("schema_version")
        content = migrated(content)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"{file}: corrupted, not JSON ({in_short(error)}); make the plan again") from error
    if content["schema_version"] != current:
        raise PlanError(f"{file}: schema version {version}, which this release does not read; make the plan again")
    return content


def migrated(plan: Json) -> Json:
    """The content of a plan.json, of any schema that is known, in the newest; of an unknown one as it is.

    Raises:
        AttributeError: it is not an object at all.
    """
    plan = dict(plan.items())
    while (step := _STEPS.get(_version(plan))) is not None:
        plan = step(plan)
    plan.setdefault("schema_version", None)
    return plan


def _version(plan: dict[str, Json]) -> int | None:
    version = plan.get("schema_version")
    return version if type(version) is int else None  # True is no version


def _from_2(plan: dict[str, Json]) -> dict[str, Json]:
    """Schema 3 calls two things by their names."""
    renamed = {"joint": "joint_checks", "tensors_sha256": "replacements_sha256"}
    return {renamed.get(name, name): value for name, value in plan.items()} | {"schema_version": 3}


_STEPS: dict[int | None, Callable[[dict[str, Json]], dict[str, Json]]] = {2: _from_2}
