"""Weights of a 500 MB model from a learner's process to an engine's on the same host, against a memory copy.

    python benchmarks/transfer.py [--mb 500] [--updates 30] [--checkpoints 3] [--chunk-mb 4] [--slots 4] [--json]

One thread a process, float32 on both sides. Timed in the learner's process, from its wish to the engine's word that the
new version serves: `in_place` and `atomic` over a warm `SharedRing`, the same with a SHA-256 of every tensor, files in
/dev/shm, and the checkpoint routes: the learner's checkpoint (masters and moments) or an export (weights alone) written
to `--folder` and synced, then read by slices into the engine. Shown: p50, p95, and p50 over the p50 of a memory copy of
as many bytes between two warm buffers, measured in the same run, turn by turn. At the end the engine's tensors are
compared with the learner's, by hash.
"""

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import moekit
from moekit import Learner, LearnerConfig, ModelConfig, Transformer
from moekit.learner.weights import from_checkpoint, load
from moekit.objectives.sft import SFT
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.transports import FileDrop
from moekit.rollout.weight_plan import held
from moekit.rollout.weight_transfer import chunks, digest
from moekit.rollout.weight_transfer import load as take


def shape(mb: float) -> ModelConfig:
    """About so many megabytes of float32; nearly all of it is experts."""
    layers = max(1, round(mb * 1e6 / 4 / 16.2e6))
    return ModelConfig(vocab=2048, width=512, layers=layers, heads=8, experts=32, top_k=4, expert_width=310,
                       qk_norm="full", family="olmoe")  # fmt: skip


def engine(line: socket.socket, mb: float) -> None:
    """The engine's process: does what it is told, and answers with a line of JSON."""
    torch.set_num_threads(1)
    e, ring = EmbeddedEngine(shape(mb), dtype="float32"), SharedRing.open(line)
    orders = sys.stdin
    for order in map(json.loads, orders):
        kind, version, mode = order["kind"], order["version"], order["mode"]
        if kind == "digests":
            told = {n: digest(t) for n, (_, t) in held(e.model).items()}
        elif kind == "ring":
            told = take(e, version, mode, ring).seconds
        elif kind == "files":
            told = take(e, version, mode, FileDrop(order["folder"], f"v{version}")).seconds
        else:
            read = from_checkpoint if kind == "checkpoint" else load
            e.update_weights(read(order["folder"], dtype="float32"), version, mode)
            told = {}
        print(json.dumps(told), flush=True)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=500.0)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--chunk-mb", type=float, default=4.0)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--folder", default=None, help="where checkpoints go; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.engine is not None:
        return engine(socket.socket(fileno=o.engine), o.mb)
    torch.set_num_threads(1)
    mine, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--engine", str(theirs.fileno()), "--mb", str(o.mb)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[theirs.fileno()])
    theirs.close()
    folder = Path(tempfile.mkdtemp(dir=o.folder))
    try:
        report = _compare(o, child, mine, folder)
    finally:
        child.kill()
        shutil.rmtree(folder)
    if o.json:
        print(json.dumps(report))
        return
    print(f"{report['bytes'] / 1e6:.0f} MB, {report['tensors']} tensors, float32, chunks of {o.chunk_mb:g} MiB, "
          f"{o.slots} slots, 1 thread a process, torch {torch.__version__}")  # fmt: skip
    print(f"{'':<34}{'n':>4}{'p50 s':>9}{'p95 s':>9}{'GB/s':>7}{'x copy':>8}   seconds by phase, mean")
    for name, row in report["rows"].items():
        phases = "  ".join(f"{k} {v:.3f}" for k, v in row["phases"].items())
        print(f"{name:<34}{row['n']:>4}{row['p50']:>9.3f}{row['p95']:>9.3f}{report['bytes'] / row['p50'] / 1e9:>7.2f}"
              f"{row['ratio']:>8.2f}   {phases}")  # fmt: skip


def _compare(o, child, line: socket.socket, folder: Path) -> dict:
    config, size = shape(o.mb), int(o.chunk_mb * 2**20)
    ring = SharedRing.make(line, chunk_bytes=size, slots=o.slots)
    model = Transformer(config, seed=0)
    weights, version = held(model), 0
    total = sum(t.nbytes for _, t in weights.values())
    two = [torch.ones(total // 4), torch.zeros(total // 4)]

    def ask(kind: str, mode: str, **more) -> None:
        child.stdin.write(json.dumps({"kind": kind, "version": version, "mode": mode, **more}) + "\n")
        child.stdin.flush()

    def update(kind: str, mode: str, verify: bool = False) -> dict[str, float]:
        nonlocal version
        version += 1
        if kind == "files":
            drop = tempfile.mkdtemp(dir="/dev/shm")
            ask(kind, mode, folder=drop)
            sent = FileDrop(drop, f"v{version}", ahead=o.slots).send(chunks(weights, chunk_bytes=size), verify=verify)
        else:
            ask(kind, mode)
            sent = ring.send(chunks(weights, chunk_bytes=size), verify=verify)
        assert sent.bytes == total, (sent, total)
        told = json.loads(child.stdout.readline())
        if kind == "files":
            shutil.rmtree(drop)
        return {f"sender {k}": v for k, v in sent.seconds.items()} | {f"engine {k}": v for k, v in told.items()}

    def route(kind: str) -> dict[str, float]:
        nonlocal version
        version, began = version + 1, time.perf_counter()
        if kind == "checkpoint":
            learner.save(folder / "at", overwrite=True)
        else:
            moekit.export(model, folder / "hf", overwrite=True)
        saved = time.perf_counter() - began
        ask(kind, "atomic", folder=str(folder / ("at" if kind == "checkpoint" else "hf")))
        json.loads(child.stdout.readline())
        return {"save": saved, "load": time.perf_counter() - began - saved}

    def copy() -> dict[str, float]:
        two[1].copy_(two[0])
        return {}

    direct = {"memory copy": copy, "ring, in_place": lambda: update("ring", "in_place")}
    atomic = {"memory copy": copy, "ring, atomic": lambda: update("ring", "atomic")}
    rest = {
        "ring, in_place, SHA-256": lambda: update("ring", "in_place", True),
        "files in /dev/shm, in_place": lambda: update("files", "in_place"),
        "export, load by slices": lambda: route("export"),
        "learner's checkpoint, load by slices": lambda: route("checkpoint"),
    }
    seconds: dict[str, list[float]] = {}
    phases: dict[str, list[dict[str, float]]] = {}

    def turns(what: dict, n: int) -> None:
        for turn in range(-2, n):  # two warm up
            for name, call in what.items():
                began = time.perf_counter()
                found = call()
                if turn >= 0:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
                    phases.setdefault(name, []).append(found)

    turns(direct, o.updates)
    turns(atomic, o.updates)
    two.clear()
    learner = Learner(model, SFT(), LearnerConfig()) if o.checkpoints else None
    weights = held(model)
    turns(rest if o.checkpoints else {n: c for n, c in rest.items() if "load" not in n}, max(1, o.checkpoints))
    update("ring", "atomic", True)
    ask("digests", "")
    assert json.loads(child.stdout.readline()) == {n: digest(t) for n, (_, t) in weights.items()}
    one = statistics.median(seconds["memory copy"])
    table = {}
    for name, found in seconds.items():
        mean = {k: statistics.mean(p[k] for p in phases[name]) for k in phases[name][0]}
        q95 = sorted(found)[min(len(found) - 1, int(0.95 * len(found)))]
        p50 = statistics.median(found)
        table[name] = {"n": len(found), "p50": p50, "p95": q95, "ratio": p50 / one, "phases": mean}
    return {"bytes": total, "tensors": len(weights), "rows": table}


if __name__ == "__main__":
    main()
