"""MXFP8: 32 neighbours along the contraction axis share one power-of-two scale; each is an 8-bit E4M3 number.

    value = code * 2^(scale - 127),   code: float8_e4m3fn (largest 448),   scale: one byte, E8M0

The mode is part of the format: "ceil" (default) takes the smallest scale that holds the block, ceil(log2(amax / 448)),
"floor" takes floor(log2(amax)) - 8, where the largest entries may saturate. What a block becomes (* in torchao too):

    all zeros; scale <= 2^-127 (amax <= 2.6e-36)   scale 0, signed zeros *
    an infinity, no NaN      scale 254; infinities read back as infinities, the rest is kept in steps of 2^118 *
    a NaN                    scale 255, every code NaN: the whole block reads back as NaN *
    amax >= 248 * 2^120      finite; "ceil" rounds past the largest float32: reads back as infinity *

Scales come from the bits of amax, so that every machine agrees. torchao 0.18 on CPU takes log2 in float32: one step too
low for amax up to 39 units of the last place above 448 * 2^k, |k| large.

Forward and input gradients are MXFP8, with weights quantised along either's contraction axis; **weight gradients stay
in the dtype of x**. They contract over tokens: blocks would run over rows of ragged groups (each padded to 32), and the
noise would be summed over microbatches and stay in the moments. (OLMoDDP's backward runs plain grouped matmuls as
well; which of the two its final recipe keeps wide is not published.) The backward takes quantisation for the identity.
This file is the truth for Triton's form, and what runs on CPU: codes are read back, exactly, and multiplied in float32.

Axis letters: R rows in expert order, N positions, K contraction axis, M outputs, E experts, D width, F expert width.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .permute import Sorted
from .ragged import Writer

Mode = Literal["ceil", "floor"]
BLOCK = 32
INF = 0x7F800000  # its float32 bits
aten = torch.ops.aten


@dataclass(frozen=True)
class Quantised:
    """A tensor in MXFP8; the last axis is the one that was quantised."""

    code: Tensor  # float8_e4m3fn [..., K]
    scale: Tensor  # uint8 [..., K / 32]
    mode: Mode = "ceil"

    def __getitem__(self, index: Any) -> "Quantised":
        return Quantised(self.code[index], self.scale[index], self.mode)

    def dequantise(self) -> Tensor:
        """float32 [..., K]; exact."""
        bits = self.scale.int()
        power = torch.where(bits == 0, 0x400000, bits << 23).view(torch.float32)  # 2^-127 is a float32 subnormal
        power = power.masked_fill(bits == 255, torch.nan)
        return (self.code.float().unflatten(-1, (bits.shape[-1], BLOCK)) * power.unsqueeze(-1)).flatten(-2)


def quantise(x: Tensor, mode: Mode = "ceil") -> Quantised:
    """To MXFP8 along the last axis, a multiple of 32; any float dtype (float64 goes through float32).

    >>> x = torch.zeros(32); x[0] = 250.0
    >>> [quantise(x, mode).dequantise()[0].item() for mode in ("ceil", "floor")]
    [256.0, 224.0]
    """
    if x.shape[-1] % BLOCK or mode not in ("ceil", "floor"):
        raise ValueError(f"quantise: {tuple(x.shape)} along the last axis must be a multiple of {BLOCK}, mode={mode!r}")
    wide = x.detach().float().contiguous().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    amax = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)  # as integers: NaN > infinity > finite
    scale = (amax >> 23) - 8
    if mode == "ceil":
        scale += (amax & 0x7FFFFF) > 0x600000  # mantissa above that of 1.75 = 448 / 2^8
    scale.clamp_(min=0).masked_fill_(amax == INF, 254).masked_fill_(amax > INF, 255)
    bits = torch.where(scale == 254, 0x400000, (254 - scale) << 23).masked_fill_(scale == 0, 0x3F800000)
    value = (wide * bits.view(torch.float32)).clamp_(-448, 448).masked_fill_(scale == 255, torch.nan)
    return Quantised(value.to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1).to(torch.uint8), mode)


def quantise_columns(x: Tensor, mode: Mode = "ceil") -> Quantised:
    """To MXFP8 along the last axis but one, transposed: [..., R, K] -> [..., K, R], R zero-padded to 32s."""
    padded = torch.nn.functional.pad(x.detach(), (0, 0, 0, -x.shape[-2] % BLOCK))
    return quantise(padded.transpose(-1, -2), mode)


def quantise_both(x: Tensor, mode: Mode = "ceil") -> tuple[Quantised, Quantised]:
    """`quantise` and `quantise_columns`; Triton's form reads x once."""
    return quantise(x, mode), quantise_columns(x, mode)


def grouped_mm(x: Quantised, w: Quantised, offset_E: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[R, K], [E, M, K] -> [R, M]: x_r @ w_e.T, e = the first with r < offset_e; rows past all give 0, unread."""
    if x.code.shape[-1] != w.code.shape[-1] or w.code.shape[0] != offset_E.shape[0]:
        raise ValueError(f"grouped_mm: x {tuple(x.code.shape)}, w {tuple(w.code.shape)}, {offset_E.shape[0]} experts")
    y = torch.zeros(x.code.shape[0], w.code.shape[1], dtype=dtype, device=x.code.device)
    for e, (start, stop) in enumerate(Sorted(offset_E, offset_E, offset_E).bounds):
        if stop > start:
            y[start:stop] = x[start:stop].dequantise() @ w[e].dequantise().T
    return y


@dataclass(frozen=True)
class Operands:
    """One stack of expert weights [E, M, K] in MXFP8, for the forward and, unless it is frozen, for the backward."""

    forward: Quantised  # [E, M, K]: blocks along K
    transposed: Quantised | None  # [E, K, M]: blocks along M

    @staticmethod
    def of(weight: Tensor, backward: bool = True, mode: Mode = "ceil", form: Any = None) -> "Operands":
        """Quantise a stack of weights, both ways or forward only; `form`: see `forms`."""
        form = form or forms(weight.is_cuda)
        return Operands(*form.quantise_both(weight, mode)) if backward else Operands(form.quantise(weight, mode), None)


def forms(use_triton: bool) -> Any:
    """The module whose `quantise`, `quantise_both` and `grouped_mm` run: Triton's, or this one."""
    return importlib.import_module(f"{__package__}.mxfp8_triton" if use_triton else __name__)


class ExpertFFN(torch.autograd.Function):
    """down_e @ (silu(g) * u), (g, u) = gate_up_e @ x_r; keeps x and the pre-activations."""

    @staticmethod
    def forward(ctx, x_RD, offset_E, gate_up_E2FD, down_EDF, up: Operands, down: Operands, slots: Any, form: Any):
        pre_R2F = form.grouped_mm(form.quantise(x_RD), up.forward, offset_E, x_RD.dtype)
        gate, high = pre_R2F.chunk(2, -1)
        hidden_RF = aten.silu(gate).mul_(high)
        ctx.save_for_backward(x_RD, offset_E, gate_up_E2FD, down_EDF, pre_R2F)  # weights: a write to them is an error
        ctx.up, ctx.down, ctx.slots, ctx.form = up, down, slots, form
        return form.grouped_mm(form.quantise(hidden_RF), down.forward, offset_E, x_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RD):
        x_RD, offset_E, gate_up_E2FD, down_EDF, pre_R2F = ctx.saved_tensors
        need, form, kind = ctx.needs_input_grad, ctx.form, x_RD.dtype
        rows = Sorted(offset_E, offset_E, offset_E)
        gate, high = pre_R2F.chunk(2, -1)
        act_RF = aten.silu(gate)
        dhidden_RF = form.grouped_mm(form.quantise(dy_RD), ctx.down.transposed, offset_E, kind)
        dpre_R2F = torch.empty_like(pre_R2F)
        dgate, dhigh = dpre_R2F.chunk(2, -1)
        torch.mul(dhidden_RF, act_RF, out=dhigh)
        aten.silu_backward.grad_input(dhidden_RF.mul_(high), gate, grad_input=dgate)
        ddown = _weight_gradient(form, dy_RD, act_RF.mul_(high), rows, down_EDF, ctx.slots[1]) if need[3] else None
        dup = _weight_gradient(form, dpre_R2F, x_RD, rows, gate_up_E2FD, ctx.slots[0]) if need[2] else None
        dx_RD = form.grouped_mm(form.quantise(dpre_R2F), ctx.up.transposed, offset_E, kind) if need[0] else None
        return dx_RD, None, dup, ddown, None, None, None, None


def _weight_gradient(form: Any, dy_RM: Tensor, x_RK: Tensor, rows: Sorted, weight: Tensor, slot: Any) -> Tensor | None:
    """dw_e = dy_e.T @ x_e in the dtype of x, into the slot if there is one."""
    if form is not forms(False):
        wgrad = importlib.import_module(f"{__package__}.grouped_gemm").grouped_wgrad
        target = torch.empty_like(weight) if slot is None else slot.view
        wgrad(dy_RM, x_RK, rows.offset_E, target, add=slot is not None and slot.filled)
        return target if slot is None else setattr(slot, "filled", True)
    write = Writer(weight, slot)
    for e, (start, stop) in enumerate(rows.bounds):
        if stop > start:
            write(e, dy_RM[start:stop].T, x_RK[start:stop])
    return write.close(rows)


class Combine(torch.autograd.Function):
    """Gated sum of a position's rows, in float32; keeps the rows, and not their products with the gates."""

    @staticmethod
    def forward(ctx, y_RD: Tensor, gate_R1: Tensor, row_R: Tensor, shape: torch.Size):
        ctx.save_for_backward(y_RD, gate_R1, row_R)
        return gate_R1.new_zeros(shape).index_add_(0, row_R, y_RD * gate_R1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        y_RD, gate_R1, row_R = ctx.saved_tensors
        dy_RD = dy_ND[row_R]
        return (dy_RD * gate_R1).to(y_RD.dtype), (dy_RD * y_RD).sum(-1, keepdim=True), None, None


def expert_ffn(
    x_RD, offset_E, gate_up_E2FD, down_EDF, up: Operands, down: Operands, slots=(None, None), order_R=None, form=None
):
    """`moekit.ops.expert_ffn` in MXFP8. The weights themselves are named for their gradients only."""
    x = x_RD if order_R is None else x_RD[order_R]
    y: Any = ExpertFFN.apply(x, offset_E, gate_up_E2FD, down_EDF, up, down, slots, form or forms(x.is_cuda))
    return y if order_R is None else torch.zeros_like(x_RD).index_copy(0, order_R, y)


def moe_ffn(
    x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, up: Operands, down: Operands, slots=(None, None), form=None
):
    """`moekit.ops.moe_ffn` in MXFP8. The gates meet the outputs, not the activations: those stay as they were drawn."""
    y_RD = expert_ffn(x_ND[rows.row_R], rows.offset_E, gate_up_E2FD, down_EDF, up, down, slots, form=form)
    y_ND: Any = Combine.apply(y_RD, gate_NK.reshape(-1, 1)[rows.slot_R].float(), rows.row_R, x_ND.shape)
    return y_ND.to(x_ND.dtype)
