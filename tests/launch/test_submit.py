"""What `submit` refuses before any process exists, and what it writes down and packs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moekit.config import SFTConfig
from moekit.errors import ConfigError, JobError, StorageError
from moekit.launch import submit as submit_module
from moekit.launch.submit import _describe, _name_of, _pack, _ranks_can_import, submit


def nothing() -> None:
    pass


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(submit_module.subprocess, "Popen", started)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nproc": 0}, "nproc=0"),
        ({"nproc": 2.0}, r"nproc=2\.0"),
        ({"nproc": True}, "nproc=True"),
        ({"nodes": 2}, "nodes=2.*this machine only.*'slurm'"),
        ({"nodes": 0, "backend": "slurm"}, "nodes=0"),
        ({"backend": "pbs"}, "backend='pbs'.*'slurm'"),
        ({"slurm": {"partition": "gpu"}}, "backend='slurm'"),
        ({"backend": "slurm", "slurm": {"nodes": 2}}, "'nodes' cannot be used.*'partition'"),
        ({"backend": "slurm", "slurm": {"bad-key": 2}}, "'bad-key' cannot be used"),
        ({"backend": "slurm", "slurm": {"account": "a\nb"}}, "'account' cannot be used"),
        ({"backend": "slurm", "slurm": {"account": None}}, "'account' cannot be used"),
        ({"backend": "slurm", "slurm": "gpu"}, "slurm='gpu'"),
        ({"threads": 0}, "threads=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"malloc": "jemalloc"}, "malloc='jemalloc'"),
        ({"env": {"A": 1}}, "env="),
        ({"port": 70_000}, "port=70000"),
        ({"name": "a/b"}, "name='a/b'"),
    ],
)
def test_a_bad_setting_is_one_clear_error(runs: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(nothing, runs=runs, **settings)
    assert not runs.exists()


@pytest.mark.usefixtures("no_process")
def test_what_is_no_function_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        submit(nothing(), runs=runs)  # type: ignore[func-returns-value]


@pytest.mark.usefixtures("no_process")
def test_bc_118_an_explicit_busy_port_is_a_clear_error(runs: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port} .*in use.*port=None"):
            submit(nothing, runs=runs, port=port)
    assert not runs.exists()


@pytest.mark.usefixtures("no_process")
def test_a_call_that_cannot_travel_is_refused(runs: Path) -> None:
    lock = threading.Lock()

    def holds_a_lock() -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match=r"holds_a_lock and its arguments cannot be sent.*inside the function"):
        submit(holds_a_lock, runs=runs)
    with pytest.raises(ConfigError, match="cannot be sent"):
        submit(nothing, (i for i in range(3)), runs=runs)
    assert not runs.exists()


def test_a_process_that_cannot_start_leaves_no_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(StorageError, match="cannot start"):
        submit(nothing, runs=runs)
    assert not list(runs.iterdir())


def test_an_interpreter_that_breaks_at_once_is_a_failed_job_at_once(runs: Path) -> None:
    job = submit(nothing, runs=runs, env={"PYTHONHOME": "/nowhere"})
    with pytest.raises(
        JobError, match=r"failed: lost: (?s:.*)The last lines of the supervisor's log:\n(?s:.*)encodings"
    ):
        job.result(20)


@dataclasses.dataclass
class Plain:
    width: int
    name: str


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_arguments_are_described_for_the_run_folder() -> None:
    config = SFTConfig("olmoe", "chats.jsonl")
    assert _describe(config) == config.to_dict()
    assert _describe(Plain(3, "x")) == {"width": 3, "name": "x"}
    assert _describe([1, "a", None, {"k": 2.5}]) == [1, "a", None, {"k": 2.5}]
    assert _describe(object).startswith("<class")
    assert len(_describe({1, *range(10_000)})) < 600
    assert "NoRepr instance" in _describe(NoRepr())


def test_functions_have_readable_names() -> None:
    assert _name_of(nothing).endswith(".nothing")
    assert _name_of(functools.partial(functools.partial(nothing))).endswith(".nothing")
    assert _name_of(Plain(1, "").__init__).endswith("Plain.__init__")
    assert "test_functions_have_readable_names" in _name_of(lambda: 0)


def test_only_modules_that_a_rank_would_find_travel_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "on_the_path.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import on_the_path  # type: ignore[import-not-found]

    assert _ranks_can_import(on_the_path)
    assert _ranks_can_import(json)
    assert _ranks_can_import(submit_module)
    packed = pickle.loads(_pack(on_the_path.f, (), {}, "f"))
    assert b"on_the_path" in packed["call"] and len(packed["call"]) < 100
    assert str(tmp_path) in packed["sys_path"]
    packed = pickle.loads(_pack(made_by_hand(tmp_path).f, (), {}, "f"))
    del sys.modules["a_name_of_its_own"]
    assert pickle.loads(packed["call"])[0]() == 2
    monkeypatch.undo()
    assert not _ranks_can_import(on_the_path)


def made_by_hand(folder: Path) -> ModuleType:
    """A module in sys.modules under a name that no path leads to, as test runners make them."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "code.py").write_text("def f():\n    return 2\n")
    spec = importlib.util.spec_from_file_location("a_name_of_its_own", folder / "elsewhere" / "code.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["a_name_of_its_own"] = module
    assert not _ranks_can_import(module)
    return module


def test_submit_is_quick_and_keeps_this_process_free_of_torch(tmp_path: Path, marked, until) -> None:
    """The secret in `env` reaches the job and not the run folder."""
    script = textwrap.dedent("""
        import json, sys, time
        from moekit.config import SFTConfig
        import moekit
        def f(config, k): pass
        env = json.load(sys.stdin)
        begin = time.perf_counter()
        job = moekit.submit(f, SFTConfig("m", "d"), nproc=3, k=1, env=env, name="quick", runs=sys.argv[1])
        seconds = time.perf_counter() - begin
        print(json.dumps([seconds, "torch" in sys.modules, job.state, repr(job)]))
        job.stop()
        print(job.state)
    """)
    env = json.dumps(marked.env | {"API_TOKEN": "hush-hush"})
    command = [sys.executable, "-c", script, str(tmp_path / "runs")]
    done = subprocess.run(command, input=env, capture_output=True, text=True, check=True)
    shown, stopped = done.stdout.splitlines()
    seconds, torch, state, text = json.loads(shown)
    assert seconds < 0.3 * 5  # 0.05 s on a quiet machine; five times the promise on a busy one
    assert not torch
    assert state == "starting" and text.startswith("Job(quick: state starting, ranks 3")
    assert stopped == "stopped"
    assert marked.all_gone()
    config = json.loads((tmp_path / "runs" / "quick" / "config.json").read_text())
    assert config["function"] == "__main__.f"
    assert config["args"] == [json.loads(json.dumps(SFTConfig("m", "d").to_dict()))] and config["kwargs"] == {"k": 1}
    assert (config["nproc"], config["name"]) == (3, "quick")
    assert config["versions"]["torch"].startswith("2.") and config["command"][0] == "-c"
    assert "hush-hush" not in (tmp_path / "runs" / "quick" / "config.json").read_text()
