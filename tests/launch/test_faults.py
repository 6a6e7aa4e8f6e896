"""Four ranks, one of which is killed, raises or hangs: the job ends in time, says the right rank, and leaves nothing.

And it can be taken up again in the same folder with the ranks that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moekit
from moekit.errors import JobError
from moekit.launch.folder import HEARTBEAT_S, read_json

TIMEOUT = 5.0  # of a collective
SLACK = 10.0  # for processes to end on a machine that does something else as well


def work(what: str, rank: int) -> list[int]:
    """Three sums over the ranks, of which `rank` misses the third; each is noted in the run folder."""
    import os
    import signal
    import subprocess
    import time

    import torch
    import torch.distributed as dist

    at = moekit.here()
    assert at.folder is not None
    path = at.folder / "checkpoints" / "step.txt"  # a checkpoint, as far as the launcher knows one
    steps = [int(line) for line in path.read_text().split()] if path.exists() else []
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    dist.barrier()
    for step in range(len(steps), 3 if what != "goes on" else 4):
        if step == 2 and at.rank == rank:
            while not path.exists() or len(path.read_text().split()) < 2:  # what rank 0 has summed, it has noted
                time.sleep(0.01)
            print("fault at", time.time(), flush=True)
            if what == "raises":
                raise ValueError(f"the value {step} is wrong")
            if what == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "will not end":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if what in ("hangs", "will not end"):
                while True:
                    time.sleep(1)
        total = torch.ones(())
        dist.all_reduce(total)
        steps.append(int(total))
        if at.rank == 0:
            path.parent.mkdir(exist_ok=True)
            path.write_text(" ".join(map(str, steps)))
    return steps


FAULTS = {"is killed": 2, "raises": 3, "hangs": 1, "will not end": 1}
Faults = dict[str, tuple[moekit.Job, Any]]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, new_mark: Callable[[], Any]) -> Iterator[Faults]:
    """One job after the other (sixteen ranks at once would measure the machine); each has ended."""
    runs, made = tmp_path_factory.mktemp("faults"), {}
    for what, rank in FAULTS.items():
        mark = new_mark()
        job = moekit.submit(work, what, rank, nproc=4, threads=1, timeout=TIMEOUT, runs=runs, name=what, env=mark.env)
        made[what] = job, mark
        job.wait(120)
    yield made
    for job, _ in made.values():
        job.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("is killed", 2, r"rank 2 was killed by signal 9 \(SIGKILL\)"),
        ("raises", 3, r"rank 3: ValueError: the value 2 is wrong\n(?s:.*)in work"),
        ("hangs", None, r"RuntimeError: .*; rank 1 was not in it, but at .*test_faults\.py:\d+ in work\n"),
        ("will not end", None, r"rank [023]: RuntimeError: "),
    ],
)
def test_a_fault_ends_the_job_in_time_with_the_right_rank(
    faults: Faults, what: str, rank: int | None, says: str
) -> None:
    job, mark = faults[what]
    assert job.state == "failed"
    with pytest.raises(JobError, match=says) as caught:
        job.result()
    assert caught.value.rank == rank if rank is not None else caught.value.rank in (0, 2, 3)
    assert job.reason.count("was not in it") == (what == "hangs")  # those that waited are not blamed
    at = float(job.logs(FAULTS[what]).split("fault at ")[1].split()[0])
    state = read_json(job.folder / "state.json")
    assert state is not None
    took = state["ended"] - at
    least, most = {"hangs": (TIMEOUT, TIMEOUT), "will not end": (TIMEOUT, TIMEOUT + 2 * HEARTBEAT_S)}.get(what, (0, 0))
    assert least * 0.9 < took < most + SLACK, took
    assert not mark.living()  # at once: the state is written when all has ended


@pytest.mark.long
def test_a_run_goes_on_with_the_ranks_that_are_left(faults: Faults) -> None:
    """The folder and the logs of the attempt before are kept; nothing of it is taken for this attempt's."""
    job, _ = faults["is killed"]
    assert (job.folder / "checkpoints" / "step.txt").read_text() == "4 4"
    again = moekit.submit(
        work, "goes on", -1, nproc=3, threads=1, timeout=TIMEOUT, runs=job.folder.parent, name=job.name, resume=True
    )
    assert again.result(120) == [[4, 4, 3, 3]] * 3
    assert (again.folder, again.nproc, again.state, again.reason) == (job.folder, 3, "finished", "")
    assert len(again.pids) == 3
    assert "fault at" in again.logs(2)
    assert not (again.folder / "errors" / "rank_2.json").exists()
    assert not (again.folder / "ranks" / "rank_3.json").exists()


def test_a_run_of_several_nodes_goes_on_here(runs: Path) -> None:
    def count() -> int:
        return moekit.here().world

    job = moekit.submit(count, backend="torchrun", nodes=2, runs=runs, name="run")
    (job.folder / "metrics.jsonl").write_text("{}\n")
    (job.folder / "slurm_job").write_text("")
    assert job.stop() == "stopped"
    began = time.monotonic()
    again = moekit.submit(count, runs=runs, name="run", resume=True)
    assert again.result(60) == [1]
    assert time.monotonic() - began < 60
    assert {path.name for path in again.folder.iterdir()} == {
        "config.json", "call.pkl", "state.json", "logs", "ranks", "results", "errors", "metrics.jsonl",
    }  # fmt: skip
