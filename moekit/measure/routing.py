"""Load statistics of a router: how evenly the rows of a layer are spread over its experts.

Axis letters: L layers, E experts. Every function takes counts [..., E] (non-negative; any integer or float type) and
returns [...] float64. An idle layer (no rows) has defined values and never NaN: 0 for every statistic, which no
layer with rows can have for `max_over_mean`; and all of its experts are dead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def max_over_mean(count_E: Tensor) -> Tensor:
    """Load of the busiest expert over the mean load: max(c) E / sum(c), in [1, E]; 1 = even, 0 = idle.

    >>> max_over_mean(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist()
    [3.0, 1.0, 0.0]
    """
    c = count_E.double()
    return _over(c.amax(-1) * c.shape[-1], c.sum(-1))


def entropy(count_E: Tensor, normalised: bool = False) -> Tensor:
    """Shannon entropy of the load, -sum(p log p) in nats with p = c / sum(c); in [0, log E], 0 = idle.

    `normalised` divides by log E, so that 1 = even whatever E is (one expert is even: 1).

    >>> entropy(torch.tensor([2, 2, 0, 0]), normalised=True).item()
    0.5
    """
    c = count_E.double()
    p = _over(c, c.sum(-1, keepdim=True))
    h = torch.special.entr(p).sum(-1)
    if not normalised:
        return h
    if c.shape[-1] == 1:
        return (c.sum(-1) > 0).double()
    return (h / math.log(c.shape[-1])).clamp(max=1.0)


def dead_experts(count_E: Tensor) -> Tensor:
    """How many experts got no row, int64; E for an idle layer."""
    return (count_E == 0).sum(-1)


def variation(count_E: Tensor) -> Tensor:
    """Coefficient of variation: population standard deviation of the load over its mean; 0 = even, or idle."""
    c = count_E.double()
    mean = c.mean(-1)
    return _over((c - mean[..., None]).square().mean(-1).sqrt(), mean)


def gini(count_E: Tensor) -> Tensor:
    """Gini coefficient of the load: mean |c_i - c_j| / (2 mean c), in [0, 1 - 1/E]; 0 = even, or idle.

    >>> gini(torch.tensor([4, 0, 0, 0])).item()
    0.75
    """
    c = count_E.double().sort(-1).values
    n = c.shape[-1]
    rank = torch.arange(1, n + 1, dtype=c.dtype, device=c.device)
    return _over(((2 * rank - n - 1) * c).sum(-1), n * c.sum(-1))


def load(count_LE: Tensor) -> dict[str, Tensor]:
    """All statistics of every layer: name -> [L]."""
    return {
        "max_over_mean": max_over_mean(count_LE),
        "entropy": entropy(count_LE, normalised=True),
        "entropy_nats": entropy(count_LE),
        "dead_experts": dead_experts(count_LE),
        "variation": variation(count_LE),
        "gini": gini(count_LE),
    }


def load_metrics(count_LE: Tensor, group: str = "load") -> dict[str, float]:
    """The same as scalars `group/name` over all layers.

    max_over_mean, entropy (normalised to [0, 1]), variation, gini: the mean over the layers that have rows.
    max_over_mean_worst: the largest of a layer. dead_experts: the sum over all layers, idle ones included.
    """
    per_layer = load(count_LE.cpu())
    busy = count_LE.cpu().sum(-1) > 0
    mean = lambda x: float(x[busy].mean()) if bool(busy.any()) else 0.0
    out: dict[str, float] = {
        f"{group}/{name}": mean(per_layer[name]) for name in ("max_over_mean", "entropy", "variation", "gini")
    }
    worst = per_layer["max_over_mean"]
    out[f"{group}/max_over_mean_worst"] = float(worst.max()) if worst.numel() else 0.0
    out[f"{group}/dead_experts"] = int(per_layer["dead_experts"].sum())
    return out


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
