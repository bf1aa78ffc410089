"""Files that users hold outlive our names: a plan that 0.4.0 wrote, in the words of schema 2, loads and is applied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_model

from ffncompress import Plan, api, verify
from ffncompress.errors import PlanError
from ffncompress.models import find_model
from ffncompress.records.migrations import migrated
from ffncompress.records.plan import SCHEMA_VERSION
from ffncompress.records.plan_files import load_tensors

OLD = Path(__file__).parents[1] / "data" / "plan-of-0.4"  # `ffncompress plan demo --tokens 4096 --blocks 1`


def test_a_plan_of_schema_2_is_read_as_it_was_written() -> None:
    was, plan = json.loads((OLD / "plan.json").read_text()), Plan.load(OLD)
    assert was["schema_version"] == 2
    assert plan.schema_version == SCHEMA_VERSION
    now = json.loads(plan.model_dump_json())
    assert now["joint_checks"] == was["joint"]
    assert now["replacements_sha256"] == was["tensors_sha256"]
    for name in was.keys() - {"joint", "tensors_sha256", "schema_version"}:
        assert _holds(now[name], was[name]), name
    assert load_tensors(plan, OLD)
    assert [block.index for block in plan.replaced] == [1]


def _holds(now: object, was: object) -> bool:
    """Whether all that was written is there still; a newer release may have added fields."""
    if isinstance(was, dict):
        return isinstance(now, dict) and all(name in now and _holds(now[name], value) for name, value in was.items())
    if isinstance(was, list):
        return isinstance(now, list) and len(now) == len(was) and all(map(_holds, now, was))
    return now == was


def test_it_is_written_again_in_the_words_of_today(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(Plan.load(OLD).model_dump_json())
    assert Plan.load(tmp_path) == Plan.load(OLD)
    assert "joint_checks" in json.loads((tmp_path / "plan.json").read_text())


def test_it_is_applied(tokenizer, tmp_path: Path) -> None:
    """To a model of the shape that it was made for: the one that it was made for, and the proof of it, are no more."""
    folder = tmp_path / "as-it-was"
    tiny_model("gpt2", n_embd=128, n_layer=7).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copytree(OLD, tmp_path / "plan")
    content = json.loads((OLD / "plan.json").read_text()) | {"proof": None}
    content["base"] |= {"name": folder.name, "fingerprint": find_model(str(folder)).fingerprint()}
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(content))
    api.compress(tmp_path / "plan", tmp_path / "slim", model=str(folder))
    assert verify(tmp_path / "slim").base_model == folder.name


@pytest.mark.parametrize("version", [None, 1, 2.0, "2", True, 99])
def test_what_is_of_no_known_schema_is_refused(version: object, tmp_path: Path) -> None:
    content = json.loads((OLD / "plan.json").read_text()) | {"schema_version": version}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match="schema version"):
        Plan.load(tmp_path)


def test_migrating_touches_nothing_of_the_newest() -> None:
    newest = {"schema_version": SCHEMA_VERSION, "joint": 1}
    assert migrated(newest) == newest
