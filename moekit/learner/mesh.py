"""Which ranks take part in what: one world, seen as a dense mesh (pp, dp) and as an expert mesh (pp, expert_dp, ep).

    rank = (pp * DP + expert_dp * EP) + ep          DP = world / PP = expert_dp ranks x EP

Attention, norms, routers, shared experts and embeddings are replicated over dp; routed experts are split over ep and
replicated over expert_dp; layers are split over pp. All pipeline ranks of one dp index get the same batches.

Every collective of the learner goes through a `World`, so the number of ranks, the backend and the reduction are
decided in one place, and the bytes that leave this rank are counted there. Reductions are sums; nothing is averaged
behind the caller's back.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import LearnerConfig, ModelConfig
from ..errors import ConfigError

# torch 2.13 renamed these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Wire:
    """Bytes that this rank sent to others, by kind; a ring is assumed where the backend chooses the algorithm."""

    _sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    _later: dict[str, Tensor] = field(default_factory=dict)  # bytes that only the device knows yet, an int64 scalar

    def add(self, kind: str, sent: float | Tensor) -> None:
        """One transfer of `sent` bytes. A tensor is added up where it is, and read when somebody asks."""
        if isinstance(sent, Tensor):
            self._later[kind] = self._later[kind] + sent if kind in self._later else sent
        else:
            self._sent[kind] += int(sent)
        self.calls[kind] += 1

    @property
    def sent(self) -> Counter[str]:
        """Bytes by kind. A host read if the device counted some of them."""
        for kind in list(self._later):
            self._sent[kind] += int(self._later.pop(kind))
        return self._sent

    def reset(self) -> None:
        """Forget everything."""
        self._sent.clear()
        self.calls.clear()
        self._later.clear()


@dataclass(frozen=True)
class World:
    """Ranks that do something together: all of them, or one axis of a mesh. `group` None = this process alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    wire: Wire = field(default_factory=Wire)

    @staticmethod
    def current() -> "World":
        """The world that torch.distributed was initialised with; one rank if it was not."""
        if not (dist.is_available() and dist.is_initialized()):
            return World()
        return World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    # ------------------------------------------------------------------ small things, on the host
    def sum_list(self, values: Iterable[float]) -> list[float]:
        """Sum a list of numbers over ranks, in float64. Every rank passes the same length."""
        return self.sum(torch.tensor(list(values), dtype=torch.float64, device=self.device), "counts").tolist()

    def max_list(self, values: Iterable[float]) -> list[float]:
        """Largest over ranks, element by element, in float64."""
        x = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        return self.sum(x, "counts", dist.ReduceOp.MAX).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; for picklable things, on the host."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    # ------------------------------------------------------------------ tensors
    def sum(self, x: Tensor, kind: str = "counts", op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or another `op`) over ranks, in place; returns `x`."""
        if self.size > 1:
            self.wire.add(kind, 2 * (self.size - 1) / self.size * x.nbytes)
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def reduce_scatter(self, x: Tensor, kind: str = "gradients") -> Tensor:
        """This rank's n-th part of the sum over ranks of a flat `x`, whose length the ranks divide; a new tensor.

        On gloo an all-to-all and a sum in rank order: two to three times as fast as gloo's own reduce-scatter.
        """
        if self.size == 1:
            return x
        self.wire.add(kind, (self.size - 1) / self.size * x.nbytes)
        if dist.get_backend(self.group) != "gloo":
            out = x.new_empty(x.shape[0] // self.size)
            _reduce_scatter(out, x, group=self.group)
            return out
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=self.group)
        return parts.view(self.size, -1).sum(0)

    def all_gather(self, out: Tensor, part: Tensor, kind: str = "parameters") -> Tensor:
        """Fill a flat `out` with every rank's equal `part` (which may be a view of `out`); returns `out`."""
        if self.size > 1:
            self.wire.add(kind, (self.size - 1) * part.nbytes)
            _all_gather(out, part.contiguous(), group=self.group)
        elif out.data_ptr() != part.data_ptr():
            out.copy_(part)
        return out

    def all_to_all(
        self, x: Tensor, out: Tensor, sent: list[int] | None = None, got: list[int] | None = None, kind: str = "rows"
    ) -> Tensor:
        """Exchange rows: `sent[r]` rows of `x` go to rank r, `got[r]` come from it; None = equal parts."""
        if self.size == 1:
            return out.copy_(x)
        own = x.shape[0] // self.size if sent is None else sent[self.rank]
        self.wire.add(kind, (x.shape[0] - own) * (x.nbytes // max(1, x.shape[0])))
        dist.all_to_all_single(out, x, got, sent, group=self.group)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The values of rank `source`, in place; returns `x`."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def barrier(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier(group=self.group)

    @property
    def cuda(self) -> bool:
        """Whether the ranks compute on GPUs; numbers of the host may travel by gloo even then (cpu:gloo,cuda:nccl)."""
        return self.size > 1 and dist.is_initialized() and "nccl" in dist.get_backend(self.group)

    @property
    def device(self) -> torch.device:
        """Where small tensors for a collective must live."""
        if self.size > 1 and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout; every one of them knows this process's place on it."""

    world: World
    pp: World
    dp: World
    expert_dp: World
    ep: World
    tie: World  # first and last pipeline rank of one dp index, which share a tied embedding; else alone

    @property
    def wire(self) -> Wire:
        """Bytes sent on any axis."""
        return self.world.wire

    @staticmethod
    def make(config: LearnerConfig, shape: ModelConfig, world: World | None = None) -> "Mesh":
        """The meshes of a layout. Every rank of the world calls it: it makes process groups.

        Raises:
            ConfigError: ranks, experts or layers that the layout does not divide, with both numbers.
        """
        world = world or World.current()
        check_layout(config, shape, world.size)
        alone = World(wire=world.wire)
        if world.size == 1:
            return Mesh(world, alone, alone, alone, alone, alone)
        if world.group is not dist.group.WORLD:
            raise ConfigError(
                f"a learner takes all {dist.get_world_size()} ranks of torch.distributed or one, not a group of "
                f"{world.size}; start as many processes as the layout has ranks"
            )
        dp = world.size // config.pp
        dense = _device_mesh(world.group, world.device.type, pp=config.pp, dp=dp)
        expert = _device_mesh(world.group, world.device.type, pp=config.pp, expert_dp=dp // config.ep, ep=config.ep)

        def axis(mesh: DeviceMesh, name: str) -> World:
            size = mesh[name].size()
            return World(mesh.get_local_rank(name), size, mesh.get_group(name), world.wire) if size > 1 else alone

        tie = alone
        if shape.tied_head and config.pp > 1 and config.pipeline != "zbv":
            for at in range(dp):  # every rank makes every group, in one order
                ranks = [at, (config.pp - 1) * dp + at]
                group = _group(world.group, *ranks)
                if world.rank in ranks:
                    tie = World(ranks.index(world.rank), 2, group, world.wire)
        return Mesh(
            world, axis(dense, "pp"), axis(dense, "dp"), axis(expert, "expert_dp"), axis(expert, "ep"), tie
        )  # fmt: skip


@cache
def _device_mesh(world: Any, kind: str, **axes: int) -> DeviceMesh:
    """Made once in a `world`: a process group holds threads and sockets, and torch frees them only with the world."""
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def _group(world: Any, *ranks: int) -> Any:
    """Likewise."""
    return dist.new_group(list(ranks))


def place(config: LearnerConfig, rank: int, world: int) -> tuple[int, int]:
    """(pipeline rank, expert-parallel rank) of one rank of a world, before there is any process group.

    >>> [place(LearnerConfig(pp=2, ep=2), rank, 8) for rank in (0, 1, 3, 6)]
    [(0, 0), (0, 1), (0, 1), (1, 0)]
    """
    dp = world // config.pp
    return rank // dp, rank % dp % config.ep


def check_layout(config: LearnerConfig, shape: ModelConfig, world: int) -> None:
    """Refuse a layout that the ranks, the experts or the layers do not divide, naming both numbers.

    Raises:
        ConfigError: before any process group is made.
    """
    if world % config.pp:
        fits = [n for n in range(1, min(world, shape.layers) + 1) if world % n == 0]
        raise ConfigError(f"{world} ranks cannot be split over pp={config.pp}; possible here: {fits}")
    stages = config.pp * (config.stages_per_rank if config.pp > 1 else 1)
    if stages > shape.layers:
        raise ConfigError(
            f"{shape.layers} layers cannot fill {stages} pipeline stages (pp={config.pp} x "
            f"stages_per_rank={config.stages_per_rank}); a stage needs a layer"
        )
    dp = world // config.pp
    for what, total in (("experts", shape.experts), ("ranks" if config.pp == 1 else "ranks of a stage", dp)):
        if total % config.ep:
            fits = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0 and dp % n == 0]
            raise ConfigError(f"{total} {what} cannot be split over ep={config.ep}; possible here: {fits}")
