"""Recipes: every option reachable, every mistake named with its line."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click
import pytest

from ffncompress.cli.commands import cli
from ffncompress.errors import RecipeError
from ffncompress.recipe import Recipe
from ffncompress.settings import ApplySettings, EvalSettings, PlanSettings, PushSettings

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.name)
def test_our_recipes_are_valid(file: Path) -> None:
    recipe, text = Recipe.read(file)
    assert recipe.model
    assert text == file.read_text()


def test_the_demo_is_the_recipe_that_we_show() -> None:
    embedded = files("ffncompress") / "demo" / "recipe.yaml"
    assert embedded.read_text() == (RECIPES / "demo.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "model: a\noutput: b\nplan:\n  budgte: 8x\n",
            r"line 4: unknown key plan.budgte; known here: budget, max_delta",
        ),
        ("model: a\noutput: b\ncolour: red\n", r"line 3: unknown key colour; known here: model, revision"),
        ("model: a\noutput: b\nplan:\n  tokens: many\n", r"line 4: plan.tokens: .*integer.*'many'"),
        ("model: a\noutput: b\nplan:\n  data:\n    - a.txt\n    - 7\n", r"line 6: plan.data.1"),
        ("model: a\noutput: b\nplan:\n  budget: lots\n", r"line 4: plan.budget: 'lots' is not a budget"),
        ("model: a\n", r"line 1: output is missing"),
        ("- a\n- b\n", r"a recipe is a mapping"),
        ("model: [a\n", r"line \d: not YAML"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=match):
        Recipe.read(file)


def test_a_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("command", "section", "elsewhere"),
    [
        (
            "plan",
            PlanSettings,
            {"model", "revision", "trust_remote_code", "output", "overwrite", "json_file", "timings"},
        ),
        ("apply", ApplySettings, {"plan_folder", "model", "output", "overwrite", "trust_remote_code"}),
        ("eval", EvalSettings, {"folder", "model", "base", "json_file", "junit", "summary", "trust_remote_code"}),
        ("push", PushSettings, {"folder"}),
    ],
)
def test_a_recipe_can_say_what_the_command_line_can(command: str, section: type, elsewhere: set[str]) -> None:
    parameters = {p.name for p in cli.commands[command].params}
    assert parameters - elsewhere - {"quiet", "verbose"} == set(section.model_fields)  # type: ignore[attr-defined]
    for option in cli.commands[command].params:
        if option.name == "speed_dtypes":  # several, by commas
            continue
        field = section.model_fields.get(option.name)  # type: ignore[attr-defined]
        if field is not None and field.default is not None and not field.is_required() and not option.multiple:
            assert option.get_default(click.Context(cli.commands[command])) == field.default, option.name
