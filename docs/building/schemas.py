"""The JSON Schemas of the files that users hold, as the code reads them now.

    python docs/building/schemas.py      writes docs/schemas/*.json

A field's description is the comment beside it in the code, so the two cannot drift apart; `tests/test_docs.py` compares
the written files with what this gives.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

FOLDER = Path(__file__).parents[1] / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by the name of its file."""
    from ffncompress.checkpoint.plugin import ReplacementSpec
    from ffncompress.exporting.record import ExportResult
    from ffncompress.profiling.records import Study
    from ffncompress.recipe import Recipe
    from ffncompress.records.gate import GateResult
    from ffncompress.records.origin import Origin
    from ffncompress.records.plan import Plan
    from ffncompress.storage.manifest import Manifest

    made = {
        "plan": (Plan, "plan.json"),
        "gate": (GateResult, "gate.json, and what eval --json writes"),
        "origin": (Origin, "origin.json of a checkpoint"),
        "manifest": (Manifest, "ffncompress.json of every folder of ours"),
        "profile": (Study, "profile.json of a report"),
        "export": (ExportResult, "what export --json writes"),
        "recipe": (Recipe, "a recipe; YAML is read as the JSON that it stands for"),
    }
    found = {name: _schema(kind, title) for name, (kind, title) in made.items()}
    found["replacements"] = _schema(
        dict[str, ReplacementSpec], "quantization_config.blocks in a checkpoint's config.json", ReplacementSpec
    )
    return found


def text_of(schema: dict[str, Any]) -> str:
    """A schema as it is written."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _schema(form: Any, title: str, kind: type[BaseModel] | None = None) -> dict[str, Any]:
    schema = TypeAdapter(form).json_schema()
    kinds = _kinds(kind or form)
    for name, part in (("", schema), *schema.get("$defs", {}).items()):
        fields = part.get("properties", {})
        for field, words in _comments(kinds.get(name or part.get("title", ""))).items():
            fields.get(field, {})["description"] = words
        fields.get("ffncompress_version", {}).pop("default", None)  # the release's own, which is no part of the form
        if "schema_version" in fields:
            fields["schema_version"]["const"] = fields["schema_version"]["default"]
    return {"$schema": DRAFT, **schema, "title": title}


def _kinds(kind: type[BaseModel]) -> dict[str, type]:
    """A record and all that it is made of, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [kind]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and each.__name__ not in found and issubclass(each, BaseModel):
            found[each.__name__] = each
            waiting += [field.annotation for field in each.model_fields.values()]
        waiting += getattr(each, "__args__", ())
    return found


def _comments(kind: type | None) -> dict[str, str]:
    """The comments beside the fields of a record and of those that it builds on."""
    if kind is None:
        return {}
    sources = [inspect.getsource(base) for base in reversed(kind.__mro__) if base.__module__.startswith("ffncompress")]
    return {
        name: words for source in sources for name, words in _COMMENT.findall(source) if "type: ignore" not in words
    }


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / f"{name}.json").write_text(text_of(schema), encoding="utf-8")


if __name__ == "__main__":
    main()
