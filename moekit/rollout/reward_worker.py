"""What one reward worker runs, as a process of its own: read a job, call the verifier, answer with a line of JSON.

It is started by its path (`moekit.rollout.rewards`), so it imports nothing but the standard library and what the
verifiers need: no torch, and not the caller's main module again. It dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pickle
import signal
import socket
import sys
import time
from importlib import import_module
from typing import Any

_PR_SET_PDEATHSIG = 1


def judge(value: Any) -> tuple[float, str, str]:
    """(score, verdict, message) of what a verifier returned; numbers are what `float` takes, texts are none.
    >>> judge(True), judge(float("nan")), judge("1.0")
    ((1.0, 'ok', ''), (0.0, 'nan', 'returned nan'), (0.0, 'type', 'returned a str, not a number'))
    """
    try:
        score = float(value) if hasattr(value, "__float__") else None
    except Exception:  # noqa: BLE001 (an array of several numbers, a class of the user's own)
        score = None
    if score is None:
        return 0.0, "type", f"returned a {type(value).__name__}, not a number"
    return (score, "ok", "") if math.isfinite(score) else (0.0, "nan", f"returned {score}")


def say(problem: BaseException) -> str:
    """An exception in at most 300 characters, also one that cannot be printed."""
    with contextlib.suppress(Exception):
        return f"{type(problem).__name__}: {problem}"[:300]
    return type(problem).__name__


def die_with(parent: int) -> None:
    """Be killed when the parent ends, also while a verifier sits in C code. Elsewhere than on Linux the closed line
    ends an idle worker only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def main(line: socket.socket) -> None:
    """Answer jobs until the other end closes."""
    jobs = line.makefile("rb")

    def receive() -> bytes:
        size = int.from_bytes(jobs.read(8), "big")
        data = jobs.read(size)
        if not size or len(data) < size:
            os._exit(0)  # the other end is gone
        return data

    def answer(value: Any) -> None:
        line.sendall(json.dumps(value).encode() + b"\n")

    sys.path[:], modules, pickled = pickle.loads(receive())
    try:
        for module in modules:
            import_module(module)
        calls = [pickle.loads(call) for call in pickled]
    except BaseException as problem:  # noqa: BLE001 (whatever it is, the pool says it)
        return answer(say(problem))
    answer("")
    while True:
        data, start = receive(), time.perf_counter()
        try:
            which, item, text = pickle.loads(data)
            found = judge(calls[which](item, text))
        except BaseException as problem:  # noqa: BLE001 (sys.exit() in a verifier is a verdict, too)
            found = 0.0, "error", say(problem)
        answer([*found[:2], time.perf_counter() - start, found[2]])


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    main(socket.socket(fileno=int(sys.argv[1])))
