"""Dispatch without a host read: every rank computes where all rows go, and writes into buffers of fixed size.

All ranks gather the counts [W, E] on the device and take the same decision: at each destination, rows stand in the
order local expert, source rank, row, and what lies past the buffer is dropped. From router to combine no value reaches
the host and no shape depends on data, outside `ops.expert_ffn`. Whether anything was dropped is known on the device
(`need` > 1); the learner reads that once a step and redoes it.

Axis letters: W ranks that share the experts, P positions whose expert rows run, K choices of a position, S = P * K
choices, R rows of a rank's buffer, E experts, e experts held by a rank.
"""

import math

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from .dispatch import ExpertParallel, inverse
from .mesh import World
from .transport import TRANSPORTS, Padded, Plan, Symmetric


def bounds(count_WE: Tensor) -> tuple[Tensor, Tensor]:
    """Where the rows of [destination, local expert, source] start and end in the destination's buffer, none dropped.

    >>> start_WeW, end_WeW = bounds(torch.tensor([[1, 2], [3, 4]]))  # one expert a rank: 1 + 3 rows for rank 0
    >>> start_WeW.tolist(), end_WeW.tolist()
    ([[[0, 1]], [[0, 2]]], [[[1, 4]], [[2, 6]]])
    """
    ranks, experts = count_WE.shape
    count_WeW = count_WE.view(ranks, ranks, experts // ranks).permute(1, 2, 0)
    end_WeW = count_WeW.reshape(ranks, -1).cumsum(1).view(count_WeW.shape)
    return end_WeW - count_WeW, end_WeW


class RowwiseDispatcher(ExpertParallel):
    """Sync-free dispatch into a buffer of ceil(capacity * K * sum(P) / W) rows on every rank.

    Rows past the buffer are masked: they run nowhere, add zero to y, and have zero gradient, their gate too. Without
    such rows the result has the bits of `SyncDispatcher`.

    Args:
        transport: "shared_memory", "padded" or "symmetric".
        capacity: the buffer as a multiple of the balanced share; may be set to another value between calls, on all
            ranks alike.

    Raises:
        ConfigError, BackendError: a transport that cannot work here. Collective: all ranks make it together.
    """

    def __init__(self, ep: World, experts: int, transport: str, capacity: float):
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}")
        super().__init__(ep, experts, TRANSPORTS[transport](ep), f"rowwise, {transport}")
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget `need` and `used`."""
        self._use: Tensor | None = None

    @property
    def need(self) -> Tensor:
        """Rows that wanted to come to the fullest rank / rows of its buffer: largest since `reset`; above 1 = dropped.

        A float64 scalar on the device, equal on all ranks of `ep`.
        """
        return torch.zeros((), dtype=torch.float64) if self._use is None else self._use

    @property
    def used(self) -> Tensor:
        """Rows kept there / rows of its buffer, likewise."""
        return self.need.clamp(max=1)

    def plan(self, expert_PK: Tensor, sizes: tuple[int, ...]) -> Plan:
        """The keep decision, and a place for every choice of this rank's positions."""
        ranks, rank, (P, K) = self.ep.size, self.ep.rank, expert_PK.shape
        if len(sizes) != ranks or sizes[rank] != P:
            raise ConfigError(f"rowwise dispatch must know P of all {ranks} ranks: sizes={sizes}, rank {rank} has {P}")
        held, room = self.experts // ranks, max(1, math.ceil(self.capacity * K * sum(sizes) / ranks))
        block, at_R, to = max(1, min(room, K * max(sizes))), None, {}
        rows = ops.sort_rows(expert_PK, self.experts)
        gathered = self.ep.all_gather(rows.count_E.new_empty(ranks * self.experts), rows.count_E, "metadata")
        start_WeW, end_WeW = bounds(gathered.view(ranks, self.experts))
        use = end_WeW[:, -1, -1].max().double() / room
        self._use = use if self._use is None else torch.maximum(self._use, use)

        expert_S, position_S = expert_PK.reshape(-1), inverse(rows.slot_R)
        first_E, home_S = rows.offset_E - rows.count_E, expert_S // held
        row_S = start_WeW[:, :, rank].reshape(-1)[expert_S] + position_S - first_E[expert_S]
        kept_S = row_S < room
        start, end = (t[rank].clamp(max=room) for t in (start_WeW, end_WeW))  # this rank's buffer, after dropping
        if isinstance(self.transport, Padded):
            nowhere = ranks * block
            lane_S = position_S - first_E[::held][home_S]  # this rank's rows for one destination, counted from 0
            index_S = torch.where(kept_S, home_S * block + lane_S, nowhere)
            row_R = torch.arange(room, device=expert_S.device)
            bucket_R = torch.searchsorted(end.reshape(-1), row_R, right=True).clamp(max=held * ranks - 1)
            count_eW = end_WeW[rank] - start_WeW[rank]
            before_eW = count_eW.cumsum(0) - count_eW  # rows from the same source for earlier experts
            lane_R = row_R + (before_eW - start).reshape(-1)[bucket_R]
            at_R = torch.where(row_R < end[-1, -1], bucket_R % ranks * block + lane_R, nowhere)
        elif isinstance(self.transport, Symmetric):
            index_S = torch.arange(K * P, device=expert_S.device).view(K, P).t().reshape(-1)
            by_choice = lambda t_S: t_S.view(P, K).t().reshape(-1)
            to = {"rank_S": by_choice(home_S), "row_S": by_choice(torch.where(kept_S, row_S, -1))}
        else:
            index_S = torch.where(kept_S, home_S * (room + 1) + row_S, rank * (room + 1) + room)
        return Plan(
            index_KP=index_S.view(P, K).t().contiguous(),
            offset_E=end[:, -1].contiguous(),
            room=room,
            block=block,
            at_R=at_R,
            dropped_P=(~kept_S).view(P, K).sum(1),
            sent=(kept_S & (home_S != rank)).sum(),
            served=(end - start).sum() - (end - start)[:, rank].sum(),
            **to,
        )
