"""Resident workers in a real notebook kernel: cells, ``%%px``, errors, interrupts, and the end of the kernel."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moekit

CELLS = {
    "start": """
        import json, os, sys, time
        from pathlib import Path
        import moekit
        counter = Path("counter.txt")
        counter.write_text(str(int(counter.read_text()) + 1) if counter.exists() else "1")
        def f(rank):
            return helper(rank)
        def helper(rank):
            return rank * 10
        marks = json.loads(os.environ["MARKS"])
        def wait_for(path):
            while not os.path.exists(path):
                time.sleep(0.05)
            return "it came"
        for name in ("attached", "detached"):
            moekit.submit(wait_for, "go", name=name, threads=1, env=marks[name], detach=name == "detached")
        pool = moekit.workers(2, threads=1, device="cpu", env=marks["pool"])
        print(pool(lambda: f(moekit.here().rank)), "torch" in sys.modules)
    """,
    "px": """%%px
import moekit, torch
x = torch.ones(2) * (1 + moekit.here().rank)
torch.distributed.all_reduce(x)
print("on", moekit.here().rank)
x.tolist()
""",
    "edit": """
        def helper(rank):
            return x.sum().item() + rank  # x: of the %%px cell
        pool(lambda: f(moekit.here().rank))
    """,
    "error": """%%px
import time
if moekit.here().rank == 1:
    1 / 0  # of rank 1
time.sleep(60)
""",
    "one": "%%px --targets 1\nprint(x.sum() / 2)",
    "call": """
        def bad():
            if moekit.here().rank == 1:
                raise ValueError("in a call")  # line of bad
            time.sleep(60)
        pool(bad)
    """,
    "wait": "pool(time.sleep, 60)",
    "same": "pool(lambda: os.getpid()) == pool.pids",
    "stuck": """%%px
if moekit.here().rank == 1:
    int("of rank 1 again")
torch.distributed.barrier()
""",
    "after": "%px print(1)",
    "restart": """
        pool.restart()
        other = moekit.workers(1, threads=1, device="cpu", env=marks["pool"])
        pool.activate()
    """,
    "two": "%px import moekit; print(moekit.here().world)",
    "names": "%px x",
    "busy": "pool(time.sleep, 600)",
}


@pytest.mark.long
@pytest.mark.usefixtures("_ipython_untouched")
def test_bc_120_a_notebook_and_its_killed_kernel(
    tmp_path: Path, new_mark: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    """BC-120: functions of cells travel by value, no cell runs again; errors show; SIGKILL of the kernel ends all, but
    for a detached job."""
    from jupyter_client.manager import start_new_kernel

    marks = {name: new_mark() for name in ("pool", "attached", "detached")}
    monkeypatch.setenv("MARKS", json.dumps({name: mark.env for name, mark in marks.items()}))
    mark = marks["pool"]
    kernel, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), startup_timeout=60)

    def run(cell: str, interrupt: float = 0.0) -> tuple[str, str, float]:
        """What a cell printed and displayed, the error that it shows, and how long it took."""
        told: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            told.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        begin = time.monotonic()
        if interrupt:
            threading.Timer(interrupt, kernel.interrupt_kernel).start()
        cell = textwrap.dedent(CELLS[cell]).strip()
        reply = client.execute_interactive(cell, timeout=100, output_hook=hook)["content"]
        shown = "\n".join(reply["traceback"]) if reply["status"] == "error" else ""
        return "".join(told), re.sub(r"\x1b\[[\d;]*m", "", shown), time.monotonic() - begin

    try:
        assert run("start")[:2] == ("[0, 10] False\n", "")  # the notebook's process has no torch
        shown, error, _ = run("px")
        assert {"[rank 0] on 0", "[rank 1] on 1"} <= set(shown.splitlines())  # who prints first is shown first
        assert shown.count("[3.0, 3.0]") == 2 and not error
        assert run("edit")[:2] == ("[6.0, 7.0]", "")
        for cell, line in (("error", "1 / 0  # of rank 1"), ("call", 'raise ValueError("in a call")  # line of bad')):
            shown, error, seconds = run(cell)
            assert error.startswith("JobError: rank 1: ") and line in error and seconds < 10
            assert "rank 0 had not ended and got an interrupt" in error and "pool.py" not in error
        assert run("one")[:2] == ("[rank 1] tensor(3.)\n", "")
        _, error, seconds = run("wait", interrupt=1.0)
        assert "KeyboardInterrupt" in error and "ranks 0, 1 had not ended" in error and seconds < 10
        assert run("same")[:2] == ("True", "")
        _, error, seconds = run("stuck")
        assert 'int("of rank 1 again")' in error and "rank 0 did not answer" in error and seconds < 10
        assert "rank 0 did not answer" in run("after")[1]
        assert run("restart")[1] == ""
        shown, error, _ = run("two")
        assert sorted(shown.splitlines()) == ["[rank 0] 2", "[rank 1] 2"] and not error
        assert "NameError" in run("names")[1]
        client.execute(CELLS["busy"])
        jobs = [moekit.attach(tmp_path / "runs" / name) for name in ("attached", "detached")]
        assert until(lambda: [job.state for job in jobs] == ["running"] * 2, 30)
        assert len(mark.living()) == 5 + 4  # guards, controllers, their heart monitors, ranks
    finally:
        os.kill(kernel.provisioner.pid, signal.SIGKILL)
        begin = time.monotonic()
        client.stop_channels()
    gone = until(lambda: not mark.living() and not marks["attached"].living(), 10)
    assert gone and time.monotonic() - begin < 10, [p.cmdline() for p in mark.living() + marks["attached"].living()]
    assert [job.state for job in jobs] == ["stopped", "running"]
    (tmp_path / "go").touch()
    assert jobs[1].result(60) == ["it came"]
    assert (tmp_path / "counter.txt").read_text() == "1"
