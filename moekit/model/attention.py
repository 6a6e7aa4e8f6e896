"""Causal self-attention, document by document, on the flat order of a microbatch.

In the flat order a document is a contiguous span and equal lengths are neighbours (`moekit.data.batch`), so a run of
documents is one dense batch for `scaled_dot_product_attention` and no [T, T] mask exists. A child of a shared prompt
attends to its parent's span and its own. Padding attends to itself only, so its output is its own value.

Axis letters: N positions, S documents of a run, L their length, H query heads, G key/value heads, d head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from ..data.batch import Flat
from .moe import Linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [N, H, d], k and v [N, G, d] -> [N, H, d]


def rope_angles(position_N: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/d), [N, d/2]; computed in float32 at least, returned in `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    d = config.head_dim
    rate_d = config.rope_theta ** (-torch.arange(0, d, 2, dtype=wide, device=position_N.device) / d)
    angle_Nd = position_N[:, None].to(wide) * rate_d
    return angle_Nd.cos().to(dtype), angle_Nd.sin().to(dtype)


def document_attention(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, flat: Flat) -> Tensor:
    """softmax(q k / sqrt(d)) v within each document and its parent; [N, H, d] in the flat order.

    Cost: two products of L^2 * d per head and document; equal lengths share one call. A child's mask is
    [L, parent + L]; nothing else is masked.
    """
    N, H, d = q_NHd.shape
    grouped = H // v_NGd.shape[1]
    parents = {c.parent_start for c in flat.children}
    pieces = []  # one per run, or per document where a document of the run is a parent
    for run in flat.runs:
        starts = [run.start + i * run.length for i in range(run.documents)]
        if parents.isdisjoint(starts):
            pieces.append((run.start, run.documents, run.length))
        else:
            pieces.extend((s, 1, run.length) for s in starts)
    sizes = [n * length for _, n, length in pieces] + [c.length for c in flat.children] + [N - flat.real]
    qs, ks, vs = (t.split(sizes) for t in (q_NHd, k_NGd, v_NGd))  # one split, so that backward is one concatenation
    out = []
    for (_, n, length), q, k, v in zip(pieces, qs, ks, vs):
        a_SLHd = ops.causal_attention(*(t.view(n, length, *t.shape[1:]) for t in (q, k, v)))
        out.append(a_SLHd.reshape(n * length, H, d))
    place = {start: i for i, (start, _, _) in enumerate(pieces)}
    for i, child in enumerate(flat.children, len(pieces)):
        up = place[child.parent_start]
        k, v = torch.cat((ks[up], ks[i])), torch.cat((vs[up], vs[i]))
        seen = torch.ones(child.length, k.shape[0], dtype=torch.bool, device=k.device).tril(child.parent_length)
        heads = [t[None].transpose(1, 2) for t in (qs[i], k, v)]
        out.append(F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=grouped > 1).transpose(1, 2)[0])
    out.append(vs[-1].repeat_interleave(grouped, 1))  # padding
    return torch.cat(out)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and optional RMSNorm of queries and keys."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device=None):
        super().__init__()
        self.heads, self.kv_heads, self.d = config.heads, config.kv_heads, config.head_dim
        self.qk_norm, self.eps = config.qk_norm, config.norm_eps
        q, kv = self.heads * self.d, self.kv_heads * self.d
        self.qkv = Linear(config.width, q + 2 * kv, dtype, device)
        self.out = Linear(q, config.width, dtype, device)
        if self.qk_norm != "none":
            full = self.qk_norm == "full"
            self.q_norm = RMSNorm(q if full else self.d, self.eps, dtype, device)
            self.k_norm = RMSNorm(kv if full else self.d, self.eps, dtype, device)

    def project(self, x_ND: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, d], keys and values [N, G, d], normalised and rotated."""
        q, kv = self.heads * self.d, self.kv_heads * self.d
        q_N, k_N, v_N = self.qkv(x_ND).split((q, kv, kv), -1)
        if self.qk_norm == "full":
            q_N, k_N = self.q_norm(q_N), self.k_norm(k_N)
        q_NHd = q_N.reshape(-1, self.heads, self.d)
        k_NGd, v_NGd = (t.reshape(-1, self.kv_heads, self.d) for t in (k_N, v_N))
        if self.qk_norm == "head":
            q_NHd, k_NGd = self.q_norm(q_NHd), self.k_norm(k_NGd)
        return *ops.rope(q_NHd, k_NGd, *angles), v_NGd

    def forward(self, x_ND: Tensor, flat: Flat | None, angles: tuple[Tensor, Tensor], attend: Attend | None = None):
        """Attention output [N, D] for normalised input [N, D]; `attend` replaces attention within documents."""
        q_NHd, k_NGd, v_NGd = self.project(x_ND, angles)
        if attend is not None:
            a_NHd = attend(q_NHd, k_NGd, v_NGd)
        else:
            assert flat is not None  # decoding, which has no microbatch, brings its own attention
            a_NHd = document_attention(q_NHd, k_NGd, v_NGd, flat)
        return self.out(a_NHd.reshape(-1, self.heads * self.d))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input."""
        return ops.rms_norm(x, self.weight, self.eps)
