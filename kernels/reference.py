"""What every kernel must compute, in the plainest torch: slow, differentiable, any dtype and device.

Tests compare each fast form with these; `moekit.ops.set_backend("reference")` runs a whole model on them.

Axis letters: N positions, K experts per position, E experts, D width, F expert width, S documents, L their length,
H query heads, G key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .mxfp8 import Operands, Quantised, quantise
from .permute import Sorted


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [..., 2F] with the gate half first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def moe_ffn(x_ND: Tensor, rows: Sorted, gate_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """y_n = sum_k gate_nk * down_e(n,k) @ swiglu(gate_up_e(n,k) @ x_n), one expert after the other."""
    y_ND = torch.zeros_like(x_ND)
    gate_R = gate_NK.reshape(-1)[rows.slot_R].to(x_ND.dtype)
    for (start, stop), gate_up_2FD, down_DF in zip(rows.bounds, gate_up_E2FD.unbind(), down_EDF.unbind()):
        row = rows.row_R[start:stop]
        hidden = swiglu(x_ND[row] @ gate_up_2FD.T) * gate_R[start:stop, None]
        y_ND = y_ND.index_add(0, row, hidden @ down_DF.T)
    return y_ND


class _MXLinear(torch.autograd.Function):
    """x @ w.T and its input gradient from what MXFP8 reads back; the weight's gradient from the wide values."""

    @staticmethod
    def forward(ctx, x_RK: Tensor, w_MK: Tensor, ahead: Quantised, back: Quantised | None) -> Tensor:
        ctx.save_for_backward(x_RK, w_MK)  # the weight: a write to it is an error
        ctx.back = back
        return (quantise(x_RK).dequantise() @ ahead.dequantise().T).to(x_RK.dtype)

    @staticmethod
    def backward(ctx, dy_RM: Tensor):
        x_RK, _ = ctx.saved_tensors
        dx_RK = (quantise(dy_RM).dequantise() @ ctx.back.dequantise().T).to(dy_RM.dtype)
        return dx_RK, dy_RM.T @ x_RK, None, None


def mxfp8_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, up: Operands, down: Operands) -> Tensor:
    """`moe_ffn` in MXFP8 (`kernels/mxfp8.py`); the gates meet the outputs, in float32."""
    y_ND = torch.zeros_like(x_ND, dtype=torch.float32)
    gate_R = gate_NK.reshape(-1)[rows.slot_R].float()
    of = lambda q, e: None if q is None else q[e]
    for e, (start, stop) in enumerate(rows.bounds):
        row = rows.row_R[start:stop]
        pre = _MXLinear.apply(x_ND[row], gate_up_E2FD[e], up.forward[e], of(up.transposed, e))
        y = _MXLinear.apply(swiglu(pre), down_EDF[e], down.forward[e], of(down.transposed, e))
        y_ND = y_ND.index_add(0, row, y * gate_R[start:stop, None])
    return y_ND.to(x_ND.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def token_logprobs(hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(h W^T / temperature) at the label, in float32 at least; all logits are held."""
    z_MV = hidden_MD @ head_VD.T
    z_MV = z_MV if z_MV.dtype == torch.float64 else z_MV.float()
    return (z_MV / temperature).log_softmax(-1).gather(1, label_M[:, None])[:, 0]


def rope(x_NHd: Tensor, cos_Nd: Tensor, sin_Nd: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of each head by the position's angle i; cos and sin are [N, d/2]."""
    a, b = x_NHd.chunk(2, -1)
    cos, sin = cos_Nd[:, None], sin_Nd[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def causal_attention(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGd: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v over positions 0..l of the same document; query heads share key heads in order."""
    L, H, d = q_SLHd.shape[1:]
    k, v = (t.repeat_interleave(H // t.shape[2], 2) for t in (k_SLGd, v_SLGd))
    future = torch.ones(L, L, dtype=torch.bool, device=k.device).triu(1)
    score = torch.einsum("slhd,smhd->shlm", q_SLHd, k) / d**0.5
    return torch.einsum("shlm,smhd->slhd", score.masked_fill(future, -torch.inf).softmax(-1), v)
