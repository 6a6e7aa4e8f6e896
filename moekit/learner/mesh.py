"""Which ranks take part in what. Here: data parallelism over one group (more axes come with the distributed learner).

Every collective of the learner goes through a `World`, so the number of ranks, the backend and the reduction are
decided in one place. Reductions are sums; nothing is averaged behind the caller's back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class World:
    """The data-parallel ranks. `group` None with size 1 means one process without torch.distributed."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def current() -> World:
        """The world that torch.distributed was initialised with; one rank if it was not."""
        if not (dist.is_available() and dist.is_initialized()):
            return World()
        return World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `x`."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.SUM, group=self.group)
        return x

    def sum_list(self, values: Iterable[float]) -> list[float]:
        """Sum a list of numbers over ranks, in float64. Every rank passes the same length."""
        return self.sum(torch.tensor(list(values), dtype=torch.float64, device=self.device)).tolist()

    def max_list(self, values: Iterable[float]) -> list[float]:
        """Largest over ranks, element by element, in float64."""
        x = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x.tolist()

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place; returns `x`."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x

    def check_experts(self, experts: int, ep: int) -> None:
        """Refuse a number of expert-parallel ranks that does not divide the experts or the ranks, naming both.

        Raises:
            ConfigError: also for every ``ep`` above 1, which this version cannot run yet.
        """
        for what, total in (("experts", experts), ("ranks", self.size)):
            if ep < 1 or total % ep:
                fits = [n for n in range(1, experts + 1) if experts % n == 0 and self.size % n == 0]
                raise ConfigError(f"{total} {what} cannot be split over ep={ep}; possible here: {fits}")
        if ep > 1:
            raise ConfigError(f"ep={ep}: this version splits no experts over ranks; leave LearnerConfig.ep at 1")

    @property
    def device(self) -> torch.device:
        """Where small tensors for a collective must live."""
        if self.size > 1 and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
