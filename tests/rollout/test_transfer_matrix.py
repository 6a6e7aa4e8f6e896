"""The transfer matrix: every bit of every layout arrives at every other, and bytes are the plan's."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from forked import run_ranks

HERE = Path(__file__).parent / "transfers.py"
sys.path.append(str(HERE.parent))
transfers = importlib.import_module("transfers")
CASES, QUICK = transfers.CASES, [n for n, c in transfers.CASES.items() if c.world == 2][:3]


@functools.cache
def matrix(world: int, names: tuple[str, ...], threads: bool) -> tempfile.TemporaryDirectory:
    """Run cases of one world of learners: each process one of them, or a server. Servers may be threads of this one."""
    kept = tempfile.TemporaryDirectory(prefix="moekit-")  # gone with the last reference, the cache's
    folder = Path(kept.name)
    roles = [("learn", r) for r in range(world)] + [("serve", t) for t in range(0 if threads else 3)]
    servers = [threading.Thread(target=transfers.main, args=("serve", t, 1, folder, names)) for t in range(3)]
    for server in servers if threads else ():
        server.start()
    assert run_ranks(HERE, [(*role, world, folder, *names) for role in roles], timeout=150) == [0] * len(roles)
    for server in servers if threads else ():
        server.join(60)
    return kept


def check_pair(folder: tempfile.TemporaryDirectory, name: str) -> None:
    """Bitwise equal to the export; bytes of every pair those of the plan; extra memory within the mode's bound."""
    case, here = CASES[name], Path(folder.name, str(list(CASES).index(name)))
    sent = [pickle.loads((here / f"sent_{r}").read_bytes()) for r in range(case.world)]
    got = [pickle.loads((here / f"got_{t}").read_bytes()) for t in range(len(case.serve))]
    for rows, planned in sent:
        assert rows == [planned, planned]
    for t, told in enumerate(got):
        assert told["wrong"] == []
        assert told["bytes"] == [told["plan"]] * 2 == [told["size"]] * 2 == [sum(p[t] for _, p in sent)] * 2
        most = told["size"] if case.mode == "atomic" else 0
        if case.wire == "files":  # a chunk that is read, and the one before
            most += 2 * (transfers.CHUNK + 256)
        assert max(told["peak"]) <= most, (told["peak"], most)
    if case.world > 1 and not case.layout.get("pp"):  # replicas share the work
        work = [sum(planned) for _, planned in sent]
        assert max(work) < 1.5 * sum(work) / len(work)


@pytest.mark.parametrize("name", QUICK)
def test_every_bit_arrives(name):
    check_pair(matrix(2, tuple(QUICK), True), name)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_bit_arrives_in_every_pair_of_layouts(name):
    """15 pairs, learners and servers in processes of their own."""
    world = CASES[name].world
    check_pair(matrix(world, tuple(n for n, c in CASES.items() if c.world == world), False), name)


@pytest.mark.long
def test_point_to_point_between_processes(tmp_path):
    """2 learners by experts, 2 servers by layers, one gloo world; then a learner is killed half-way."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import transfers; transfers.points"
    ranks = [subprocess.Popen([sys.executable, "-c", f"{code}({r}, {str(tmp_path)!r})"], env=env) for r in range(4)]
    try:
        assert [p.wait(timeout=100) for p in ranks] == [0, -signal.SIGKILL, 0, 0]
    finally:
        for p in ranks:
            p.kill()
    for r in (2, 3):
        told = pickle.loads((tmp_path / f"told_{r}").read_bytes())
        assert told["wrong"] == [] and told["bytes"] == told["plan"] and "cannot be reached" in told["problem"]
