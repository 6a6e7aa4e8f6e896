"""Log-probability of labels and entropy straight from hidden states and the head; logits live in registers only.

The forward keeps, per position and slice of the vocabulary, the running maximum and two sums. The backward makes the
gradient of the logits anew for one slice of the vocabulary at a time, and leaves the two products to torch's matmul.
Axis letters: M positions, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .grouped_gemm import INTERPRET, narrow

SLICES = 8  # of the vocabulary in the forward, which keep all programs busy when positions are few
# name (* = on matrix units); M, V and D of a tile, warps, stages
TILES = {torch.bfloat16: ("bf16 *", 128, 128, 64, 8, 3), torch.float32: ("fp32", 64, 64, 16, 4, 2)}


def token_logprobs(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, *, temperature: float = 1.0, chunk_bytes: int = 2**28
) -> tuple[Tensor, Tensor]:
    r"""Log-probability of each label and entropy of its distribution, for logits :math:`z = h W^\top / \tau`.

    log p = z_y - log sum_v e^{z_v};   H = -sum_v p_v log p_v

    Args:
        hidden_MD, head_VD: both float32 or both bfloat16; M may be 0. The results are [M] float32.
        label_M: int64 in [0, V). Not checked: one out of range gives a number without meaning.
        chunk_bytes: the most that the backward's gradient of logits may take (one tile of columns at least).

    Gradients: of both, to hidden and head: dz_v = g (1[v=y] - p_v) - e p_v (log p_v + H), with g and e the gradients of
    log p and H. dz takes the inputs' dtype; d hidden is added over slices in float32. Equal bits in every run.
    Cost: one M x D x V product forward and three backward, of which one is the forward's again.
    """
    shapes, kinds = [list(t.shape) for t in (hidden_MD, head_VD, label_M)], {hidden_MD.dtype, head_VD.dtype}
    if shapes[0] != [*shapes[2], shapes[1][1]] or len(kinds) > 1 or not kinds <= TILES.keys() or not temperature > 0:
        need = f"[M, D], [V, D], [M], one dtype of {list(TILES)}, temperature > 0"
        raise ValueError(f"token_logprobs: {shapes}, {kinds}, temperature {temperature}; needs {need}")
    hidden_MD, head_VD = _aligned(hidden_MD), _aligned(head_VD)
    return _TokenLogprobs.apply(hidden_MD, head_VD, label_M, temperature, chunk_bytes)  # type: ignore[no-any-return]


def _aligned(x: Tensor) -> Tensor:
    """Rows of whole 32 bytes at least, zeros at their end: one compiled form for all sizes, and it does not spill."""
    x = F.pad(x, (0, -x.shape[1] % 16)).contiguous()
    return x if x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, head, label, temperature, chunk_bytes):
        label = label.contiguous()
        (M, D), V = hidden.shape, head.shape[0]
        m, v, d, warps, stages = (16, 16, 16, 4, 2) if INTERPRET.value else TILES[hidden.dtype][1:]
        span = triton.cdiv(V, SLICES * v) * v
        parts = hidden.new_empty(4, triton.cdiv(V, span), M, dtype=torch.float32)
        grid, args = (triton.cdiv(M, m), parts.shape[1]), (hidden, head, label, parts, M, V, D, span, 1.0 / temperature)
        _forward[grid](*args, m, v, d, num_warps=warps, num_stages=stages)
        top, total, spread, own = parts
        shift = top - (largest := top.amax(0))  # brings the sums of each slice to the common maximum
        spread, total = ((spread + shift * total) * shift.exp()).sum(0), (total * shift.exp()).sum(0)
        lse, entropy = largest + total.log(), total.log() - spread / total
        ctx.save_for_backward(hidden, head, label, lse, entropy)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        return own.sum(0) - largest - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad, grad_entropy):
        hidden, head, label, lse, entropy = ctx.saved_tensors
        (M, D), V = hidden.shape, head.shape[0]
        m, v, d, warps, stages = (16, 16, 16, 4, 2) if INTERPRET.value else TILES[hidden.dtype][1:]
        wide = max(1, ctx.chunk_bytes // (max(M, 1) * hidden.element_size() * v)) * v
        d_hidden = hidden.new_zeros(M, D, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        d_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        given = (hidden, head, label, lse, entropy, grad.contiguous(), grad_entropy.contiguous())
        for start in range(0, V, wide):
            width = min(wide, V - start)
            tiles = triton.cdiv(width, v)
            grid, dz = (triton.cdiv(M, m), tiles), hidden.new_empty(M, tiles * v)  # whole tiles: stores need no mask
            args = (dz, M, V, D, start, tiles * v, 1.0 / ctx.temperature)
            _backward[grid](*given, *args, m, v, d, num_warps=warps, num_stages=stages)
            dz = dz[:, :width]
            if d_hidden is not None:
                d_hidden += dz @ head[start : start + wide]
            if d_head is not None:
                torch.mm(dz.t(), hidden, out=d_head[start : start + wide])
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_head, None, None, None


@triton.jit
def _logits(hidden, head, m, v, M, V, D, scale, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    z = tl.zeros([BM, BV], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        h = tl.load(hidden + m[:, None] * D + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(head + v[None, :] * D + d[:, None], mask=(v < V)[None, :] & (d < D)[:, None], other=0.0)
        if INTERPRET:
            h, w = h.to(tl.float32), w.to(tl.float32)
        z = tl.dot(h, w, z, input_precision="ieee")
    return tl.where((v < V)[None, :], z * scale, float("-inf"))


@triton.jit(do_not_specialize=["M", "V", "label"])
def _forward(hidden, head, label, parts, M, V, D, span, scale, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    """Of one slice: the maximum, sum_v e^u, sum_v u e^u with u = z - maximum, and the label's logit if it is here."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    y = tl.load(label + m, mask=m < M, other=-1)
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    spread, own = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    first = tl.program_id(1) * span
    for start in range(first, tl.minimum(first + span, V), BV):
        v = (start + tl.arange(0, BV)).to(tl.int64)
        z = _logits(hidden, head, m, v, M, V, D, scale, BM, BV, BD)
        own += tl.sum(tl.where(v[None, :] == y[:, None], z, 0.0), 1)
        higher = tl.maximum(top, tl.max(z, 1))
        u = z - higher[:, None]
        p = tl.exp(u)
        shift = tl.where(start == first, 0.0, top - higher)
        spread = (spread + shift * total) * tl.exp(shift) + tl.sum(tl.where(p == 0.0, 0.0, u) * p, 1)
        total = total * tl.exp(shift) + tl.sum(p, 1)
        top = higher
    at, each = parts + tl.program_id(1).to(tl.int64) * M + m, tl.num_programs(1).to(tl.int64) * M
    tl.store(at, top, mask=m < M)
    tl.store(at + each, total, mask=m < M)
    tl.store(at + 2 * each, spread, mask=m < M)
    tl.store(at + 3 * each, own, mask=m < M)


@triton.jit(do_not_specialize=["M", "V", "label", "grad", "grad_entropy"])
def _backward(
    hidden, head, label, lse, entropy, grad, grad_entropy, dz, M, V, D, start, row, scale,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    v, real = (start + column).to(tl.int64), m < M
    z = _logits(hidden, head, m, v, M, V, D, scale, BM, BV, BD)
    g, e = tl.load(grad + m, mask=real, other=0.0), tl.load(grad_entropy + m, mask=real, other=0.0)
    log_p = z - tl.load(lse + m, mask=real, other=0.0)[:, None]
    p = tl.exp(log_p)
    bend = tl.where(p == 0.0, 0.0, log_p) + tl.load(entropy + m, mask=real, other=0.0)[:, None]
    hit = v[None, :] == tl.load(label + m, mask=real, other=-1)[:, None]
    out = (g[:, None] * (tl.where(hit, 1.0, 0.0) - p) - e[:, None] * p * bend) * scale
    tl.store(dz + m[:, None] * row + column[None, :], narrow(out, dz.dtype.element_ty), mask=real[:, None])
