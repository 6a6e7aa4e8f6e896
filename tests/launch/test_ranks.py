"""What a rank gets, does and gives back: real jobs of two processes, started side by side and shared by the tests."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moekit
from moekit.errors import ConfigError, JobError
from moekit.launch import worker

BASE = {"one": 1.0, "two": 10.0}  # a global that the functions below take along


def report(job: str) -> dict[str, Any]:
    """Inputs {1, 2} in job one and {10, 20} in job two; the sum over the ranks of its own job."""
    import torch.distributed as dist

    at = moekit.here()
    total = torch.tensor(BASE[job] * (at.rank + 1))
    dist.all_reduce(total)
    print(f"rank {at.rank} says é")
    print("and on stderr", file=sys.stderr)
    os.system("echo from a child process")
    return {
        "here": at,
        "sum": total,
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "asked": os.environ.get("ASKED_FOR"),
        "malloc": os.environ.get("MALLOC_TRIM_THRESHOLD_"),
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "parent_memory": hasattr(json, "only_in_the_parent"),
        "backend": dist.get_backend(),
    }


def one_rank_fails() -> None:
    import torch.distributed as dist

    def inner(value: int) -> None:
        raise ValueError(f"the value {value} is wrong")

    if moekit.here().rank == 1:
        inner(42)
    dist.all_reduce(torch.zeros(1))  # rank 0 waits here, and fails because rank 1 is gone


def one_rank_hangs() -> None:
    import time

    import torch.distributed as dist

    if moekit.here().rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.zeros(1))


Jobs = dict[str, moekit.Job]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    runs = tmp_path_factory.mktemp("ranks") / "runs"
    with pytest.MonkeyPatch.context() as patch, socket.socket() as taken:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(json, "only_in_the_parent", True, raising=False)
        patch.setenv("RANK", "7")  # as if this process were a rank itself
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which serves as well
        common: dict[str, Any] = {"nproc": 2, "runs": runs, "threads": 1}
        made = {
            "one": moekit.submit(report, "one", name="one", env={"ASKED_FOR": "it"}, malloc="keep", **common),
            "two": moekit.submit(report, job="two", name="two", **{**common, "threads": 3}),
            "fails": moekit.submit(one_rank_fails, name="fails", **common),
            # long enough for eight ranks to import torch side by side and meet, or that is what times out
            "hangs": moekit.submit(one_rank_hangs, name="hangs", timeout=5.0, **common),
        }
        yield made
        for job in made.values():
            job.stop()


def test_bc_116_a_parent_with_cuda_started_gets_fresh_interpreters(jobs: Jobs) -> None:
    results = jobs["one"].result(120)
    assert [r["parent_memory"] for r in results] == [False, False]
    assert len({os.getpid(), *(r["pid"] for r in results)}) == 3


def test_bc_118_two_jobs_at_once_with_the_usual_port_taken(jobs: Jobs) -> None:
    assert [r["sum"].item() for r in jobs["one"].result(120)] == [3.0, 3.0]
    assert [r["sum"].item() for r in jobs["two"].result(120)] == [30.0, 30.0]
    for name in ("one", "two"):
        assert json.loads((jobs[name].folder / "state.json").read_text())["exit_codes"] == [0, 0]


def test_a_rank_knows_its_place_and_gets_its_settings(jobs: Jobs) -> None:
    one, two = jobs["one"].result(120), jobs["two"].result(120)
    for rank, result in enumerate(one):
        assert result["here"] == worker.Here(rank, 2, rank, "cpu", jobs["one"].folder)
        assert (result["threads"], result["omp"], result["asked"]) == (1, "1", "it")
        assert result["malloc"] is not None
        assert (result["cwd"], result["backend"]) == (os.getcwd(), "gloo")
    for result in two:
        assert (result["threads"], result["omp"], result["asked"], result["malloc"]) == (3, "3", None, None)
    assert jobs["one"].pids == [r["pid"] for r in one]


def test_all_output_of_a_rank_is_in_its_log(jobs: Jobs) -> None:
    jobs["one"].result(120)
    for rank in range(2):
        lines = jobs["one"].logs(rank).splitlines()
        assert {f"rank {rank} says é", "and on stderr", "from a child process"} <= set(lines)


def test_the_finished_run_is_found_again(jobs: Jobs) -> None:
    jobs["one"].result(120)
    again = moekit.attach(jobs["one"].folder)
    assert (again.state, again.done, again.reason) == ("finished", True, "")
    assert again.result()[1]["sum"].item() == 3.0
    assert again.wait() == again.stop() == "finished"
    assert {p.name for p in again.folder.iterdir()} == {
        "config.json", "call.pkl", "state.json", "logs", "ranks", "results", "errors",
    }  # fmt: skip
    assert {p.name for p in (again.folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log", "supervisor.log"}
    assert again.config["malloc"] == "keep"


def test_the_first_failing_rank_explains_the_failure(jobs: Jobs) -> None:
    for job in (jobs["fails"], moekit.attach(jobs["fails"].folder)):
        with pytest.raises(JobError, match=r"job fails failed: rank 1: ValueError: the value 42 is wrong") as caught:
            job.result(120)
        assert caught.value.rank == 1
        trace = caught.value.traceback
        assert trace in str(caught.value)
        assert 'raise ValueError(f"the value {value} is wrong")' in trace
        assert "in one_rank_fails" in trace and "worker.py" not in trace
        assert "rank_1.log" in str(caught.value)
        assert job.state == "failed"
        assert "ValueError: the value 42 is wrong" in job.logs(1)


def test_a_hang_in_a_collective_ends_by_the_timeout(jobs: Jobs) -> None:
    with pytest.raises(JobError, match=r"rank 0: .*(?i:timed out|timeout)"):
        jobs["hangs"].result(120)
    assert jobs["hangs"].elapsed < 100


# Pieces of a rank that need no process of their own


def test_here_in_a_plain_process_and_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert moekit.here() == worker.Here(0, 1, 0, device, None)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert moekit.here() == worker.Here(5, 8, 1, "cuda:1", None)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"nproc=4 .* 1 are visible.*device='cpu'"):
        worker.join(device=device, timeout=1)


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ConfigError, match="the value that rank 3 returned cannot be pickled"):
        worker.dumps_result((i for i in range(3)), 3)
    data = worker.dumps_result({"f": lambda x: x + 1, "t": torch.ones(2)}, 3)
    back = pickle.loads(data)
    assert back["f"](1) == 2 and torch.equal(back["t"], torch.ones(2))


def test_only_collectives_count_as_knock_on() -> None:
    closed = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
    assert worker._is_knock_on(closed)
    assert worker._is_knock_on(torch.distributed.DistNetworkError("x"))
    assert not worker._is_knock_on(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not worker._is_knock_on(ValueError("NCCL"))
    try:
        try:
            raise closed
        except RuntimeError as error:
            raise ValueError("could not reduce") from error
    except ValueError as wrapped:
        assert worker._is_knock_on(wrapped)


@pytest.mark.timeout(20)
def test_an_error_raised_again_in_its_own_past_ends() -> None:
    """As the pipeline raises what torch's schedule wrapped: the chain is a ring, and the rank must still end."""
    cause = ValueError("no pairs")
    try:
        try:
            raise RuntimeError("stage 1 failed") from cause
        except RuntimeError as error:
            raise error.__cause__ from None
    except ValueError as again:
        assert again.__context__.__cause__ is again and not worker._is_knock_on(again)


def test_a_missing_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks").mkdir()
    config = {"function": "module.train", "nproc": 1, "nodes": 1, "threads": 1, "device": "cpu", "timeout": 1}
    call = b"cno_such_module\nf\n."
    packed = {"cwd": os.getcwd(), "sys_path": list(sys.path), "sources": {}, "call": call}
    (tmp_path / "call.pkl").write_bytes(pickle.dumps(packed))
    monkeypatch.setattr(worker, "join", lambda *settings: None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="cannot import 'no_such_module', which module.train needs"):
        worker._call(tmp_path, config, 0)
