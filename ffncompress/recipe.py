"""A recipe: the whole pipeline in one YAML file, checked before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ffncompress.errors import RecipeError
from ffncompress.sanitize import in_short
from ffncompress.settings import ApplySettings, EvalSettings, Name, PlanSettings, PushSettings
from ffncompress.text.sources import public_name

LONGEST = 100_000  # characters
DEEPEST = 20  # collections within each other


class Recipe(BaseModel):
    """What to compress, how, where to, and what must hold of the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: Name
    revision: str | None = None
    trust_remote_code: bool = False  # it needs its own code; the person who runs the recipe must allow it too
    output: Name
    plan: PlanSettings = PlanSettings()
    apply: ApplySettings = ApplySettings()
    eval: EvalSettings = EvalSettings()
    push: PushSettings | None = None

    @classmethod
    def read(cls, file: str | Path) -> tuple[Recipe, str]:
        """(recipe, its verbatim text).

        Raises:
            RecipeError: it is missing, not YAML, or has a wrong key or value; says on which line.
        """
        try:
            with Path(file).open(encoding="utf-8") as stream:
                text = stream.read(LONGEST + 1)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{file}: cannot be read; give a YAML recipe such as recipes/demo.yaml") from error
        if len(text) > LONGEST:
            raise RecipeError(f"{file}: longer than {LONGEST:,} characters, which no recipe is; give another")
        try:
            _check_events(text, file)
            tree = yaml.compose(text, Loader=yaml.SafeLoader)
            content = yaml.safe_load(text)
        except (RecursionError, ValueError) as error:  # a date that is none, brackets a thousand deep
            raise RecipeError(f"{file}: not a recipe ({in_short(error)}); mend it") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            raise RecipeError(f"{file}, line {line}: not YAML ({getattr(error, 'problem', error)}); mend it") from error
        if not isinstance(content, dict):
            raise RecipeError(f"{file}, line 1: a recipe is a mapping with keys {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(content), text
        except ValidationError as error:
            raise RecipeError(f"{file}, {_explain(error, tree)}") from error

    def public_text(self, text: str) -> str:
        """The recipe's text as it may leave this machine: with names where it had paths."""
        sources = [*self.plan.data, *self.plan.choose_data, *self.apply.data, *self.eval.also, self.eval.data or ""]
        named = {source: public_name(source) for source in sources if source}
        named |= {file: Path(file).name for file in (*self.eval.tasks, self.eval.baseline or "") if file}
        is_place = self.model.startswith(("/", ".", "~")) or os.path.exists(self.model)
        named |= {place: Path(place).name for place in (self.output, *([self.model] if is_place else []))}
        for place in sorted(named, key=len, reverse=True):
            text = text.replace(place, named[place])
        return text


def _check_events(text: str, file: str | Path) -> None:
    """Before a tree is built: what would make it endless, or take the parser minutes.

    Raises:
        RecipeError: there are aliases in it, or brackets within brackets.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise RecipeError(f"{file}: it uses YAML aliases (*name), which a recipe has no need of; write them out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecipeError(f"{file}: not a recipe (nested more than {DEEPEST} deep); mend it")


def _explain(error: ValidationError, tree: Any) -> str:
    first = error.errors()[0]
    place = first["loc"]
    key = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        reason = f"unknown key {key}; known here: {', '.join(_known(place[:-1]))}"
    elif first["type"] == "missing":
        reason = f"{key} is missing; add it"
    else:
        reason = f"{key}: {first['msg'].removeprefix('Value error, ')}, not {repr(first['input'])[:80]}; mend it"
    return f"line {_line(tree, place)}: {reason}"


def _known(place: tuple[int | str, ...]) -> list[str]:
    if not place:
        return list(Recipe.model_fields)
    section = PushSettings if place[0] == "push" else Recipe.model_fields[str(place[0])].annotation
    return list(getattr(section, "model_fields", ()))


def _line(node: Any, place: tuple[int | str, ...]) -> int:
    """The line of the deepest node that the place names."""
    line = int(node.start_mark.line) + 1
    for step in place:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == str(step)), None)
            if pair is None:
                break
            key, node = pair
            line = int(key.start_mark.line) + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = int(node.start_mark.line) + 1
    return line
