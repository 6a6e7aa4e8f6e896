"""Identity of processes, and the end of a whole tree of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from moekit.launch.processes import descendants, is_alive, kill_descendants, signal_name, stamp


def test_a_stamp_tells_a_process_from_its_successor() -> None:
    child = subprocess.Popen(["sleep", "60"])
    start = stamp(child.pid)
    assert start is not None
    assert start == stamp(child.pid)
    assert is_alive(child.pid, start)
    assert not is_alive(child.pid, start + "1")  # the id was given to another process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert stamp(child.pid) is None  # a zombie is gone
    child.wait()
    assert stamp(child.pid) is None
    assert not is_alive(None, None)


def test_a_process_that_renames_itself_keeps_its_stamp() -> None:
    child = subprocess.Popen(["sh", "-c", "exec -a 'x) R (1 2 3' sleep 60"], executable="/bin/bash")
    try:
        start = stamp(child.pid)
        assert start is not None and start.rpartition(":")[2].isdigit()
    finally:
        child.kill()
        child.wait()


TREE = """
import subprocess, sys, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 61 & sleep 62"])
print("up", flush=True)
time.sleep(60)
"""


def test_kill_descendants_leaves_nothing_below() -> None:
    top = subprocess.Popen(
        ["sh", "-c", f'"{sys.executable}" -c "$TREE"; true'], env=os.environ | {"TREE": TREE}, stdout=-1
    )
    assert top.stdout is not None and top.stdout.readline() == b"up\n"
    end = time.monotonic() + 10
    while len(descendants(top.pid)) < 4 and time.monotonic() < end:
        time.sleep(0.02)
    below = [(process.pid, stamp(process.pid)) for process in descendants(top.pid)]
    assert len(below) == 4  # python, the inner sh, two sleeps (one in a session of its own)
    assert kill_descendants(top.pid) == []
    assert not any(is_alive(*one) for one in below)
    top.kill()
    top.wait()


CHILD = """
import os, sys, time
from moekit.launch import processes
if sys.argv[1] == "watch":
    processes._prctl = lambda *arguments: False  # as on a system that has no such call
processes.die_with_parent(os.getppid())
print(os.getpid(), processes.stamp(os.getpid()), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["ask", "watch"])
def test_a_process_dies_with_its_parent(how: str) -> None:
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", start, CHILD, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, start = parent.stdout.readline().split()
    assert is_alive(int(pid), start)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while is_alive(int(pid), start) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(int(pid), start)


def test_signal_names() -> None:
    assert (signal_name(9), signal_name(11), signal_name(200)) == ("SIGKILL", "SIGSEGV", "signal 200")
