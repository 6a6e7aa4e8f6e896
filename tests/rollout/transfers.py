"""Learners of one layout give weights to servers of another: what every process of the transfer matrix runs.

Run by path as `transfers.py ROLE RANK WORLD FOLDER NAMES`, so it is a module beside the tests and not a test itself.
Learners take real steps, export what they have, and send; servers compare every tensor with the export, bit by bit.
"""

import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moekit
from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.errors import TransferError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Part, Transformer
from moekit.objectives.sft import SFT
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.transports import FileDrop, PointToPoint
from moekit.rollout.weight_plan import dtypes, held, plan
from moekit.rollout.weight_transfer import Sent, Update, chunks, load

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=12, top_k=2, expert_width=8, qk_norm="head",
    normalize_gates=True, init_std=0.3, family="qwen3_moe",
)  # fmt: skip
TIED = replace(MODEL, tied_head=True)
CHUNK = 4096
ALL = ((0, 4),)
WHOLE = (Part(ALL, (0, 12)),)
EXPERTS2 = (Part(ALL, (0, 5)), Part(ALL, (5, 12)))
EXPERTS3 = (Part(ALL, (0, 7)), Part(ALL, (7, 8)), Part(ALL, (8, 12)))
LAYERS2 = (Part(((0, 1),), (0, 12)), Part(((1, 4),), (0, 12)))
LAYERS3 = (Part(((0, 2),), (0, 12)), Part(((2, 3),), (0, 12)), Part(((3, 4),), (0, 12)))
MIXED3 = (Part(((0, 3),), (0, 12)), Part(((3, 4),), (0, 9)), Part(((3, 4),), (9, 12)))


@dataclass(frozen=True)
class Case:
    """One pair of layouts."""

    world: int
    serve: tuple[Part, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = MODEL
    mode: str = "atomic"
    dtype: torch.dtype = torch.float32
    wire: str = "ring"


CASES = {
    "1 to 1": Case(1, WHOLE, mode="in_place"),
    "1 to 3, experts": Case(1, EXPERTS3, {"zero": 0}, dtype=torch.bfloat16),
    "1 tied to 2, layers": Case(1, LAYERS2, model=TIED, wire="files"),
    "dp2 zero2 to 1": Case(2, WHOLE, {"zero": 2}, dtype=torch.bfloat16),
    "ep2 zero1 to 3, experts": Case(2, EXPERTS3, {"ep": 2, "zero": 1}, mode="in_place"),
    "pp2 to 2, experts": Case(2, EXPERTS2, {"pp": 2}, wire="files"),
    "pp2 tied to 2, layers": Case(2, LAYERS2, {"pp": 2, "zero": 0}, model=TIED, dtype=torch.bfloat16, mode="in_place"),
    "dp3 zero2 to 2, experts": Case(3, EXPERTS2, {"zero": 2}),
    "ep3 to 3, layers and experts": Case(3, MIXED3, {"ep": 3}, dtype=torch.bfloat16),
    "pp3 to 1": Case(3, WHOLE, {"pp": 3, "zero": 1}, mode="in_place"),
    "dp4 ep2 zero1 to 3, experts": Case(4, EXPERTS3, {"ep": 2, "zero": 1}, dtype=torch.bfloat16),
    "ep4 zero2 to 2, layers": Case(4, LAYERS2, {"ep": 4, "zero": 2}, mode="in_place"),
    "pp2 ep2 zero1 to 3, layers and experts": Case(4, MIXED3, {"pp": 2, "ep": 2, "zero": 1}, wire="files"),
    "pp2 dp2 zero2 tied to 2, layers": Case(4, LAYERS2, {"pp": 2, "zero": 2}, model=TIED),
    "pp4 to 3, layers": Case(4, LAYERS3, {"pp": 4}, dtype=torch.bfloat16, mode="in_place"),
}


class Peak(TorchDispatchMode):
    """The most bytes of new tensor storages that were alive at once, among those that this thread's operations made."""

    def __enter__(self):
        self.known, self.peak = {}, 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.untyped_storage()._cdata not in old:
                ref = StorageWeakRef(t.untyped_storage())
                self.known.setdefault(ref.cdata, (ref, t.untyped_storage().nbytes()))
        self.known = {k: v for k, v in self.known.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(n for _, n in self.known.values()))
        return out


class Receiver:
    """What an engine does with an update, for the part of a model."""

    def __init__(self, model: Transformer):
        self.model, self.version, self.update = model, 0, None

    def begin_update(self, version: int, mode: str = "atomic") -> bool:
        if version != self.version:
            self.update = Update(self.model, version, mode)
        return version != self.version

    def write(self, chunk) -> None:
        self.update.write(chunk)

    def finish_update(self, digests=None) -> None:
        self.update.check(digests)
        self.update.switch()
        self.version, self.update = self.update.version, None

    def abort_update(self) -> None:
        self.update = None


def put(file: Path, value: Any) -> None:
    """Write a file that appears whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new" + file.suffix)
    new.write_bytes(pickle.dumps(value))
    new.rename(file)


def get(file: Path, seconds: float = 40.0) -> Any:
    """Wait for a file."""
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.002)
    return pickle.loads(file.read_bytes())


def planned(case: Case, folder: Path):
    """The plan, from what all processes published; every one makes it by itself."""
    have = [get(folder / f"have_{r}") for r in range(case.world)]
    want = [get(folder / f"want_{t}") for t in range(len(case.serve))]
    kinds = dtypes(case.model, case.dtype)
    return plan(have, want, {n: d.itemsize for n, d in kinds.items()}), kinds


def learn(case: Case, folder: Path, world: World) -> None:
    """A rank of the learner: two steps, each followed by an export and a transfer."""
    learner = Learner(Transformer(case.model, seed=1), SFT(), LearnerConfig(lr=0.05, **case.layout), world)
    put(folder / f"have_{world.rank}", [p for p, _ in held(learner.model).values()])
    way, kinds = planned(case, folder)
    targets = list(dict.fromkeys(s.target for s in way.of(world.rank)))
    rings = {}
    for t in targets if case.wire == "ring" else ():
        get(folder / f"listens_{t}")
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(folder / f"{t}.sock"))
        line.sendall(bytes([world.rank]))
        rings[t] = SharedRing.make(line, chunk_bytes=CHUNK, slots=3)
    sent = []
    for version in (1, 2):
        g = torch.Generator().manual_seed(version)
        ids = torch.randint(0, 31, (4 * learner.mesh.dp.size, 10), generator=g)
        mine = ids[4 * learner.mesh.dp.rank :][:4]
        learner.step(Batch.make(mine).split(2))
        whole = learner.gathered("parameter")
        if world.rank == 0:
            model = Transformer(case.model, seed=None)
            model.load_state_dict(whole)
            moekit.export(model, folder / f"export_{version}")
            put(folder / f"exported_{version}", True)
        row = []
        for t in range(len(case.serve)):
            row.append(0)
        for t in targets:
            sends = [s for s in way.of(world.rank) if s.target == t]
            cut = chunks(held(learner.model), sends, kinds, CHUNK)
            drop = FileDrop(folder / "files", f"v{version}_{world.rank}_{t}", ahead=3)
            row[t] = (rings[t] if rings else drop).send(cut, verify=version == 2).bytes
        sent.append(row)
    put(folder / f"sent_{world.rank}", (sent, way.bytes_ST[world.rank].tolist()))


def serve(case: Case, folder: Path, t: int) -> None:
    """A server: takes two versions, compares them with the exports, and is offered the second one again."""
    part, whole = case.serve[t], case.serve == WHOLE
    if whole:
        engine: Any = EmbeddedEngine(case.model, dtype=str(case.dtype).removeprefix("torch."))
    else:
        engine = Receiver(Transformer(case.model, dtype=case.dtype, seed=9, part=part))
    put(folder / f"want_{t}", [p for p, _ in held(engine.model).values()])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{t}.sock"))
    listener.listen(8)
    put(folder / f"listens_{t}", True)
    way, _ = planned(case, folder)
    sources, rings = list(dict.fromkeys(s.source for s in way.to(t))), {}
    for _ in sources if case.wire == "ring" else ():
        line, _ = listener.accept()
        source = line.recv(1)[0]
        rings[source] = SharedRing.open(line)
    told, size = {"bytes": [], "wrong": [], "peak": []}, sum(x.nbytes for _, x in held(engine.model).values())
    for version in (1, 2):
        ways = [rings[s] if rings else FileDrop(folder / "files", f"v{version}_{s}_{t}") for s in sources]
        with Peak() as peak:
            got = load(engine, version, case.mode, *ways)
        told["bytes"].append(got.bytes)
        told["peak"].append(peak.peak)
        get(folder / f"exported_{version}")
        want = held(moekit.load(folder / f"export_{version}", dtype=case.dtype, part=part))
        have = held(engine.model)
        told["wrong"] += [
            n for n in want.keys() | have.keys() if n not in have or not torch.equal(have[n][1], want[n][1])
        ]
        assert engine.version == version
    again = load(engine, 2, case.mode, chunks(held(engine.model)))  # nothing moves when nothing changed
    assert again == Sent(0, {"wire": 0.0, "load": 0.0, "verify": 0.0})
    put(folder / f"got_{t}", told | {"size": size, "plan": int(way.bytes_ST[:, t].sum())})


def main(role: str, rank: int, world: int, folder: Path, names: list[str]) -> None:
    """One process of a pool, through all its cases."""
    torch.set_num_threads(1)
    if role == "learn" and world > 1:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names:
        case, here = CASES[name], folder / str(list(CASES).index(name))
        here.mkdir(exist_ok=True)
        if role == "learn":
            learn(case, here, World.current())
        elif rank < len(case.serve):
            serve(case, here, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def points(rank: int, folder: str) -> None:
    """Ranks 0 and 1 learn, 2 and 3 serve, all in one world; rank 1 is killed in its second update."""
    torch.set_num_threads(1)
    here = Path(folder)
    dist.init_process_group("gloo", store=dist.FileStore(str(here / "points"), 4), rank=rank, world_size=4)
    parts = (*EXPERTS2, *LAYERS2)
    whole = Transformer(MODEL, seed=1)
    model = Transformer(MODEL, seed=1 if rank < 2 else 9, part=parts[rank])
    held_by = World.current().gather([p for p, _ in held(model).values()])
    way = plan(held_by[:2], held_by[2:], 4)

    def second():
        for n, chunk in enumerate(chunks(held(model), way.of(1), chunk_bytes=CHUNK)):
            if n == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    if rank < 2:
        for t in dict.fromkeys(s.target for s in way.of(rank)):
            PointToPoint(2 + t).send(
                chunks(held(model), [s for s in way.of(rank) if s.target == t], None, CHUNK), verify=True
            )
        for t in dict.fromkeys(s.target for s in way.of(rank)) if rank else ():
            PointToPoint(2 + t).send(second())
        return
    engine, told = Receiver(model), {}
    got = load(engine, 1, "atomic", *(PointToPoint(s) for s in dict.fromkeys(s.source for s in way.to(rank - 2))))
    want = held(whole.keep(parts[rank]))
    told |= {"wrong": [n for n, (_, t) in held(model).items() if not torch.equal(t, want[n][1])], "bytes": got.bytes,
             "plan": int(way.bytes_ST[:, rank - 2].sum())}  # fmt: skip
    try:
        load(engine, 2, "atomic", PointToPoint(1))
    except TransferError as problem:
        told["problem"] = str(problem)
    assert engine.version == 1 and all(torch.equal(t, want[n][1]) for n, (_, t) in held(model).items())
    put(here / f"told_{rank}", told)
    os._exit(0)  # the world is broken: nothing can be taken down in order


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
