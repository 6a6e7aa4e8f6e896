r"""Router losses: load balancing and z-loss, with their own divisor and scope.

Axis letters: N positions of a microbatch, E experts, K experts per token, S documents.

Both are sums over the positions in scope divided by the number of such positions in the whole step, never by the label
count: response-only training must not inflate them. Statistics come from the router's decisions, never from dispatched
rows, so elision and drops do not change them. A position of a shared prompt counts once for each of its children.

The balance loss is a product of two means, hence its granularity decides whether it survives a cut into microbatches
and ranks:

    sequence    (1/N) sum_s n_s E sum_e f_se P_se    per document s: the same for every cut (default)
    microbatch  the same formula with the microbatch's f, counts summed over data-parallel ranks: depends on the cut
    hf          Transformers' form, pooled over layers of one microbatch: K times larger; for parity tests

with f the share of choices (summing to 1 over experts) and P the mean router probability (summing to 1).
Source: Fedus et al. 2021 (arXiv 2101.03961) for the balance loss, Zoph et al. 2022 (arXiv 2202.08906) for the z-loss.
Departure: f sums to 1 rather than to K, so a balanced router reads 1 for every K.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import RouterLossConfig, Scope
from ..data.batch import Flat
from ..errors import ConfigError


def in_scope(flat: Flat, scope: Scope) -> slice | Tensor:
    """The positions that router statistics count, as an index that the host knows: a mask would be a device read."""
    return {"all": slice(None), "valid": slice(flat.real), "supervised": flat.label_index_M}[scope]


def scope_count(flats: Sequence[Flat], scope: Scope) -> float:
    """This rank's number of positions in scope, shared ones once per child; sum it over ranks for the divisor."""
    return float(sum(int(f.share_N[in_scope(f, scope)].sum()) for f in flats))


def convert_coefficient(value: float, source: str, target: str, top_k: int, layers: int = 1) -> float:
    """The coefficient that gives `target` the gradient that `value` gives `source`; names "moekit" and "hf".

    moekit sums over routing layers, "hf" pools them into one mean: K / layers times the gradient. Exact for one layer;
    for several where all route alike, because a product of means over layers is not the mean of their products.

    >>> convert_coefficient(0.01, "hf", "moekit", top_k=8), convert_coefficient(0.01, "hf", "moekit", top_k=8, layers=4)
    (0.08, 0.02)
    """
    for name in (source, target):
        if name not in ("moekit", "hf"):
            raise ConfigError(f"balance-loss convention {name!r} is not 'moekit' or 'hf'")
    scale = {"moekit": 1.0, "hf": top_k / layers}
    return value * scale[source] / scale[target]


def balance_by_sequence(route: Any, flat: Flat, scope: Scope) -> Tensor:
    """Sum over documents of n_s * E * sum_e f_se P_se: the `sequence` loss before its divisor, a scalar."""
    probs, experts = route.probs_NE, route.expert_NK
    e, document, groups = probs.shape[1], flat.document_N, flat.documents
    if scope == "all":  # each row's padding is a document of its own
        document = torch.where(document < 0, groups + flat.order_N // max(flat.length, 1), document)
        groups += flat.rows
    keep = in_scope(flat, scope)
    document = document[keep]
    prob_SE = probs.new_zeros(groups, e).index_add(0, document, probs[keep])
    slot = document[:, None] * e + experts[keep]
    count_SE = probs.new_zeros(groups * e).index_add_(0, slot.reshape(-1), probs.new_ones(slot.numel())).view(-1, e)
    if flat.children:  # documents that have a parent come last
        child = torch.arange(flat.documents - len(flat.children), flat.documents, device=probs.device)
        up = flat.parent_S[child]
        prob_SE = prob_SE.index_add(0, child, prob_SE[up])
        count_SE = count_SE.index_add(0, child, count_SE[up])
        alone = probs.new_ones(groups, 1).index_fill(0, up, 0)
        prob_SE = prob_SE * alone
    choices_S = count_SE.sum(1, keepdim=True).clamp(min=1)  # n_s * K
    return e * (count_SE / choices_S * prob_SE).sum()


def balance_by_microbatch(route: Any, flat: Flat, scope: Scope, all_reduce: Callable | None = None) -> Tensor:
    """N_microbatch * E * sum_e f_e P_e, counts pooled over ranks, this rank's share of P: a scalar."""
    probs, experts = route.probs_NE, route.expert_NK
    e = probs.shape[1]
    keep = in_scope(flat, scope)
    share = flat.share_N[keep].to(probs.dtype)
    prob_E = (probs[keep] * share[:, None]).sum(0)
    weight = share[:, None].expand(-1, experts.shape[1])
    count_E = probs.new_zeros(e).index_add_(0, experts[keep].reshape(-1), weight.reshape(-1))
    if all_reduce is not None:
        count_E = all_reduce(count_E)
    return e * (count_E / count_E.sum().clamp(min=1) * prob_E).sum()


def balance_hf(routes: Sequence[Any], flat: Flat, scope: Scope) -> Tensor:
    """Transformers' load-balancing loss over all layers of one microbatch: K for a balanced router, a scalar."""
    keep = in_scope(flat, scope)
    probs = torch.cat([r.probs_NE[keep] for r in routes])
    experts = torch.cat([r.expert_NK[keep] for r in routes])
    share = flat.share_N[keep].repeat(len(routes))
    e, n = probs.shape[1], share.sum().clamp(min=1)
    count_E = ops.count(experts.reshape(-1), e, share.repeat_interleave(experts.shape[1])).to(probs.dtype)
    return e * (count_E / n * (share.to(probs.dtype) @ probs) / n).sum()


def z_sum(route: Any, flat: Flat, scope: Scope) -> Tensor:
    """Sum over positions in scope of logsumexp(logits)^2, a scalar."""
    keep = in_scope(flat, scope)
    share = flat.share_N[keep].to(route.logits_NE.dtype)
    return (torch.logsumexp(route.logits_NE[keep], 1).square() * share).sum()


@dataclass(frozen=True)
class RouterLoss:
    """The router losses of one step, called by every MoE layer: ``(layer, route, flat) -> scaled scalar``."""

    config: RouterLossConfig
    divisor: float  # positions in scope over the whole step and all ranks
    all_reduce: Callable[[Tensor], Tensor] | None = None  # sum over data-parallel ranks ("microbatch"); None = one rank
    # detached, without their coefficients: one scalar per call
    values: dict[str, list[Tensor]] = field(default_factory=lambda: {"balance": [], "z": []})

    @property
    def per_layer(self) -> bool:
        """Whether layers have anything to add on their own (not so for granularity "hf" without z-loss)."""
        return bool((self.config.balance and self.config.granularity != "hf") or self.config.z)

    def __call__(self, layer: int, route: Any, flat: Flat, again: bool = False) -> Tensor:
        """`again`: this is a recomputation for the backward, and its values are in `values` already."""
        c, total, found = self.config, route.logits_NE.new_zeros(()), []
        if c.balance and c.granularity == "sequence":
            found.append(("balance", c.balance, balance_by_sequence(route, flat, c.scope)))
        elif c.balance and c.granularity == "microbatch":
            found.append(("balance", c.balance, balance_by_microbatch(route, flat, c.scope, self.all_reduce)))
        if c.z:
            found.append(("z", c.z, z_sum(route, flat, c.scope)))
        for name, coefficient, value in found:
            total = total + coefficient / self.divisor * value
            if not again:
                self.values[name].append(value.detach() / self.divisor)
        return total


def bias_step(count_E: Tensor, rate: float, *, zero_mean: bool = False) -> Tensor:
    r"""Move of the selection bias: :math:`\gamma\,\mathrm{sign}(\bar c - c_e)`, float32, same shape as `count_E`.

    Args:
        count_E: choices of each expert in the step, over all ranks, positions in scope "valid".
        rate: gamma.
        zero_mean: subtract the mean of the signs, so that the bias does not drift; no comparison changes.

    Source: Wang et al. 2024, auxiliary-loss-free balancing (arXiv 2408.15664).

    >>> bias_step(torch.tensor([5.0, 1.0, 0.0]), 0.001).tolist() == torch.tensor([-0.001, 0.001, 0.001]).tolist()
    True
    """
    count = count_E.to(torch.float64)
    sign = torch.sign(count.mean(-1, keepdim=True) - count)
    if zero_mean:
        sign = sign - sign.mean(-1, keepdim=True)
    return (rate * sign).to(torch.float32)
