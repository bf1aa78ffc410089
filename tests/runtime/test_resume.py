"""Killed runs go on, to the same bytes as if nothing had happened."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from fresh_process import OURS, start_python

from ffncompress import Plan, api
from ffncompress.errors import ArtifactError
from ffncompress.journal import AMENDED
from ffncompress.recovery import LinearFit
from ffncompress.runtime import stages
from ffncompress.runtime.progress import silent
from ffncompress.runtime.stages import StageKey, Stages
from ffncompress.storage import outputs
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest
from ffncompress.storage.working import open_working, working_folder

pytestmark = pytest.mark.slow

T = TypeVar("T")


class Stop(BaseException):
    """A kill, as far as the code inside can tell."""


class Stopping:
    """A progress that raises at its n-th tick, or where a loop is called so."""

    def __init__(self, at: int = -1, called: str = "nothing") -> None:
        self.left, self.called = at, called

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]:
        for item in items:
            self.left -= 1
            if self.left == 0 or description.startswith(self.called):
                raise Stop(description)
            yield item


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i}: how {i % 7} of {i % 11} words go on\n" for i in range(4000)))
    return str(file)


@pytest.fixture(scope="module")
def settings(text: str, short_demo: Path) -> dict[str, object]:
    return {"model": str(short_demo), "data": [text], "tokens": 1024, "blocks": "0,2", "budget": "8x"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, settings) -> dict[str, bytes]:
    return files(planned(tmp_path_factory.mktemp("undisturbed") / "plan", settings))


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be saved is, as if each step took half a minute."""
    monkeypatch.setattr(stages, "PAUSE", 0.0)
    monkeypatch.setattr(stages, "WORTH", 0.0)


def planned(folder: Path, settings, progress=silent) -> Path:
    api.plan(output=folder, progress=progress, **settings)
    return folder


OF_THE_CLOCK = ("timings.json", "plan.html", MANIFEST_FILE)  # these say how long it took, or their checksums do


def files(folder: Path) -> dict[str, bytes]:
    """What must be the same, whenever and however often a run was stopped."""
    assert Manifest.read(folder).changes(folder) == []
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if name not in OF_THE_CLOCK}


def stopped_again_and_again(folder: Path, settings, ticks: Iterator[int]) -> int:
    """How often it was stopped until it was done."""
    for stops, tick in enumerate(ticks):
        try:
            planned(folder, settings, Stopping(tick))
        except Stop:
            assert not folder.exists()
            assert {path.name for path in folder.parent.iterdir()} <= {"plan.partial"}
        else:
            return stops
    raise AssertionError("it was never done")


def test_a_plan_stopped_at_twenty_points_is_the_same(tmp_path: Path, settings, undisturbed, saving: None) -> None:
    stops = 0
    for first in (1, 2, 3):
        folder = tmp_path / str(first) / "plan"
        stops += stopped_again_and_again(folder, settings, iter(range(first, 100)))
        assert files(folder) == undisturbed
        assert list(folder.parent.iterdir()) == [folder]
    assert stops >= 20


def test_what_is_finished_is_kept_by_a_tidy_end_too(tmp_path: Path, settings, undisturbed) -> None:
    """Nothing is due to be saved in so short a run; what is finished is written when it is interrupted."""
    folder = tmp_path / "plan"
    with pytest.raises(Stop, match="trying swaps"):
        planned(folder, settings, Stopping(called="trying swaps"))
    kept = {path.suffix for path in working_folder(folder).iterdir()}
    assert kept == {".pt", ".json"}
    with pytest.raises(Stop, match="trying swaps"):  # and so it comes back to the same place at once
        planned(folder, settings, Stopping(at=4, called="trying swaps"))
    planned(folder, settings)
    assert files(folder) == undisturbed


KILLED = """
import json, sys
from ffncompress import api
from ffncompress.runtime import stages
stages.PAUSE = stages.WORTH = 0.0
api.plan(output=sys.argv[1], **json.loads(sys.argv[2]))
"""


def test_a_plan_killed_for_real_twice(tmp_path: Path, settings, undisturbed) -> None:
    folder = tmp_path / "plan"
    for enough in (4, 11):
        process = start_python(KILLED, folder, json.dumps(settings), imports=OURS)
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("plan.partial/*"))) < enough and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL
    assert not folder.exists()
    before = len(list(tmp_path.glob("plan.partial/*")))
    seen: list[str] = []

    def noting(items: Sequence[T], description: str, /) -> Iterable[T]:
        seen.append(description)
        return items

    planned(folder, settings, noting)
    assert before >= 11
    assert "asking what the loss feels" not in seen
    assert files(folder) == undisturbed
    assert os.listdir(tmp_path) == ["plan"]


def test_a_kill_after_all_was_done(
    tmp_path: Path, settings, undisturbed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is in its place, and its working folder not yet gone."""
    folder = tmp_path / "plan"
    with monkeypatch.context() as patch:
        place = outputs._place

        def dying(*paths: Path) -> None:
            place(*paths)
            raise Stop

        patch.setattr(outputs, "_place", dying)
        with pytest.raises(Stop):
            planned(folder, settings)
    assert sorted(os.listdir(tmp_path)) == ["plan", "plan.partial"]
    with pytest.raises(ArtifactError, match="already exists"):
        planned(folder, {**settings, "tokens": 2048})  # not what was asked for then
    assert planned(folder, settings, Stopping(1)) == folder
    assert files(folder) == undisturbed
    assert os.listdir(tmp_path) == ["plan"]
    with pytest.raises(ArtifactError, match="already exists"):
        planned(folder, settings)


def test_timings_are_measured_once(tmp_path: Path, settings) -> None:
    """Or the run that goes on would choose otherwise than the killed one would have."""
    wanted = {**settings, "blocks": None, "budget": None, "target_speed": "1.02x", "refit": False}
    with pytest.raises(Stop):
        planned(tmp_path / "plan", wanted, Stopping(called="verifying"))
    assert planned(tmp_path / "plan", wanted, Stopping(called="timing replacements")).is_dir()


def test_other_settings_are_other_stages(tmp_path: Path, settings, undisturbed) -> None:
    folder = tmp_path / "plan"
    with pytest.raises(Stop):
        planned(folder, {**settings, "tokens": 2048}, Stopping(called="trying swaps"))
    planned(folder, settings)
    assert files(folder) == undisturbed
    assert os.listdir(tmp_path) == ["plan"]


def test_moments_are_kept_whole(tmp_path: Path, settings, saving: None) -> None:
    wanted = {**settings, "keep_moments": True, "refit": False}
    one = files(planned(tmp_path / "one", wanted))
    with pytest.raises(Stop):
        planned(tmp_path / "two", wanted, Stopping(called="trying swaps"))
    assert files(planned(tmp_path / "two", wanted)) == one


def test_a_working_folder_of_somebody_else_is_left_alone(tmp_path: Path, settings) -> None:
    (tmp_path / "plan.partial").mkdir()
    (tmp_path / "plan.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="not a working folder"):
        planned(tmp_path / "plan", settings)
    assert os.listdir(tmp_path / "plan.partial") == ["thesis.tex"]


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_a_strangers_stage_runs_no_code_and_a_broken_one_is_made_anew(tmp_path: Path) -> None:
    made = Stages(tmp_path / "w")
    made.records = [LinearFit]
    tensor = torch.arange(6.0).reshape(2, 3).T  # strides are kept too: products depend on them in the last digits
    fit = LinearFit(*[tensor] * 6, 0.5)
    made.put("fit", {}, [fit, None])
    made.flush()
    found = made.find("fit", {})
    assert isinstance(found[0], LinearFit)
    assert torch.equal(found[0].weight, tensor)
    assert found[0].weight.stride() == tensor.stride()
    assert Stages(tmp_path / "w").find("fit", {}) is None  # a class that was not named
    assert made.find("fit", {"seed": 1}) is None
    (file,) = (tmp_path / "w").glob("*.pt")
    for content in (pickle.dumps(Trap(tmp_path / "sprung")), b"", b"\0" * 100, file.read_bytes()[:200]):
        file.write_bytes(content)
        assert made.find("fit", {}) is None
    torch.save(Trap(tmp_path / "sprung"), file)
    assert made.find("fit", {}) is None
    assert not (tmp_path / "sprung").exists()
    assert made.do("small", {}, list[float], lambda: [0.1, float(1 / 3)]) == [0.1, 1 / 3]
    (small,) = (tmp_path / "w").glob("*[0-9a-f].json")
    for content in ('{"seconds": 1, "result": ["x"]}', "[", "[]", '{"seconds": 1}'):
        small.write_text(content)
        assert made.do("small", {}, list[float], lambda: [2.0]) == [2.0]


def test_sums_of_another_shape_are_not_taken_up(tmp_path: Path, saving: None) -> None:
    def total(count: int, size: int, stop: int = -1) -> torch.Tensor:
        sums = [torch.zeros(size)]
        key = StageKey("sum", {})
        for item in Stages(tmp_path / "w").resumed(key, range(count), sums, Stopping(stop), "adding"):
            sums[0] += item
        return sums[0]

    with pytest.raises(Stop):
        total(10, 2, stop=8)
    assert torch.equal(total(10, 3), torch.full((3,), 45.0))
    assert torch.equal(total(10, 3), torch.full((3,), 45.0))
    assert torch.equal(total(4, 3), torch.full((3,), 6.0))


def test_a_disk_that_is_full_for_stages_does_not_end_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    made = Stages(tmp_path / "w")
    assert made.keep("fit", {}, lambda: [torch.ones(2)])[0].sum() == 2
    made.flush()
    assert not list((tmp_path / "w").glob("*.pt"))


def recipe_of(folder: Path, settings) -> Path:
    file, plan = folder / "recipe.yaml", {**settings}
    model = plan.pop("model")
    evaluation = {"tokens": 600, "repeats": 1, "max_delta": "500%"}
    file.write_text(json.dumps({"model": model, "output": "unused", "plan": plan, "eval": evaluation}))
    return file


def weights(folder: Path) -> dict[str, bytes]:
    """All of a checkpoint but what is measured with a clock."""
    return {name: content for name, content in files(folder).items() if name not in (*AMENDED, MANIFEST_FILE)}


def test_a_run_goes_on(tmp_path: Path, settings, undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """No --overwrite is needed for what its own killed run left; for anything else it still is."""
    recipe = recipe_of(tmp_path, settings)
    api.run(recipe, output=tmp_path / "a" / "slim")
    target = tmp_path / "b" / "slim"
    place = outputs._place

    def before(*_paths: Path) -> None:
        raise Stop("before")

    def after(*paths: Path) -> None:
        place(*paths)
        raise Stop("after")

    ways = [("trying swaps", place), ("nothing", before), ("nothing", after), ("writing", place), ("nothing", after)]
    ways += [("lm-eval: slimmed", place), ("measuring speed", place)]
    for called, placing in ways:
        monkeypatch.setattr(outputs, "_place", placing)
        with pytest.raises(Stop):
            api.run(recipe, output=target, progress=Stopping(called=called))
    monkeypatch.setattr(outputs, "_place", place)
    assert (target.parent / "slim.partial" / "run.json").is_file()
    seen: list[object] = []
    api.run(recipe, output=target, report=seen.append)
    assert isinstance(seen[0], Plan)
    assert seen[1:3] == [target.parent / "slim-plan", target]
    assert files(target.parent / "slim-plan") == undisturbed
    assert weights(target) == weights(tmp_path / "a" / "slim")
    assert sorted(os.listdir(target.parent)) == ["slim", "slim-plan"]
    with pytest.raises(ArtifactError, match="already exists"):
        api.run(recipe, output=target)


def test_a_run_does_not_take_anybody_elses_plan_for_its_own(tmp_path: Path, settings) -> None:
    recipe, target = recipe_of(tmp_path, settings), tmp_path / "b" / "slim"
    with pytest.raises(Stop):
        api.run(recipe, output=target, progress=Stopping(called="writing"))
    made = files(target.parent / "slim-plan")
    recipe.write_text(recipe.read_text() + "\n# another recipe\n")
    with pytest.raises(ArtifactError, match="slim-plan: already exists"):
        api.run(recipe, output=target)
    assert files(target.parent / "slim-plan") == made
    open_working(working_folder(tmp_path / "c"))
    planned(tmp_path / "c-plan", settings)
    with pytest.raises(ArtifactError, match="c-plan: already exists"):
        api.run(recipe, output=tmp_path / "c")
