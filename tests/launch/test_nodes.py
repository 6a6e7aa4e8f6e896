"""A job on several nodes: torchrun agents on loopback in the place of nodes, a script in the place of Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moekit
from moekit.errors import BackendError, ConfigError, JobError
from moekit.launch import outcome, slurm
from moekit.launch.folder import HEARTBEAT_S, read_json, write_json
from moekit.launch.host import port_is_free
from moekit.launch.processes import host_id

TIMEOUT = 4.0  # of a collective
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def work(what: str) -> dict[str, Any]:
    """The sum over ranks of rank + 1, unless rank 1 has something else to do."""
    import time

    import torch
    import torch.distributed as dist

    at = moekit.here()
    print(f"rank {at.rank} is here", flush=True)
    if at.rank == 1:
        if what == "raises":
            raise ValueError("the value 42 is wrong")
        if what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hangs":
            time.sleep(600)
    began = time.time()
    total = torch.tensor(float(at.rank + 1))
    dist.all_reduce(total)
    while what == "waits":
        time.sleep(0.1)
    return {
        "here": at,
        "sum": total.item(),
        "threads": torch.get_num_threads(),
        "began": began,
        "env": dict(os.environ),
    }


def free_port() -> int:
    """Below those that the system gives to connections (32768 and up), so that none takes it meanwhile."""
    return next(port for port in range(21_000 + os.getpid() % 10_000, 32_768) if port_is_free(port))


class Nodes:
    """A job for `nodes` nodes, and torchrun started for each of them."""

    def __init__(self, runs: Path, mark: Any, what: str, nodes: int = 2, nproc: int = 1):
        self.mark = mark
        self.job = moekit.submit(
            work, what, backend="torchrun", nodes=nodes, nproc=nproc, runs=runs, name=f"it {what}", timeout=TIMEOUT,
            threads=1,
        )  # fmt: skip
        command = ["bash", str(self.job.folder / "node.sh"), f"127.0.0.1:{free_port()}", "127.0.0.1"]
        self.agents = [
            subprocess.Popen(command, env=os.environ | LOOPBACK | mark.env, stderr=subprocess.DEVNULL)
            for _ in range(nodes)
        ]

    def gone(self) -> None:
        """torchrun has ended on every node, and no process is left."""
        for agent in self.agents:
            agent.wait(60)
        assert self.mark.all_gone(), [p.cmdline() for p in self.mark.living()]


@pytest.fixture
def start(runs: Path, new_mark: Callable[[], Any]) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(what: str, **size: int) -> Nodes:
        made.append(Nodes(runs, new_mark(), what, **size))
        return made[-1]

    yield make
    for nodes in made:
        for agent in nodes.agents:
            agent.kill()
            agent.wait()


def test_two_torchrun_agents_run_one_job(start: Callable[..., Nodes]) -> None:
    nodes = start("works")
    assert nodes.job.state == "starting" and not nodes.job.done
    found = moekit.attach(nodes.job.folder).result(120)
    assert [one["sum"] for one in found] == [3.0, 3.0]
    assert [(at.rank, at.world, at.local_rank, at.device, at.folder) for at in (one["here"] for one in found)] == [
        (rank, 2, 0, "cpu", nodes.job.folder) for rank in range(2)
    ]
    assert {one["env"]["GROUP_RANK"] for one in found} == {"0", "1"}  # two agents, one rank each
    nodes.gone()
    assert (nodes.job.state, nodes.job.reason) == ("finished", "")
    assert "rank 1 is here" in nodes.job.logs(1)
    assert [agent.returncode for agent in nodes.agents] == [0, 0]


@pytest.mark.long
def test_two_nodes_with_two_ranks_each(start: Callable[..., Nodes]) -> None:
    nodes = start("works", nproc=2)
    found = nodes.job.result(120)
    assert [one["sum"] for one in found] == [10.0] * 4
    assert [(one["env"]["GROUP_RANK"], one["here"].local_rank) for one in found] == [
        ("0", 0), ("0", 1), ("1", 0), ("1", 1),
    ]  # fmt: skip
    nodes.gone()


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises", r"rank 1: ValueError: the value 42 is wrong\n(?s:.*)in work"),
        ("is killed", r"rank 1 ended without a word: it was killed(?s:.*)rank 1 is here"),
        ("hangs", r"rank 0: RuntimeError: .*Timed out.*; rank 1 was not in it, but at .*test_nodes\.py:\d+ in work"),
    ],
)
def test_a_fault_on_one_node_ends_the_job_with_its_name(start: Callable[..., Nodes], what: str, says: str) -> None:
    nodes = start(what)
    with pytest.raises(JobError, match=says) as caught:
        nodes.job.result(120)
    assert caught.value.rank == (0 if what == "hangs" else 1)
    state = read_json(nodes.job.folder / "state.json")
    assert state is not None and state["state"] == "failed"
    ranks = [read_json(nodes.job.folder / "ranks" / f"rank_{rank}.json") for rank in range(2)]
    began = min(one["time"] for one in ranks if one)
    assert state["ended"] - began < TIMEOUT * (what == "hangs") + 2 * HEARTBEAT_S + 10.0  # the last: a busy machine
    nodes.gone()


@pytest.mark.long
def test_stop_ends_torchrun_on_this_host(start: Callable[..., Nodes], until: Callable[..., bool]) -> None:
    nodes = start("waits")
    assert until(lambda: nodes.job.state == "running", 120)
    assert moekit.attach(nodes.job.folder).stop() == "stopped"
    assert nodes.job.reason == "stopped on request"
    nodes.gone()


# How a job stands, by folders written by hand


@pytest.fixture
def run(runs: Path) -> moekit.Job:
    return moekit.submit(work, "x", backend="torchrun", nodes=2, nproc=2, runs=runs, name="run")


def say(job: moekit.Job, *phases: str, host: str = "far away", ago: float = 0.0) -> str:
    """Writes what four ranks say about themselves; the job's state then."""
    for rank, phase in enumerate(phases):
        path = job.folder / "ranks" / f"rank_{rank}.json"
        if phase:
            said = {"pid": os.getpid(), "stamp": "not this process", "host": host, "phase": phase, "time": time.time()}
            write_json(path, said)
            os.utime(path, (time.time() - ago,) * 2)
    return moekit.attach(job.folder).state


def test_the_state_is_what_the_ranks_say(run: moekit.Job) -> None:
    assert run.nproc == 4
    assert say(run, "", "", "", "") == "starting"
    assert run.reason == f"waits for `bash {run.folder}/node.sh HOST:PORT` on every node"
    assert say(run, "running", "starting", "", "running") == "starting"
    assert say(run, "running", "running", "returned", "running") == "running"
    with pytest.raises(JobError, match="other hosts"):
        run.stop()
    assert say(run, "returned", "returned", "returned", "returned") == "finished"
    assert read_json(run.folder / "state.json")["state"] == "finished"  # type: ignore[index]


def test_ranks_that_are_silent_elsewhere_or_gone_here_are_dead(run: moekit.Job) -> None:
    assert say(run, *["running"] * 4, ago=outcome.SILENT_S / 2) == "running"
    assert say(run, "running", "returned", "returned", "returned", ago=2 * outcome.SILENT_S) == "failed"
    assert run.reason.startswith("rank 0 ended without a word")


def test_a_rank_that_torchrun_ended_is_not_the_one_that_failed(run: moekit.Job) -> None:
    for rank in (0, 1, 3):
        (run.folder / "ranks" / f"rank_{rank}.stack").write_text('Current thread:\n  File "a.py", line 3 in f\n')
    assert say(run, *["running"] * 4, host=host_id()) == "failed"
    assert run.reason.startswith("rank 2 ended without a word")


def test_who_did_not_join_is_told_from_who_waited(run: moekit.Job) -> None:
    waits = (
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 9 in g'
    )
    stacks = {1: waits, 2: 'Current thread 0x1 (most recent call first):\n  File "/a b/t.py", line 3 in f\n  File "u"'}
    for rank, text in stacks.items():
        (run.folder / "ranks" / f"rank_{rank}.stack").write_text(text)
    error = {"rank": 0, "type": "RuntimeError", "message": "Timed out", "traceback": "", "time": 1.0, "knock_on": True}
    write_json(run.folder / "errors" / "rank_0.json", error)
    assert say(run, "failed", "running", "running", "returned", host=host_id()) == "failed"
    assert run.reason == "rank 0: RuntimeError: Timed out; rank 2 was not in it, but at /a b/t.py:3 in f"


def test_another_number_of_ranks_than_was_submitted_is_refused(run: moekit.Job, monkeypatch) -> None:
    from moekit.launch import worker

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=r"torchrun started 3 ranks.*submitted for 4 \(nodes=2, nproc=2\)"):
        worker._call(run.folder, run.config, 0)


# Slurm: what the batch script says, and a Slurm of shell scripts that runs it on "nodes" of this machine


def batch(runs: Path, **how: Any) -> tuple[moekit.Job, str, str]:
    how = {"nodes": 2, "nproc": 4, "name": "two words", **how}
    how["slurm"] = {"submit": False, **how.get("slurm", {})}
    job = moekit.submit(work, "works", backend="slurm", runs=runs / "100% 'quoted'", **how)
    return job, (job.folder / "job.sbatch").read_text(), (job.folder / "node.sh").read_text()


def test_the_batch_script(runs: Path) -> None:
    options = {"partition": "gpu", "account": "a b", "time": "2:00:00", "gpus_per_node": 4, "exclusive": True}
    options |= {"hold": False, "setup": "module load cuda\nulimit -n 4096"}
    env = {"WORD": "it's", "API_TOKEN": "hush"}
    job, script, node = batch(runs, slurm=options, threads=3, malloc="keep", env=env, timeout=30)
    log = str(job.folder / "logs" / "supervisor.log").replace("%", "%%").replace("'", "'\"'\"'")
    assert {line for line in script.splitlines() if line.startswith("#SBATCH")} == {
        "#SBATCH --job-name='two words'", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=12", "#SBATCH --no-requeue", f"#SBATCH --output='{log}'",
        "#SBATCH --open-mode=append", "#SBATCH --partition=gpu", "#SBATCH --account='a b'",
        "#SBATCH --time=2:00:00", "#SBATCH --gpus-per-node=4", "#SBATCH --exclusive",
    }  # fmt: skip
    assert "\nmodule load cuda\nulimit -n 4096\n" in script and "resume=True" in script
    assert "torch.distributed.run --nnodes=2 --nproc-per-node=4 " in node and "--rdzv-backend=c10d" in node
    for line in ("OMP_NUM_THREADS=3", "MALLOC_MMAP_THRESHOLD_=33554432", "WORD='it'\"'\"'s'"):
        assert f"\nexport {line}\n" in node
    assert "API_TOKEN" not in script + node  # sbatch hands it on from its own environment
    for name in ("job.sbatch", "node.sh"):
        subprocess.run(["bash", "-n", str(job.folder / name)], check=True)
    assert job.state == "starting"
    job.stop()


def test_a_port_and_cores_of_its_own(runs: Path) -> None:
    _, script, _ = batch(runs, slurm={"cpus_per_task": 7}, port=4321)
    assert "--cpus-per-task=7" in script and "\nPORT=4321\n" in script


FAKES = {
    "sbatch": 'cp "$1" "$FAKE/script"; echo "$API_TOKEN" > "$FAKE/token"; echo "Submitted batch job 123"',
    "scontrol": '[ "$*" = "show hostnames n[1-2]" ] && printf "127.0.0.1\\nn2\\n"',
    "squeue": '[ -f "$FAKE/queue" ] && cat "$FAKE/queue"',
    "sacct": '[ -f "$FAKE/acct" ] && cat "$FAKE/acct"',
    "scancel": 'echo "$1" > "$FAKE/cancelled"; rm -f "$FAKE/queue"; echo "CANCELLED by 0" > "$FAKE/acct"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@" 127.0.0.1 & "$@" 127.0.0.1; wait',
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm: scripts on PATH that say what the files in the folder hold."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "_LOOK_S", 1e-9)  # every look asks
    return folder


def test_slurm_gets_the_script_and_is_asked_how_it_goes(runs: Path, fake: Path) -> None:
    job, script, _ = batch(runs, slurm={"submit": True}, env={"API_TOKEN": "hush"})
    assert (fake / "script").read_text() == script
    assert (fake / "token").read_text() == "hush\n"
    assert (job.folder / "slurm_job").read_text() == "123"
    (fake / "queue").write_text("PENDING\n")
    assert (job.state, job.reason) == ("starting", "waits for Slurm job 123 (PENDING)")
    (fake / "queue").unlink()
    assert job.state == "starting"  # Slurm says nothing: no verdict
    (fake / "acct").write_text("TIMEOUT\n")
    assert (job.state, job.reason) == (
        "failed", "its ranks were ended from outside, or never ran (Slurm job 123: TIMEOUT)",
    )  # fmt: skip


def test_stop_cancels_the_slurm_job(runs: Path, fake: Path) -> None:
    job, _, _ = batch(runs, slurm={"submit": True})
    (fake / "queue").write_text("RUNNING\n")
    assert say(job, *["running"] * 8) == "running"
    assert job.stop() == "stopped"
    assert (fake / "cancelled").read_text() == "123\n"
    assert job.state == moekit.attach(job.folder).state == "stopped"


def test_ranks_of_a_slurm_job_that_is_over_are_dead(runs: Path, fake: Path) -> None:
    job, _, _ = batch(runs, slurm={"submit": True})
    (fake / "queue").write_text("RUNNING\n")
    assert say(job, *["running"] * 8, ago=outcome.SETTLE_S + 1) == "running"
    (fake / "queue").write_text("OUT_OF_MEMORY\n")
    assert say(job, *["running"] * 7, "returned", ago=outcome.SETTLE_S / 2) == "running"
    assert say(job, *["running"] * 7, "returned", ago=outcome.SETTLE_S + 1) == "failed"
    assert re.match(r"rank 0 ended without a word.* \(Slurm job 123: OUT_OF_MEMORY\)", job.reason)


def test_without_slurm_the_script_stays_and_is_named(runs: Path, fake: Path) -> None:
    (fake / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    with pytest.raises(BackendError, match="`sbatch .*job.sbatch.*` failed: invalid partition"):
        batch(runs, slurm={"submit": True})
    (fake / "sbatch").unlink()
    with pytest.raises(BackendError, match=r"no `sbatch`; run `sbatch .*job\.sbatch'.*moekit.attach\(.*run2") as caught:
        batch(runs, slurm={"submit": True}, name="run2")
    folder = next(runs.glob("*/run2"))
    assert (folder / "job.sbatch").exists() and str(folder) in str(caught.value)
    job = moekit.attach(folder)
    assert job.state == "starting"
    (fake / "scancel").unlink()
    (folder / "slurm_job").write_text("7\n")
    with pytest.raises(BackendError, match="scancel 7"):
        job.stop()


@pytest.mark.long
def test_the_batch_script_runs(runs: Path, fake: Path, marked: Any) -> None:
    """bash runs the very script that sbatch got; srun is two processes of this machine."""
    job, script, _ = batch(runs, nproc=1, threads=2, port=free_port(), slurm={"submit": True})
    assert script.count("srun") == 1
    env = os.environ | LOOPBACK | marked.env | {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "n[1-2]"}
    subprocess.run(["bash", str(fake / "script")], env=env, timeout=120, check=True)
    found = job.result(10)
    assert [one["sum"] for one in found] == [3.0, 3.0]
    assert {(one["threads"], one["env"]["OMP_NUM_THREADS"]) for one in found} == {(2, "2")}
    assert marked.all_gone()
