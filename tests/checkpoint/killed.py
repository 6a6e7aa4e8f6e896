"""Two ranks save again and again; one of them is killed with SIGKILL at a random moment; what is left must be whole.

    python killed.py FOLDER MOMENTS

A script of its own, because it forks and the test process has threads. Prints what it counted as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from moekit.checkpoint.intervals import Piece
from moekit.checkpoint.load import open_checkpoint, verify
from moekit.checkpoint.save import latest, retain
from moekit.checkpoint.write import save_state
from moekit.errors import CheckpointError

SIZE = 400_000  # elements of each of two tensors; a rank owns half of both, 3.2 MB


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int = 2


def save_for_ever(rank, folder, attempt, first):
    """A rank: checkpoints step_first, step_first+1, ...; all values of a step are that step. Every third overwrites."""
    step = first
    while True:
        half = SIZE // 2
        piece = [Piece(n, (SIZE,), rank * half, (rank + 1) * half) for n in ("a", "b")]
        entries = {kind: [(p, torch.full((half,), float(step))) for p in piece] for kind in ("master", "exp_avg")}
        for again in range(2 if step % 3 == 0 else 1):
            token = f"{attempt}-{step}-{again}"
            try:
                save_state(folder / f"step_{step}", entries, {"updates": step}, world=Ranks(rank), token=token,
                           overwrite=True, asynchronous=step % 2 == 0, patience=1.5).wait()  # fmt: skip
            except CheckpointError as e:  # the other one was killed: it must be that, and nothing else
                os._exit(0 if f"no sign of rank {1 - rank}" in str(e) else 3)
            except BaseException as e:  # noqa: BLE001 (a forked child must not run on in main)
                print(e, file=sys.stderr, flush=True)
                os._exit(4)
        if rank == 0:
            retain(folder, 2)
        step += 1


def check(folder):
    """All visible checkpoints are whole and hold the values of their step. Returns how many, and the newest step."""
    count = 0
    for path in folder.glob("step_*"):
        verify(path)
        step = int(path.name[5:])
        with open_checkpoint(path) as c:
            assert c.manifest["updates"] == step
            for kind in ("master", "exp_avg"):
                for name in ("a", "b"):
                    out = torch.zeros(SIZE)
                    c.read(kind, [(Piece.whole(name, (SIZE,)), out)], names="ab")
                    assert (out == step).all(), f"{path} {kind} {name} holds other values"
        count += 1
    newest = latest(folder)
    return count, int(newest.name[5:]) if newest else 0


def main(folder, moments):
    """Returns the counts."""
    torch.set_num_threads(1)
    rng, counted = random.Random(0), {"kills": 0, "mid_save": 0, "checked": 0, "survivor_told": 0}
    done = 0
    for attempt in range(moments):
        ranks = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                save_for_ever(rank, folder, attempt, done + 1)
            ranks.append(pid)
        deadline = time.monotonic() + 30
        while not (folder / f"step_{done + 1}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)  # a previous checkpoint is there; from now on no moment may lose it
        before = check(folder)[1] if attempt == 0 else max(done, 1)
        time.sleep(rng.uniform(0, 0.12))
        victim = rng.randrange(2)
        os.kill(ranks[victim], signal.SIGKILL)
        os.waitpid(ranks[victim], 0)
        counted["kills"] += 1
        partial = [p for p in folder.glob(".step_*.partial") if list(p.glob("rank_*"))]
        counted["mid_save"] += bool(partial)
        if attempt % 3 == 0:  # let the survivor find out by itself
            _, status = os.waitpid(ranks[1 - victim], 0)
            assert os.waitstatus_to_exitcode(status) == 0, "the survivor did not say that the other rank is missing"
            counted["survivor_told"] += 1
        else:
            os.kill(ranks[1 - victim], signal.SIGKILL)
            os.waitpid(ranks[1 - victim], 0)
        count, done = check(folder)
        assert count >= 1 and done >= before, f"after kill {attempt}: newest is {done}, was {before}"
        counted["checked"] += count
    return counted


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
