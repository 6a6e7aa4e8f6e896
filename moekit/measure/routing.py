"""How evenly the rows of a layer are spread over its experts, and what it costs where they are not.

Axis letters: L layers, E experts, W expert-parallel ranks. Counts are [..., E] (non-negative; any integer or float
type); a statistic of them is [...] float64. An idle layer (no rows) has defined values and never NaN: 0 for every
statistic, which no layer with rows can have for `max_over_mean`; and all of its experts are dead.
"""

import math

import torch
from torch import Tensor

from ..errors import ConfigError


def max_over_mean(count_E: Tensor) -> Tensor:
    """Load of the busiest expert over the mean load: max(c) E / sum(c), in [1, E]; 1 = even, 0 = idle.

    >>> max_over_mean(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist()
    [3.0, 1.0, 0.0]
    """
    c = count_E.double()
    return _over(c.amax(-1) * c.shape[-1], c.sum(-1))


def entropy(count_E: Tensor) -> Tensor:
    """Shannon entropy of the load over its largest value: -sum(p log p) / log E with p = c / sum(c).

    In [0, 1]; 1 = even whatever E is (a single expert is even), 0 = all on one, or idle.

    >>> entropy(torch.tensor([2, 2, 0, 0])).item()
    0.5
    """
    c = count_E.double()
    if c.shape[-1] == 1:
        return (c.sum(-1) > 0).double()
    p = _over(c, c.sum(-1, keepdim=True))
    return (torch.special.entr(p).sum(-1) / math.log(c.shape[-1])).clamp(max=1.0)


def dead_experts(count_E: Tensor) -> Tensor:
    """How many experts got no row, int64; E for an idle layer."""
    return (count_E == 0).sum(-1)


def load_metrics(count_LE: Tensor, group: str = "load") -> dict[str, float]:
    """Scalars `group/name` over all layers.

    max_over_mean, entropy: the mean over the layers that have rows. max_over_mean_worst: the largest of a layer.
    dead_experts: the sum over all layers, idle ones included.
    """
    c = count_LE.cpu()
    busy, over = c.sum(-1) > 0, max_over_mean(c)
    mean = lambda x: float(x[busy].mean()) if bool(busy.any()) else 0.0
    return {
        f"{group}/max_over_mean": mean(over),
        f"{group}/entropy": mean(entropy(c)),
        f"{group}/max_over_mean_worst": float(over.max()) if over.numel() else 0.0,
        f"{group}/dead_experts": int(dead_experts(c).sum()),
    }


def rank_rows(count_E: Tensor, ep: int, rank_E: Tensor | None = None) -> Tensor:
    r"""Rows that each of `ep` ranks multiplies, [..., W] float64: :math:`r_w = \sum_{e: rank(e) = w} c_e`.

    Args:
        count_E: rows by expert of one forward of the whole expert-parallel group.
        ep: W, ranks; divides E.
        rank_E: the rank that holds each expert, int64, of the shape of `count_E` or fewer leading axes; None =
            `placement(..., "contiguous")`, as moekit lays them.

    >>> rank_rows(torch.tensor([5, 1, 0, 2]), ep=2).tolist()
    [6.0, 2.0]
    """
    c = count_E.double()
    rank_E = placement(c, ep, "contiguous") if rank_E is None else rank_E
    return c.new_zeros(*c.shape[:-1], ep).scatter_add_(-1, rank_E.expand(c.shape), c)


def lost_share(rows_W: Tensor, over: tuple[int, ...] = ()) -> Tensor:
    r"""Share of the ranks' expert time spent waiting for the rank with most rows.

    .. math:: 1 - \frac{\sum \mathrm{mean}_w\, r_w}{\sum \max_w r_w} \in [0, 1 - 1/W]

    The combine of a layer needs every rank's rows, so the busiest sets the pace: max / mean times the balanced time.

    Args:
        rows_W: rows by rank of one forward each (`rank_rows`). Rows of several forwards added up hide waiting: a
            rank that is late in one cannot make up for it in the next.
        over: leading axes (steps, layers) to sum over, since their waiting adds up; () = each on its own.

    >>> lost_share(torch.tensor([6.0, 2.0])).item(), lost_share(torch.tensor([[6.0, 2.0], [4.0, 4.0]]), (0,)).item()
    (0.33333333333333337, 0.19999999999999996)
    """
    mean, most = rows_W.double().mean(-1), rows_W.double().amax(-1)
    mean, most = (mean.sum(over), most.sum(over)) if over else (mean, most)
    return torch.where(most == 0, 0.0, 1 - _over(mean, most))


def tile_waste(count_E: Tensor, tile: int = 128) -> Tensor:
    r"""Rows that a grouped GEMM multiplies for nothing: :math:`\sum_e \lceil c_e / b \rceil b - c_e` with b = `tile`.

    A kernel takes an expert's rows in tiles of fixed height and fills up the last one; an expert without rows has no
    tile. So each busy expert wastes from 0 to b - 1 rows, whatever its load: few rows an expert cost, imbalance hardly.

    >>> tile_waste(torch.tensor([130, 128, 1, 0]), tile=128).item()
    253.0
    """
    c = count_E.double()
    return ((c / tile).ceil() * tile - c).sum(-1)


def placement(count_E: Tensor, ep: int, kind: str = "greedy") -> Tensor:
    """The rank that would hold each expert, [..., E] int64, E / ep experts on every rank: a what-if.

    "contiguous" is what moekit does: experts 0 .. E/ep - 1 on rank 0, and so on. "greedy" (longest processing time
    first): from the busiest expert down, each goes to the rank with fewest rows that still has a place; a layer for
    which that is no better than contiguous stays contiguous. Optimal for E = 2 ep, near it otherwise.

    Args:
        count_E: rows by expert, of the past: what comes is better or worse (`lost_share` of later counts tells).

    Raises:
        ConfigError: `ep` does not divide the number of experts, or an unknown kind.

    >>> placement(torch.tensor([9, 8, 2, 1]), ep=2).tolist()
    [0, 1, 1, 0]
    """
    experts = count_E.shape[-1]
    if ep < 1 or experts % ep or kind not in ("contiguous", "greedy"):
        raise ConfigError(
            f"placement(ep={ep}, kind={kind!r}): ep must divide {experts} experts; 'contiguous', 'greedy'"
        )
    c = count_E.double().reshape(-1, experts)
    laid = (torch.arange(experts, device=c.device) // (experts // ep)).expand(c.shape)
    if kind == "greedy":
        rank, rows, held = torch.empty_like(laid), c.new_zeros(len(c), ep), c.new_zeros(len(c), ep)
        for e in c.argsort(dim=-1, descending=True, stable=True).split(1, -1):
            w = torch.where(held < experts // ep, rows, math.inf).argmin(-1, keepdim=True)
            rank.scatter_(-1, e, w)
            rows.scatter_add_(-1, w, c.gather(-1, e))
            held.scatter_add_(-1, w, torch.ones_like(w, dtype=c.dtype))
        better = rows.amax(-1, keepdim=True) < rank_rows(c, ep, laid).amax(-1, keepdim=True)
        laid = torch.where(better, rank, laid)
    return laid.reshape(count_E.shape).contiguous()


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
