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


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
