"""Resident workers that start, or do not: what is refused, pools side by side, ports that were taken, a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moekit
from moekit.errors import BackendError, ConfigError, JobError
from moekit.launch import host
from moekit.launch import pool as pools


@pytest.mark.parametrize("nproc", [0, -1, "x", 1.0, True, None])
def test_a_number_of_ranks_that_is_none_is_refused(nproc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=f"nproc={nproc!r} must be a whole number of ranks, at least 1"):
        moekit.workers(nproc)
    with pytest.raises(ConfigError, match="timeout=0 must be a number of seconds"):
        moekit.workers(2, timeout=0)


@pytest.mark.parametrize(("listed", "visible"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1,2", 2)])
def test_more_ranks_than_gpus_are_refused(listed: str | None, visible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [host.Gpu(index, f"GPU-{index}", "H200", 141_000, 0) for index in range(2)]
    monkeypatch.setattr(host, "gpus", lambda: two)
    monkeypatch.setattr(pools, "Pool", lambda *_: "started")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    with pytest.raises(ConfigError, match=f"nproc=3 ranks need one GPU each, and {visible} are visible.*device='cpu'"):
        moekit.workers(3, device="cuda")
    assert moekit.workers(3, device="cpu") == "started"
    if visible:
        assert moekit.workers(visible) == "started"
        with pytest.raises(ConfigError, match="need one GPU each"):
            moekit.workers(visible + 1)
    else:
        assert moekit.workers(3) == "started"  # on the CPU


def test_without_ipyparallel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs ipyparallel; .*pip install 'moekit\[notebooks\]'"):
        moekit.workers(2)


def test_importing_it_loads_neither_ipyparallel_nor_torch() -> None:
    code = "import moekit, sys; moekit.workers; print({'ipyparallel', 'torch', 'IPython'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


OTHER = """
import json, sys, time
import moekit, torch
def total(base):
    mine = torch.tensor(float(base * (moekit.here().rank + 1)))
    torch.distributed.all_reduce(mine)
    return mine.item()
pool = moekit.workers(2, threads=1, device="cpu", env=json.loads(sys.argv[1]), timeout=60)
print(pool(total, 10), flush=True)
pool(time.sleep, 600)
"""


@pytest.mark.long
@pytest.mark.usefixtures("_ipython_untouched")
def test_bc_118_two_pools_at_once_a_killed_rank_and_a_restart(
    new_mark: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    """BC-118: the classic port is taken, and both pools have their own sums; one loses a rank during a call."""

    def total(base: int) -> float:
        mine = torch.tensor(float(base * (moekit.here().rank + 1)))
        torch.distributed.all_reduce(mine)
        return mine.item()

    def die() -> None:
        if moekit.here().rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    one, two = new_mark(), new_mark()
    busy = socket.create_server(("127.0.0.1", 29500)) if host.port_is_free(29500) else None
    other = subprocess.Popen([sys.executable, "-c", OTHER, json.dumps(two.env)], stdout=subprocess.PIPE, text=True)
    request.addfinalizer(other.kill)
    pool = moekit.workers(2, threads=1, device="cpu", env=one.env, timeout=60)
    request.addfinalizer(pool.close)
    assert pool(total, 1) == [3.0, 3.0]
    assert other.stdout.readline() == "[30.0, 30.0]\n"
    begin = time.monotonic()
    with pytest.raises(JobError, match=r"lost rank 1: it was killed by signal 9 \(SIGKILL\)") as caught:
        pool(die)
    assert time.monotonic() - begin < 10 and caught.value.rank == 1
    with pytest.raises(JobError, match="lost rank 1"):
        pool(total, 1)
    pool.restart()
    assert pool(total, 1) == [3.0, 3.0]
    assert len(two.living()) == 5  # its guard, controller, heart monitor and ranks are not ours
    other.kill()
    other.wait()
    assert two.all_gone(10), [p.cmdline() for p in two.living()]
    assert pool(total, 1) == [3.0, 3.0]
    pool._guard.kill()  # all of the pool dies with the process that keeps it
    assert one.all_gone(10), [p.cmdline() for p in one.living()]
    with pytest.raises(JobError, match="which keeps it, ended"):
        pool(total, 1)
    pool.close()
    if busy is not None:
        busy.close()


TAKEN = """
import os, sys
if "controller" in sys.orig_argv:
    import ipyparallel.util as util
    free, calls = util.select_random_ports, []
    def some(n):
        ports = free(n)
        calls.extend(ports)
        if len(calls) - n <= 3 < len(calls) and not os.path.exists("{once}"):
            open("{once}", "x").close()
            ports[3 - len(calls)] = {port}
        return ports
    util.select_random_ports = some
"""


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
def test_a_port_that_another_took_first_is_no_failure(
    late: bool, tmp_path: Path, marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ipyparallel looks for free ports and binds them later; in between another pool of the same second can take one.
    The controller's fourth port is in use here, the first time that it is asked for. `late`: nobody looks before the
    controller and its log are gone."""
    look = pools.Pool._ports_were_taken
    if late:
        monkeypatch.setattr(pools.Pool, "_ports_were_taken", lambda p: p._guard.poll() is not None and look(p))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        once, port = tmp_path / "once", busy.getsockname()[1]
        (tmp_path / "sitecustomize.py").write_text(TAKEN.format(once=once, port=port))
        begin = time.monotonic()
        with moekit.workers(1, threads=1, device="cpu", env={**marked.env, "PYTHONPATH": str(tmp_path)}) as pool:
            assert pool(lambda: moekit.here().world) == [1] and once.exists()
        assert time.monotonic() - begin < 60  # not the time that a pool may take to start
    assert marked.all_gone(10)
