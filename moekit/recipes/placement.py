"""Where a run's answers are sampled, and how the learner's weights get there: by intervals, once for each version.

Each rank has an engine for the whole model: in its own process, in a process beside it, or vLLM. What a rank does not
hold (other experts, other pipeline stages) comes point to point from a rank that does, a chunk at a time, and goes on
to the rank's engine; nothing is put together that the engine does not keep.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.intervals import Piece
from ..errors import ConfigError
from ..learner.learner import Learner
from ..learner.mesh import World
from ..model.transformer import Part, Transformer
from ..rollout.embedded import DTYPES, EmbeddedEngine
from ..rollout.engine_process import EngineProcess
from ..rollout.weight_plan import Send, WeightPlan, dtypes, held, plan
from ..rollout.weight_transfer import CHUNK, Chunk, Sent, chunks, load
from ..workloads import RLConfig

PROBE = 1 << 24  # bytes of the copy that the floor is measured with


class Weights:
    """The learner's weights on their way to this rank's engine.

    `moved` is what the last call of `give` took; `plan_s` the seconds of planning, which is done once.

    Args:
        learner: whose.
        config: of the run; `rollout_dtype` is that of the wire.
    """

    def __init__(self, learner: Learner, config: RLConfig):
        began, self.learner, self.world = time.perf_counter(), learner, learner.world
        shape, self.own = learner.model.config, held(learner.model)
        self.pieces = {n: p for n, (p, _) in held(Transformer(shape, device="meta", seed=None)).items()}
        self.dtypes = dtypes(shape, DTYPES[config.rollout_dtype or config.dtype])
        everything, ranks = list(self.pieces.values()), range(self.world.size)
        have = self.world.gather([p for p, _ in self.own.values()])
        sizes = {n: d.itemsize for n, d in self.dtypes.items()}
        self.plan: WeightPlan = plan(have, [everything] * self.world.size, sizes, near=list(ranks))
        # one who starts an engine again has the weights that it served: others may train on, and be elsewhere
        keeps = config.engine == "process" and (bool(config.staleness) or bool(self.plan.wire_ST.any()))
        self.kept = {n: torch.empty(len(p), dtype=self.dtypes[n]) for n, p in self.pieces.items()} if keeps else None
        self.plan_s, self.waited, self.sent_bytes = time.perf_counter() - began, 0.0, 0
        self.floor_s = int(self.plan.bytes_ST.sum(0).max()) / _bandwidth()
        size = sum(len(p) * sizes[n] for n, p in self.pieces.items())
        self.engine_bytes = size * (2 if keeps else 1)  # of weights that are there for the engine
        self.moved, self.version = Sent(), -1

    def give(self, engine: Any, mode: str) -> None:
        """Bring the learner's newest version to the engine; nothing moves where it is there. A collective.

        `engine`: embedded, or with an `update(chunks, version, mode)` that takes all of them and returns `Sent`."""
        version = self.learner.updates
        self.moved, self.waited, self.sent_bytes = Sent(), 0.0, 0
        if version == self.version:
            return
        if isinstance(engine, EmbeddedEngine):
            self.moved = load(engine, version, mode, self.chunks())
        else:
            sent = engine.update(self.chunks(), version, mode)
            others = {"cast": -self.waited, "wire": self.waited}  # the ring waited for ranks, not for a cast
            self.moved = sent + Sent(0, others)
        self.version = version

    def chunks(self) -> Iterator[Chunk]:
        """Every element of every parameter and buffer once. A collective."""
        for chunk in exchange(self.world, self.plan, self._held(), self.dtypes, self):
            if self.kept is not None:
                self.kept[chunk.name][chunk.start : chunk.start + len(chunk.data)] = chunk.data
            yield chunk

    def _held(self) -> dict[str, tuple[Piece, Tensor]]:
        model = self.learner.model
        if any(
            t.data_ptr() != self.own[n][1].data_ptr() for n, t in (*model.named_parameters(), *model.named_buffers())
        ):
            self.own = held(model)
        return self.own

    def again(self) -> Iterable[Chunk]:
        """The version that was given last, on this rank alone."""
        if self.kept is None:
            return chunks(self._held(), None, self.dtypes)
        return chunks({n: (self.pieces[n], flat) for n, flat in self.kept.items()})

    def metrics(self) -> dict[str, float]:
        """Of the last transfer: seconds by phase, of the slowest rank; bytes of all; the time of one copy of what a
        rank takes, as fast as this machine copies memory. A collective."""
        phases = ("cast", "wire", "load", "verify")
        spent = [self.moved.seconds.get(p, 0.0) for p in phases]
        *seconds, plan_s, floor_s = self.world.max_list([*spent, self.plan_s, self.floor_s])
        (size,) = self.world.sum_list([self.moved.bytes])
        self.plan_s = 0.0
        return {"transfer/plan_s": plan_s, **{f"transfer/{p}_s": s for p, s in zip(phases, seconds)},
                "transfer/bytes": size, "transfer/floor_s": floor_s}  # fmt: skip


def exchange(
    world: World, plan: WeightPlan, own: dict[str, tuple[Piece, Tensor]], kinds: dict[str, torch.dtype],
    told: Weights,
) -> Iterator[Chunk]:  # fmt: skip
    """What this rank's engine wants: what is here first, then, in turn k, rank r gives to r + k and takes from r - k.

    Args:
        plan: with as many targets as sources, each near the source of its number.
        kinds: dtype on the wire, by name.
        told: gets seconds of waiting for other ranks in `waited`, bytes that were sent to them in `sent_bytes`.
    """
    rank, size = world.rank, world.size
    device = next(t for _, t in own.values()).device
    yield from chunks(own, [s for s in plan.of(rank) if s.target == rank], kinds)
    for turn in range(1, size):
        to, source = (rank + turn) % size, (rank - turn) % size
        mine = chunks(own, _cut(s for s in plan.of(rank) if s.target == to), kinds)
        theirs = _cut(s for s in plan.to(rank) if s.source == source)
        for out, into in zip_longest(mine, theirs):
            began, found, work = time.perf_counter(), None, []
            if out is not None:
                told.sent_bytes += out.data.nbytes
                work.append(dist.P2POp(dist.isend, out.data.contiguous(), group=world.group, group_peer=to))
            if into is not None:
                found = Chunk(into.name, into.start, torch.empty(len(into), dtype=kinds[into.name], device=device))
                work.append(dist.P2POp(dist.irecv, found.data, group=world.group, group_peer=source))
            for one in dist.batch_isend_irecv(work):
                one.wait()
            told.waited += time.perf_counter() - began
            if found is not None:
                yield found


def _cut(sends: Iterable[Send]) -> list[Send]:
    """The same cuts on both sides; eight bytes are the most that an element has."""
    step = CHUNK // 8
    return [
        Send(s.source, s.target, s.name, at, min(at + step, s.stop))
        for s in sends
        for at in range(s.start, s.stop, step)
    ]


def _bandwidth() -> float:
    """Bytes a second of one copy in memory, the best of three."""
    a, best = torch.ones(PROBE, dtype=torch.uint8), float("inf")
    b = torch.empty_like(a)
    for _ in range(3):
        began = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - began)
    return PROBE / best


def engine_of(learner: Learner, config: RLConfig) -> tuple[Any, Weights | None]:
    """The engine that the config names, and what brings it weights: None where it stands on the learner's own, which
    an engine in this process does if they are all here and of its dtype. Others wait for their first transfer.

    Raises:
        ConfigError: an engine that this build does not have.
        BackendError: an engine's process cannot start.
    """
    own, model = config.rollout_dtype or config.dtype, learner.model
    if config.engine == "embedded":
        if own == config.dtype and model.part == Part.whole(model.config):
            return EmbeddedEngine.of(model, lambda: learner.updates, slots=config.slots), None
        return EmbeddedEngine(model.config, dtype=own, slots=config.slots, device=model.device), Weights(
            learner, config
        )
    if config.engine == "process":
        weights = Weights(learner, config)
        how = {"dtype": own, "slots": config.slots, "device": model.device, "weights": weights.again}
        return EngineProcess(model.config, **how), weights
    raise ConfigError(f"engine={config.engine!r} is not here; take engine='embedded' or 'process'")
