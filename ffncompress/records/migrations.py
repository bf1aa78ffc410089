"""Plans of earlier releases in the words of this one: a file that somebody holds keeps loading.

A new schema adds one function here, from the schema before it; they are applied in a row.
"""

from __future__ import annotations

from collections.abc import Callable

from ffncompress.type_aliases import Json


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
