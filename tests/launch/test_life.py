"""The end of jobs: stopped, killed in every place, orphaned. Nothing may be left running, and the state must say why.

Every rank has a helper in a session of its own that ignores SIGTERM, which is what is easily forgotten.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import moekit
from moekit.errors import JobError, RunExistsError


def wait_for_ever(stubborn: bool = False) -> None:
    import signal
    import subprocess
    import time

    subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 600; true"], start_new_session=True)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waiting", flush=True)
    while True:
        time.sleep(0.1)


PARENT = textwrap.dedent("""
    import json, os, sys, time
    import moekit
    marks = json.load(sys.stdin)
    runs = sys.argv[1]
    def wait_for_ever():
        import subprocess, time
        subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 600; true"], start_new_session=True)
        print("waiting", flush=True)
        time.sleep(600)
    def wait_for_file(path):
        import os, time
        print("waiting", flush=True)
        while not os.path.exists(path):
            time.sleep(0.05)
        return "it came"
    moekit.submit(wait_for_ever, name="attached", runs=runs, env=marks["attached"])
    moekit.submit(wait_for_file, runs + "/go", name="detached", runs=runs, env=marks["detached"], detach=True)
    time.sleep(600)
""")


class Life:
    """All jobs of this file, started together (the start is what costs), each with a mark in its environment."""

    def __init__(self, runs: Path, new_mark: Callable[[], Any], until: Callable[..., bool]):
        self.runs = runs
        names = ("stubborn", "rank", "agent", "supervisor", "attached", "detached")
        self.marks = {name: new_mark() for name in names}
        self.until = until
        self.jobs = {
            name: moekit.submit(
                wait_for_ever, name == "stubborn", nproc=2 if name == "rank" else 1, name=name, runs=runs, threads=1,
                env=self.marks[name].env,
            )
            for name in names[:4]
        }  # fmt: skip
        self.parent = subprocess.Popen([sys.executable, "-c", PARENT, str(runs)], stdin=subprocess.PIPE, text=True)
        assert self.parent.stdin is not None
        self.parent.stdin.write(json.dumps({name: mark.env for name, mark in self.marks.items()}))
        self.parent.stdin.close()
        for name in ("attached", "detached"):
            assert until((runs / name / "state.json").exists)
            self.jobs[name] = moekit.attach(runs / name)

    def up(self, name: str) -> moekit.Job:
        """The job `name`, once every rank waits and its helper runs."""
        job = self.jobs[name]
        assert self.until(lambda: all("waiting" in job.logs(rank) for rank in range(job.nproc))), job.logs("supervisor")
        assert self.until(lambda: job.state == "running")
        return job

    def gone(self, name: str) -> None:
        assert self.marks[name].all_gone(), [p.cmdline() for p in self.marks[name].living()]


@pytest.fixture(scope="module")
def life(
    tmp_path_factory: pytest.TempPathFactory, new_mark: Callable[[], Any], until: Callable[..., bool]
) -> Iterator[Life]:
    made = Life(tmp_path_factory.mktemp("life") / "runs", new_mark, until)
    yield made
    made.parent.kill()
    made.parent.wait()
    for job in made.jobs.values():
        job.stop()


def test_waiting_can_be_interrupted_or_time_out_and_the_job_goes_on(life: Life) -> None:
    job = life.up("stubborn")
    assert job.wait(0.1) == "running"
    with pytest.raises(TimeoutError, match="still running"):
        job.result(timeout=0.1)
    begin = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        job.result(60)
    assert time.monotonic() - begin < 20
    assert job.state == "running"
    assert not job.done
    assert job.supervisor_pid is not None
    assert os.getsid(job.supervisor_pid) != os.getsid(0)  # an interrupt of the notebook's group does not reach it


def test_a_running_job_is_found_and_its_folder_is_not_taken(life: Life) -> None:
    job = life.up("stubborn")
    again = moekit.attach(job.folder)
    assert (again.state, again.pids, again.logs()) == ("running", job.pids, "waiting")
    assert "state running" in repr(again)
    with pytest.raises(RunExistsError, match="still going"):
        moekit.submit(wait_for_ever, name="stubborn", runs=life.runs, overwrite=True)


def test_stop_leaves_no_process_even_of_a_rank_that_ignores_it(life: Life) -> None:
    job = life.up("stubborn")
    assert life.until(lambda: len(life.marks["stubborn"].living()) >= 5)  # supervisor, agent, rank, its helper's two
    begin = time.monotonic()
    assert moekit.attach(job.folder).stop() == "stopped"  # from anywhere
    assert time.monotonic() - begin < 40
    life.gone("stubborn")
    assert job.wait(10) == "stopped"
    assert job.reason == "stopped on request (SIGTERM)"
    with pytest.raises(JobError, match="was stopped"):
        job.result(10)


def test_a_killed_rank_ends_the_job_with_its_name(life: Life) -> None:
    job = life.up("rank")
    assert job.pids[1] is not None
    os.kill(job.pids[1], signal.SIGKILL)
    with pytest.raises(JobError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)") as caught:
        job.result(60)
    assert caught.value.rank == 1
    assert "waiting" in str(caught.value)  # the last lines of its log
    life.gone("rank")
    assert json.loads((job.folder / "state.json").read_text())["exit_codes"][1] == -9


def test_a_killed_agent_ends_the_job(life: Life) -> None:
    job = life.up("agent")
    os.kill(json.loads((job.folder / "state.json").read_text())["pids"]["agent"], signal.SIGKILL)
    with pytest.raises(JobError, match="launching process was killed by SIGKILL"):
        job.result(60)
    life.gone("agent")


def test_a_killed_supervisor_leaves_no_process_and_a_failed_job(life: Life) -> None:
    job = life.up("supervisor")
    assert job.supervisor_pid is not None
    os.kill(job.supervisor_pid, signal.SIGKILL)
    with pytest.raises(JobError, match="lost: the supervisor"):
        job.result(60)
    life.gone("supervisor")
    assert moekit.attach(job.folder).state == "failed"


def test_a_killed_parent_takes_the_attached_job_with_it_and_not_the_detached_one(life: Life) -> None:
    attached, detached = life.up("attached"), life.up("detached")
    life.parent.kill()
    life.parent.wait()
    assert life.until(lambda: attached.done, 30)
    assert attached.state == "stopped"
    assert f"process {life.parent.pid}) ended" in attached.reason
    life.gone("attached")
    time.sleep(0.5)
    assert detached.state == "running"
    (life.runs / "go").touch()
    assert moekit.attach(detached.folder).result(60) == ["it came"]
    life.gone("detached")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_a_kill_at_any_moment_leaves_no_process(
    tmp_path: Path, new_mark: Callable[[], Any], until: Callable[..., bool], seed: int
) -> None:
    """One process of the job, whichever it is, is killed while the others start."""
    choice, mark = random.Random(seed), new_mark()
    job = moekit.submit(wait_for_ever, nproc=2, runs=tmp_path, threads=1, env=mark.env)
    time.sleep(choice.uniform(0.0, 6.0))
    victims = mark.living()
    assert victims
    with suppress(psutil.NoSuchProcess):  # one that is there for a moment only, as an `uname` of platform's
        choice.choice(victims).kill()
    if not until(lambda: job.done, 3):  # it was a helper of a rank: the job goes on
        job.stop()
    assert job.state in ("failed", "stopped")
    assert mark.all_gone(), [p.cmdline() for p in mark.living()]


@pytest.mark.long
def test_more_ranks_than_cores(tmp_path: Path) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        mine = torch.tensor(float(moekit.here().rank + 1))
        dist.all_reduce(mine)
        return mine.item()

    assert moekit.submit(total, nproc=8, runs=tmp_path).result(250) == [36.0] * 8
