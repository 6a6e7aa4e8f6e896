"""The run folder: made whole or not at all, replaced with care, and honest about a job that vanished."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from moekit.errors import ConfigError, MoekitError, RunExistsError, StorageError
from moekit.launch.folder import create, read_json, read_state, write_json
from moekit.launch.job import attach
from moekit.launch.processes import host_id, stamp

CONFIG = {"nproc": 2, "function": "module.train"}


def make(runs: Path, name: str | None = "run", call: bytes = b"call", **how: bool) -> Path:
    return create(runs, name, "module.train", CONFIG, call, **how)


def set_state(folder: Path, **changes) -> None:
    state = read_json(folder / "state.json")
    assert state is not None
    write_json(folder / "state.json", state | changes)


def test_a_new_run_has_its_parts(runs: Path) -> None:
    folder = make(runs)
    assert folder == runs / "run"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "call.pkl", "state.json", "logs", "ranks", "results", "errors",
    }  # fmt: skip
    assert (folder / "call.pkl").read_bytes() == b"call"
    assert json.loads((folder / "config.json").read_text()) == CONFIG | {"name": "run"}
    assert read_state(folder)["state"] == "starting"
    assert [p.name for p in runs.iterdir()] == ["run"]


def test_names_without_a_name_are_unique_and_say_when_and_what(runs: Path) -> None:
    names = {make(runs, None).name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith(time.strftime("%Y%m%d-")) and "-train" in name for name in names)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "/abs"])
def test_a_name_that_is_no_folder_name_is_refused(runs: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        make(runs, name)
    assert not runs.exists()


def test_an_existing_folder_is_refused_and_untouched(runs: Path) -> None:
    folder = make(runs)
    set_state(folder, state="finished")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    with pytest.raises(RunExistsError, match="overwrite=True") as caught:
        make(runs, call=b"other")
    assert isinstance(caught.value, FileExistsError)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    (runs / "mine").mkdir()
    with pytest.raises(RunExistsError):  # not even an empty folder of the user's is taken
        make(runs, "mine")


def test_overwrite_removes_only_what_moekit_wrote(runs: Path) -> None:
    folder = make(runs)
    set_state(folder, state="finished")
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "results" / "rank_0.pkl").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    make(runs, overwrite=True, call=b"new")
    assert (folder / "call.pkl").read_bytes() == b"new"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "metrics.jsonl").exists()
    assert list((folder / "results").iterdir()) == []
    assert [p.name for p in runs.iterdir()] == ["run"]


def test_resume_keeps_what_the_recipe_needs_to_go_on(runs: Path) -> None:
    folder = make(runs, resume=True)  # nothing to resume yet: a new run
    set_state(folder, state="failed")
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "logs" / "rank_0.log").write_text("before\n")
    (folder / "errors" / "rank_0.json").write_text("{}")
    (folder / "results" / "rank_0.pkl").write_bytes(b"old")
    make(runs, resume=True, call=b"new")
    assert read_state(folder)["state"] == "starting"
    assert (folder / "call.pkl").read_bytes() == b"new"
    assert (folder / "checkpoints" / "step_1").is_dir()
    assert (folder / "metrics.jsonl").exists() and (folder / "logs" / "rank_0.log").exists()
    assert list((folder / "errors").iterdir()) == list((folder / "results").iterdir()) == []
    assert [p.name for p in runs.iterdir()] == ["run"]


def test_overwrite_refuses_a_run_that_is_going(runs: Path) -> None:
    folder = make(runs)
    me = os.getpid()
    set_state(folder, state="running", pids={"supervisor": me, "ranks": []}, stamps={str(me): stamp(me)})
    for how in ("overwrite", "resume"):
        with pytest.raises(RunExistsError, match="still going"):
            make(runs, "run", b"new", **{how: True})
    assert (folder / "call.pkl").read_bytes() == b"call"


def assert_storage_error(runs: Path, tmp_path: Path, **kwargs) -> StorageError:
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(StorageError, match="nothing was left behind") as caught:
        make(runs, **kwargs)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, MoekitError)
    assert sorted(p for p in tmp_path.rglob("*")) == before
    return caught.value


def test_an_unwritable_place_is_one_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_storage_error(tmp_path / "file" / "runs", tmp_path)  # below a file
    assert_storage_error(tmp_path / "file", tmp_path)
    assert_storage_error(Path("/proc/runs"), tmp_path)  # where not even root may write


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, overwrite: bool) -> None:
    """The system's own limit on file sizes stands in for a full disk: the write itself fails half way."""
    runs = tmp_path / "deep" / "runs"
    if overwrite:
        set_state(make(runs), state="finished")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        error = assert_storage_error(runs, tmp_path, overwrite=overwrite, call=b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.__cause__ is not None and error.__cause__.errno == errno.EFBIG  # type: ignore[attr-defined]
    if overwrite:
        assert (runs / "run" / "call.pkl").read_bytes() == b"call"


def test_state_is_still_written_when_no_new_file_can_be(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(runs)

    def full(self: Path, *args) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    set_state(folder, state="failed", reason="disk full")
    assert read_state(folder)["reason"] == "disk full"
    with pytest.raises(OSError, match="No space left"):
        write_json(folder / "new.json", {})
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def dead_process() -> tuple[int, str]:
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    start = stamp(child.pid) or "0:0"
    child.wait()
    return child.pid, start


def test_a_supervisor_that_died_silently_makes_a_failed_job(runs: Path) -> None:
    folder = make(runs)
    pid, start = dead_process()
    pids = {"supervisor": pid, "agent": None, "ranks": [None, None]}
    set_state(folder, state="running", pids=pids, stamps={str(pid): start})
    job = attach(folder)
    assert job.state == "failed"
    assert job.reason.startswith("lost:") and str(pid) in job.reason
    assert json.loads((folder / "state.json").read_text())["state"] == "failed"  # others see it too


def test_a_process_id_that_was_given_away_is_not_the_supervisor(runs: Path) -> None:
    folder = make(runs)
    me = os.getpid()
    set_state(folder, state="running", pids={"supervisor": me, "agent": None, "ranks": []}, stamps={str(me): "old:1"})
    assert attach(folder).state == "failed"


def test_a_job_of_another_host_is_judged_by_its_heartbeat(runs: Path) -> None:
    folder = make(runs)
    pids = {"supervisor": 1, "agent": None, "ranks": []}
    set_state(folder, state="running", host="elsewhere", pids=pids)
    assert host_id() != "elsewhere"
    assert read_state(folder)["state"] == "running"
    old = time.time() - 3600
    os.utime(folder / "state.json", (old, old))
    assert read_state(folder)["state"] == "failed"


def test_a_start_that_never_came_is_a_failed_job(runs: Path) -> None:
    folder = make(runs)
    assert read_state(folder)["state"] == "starting"
    set_state(folder, created=time.time() - 3600)
    assert read_state(folder)["state"] == "failed"


def test_attach_names_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run at .*nothing"):
        attach(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="no run at"):
        attach(tmp_path / "other")
