"""Where a run's answers are sampled, and how the learner's weights get there: by intervals, once for each version.

Each rank has an engine for the whole model, in its own process or in one beside it. Or some ranks serve together, each
with a slice of the experts (`serve_ep`), or one vLLM server serves all. What an engine needs and its rank does not hold
(other experts, other pipeline stages) comes point to point from a rank that does, a chunk at a time, and goes on to the
engine; nothing is put together that the engine does not keep.

A vLLM server may die and come back: rank 0 has a copy of the weights that it had, and gives them to it again.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.intervals import Piece
from ..errors import EngineError
from ..learner.learner import Learner
from ..learner.mesh import World
from ..model.transformer import Part, Transformer
from ..rollout.embedded import DTYPES, EmbeddedEngine
from ..rollout.engine_process import EngineProcess
from ..rollout.vllm_engine import VLLMEngine
from ..rollout.vllm_http import HTTPLink
from ..rollout.weight_plan import Send, dtypes, held, plan
from ..rollout.weight_transfer import CHUNK, Chunk, Sent, chunks, load
from ..workloads import RLConfig
from .serve import serving_engine
from .setup import together

PROBE = 1 << 24  # bytes of the copy that the floor is measured with
CUT = CHUNK // 8  # elements of a chunk between ranks; both sides cut alike, and an element has eight bytes at most
PHASES = ("cast", "wire", "load", "verify")
MOVED = [f"transfer/{name}" for name in ("plan_s", *(f"{p}_s" for p in PHASES), "floor_s", "bytes")]


class Weights:
    """The learner's weights on their way to this rank's engine.

    `moved` is what the last call of `give` took, `wired` the bytes that it sent to other ranks; `plan_s` the seconds of
    planning, which is done once.

    Args:
        learner: whose.
        config: of the run; `rollout_dtype` is that of the wire.
        serves: what this rank's engine holds; None = the whole model.
        waits: the ranks, for a collective that waits for a server or for another rank's engine.
    """

    def __init__(
        self, learner: Learner, config: RLConfig, serves: Transformer | None = None, waits: World | None = None
    ):  # fmt: skip
        began, self.learner, self.world = time.perf_counter(), learner, learner.world
        self.waits, self.patience = waits or self.world, config.engine_seconds
        shape, self.own = learner.model.config, held(learner.model)
        serves = Transformer(shape, device="meta", seed=None) if serves is None else serves
        self.pieces = {n: p for n, (p, _) in held(serves).items()}
        self.dtypes = dtypes(shape, DTYPES[config.rollout_dtype or config.dtype])
        have = self.world.gather([p for p, _ in self.own.values()])
        sizes = {n: d.itemsize for n, d in self.dtypes.items()}
        want, ranks = self.world.gather(list(self.pieces.values())), list(range(self.world.size))
        if config.engine == "vllm":  # one server for all ranks
            want[1:] = [[] for _ in ranks[1:]]
        self.plan = plan(have, want, sizes, near=ranks)
        # who starts an engine again needs the weights that it served: others may train on, or hold a part of them
        keeps = config.engine == "process" and (config.staleness > 0 or bool(self.plan.wire_ST.any()))
        self.kept = {n: torch.empty(len(p), dtype=self.dtypes[n]) for n, p in self.pieces.items()} if keeps else {}
        size = sum(len(p) * sizes[n] for n, p in self.pieces.items())
        self.engine_bytes = size * (1 + keeps) if want[self.world.rank] else 0  # of weights held here for the engine
        self.plan_s, self.waited, self.wired = time.perf_counter() - began, 0.0, 0
        self.moved, self.version, self.whole = Sent(), -1, False  # whole: what `again` gives is of one version
        a, b = torch.ones(2, PROBE, dtype=torch.uint8)
        self.floor_s = size / PROBE * min(timeit.repeat(lambda: a.copy_(b), number=1, repeat=3))

    def give(self, engine: Any, mode: str) -> None:
        """Bring the learner's newest version to the engine; nothing moves where it is there. A collective.

        `engine`: embedded, or with an `update(chunks, version, mode)` that takes all of them and returns `Sent`. Of a
        vLLM server it is rank 0's; the other ranks give that one what they hold, and wait.
        Raises: MoekitError, on all ranks: an engine of one of them did not take the weights."""
        version = self.learner.updates
        self.moved, self.waited, self.wired = Sent(), 0.0, 0
        if version == self.version:
            return
        own, one, lost = isinstance(engine, EmbeddedEngine), isinstance(engine, VLLMEngine), False
        source = self.chunks()
        with together(self.waits):
            try:
                if own:
                    self.moved = load(engine, version, mode, source)
                elif not one or self.world.rank == 0:
                    self.moved = engine.update(source, version, mode)
            except EngineError:
                lost = one
                if not one:
                    raise
            finally:
                for _ in source:  # what an engine did not take, others may be waiting to give, or to get
                    pass
        if not own:  # it waited for ranks, not for a cast
            self.moved += Sent(0, {"cast": -self.waited, "wire": self.waited})
        self.version = version
        if one and not self.recovered(engine, lost):
            engine.follow(version)

    def recovered(self, engine: VLLMEngine, lost: bool) -> bool:
        """Whether some rank has `lost` its server, which then has the newest version again. A collective.

        Raises EngineError: it did not come back in `patience` seconds, or does not take the weights."""
        if not any(self.waits.gather(lost)):
            return False
        with together(self.waits):
            if self.world.rank == 0:
                self.moved += engine.recover(self.patience)
        engine.follow(self.version)
        return True

    def chunks(self) -> Iterator[Chunk]:
        """Every element of every parameter and buffer once: what is here first, then, in turn k, rank r gives to r + k
        and takes from r - k. A collective."""
        own, rank, size = self._held(), self.world.rank, self.world.size
        sends = {(s.source, s.target): list[Send]() for s in self.plan.sends}
        for s in self.plan.sends:
            cuts = range(s.start, s.stop, CUT)
            sends[s.source, s.target] += [replace(s, start=at, stop=min(at + CUT, s.stop)) for at in cuts]
        self.whole = False
        for turn in range(size):
            to, source = (rank + turn) % size, (rank - turn) % size
            mine = chunks(own, sends.get((rank, to), []), self.dtypes)
            for pair in zip_longest(mine, sends.get((source, rank), []) if turn else []):
                chunk = self._swap(*pair, to, source) if turn else pair[0]
                if chunk is not None and self.kept:
                    self.kept[chunk.name][chunk.start : chunk.start + len(chunk.data)] = chunk.data
                if chunk is not None:
                    yield chunk
        self.whole = True

    def _swap(self, out: Chunk | None, into: Send | None, to: int, source: int) -> Chunk | None:
        """One chunk to a rank, one from another, side by side."""
        began, found, work = time.perf_counter(), None, []
        if out is not None:
            self.wired += out.data.nbytes
            work.append(dist.P2POp(dist.isend, out.data.contiguous(), group=self.world.group, group_peer=to))
        if into is not None:
            data = torch.empty(len(into), dtype=self.dtypes[into.name], device=self.learner.model.device)
            found = Chunk(into.name, into.start, data)
            work.append(dist.P2POp(dist.irecv, data, group=self.world.group, group_peer=source))
        for one in dist.batch_isend_irecv(work):
            one.wait()
        self.waited += time.perf_counter() - began
        return found

    def _held(self) -> dict[str, tuple[Piece, Tensor]]:
        model = self.learner.model
        now = (*model.named_parameters(), *model.named_buffers())
        if any(t.data_ptr() != self.own[n][1].data_ptr() for n, t in now):
            self.own = held(model)
        return self.own

    def again(self) -> Iterable[Chunk]:
        """The version that was given last, on this rank alone. Raises EngineError: a part of another came after it."""
        if not self.whole:
            raise EngineError("the weights for the engine's process are half of a transfer; resume from a checkpoint")
        kept = {n: (self.pieces[n], flat) for n, flat in self.kept.items()}
        return chunks(kept or self._held(), None, self.dtypes)

    def metrics(self) -> dict[str, float]:
        """Of the last transfer: seconds by phase, of the slowest rank; bytes of all; the time of one copy of what a
        rank takes, as fast as this machine copies memory. A collective."""
        spent = [self.plan_s, *(self.moved.seconds.get(p, 0.0) for p in PHASES), self.floor_s]
        seconds, (size,) = self.world.max_list(spent), self.world.sum_list([self.moved.bytes])
        self.plan_s = 0.0
        return {**dict(zip(MOVED, seconds)), "transfer/bytes": size}


def engine_of(learner: Learner, config: RLConfig, waits: World | None = None) -> tuple[Any, Weights | None]:
    """The engine that the config names, and what brings it weights: None where it stands on the learner's own, which
    an engine in this process does if they are all here and of its dtype. Others wait for their first transfer.

    Beside the protocol an engine has `shared`, `stats` (`Stats`), `metrics()` and `counter` (None = passes that cannot
    be seen), and perhaps `restarts` and `close()`.

    Raises:
        ConfigError: a dtype that vLLM is not served in here.
        BackendError: an engine's process cannot start.
        EngineError: nobody answers at a server's address.
    """
    own, model = config.rollout_dtype or config.dtype, learner.model
    how: dict[str, Any] = {"dtype": own, "slots": config.slots, "device": model.device}
    if config.engine == "embedded":
        layout, same = replace(config.learner, ep=config.serve_ep or 1), own == config.dtype
        if layout.ep == 1 and same and model.part == Part.whole(model.config):
            return EmbeddedEngine.of(model, lambda: learner.updates, slots=config.slots), None
        engine = serving_engine(model.config, layout, learner.world, **how)
        return engine, Weights(learner, config, engine.model, waits)
    weights = Weights(learner, config, None, waits)
    if config.engine == "process":
        return EngineProcess(model.config, **how, weights=weights.again), weights
    seconds = max(120.0, config.engine_seconds)
    link = HTTPLink(config.engine_url or "", timeout=seconds, connections=config.slots)
    # a step may move the weights too little for the probe: that is counted in the metrics
    vllm = VLLMEngine(link, model.config, dtype=own, need_proof=False)
    vllm.attach()
    return vllm, weights
