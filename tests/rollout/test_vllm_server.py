"""A server's processes: whatever ends it, none of them is left, and no shared memory. A script stands for vLLM."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moekit.errors import EngineError
from moekit.rollout.vllm_http import HTTPLink, group_alive, start_server

SCRIPT = """#!{python}
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

kept = SharedMemory(create=True, size=4096)
subprocess.Popen(["sleep", "60"])
print("segment", kept.name, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def how(tmp_path):
    """A script that says it is healthy, holds shared memory, and has a child."""
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    return {"python": str(script), "log": tmp_path / "log", "patience": 30.0}


def segment(log: Path) -> Path:
    return Path("/dev/shm", log.read_text().split("segment ")[1].split()[0])


def test_a_server_that_was_killed_leaves_no_shared_memory(how, tmp_path):
    """All its processes at once, so that none of them can tidy up: what they had is gone when it is started again."""
    with start_server(tmp_path, **how) as server:
        first = segment(how["log"])
        assert first.exists()
        os.killpg(server.process.pid, signal.SIGKILL)
        assert first.exists()
        how["log"].write_text("")
        server.restart()
        second = segment(how["log"])
        assert second.exists() and not first.exists() and second != first
        group = server.process
    assert not group_alive(group) and not second.exists() and server.process is None


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), EngineError("not yet")], ids=["interrupted", "too slow"])
def test_a_start_that_is_given_up_leaves_no_process(how, tmp_path, monkeypatch, problem):
    made, start = [], subprocess.Popen

    def call(*_):
        raise problem

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: made.append(start(*a, **k)) or made[-1])
    monkeypatch.setattr(HTTPLink, "call", call)
    with pytest.raises((KeyboardInterrupt, EngineError), match=r"^$|did not start \(exit None\)"):
        start_server(tmp_path, **how | {"patience": 0.6})
    assert len(made) == 1 and not group_alive(made[0])


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.long
def test_a_server_ends_with_its_owner(how, tmp_path):
    """Which is killed, and can stop nothing."""
    code = f"""import time
from moekit.rollout.vllm_http import start_server
server = start_server({str(tmp_path)!r}, python={how["python"]!r}, log={str(how["log"])!r})
print(server.process.pid, flush=True)
time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        group, began = int(owner.stdout.readline()), time.monotonic()
        owner.kill()
    try:
        while not ended(group):
            assert time.monotonic() - began < 10
            time.sleep(0.02)
    finally:
        os.killpg(group, signal.SIGKILL)  # a real vLLM ends its processes; the script leaves its child
        segment(how["log"]).unlink(missing_ok=True)


def test_an_object_that_is_gone_ends_its_server(how, tmp_path):
    server = start_server(tmp_path, **how)
    group = server.process
    del server
    gc.collect()
    assert group.wait(10) == -signal.SIGTERM
    os.killpg(group.pid, signal.SIGKILL)
    segment(how["log"]).unlink(missing_ok=True)
