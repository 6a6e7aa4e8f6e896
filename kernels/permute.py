"""Routed rows in expert order: which position each row copies, and where each expert's rows end.

Axis letters: N positions, K experts per position, R = N*K routed rows, E experts.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sorted:
    """Routed rows grouped by expert, expert 0 first; inside an expert, rows keep position order."""

    row_R: Tensor  # int64, the position that row r copies
    slot_R: Tensor  # int64, row r is choice slot_R[r] of the flattened [N*K]
    offset_E: Tensor  # int64, where the rows of expert e end

    @property
    def rows(self) -> int:
        """R."""
        return self.row_R.shape[0]

    @cached_property
    def count_E(self) -> Tensor:
        """int64, rows of each expert; sums to R."""
        return torch.diff(self.offset_E, prepend=self.offset_E.new_zeros(1))

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of each expert's rows, on the host. One device read, the first time."""
        stops = self.offset_E.tolist()
        return list(zip([0, *stops[:-1]], stops))

    @cached_property
    def expert_R(self) -> Tensor:
        """int64, the expert of each row."""
        experts = torch.arange(self.offset_E.shape[0], device=self.offset_E.device)
        return torch.repeat_interleave(experts, self.count_E, output_size=self.rows)


def count(index_R: Tensor, bins: int, weight_R: Tensor | None = None) -> Tensor:
    """int64 [bins]: how often each value occurs, or the sum of its weights. `torch.bincount` without its host read."""
    return index_R.new_zeros(bins).scatter_add_(0, index_R, torch.ones_like(index_R) if weight_R is None else weight_R)


def sort_rows(expert_NK: Tensor, experts: int) -> Sorted:
    """Group all (position, expert) pairs by expert, with a stable sort: equal inputs give bitwise equal orders.

    Args:
        expert_NK: [N, K] int64 in [0, E); N may be 0.
        experts: E, passed and not inferred, because an expert may have no row.

    Cost: one sort of N*K integers, no host read.

    >>> s = sort_rows(torch.tensor([[1], [0], [1]]), experts=3)
    >>> s.row_R.tolist(), s.offset_E.tolist()
    ([1, 0, 2], [1, 3, 3])
    """
    flat_R = expert_NK.reshape(-1)
    slot_R = torch.argsort(flat_R, stable=True)
    offset_E = count(flat_R, experts).cumsum(0)
    return Sorted(slot_R // max(expert_NK.shape[1], 1), slot_R, offset_E)
