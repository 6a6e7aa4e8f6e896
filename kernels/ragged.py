"""Expert feed-forward over ragged rows, expert by expert, with a backward written by hand.

Built for few passes over memory: the rows of one expert are gathered into scratch that stays in cache, forward keeps
the pre-activations [R, 2F] only, backward recomputes the activation from them, and weight gradients are written
straight to where they are kept. Nothing of size [R, D] exists.

In bfloat16, row counts are padded with zero rows to a multiple of `PAD`: oneDNN compiles a matmul for every shape and
keeps 1024 of them, and as many row counts as there are experts and layers overflow that (measured on 2 cores, first
call with a new row count: 0.6 of the rate).

Works on any device and float dtype; reads E row counts on the host.

Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .permute import Sorted

PAD = 16  # rows; of 16, 32 and 1 the fastest in bfloat16 at 250 rows an expert
aten = torch.ops.aten


def padding_unit(dtype: torch.dtype) -> int:
    """Rows of an expert are padded to a multiple of this."""
    return PAD if dtype in (torch.bfloat16, torch.float16) else 1


class Walk:
    """One walk over the experts that have rows: their slices, and scratch as tall as the fullest of them."""

    def __init__(self, rows: Sorted, like: Tensor):
        self.rows, self.like = rows, like
        self.unit = padding_unit(like.dtype)
        tall = [-(-(stop - start) // self.unit) * self.unit for start, stop in rows.bounds]
        self.tallest, self.total = max(tall, default=0), sum(tall)
        self.steps, at = [], 0  # (expert, slice of R, slice of the padded R)
        for expert, ((start, stop), height) in enumerate(zip(rows.bounds, tall)):
            if height:
                self.steps.append((expert, slice(start, stop), slice(at, at + height)))
            at += height

    def scratch(self, *widths: int) -> list[Tensor]:
        """Uninitialised [rows of the fullest expert, width] buffers."""
        return [self.like.new_empty(self.tallest, width) for width in widths]


def gather(x_ND: Tensor, row: Tensor, out: Tensor) -> None:
    """out = x[row], and zero where out is taller: zero rows add nothing to a weight gradient."""
    torch.index_select(x_ND, 0, row, out=out[: row.shape[0]])
    out[row.shape[0] :].zero_()


class MoEFFN(torch.autograd.Function):
    """y_n = sum_k gate_nk * down_e @ (silu(g) * u), (g, u) = gate_up_e @ x_n."""

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, rows: Sorted, slots: tuple[Any, Any]):
        walk = Walk(rows, x_ND)
        (_, D, F), wide = down_EDF.shape, torch.promote_types(x_ND.dtype, torch.float32)
        gate_R1 = gate_NK.reshape(-1, 1)[rows.slot_R].to(x_ND.dtype)
        pre_R2F = x_ND.new_empty(walk.total, 2 * F)
        y_ND = torch.zeros_like(x_ND, dtype=wide)  # K terms are added in float32 at least
        xs, hs, ys = walk.scratch(D, F, D)
        for e, part, padded in walk.steps:
            row, pre = rows.row_R[part], pre_R2F[padded]
            n, tall = row.shape[0], pre.shape[0]
            x, hidden, y = xs[:tall], hs[:tall], ys[:tall]
            gather(x_ND, row, x)
            torch.mm(x, gate_up_E2FD[e].t(), out=pre)
            aten.silu.out(pre[:, :F], out=hidden)
            hidden.mul_(pre[:, F:])
            hidden[:n].mul_(gate_R1[part])
            torch.mm(hidden, down_EDF[e].t(), out=y)
            y_ND.index_add_(0, row, y[:n].to(wide))
        ctx.save_for_backward(x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_R2F)
        ctx.rows, ctx.slots = rows, slots
        return y_ND.to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_R2F = ctx.saved_tensors
        rows, (slot_up, slot_down) = ctx.rows, ctx.slots
        need_x, need_gate, need_up, need_down = ctx.needs_input_grad[:4]
        walk = Walk(rows, x_ND)
        (_, D, F), wide = down_EDF.shape, torch.promote_types(x_ND.dtype, torch.float32)
        dy_ND = dy_ND.contiguous()
        gate_R1 = gate_NK.reshape(-1, 1)[rows.slot_R].to(x_ND.dtype)
        dgate_R = gate_NK.new_empty(rows.rows, dtype=wide)
        dx_ND = torch.zeros_like(x_ND, dtype=wide) if need_x else None
        write_up = Writer(gate_up_E2FD, slot_up) if need_up else None
        write_down = Writer(down_EDF, slot_down) if need_down else None
        xs, dys, acts, hs, dhs, dpres = walk.scratch(D, D, F, F, F, 2 * F)
        for e, part, padded in walk.steps:
            row, pre = rows.row_R[part], pre_R2F[padded]
            n, tall = row.shape[0], pre.shape[0]
            x, dy, act, hidden, dhidden, dpre = (s[:tall] for s in (xs, dys, acts, hs, dhs, dpres))
            gate, up, g = pre[:, :F], pre[:, F:], gate_R1[part]
            gather(dy_ND, row, dy)
            aten.silu.out(gate, out=act)
            torch.mul(act, up, out=hidden)
            torch.mm(dy, down_EDF[e], out=dhidden)
            torch.sum(torch.mul(dhidden[:n], hidden[:n], out=dpre[:n, :F]), -1, dtype=wide, out=dgate_R[part])
            if write_down is not None:
                hidden[:n].mul_(g)
                write_down(e, dy.t(), hidden)
            if write_up is None and dx_ND is None:
                continue
            dhidden[:n].mul_(g)
            torch.mul(dhidden, act, out=dpre[:, F:])
            aten.silu_backward.grad_input(dhidden.mul_(up), gate, grad_input=dpre[:, :F])
            if write_up is not None:
                gather(x_ND, row, x)
                write_up(e, dpre.t(), x)
            if dx_ND is not None:
                torch.mm(dpre, gate_up_E2FD[e], out=dy)  # dy is not needed any more
                dx_ND.index_add_(0, row, dy[:n].to(wide))
        grads = [None if w is None else w.close(rows) for w in (write_up, write_down)]
        dgate_NK = None
        if need_gate:
            dgate_NK = torch.zeros_like(gate_NK)  # choices without a row have no gradient
            dgate_NK.view(-1)[rows.slot_R] = dgate_R.to(gate_NK.dtype)
        return (None if dx_ND is None else dx_ND.to(x_ND.dtype)), dgate_NK, *grads, None, None


class Writer:
    """Puts one expert's weight gradient where it is kept: into a slot (overwriting once, then adding), or anew."""

    def __init__(self, weight: Tensor, slot: Any):
        self.slot = slot
        self.target = torch.empty_like(weight) if slot is None else slot.view
        self.add = slot is not None and slot.filled
        self.product = weight.new_empty(weight.shape[1:]) if self.target.dtype != weight.dtype else None

    def __call__(self, expert: int, left: Tensor, right: Tensor) -> None:
        """target[expert] (+)= left @ right."""
        target = self.target[expert]
        if self.product is not None:
            torch.mm(left, right, out=self.product)
            target.add_(self.product) if self.add else target.copy_(self.product)
        elif self.add:
            target.addmm_(left, right)
        else:
            torch.mm(left, right, out=target)

    def close(self, rows: Sorted) -> Tensor | None:
        """Zero for experts without rows; returns the gradient that autograd gets (None when a slot has it)."""
        if not self.add:
            for e, (start, stop) in enumerate(rows.bounds):
                if start == stop:
                    self.target[e].zero_()
        if self.slot is None:
            return self.target
        self.slot.filled = True
        return None


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`."""
    return MoEFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows, slots)
