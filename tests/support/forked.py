"""Runs a script in several processes that are forked from one: what all of them import is imported once.

A rank that Python starts anew spends 2 s of processor time on imports before its first line. The server that forks
them has imported the same, has computed nothing and has one thread; it ends with the session. Tests of how processes
start, or of ranks that are killed, start theirs with subprocess.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

IMPORTED = ["moekit.recipes.ppo", "moekit.recipes.dpo", "moekit.rollout.embedded", "moekit.rollout.shared_ring",
            "torch.distributed.pipelining"]  # fmt: skip


def run_ranks(script: str | Path, each: Iterable[Sequence[object]], timeout: float) -> list[int | None]:
    """`python SCRIPT ARGUMENTS` side by side for each of the arguments, one thread each; returns the exit codes.

    -9 after SIGKILL, as subprocess has it; None of those that still ran after `timeout` seconds, and were killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    env = dict(os.environ)  # the server has that of its start
    ranks = [context.Process(target=_main, args=(str(script), [str(a) for a in one], env)) for one in each]
    try:
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()


def _main(script: str, arguments: list[str], env: dict[str, str]) -> None:
    """What the interpreter would do, up to what was registered for its end."""
    import torch

    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    atexit._run_exitfuncs()
