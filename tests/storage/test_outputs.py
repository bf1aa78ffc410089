"""Outputs that cost nobody anything: what is refused, what is replaced, and what a killed run leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ffncompress import api
from ffncompress.cli import run
from ffncompress.errors import ArtifactError
from ffncompress.storage import outputs
from ffncompress.storage.files import write_file
from ffncompress.storage.locks import beside, locked
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest
from ffncompress.storage.outputs import claimed, staged_directory
from ffncompress.storage.places import check_place
from ffncompress.storage.working import check_working, open_working, remove_working, spool, working_folder


def make(directory: str | Path, content: str = "new", kind: str = "plan", overwrite: bool = False) -> Path:
    with staged_directory(directory, kind, overwrite=overwrite) as folder:  # type: ignore[arg-type]
        (folder / "sub").mkdir()
        (folder / "sub" / "file.txt").write_text(content)
    return Path(directory)


def content(directory: Path) -> str:
    assert Manifest.read(directory).changes(directory) == []
    return (directory / "sub" / "file.txt").read_text()


def refused(directory: str | Path, match: str, **options: object) -> None:
    with pytest.raises(ArtifactError, match=match), claimed(directory, "plan", overwrite=True, **options):  # type: ignore[arg-type]
        pytest.fail("it was let pass")


def test_an_output_of_ours_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    target = make(tmp_path / "out", "old")
    with pytest.raises(ArtifactError, match="already exists"):
        make(target)
    make(target, "new", overwrite=True)
    assert content(target) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda out: (out / "thesis.tex").write_text("years"), r"thesis\.tex was added"),
        (lambda out: (out / "sub" / "empty").mkdir(), "sub/empty was added"),
        (lambda out: (out / "sub" / "file.txt").write_text("mine"), r"file\.txt has another"),
        (lambda out: (out / "sub" / "file.txt").write_text("owl"), r"file\.txt has another content"),
        (lambda out: (out / "sub" / "file.txt").unlink(), "is missing"),
        (lambda out: (out / MANIFEST_FILE).unlink(), f"no {MANIFEST_FILE}"),
        (lambda out: (out / MANIFEST_FILE).write_text("{}"), "corrupted"),
        (lambda out: (out / ".git").mkdir(), r"holds \.git"),
        (lambda out: (out / "link").symlink_to(out), "link was added"),
    ],
)
def test_what_anybody_touched_is_not_overwritten(tmp_path: Path, spoil, match: str) -> None:
    target = make(tmp_path / "out", "old")
    spoil(target)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match=match):
        make(target, overwrite=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_file_that_was_being_rewritten_is_no_reason_to_refuse(tmp_path: Path) -> None:
    target = make(tmp_path / "out", "old")
    (target / "sub" / ".ffncompress-ab12_xyz.tmp").write_text("half a g")
    make(target, "new", overwrite=True)
    assert content(target) == "new"


def test_an_empty_name_on_the_command_line(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["plan", "demo"], ["demo"], ["profile", "demo"], ["apply", "p"]):
        assert run([*words, "-o", ""]) == 2
        assert "is not a name for an output" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_only_the_same_kind_is_replaced(tmp_path: Path) -> None:
    make(tmp_path / "out", kind="report")
    refused(tmp_path / "out", "it is a report, and a plan is to be written")


def test_what_was_added_while_the_work_went_on_stays(tmp_path: Path) -> None:
    target = make(tmp_path / "out", "old")
    with (
        pytest.raises(ArtifactError, match=r"thesis\.tex was added"),
        staged_directory(target, "plan", overwrite=True),
    ):
        (target / "thesis.tex").write_text("years of work")
    assert (target / "thesis.tex").is_file()
    assert os.listdir(tmp_path) == ["out"]


def test_places_that_are_never_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    home = tmp_path / "users" / "me"
    home.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    for name in ("", ".", "..", "/", "../..", "x/.."):
        refused(name, "is not a name for an output")
    for folder in (here, here.parent, here.parent / "b" / ".." / "b"):
        refused(folder, "holds, the current folder")
    for folder in (home, home.parent):
        refused(folder, "holds, the home folder")
    (here / "file").write_text("text")
    refused("file", "a file")
    (here / "link").symlink_to(home)
    refused("link", "a link")
    (here / "gone").symlink_to(here / "nowhere")
    refused("gone", "a link")
    refused("/proc", "a mount point")
    (here / "empty").mkdir()
    make("empty", overwrite=True)
    assert content(here / "empty") == "new"


def test_an_input_is_never_an_output(tmp_path: Path) -> None:
    plan = make(tmp_path / "in" / "plan")
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    for given in (plan, tmp_path / "alias" / "plan", plan / "sub" / "file.txt"):
        refused(plan, "the input", inputs=[None, "nobody/nothing", given])
        refused(tmp_path / "in", "the input", inputs=[str(given)])
    assert check_place(plan / "sub" / "new", [plan])


def test_commands_do_not_destroy_their_own_input(
    demo_slim: Path, demo_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    slim, plan = shutil.copytree(demo_slim, tmp_path / "slim"), shutil.copytree(demo_plan, tmp_path / "plan")
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("words")
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ["plan", slim, "-o", slim],
        ["apply", plan, "-o", plan],
        ["apply", plan, "-o", slim, "--model", slim],
        ["plan", "demo", "-o", text.parent, "--data", text],
        ["profile", "demo", "-o", slim, "--revisions", slim],
    ):
        assert run([*map(str, words), "--overwrite"]) == 2
        assert "the input" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_demo_asks_before_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pj" / "ffncompress").mkdir(parents=True)
    (tmp_path / "pj" / "thesis").mkdir()
    for words in (["-o", "pj"], ["-o", "pj", "--overwrite"]):
        assert run(["demo", *words]) == 2
        assert "pj: " in capsys.readouterr().err
    (tmp_path / "pj").rename(tmp_path / "ffncompress-demo")
    assert run(["demo"]) == 2
    assert "no ffncompress.json" in capsys.readouterr().err
    assert (tmp_path / "ffncompress-demo" / "thesis").is_dir()
    (tmp_path / "ffncompress-demo").rename(tmp_path / "pj")
    (tmp_path / "ffncompress-demo-plan").mkdir()
    (tmp_path / "ffncompress-demo-plan" / "notes.txt").write_text("mine")
    assert run(["demo"]) == 2
    assert (tmp_path / "ffncompress-demo-plan" / "notes.txt").is_file()


@pytest.mark.slow
def test_every_output_has_its_manifest_and_eval_keeps_it_true(demo_plan: Path, tmp_path: Path) -> None:
    assert Manifest.read(demo_plan).kind == "plan"
    slim = api.compress(demo_plan, tmp_path / "slim")
    assert Manifest.read(slim).kind == "checkpoint"
    assert Manifest.read(slim).changes(slim) == []
    api.evaluate(slim, tokens=600, repeats=1)
    assert Manifest.read(slim).changes(slim) == []
    assert "ffncompress/gate.json" in Manifest.read(slim).files
    assert api.compress(demo_plan, slim, overwrite=True) == slim


def test_long_names(tmp_path: Path) -> None:
    make(tmp_path / ("n" * 250), "old")
    make(tmp_path / ("n" * 250), "new", overwrite=True)
    write_file(tmp_path / ("f" * 250), "text")
    open_working(working_folder(tmp_path / ("n" * 250)))
    remove_working(working_folder(tmp_path / ("n" * 250)))
    assert sorted(map(len, os.listdir(tmp_path))) == [250, 250]
    for length in (256, 300, 5000):
        refused(tmp_path / ("n" * length), "a name of over 255 bytes")
    refused(tmp_path / "/".join(["n" * 200] * 30) / "x", "cannot be")


def test_large_files_are_compared_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(tmp_path / "out", "aaa")
    (target / "sub" / "file.txt").write_text("bbb")
    manifest = Manifest.read(target)
    assert manifest.changes(target) == ["sub/file.txt has another content"]
    assert manifest.changes(target, hashed_up_to=2) == []


DIE = """
import os, sys
from pathlib import Path
from ffncompress.storage import outputs
at, way, target = sys.argv[1:]
if way == "renames":
    outputs.exchange = lambda one, other: False
def dying(function, before):
    def wrapped(*args, **kwargs):
        if before: os._exit(9)
        function(*args, **kwargs)
        os._exit(9)
    return wrapped
renames = 0
rename = Path.rename
def counted(self, other):
    global renames
    renames += 1
    done = rename(self, other)
    if at == f"rename {renames}": os._exit(9)
    return done
Path.rename = counted
if at == "placing": outputs._place = dying(outputs._place, True)
if at == "placed": outputs._place = dying(outputs._place, False)
if at == "removing":
    unlink = Path.unlink
    def dies(self, *args, **kwargs):
        unlink(self, *args, **kwargs)
        if self.name == "first.txt": os._exit(9)
    Path.unlink = dies
with outputs.staged_directory(target, "plan", overwrite=True) as folder:
    if at == "making": os._exit(9)
    (folder / "first.txt").write_text("new")
    (folder / "sub").mkdir()
    (folder / "sub" / "file.txt").write_text("new")
print("done")
"""


@pytest.mark.parametrize("way", ["exchange", "renames"])
@pytest.mark.parametrize("at", ["making", "placing", "rename 1", "rename 2", "placed", "removing", "never"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, at: str, way: str) -> None:
    target = tmp_path / "out"
    with staged_directory(target, "plan") as folder:
        (folder / "first.txt").write_text("old")
        (folder / "sub").mkdir()
        (folder / "sub" / "file.txt").write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", DIE, at, way, str(target)], capture_output=True, text=True, check=False
    )
    finished = "done" in done.stdout
    assert finished == (at == "never" or (at.startswith("rename") and way == "exchange")), done.stderr
    if way == "exchange":  # whole at every instant
        assert content(target) == ("old" if at in ("making", "placing") else "new")
    with claimed(target, "plan", overwrite=True):  # the next run puts it right
        assert content(target) == ("old" if at in ("making", "placing", "rename 1") and not finished else "new")
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_in_the_way_and_not_ours_is_not_removed(tmp_path: Path) -> None:
    for what in ("new", "old"):
        folder = beside(tmp_path / "out", what)
        folder.mkdir()
        (folder / "thesis.tex").write_text("years of work")
        with pytest.raises(ArtifactError, match="in the way"):
            make(tmp_path / "out")
        assert (folder / "thesis.tex").is_file()
        (folder / "thesis.tex").unlink()
        folder.rmdir()


HOLD = """
import sys, time
from ffncompress.storage.outputs import staged_directory
from ffncompress.storage.working import spool
with spool() as states, staged_directory(sys.argv[1], "plan") as folder:
    (states / "states.pt").write_text("x")
    (folder / "file.txt").write_text("x")
    print(states, flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    target, other = tmp_path / "out", tmp_path / "other"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    states = Path(holder.stdout.readline().strip())
    start = time.monotonic()
    with pytest.raises(ArtifactError, match="another run is writing to it"):
        make(target)
    with pytest.raises(ArtifactError, match="another run is writing to it"), locked(target):
        pass
    assert time.monotonic() - start < 2
    make(other)  # beside it, and what the living one needs stays
    with spool():
        assert (states / "states.pt").is_file()
    assert (beside(target, "new") / "file.txt").is_file()
    holder.kill()
    holder.wait()
    assert len(os.listdir(tmp_path)) == 3  # its unfinished output, and its lock
    make(other, overwrite=True)  # a run on another output tidies up too
    assert os.listdir(tmp_path) == ["other"]
    with spool() as own:
        assert not states.exists()
    assert not own.exists()
    make(target)


def test_a_lock_is_of_the_folder_by_any_name_and_may_be_nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(tmp_path / "out")
    (tmp_path / "alias").symlink_to(target)
    assert beside(tmp_path / "alias", "lock") == beside(target, "lock")
    with locked(target), locked(tmp_path / "alias"):
        make(target, overwrite=True)
        assert beside(target, "lock").is_file()
    assert sorted(os.listdir(tmp_path)) == ["alias", "out"]
    with locked(tmp_path / "no" / "such"):
        pass


def test_a_spool_of_somebody_else_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "ffncompress-spool-mine").mkdir()
    (tmp_path / "ffncompress-spool-mine" / "thesis.tex").write_text("years")
    with spool():
        pass
    assert (tmp_path / "ffncompress-spool-mine" / "thesis.tex").is_file()


def test_a_working_folder_that_is_not_ours(tmp_path: Path) -> None:
    folder = working_folder(tmp_path / "out")
    assert folder.name == "out.partial"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years")
    with pytest.raises(ArtifactError, match="not a working folder"):
        open_working(folder)
    with pytest.raises(ArtifactError, match="not a working folder"):
        api.profile("demo", tmp_path / "out", tokens=2048)
    assert os.listdir(folder) == ["thesis.tex"]
    (folder / "thesis.tex").unlink()
    open_working(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'a' * 16}.json").write_text("{}")
    remove_working(folder)
    assert sorted(os.listdir(folder)) == [MANIFEST_FILE, "notes.txt"]
    (folder / "notes.txt").unlink()
    remove_working(folder)
    check_working(folder)
    assert not folder.exists()


def test_exchange_is_used_where_the_system_has_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.write_text("file")
    if not outputs.exchange(one, two):
        pytest.skip("this system cannot exchange names")
    assert one.is_file()
    assert two.is_dir()
    with pytest.raises(OSError, match="No such file"):
        outputs.exchange(one, tmp_path / "three")
