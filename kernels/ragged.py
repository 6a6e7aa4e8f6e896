"""Expert feed-forward over ragged rows, expert by expert, with a backward written by hand.

Nothing of size [R, D] is kept: rows are gathered per expert into scratch, forward saves the pre-activations [R, 2F]
only, and backward recomputes the activation from them. Weight gradients go straight to where they are kept.

Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .permute import Sorted


class MoEFFN(torch.autograd.Function):
    """y_n = sum_k gate_nk * down_e @ (silu(g) * u), (g, u) = gate_up_e @ x_n."""

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, rows: Sorted, slots: tuple[Any, Any]):
        gate_R = gate_NK.reshape(-1)[rows.slot_R].to(x_ND.dtype)
        pre_R2F = x_ND.new_empty(rows.rows, gate_up_E2FD.shape[1])
        y_ND = torch.zeros_like(x_ND)
        for e, (start, stop) in enumerate(rows.bounds):
            if start == stop:
                continue
            row, pre = rows.row_R[start:stop], pre_R2F[start:stop]
            torch.mm(x_ND[row], gate_up_E2FD[e].T, out=pre)
            gate, up = pre.chunk(2, -1)
            hidden = F.silu(gate).mul_(up).mul_(gate_R[start:stop, None])
            y_ND.index_add_(0, row, hidden @ down_EDF[e].T)
        ctx.save_for_backward(x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_R2F)
        ctx.rows, ctx.slots = rows, slots
        return y_ND

    @staticmethod
    def backward(ctx, dy_ND):
        x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_R2F = ctx.saved_tensors
        rows, (slot_up, slot_down) = ctx.rows, ctx.slots
        need_x, need_gate, need_up, need_down = ctx.needs_input_grad[:4]
        dy_ND = dy_ND.contiguous()
        gate_R = gate_NK.reshape(-1)[rows.slot_R].to(x_ND.dtype)
        dgate_R = torch.zeros_like(gate_R)
        dx_ND = torch.zeros_like(x_ND) if need_x else None
        write_up = Writer(gate_up_E2FD, slot_up) if need_up else None
        write_down = Writer(down_EDF, slot_down) if need_down else None
        for e, (start, stop) in enumerate(rows.bounds):
            if start == stop:
                continue
            row, g = rows.row_R[start:stop], gate_R[start:stop, None]
            gate, up = pre_R2F[start:stop].chunk(2, -1)
            dy = dy_ND[row]
            sig = torch.sigmoid(gate)
            act = gate * sig
            hidden = act * up
            if write_down is not None:
                write_down(e, dy.T, hidden * g)
            dhidden = dy @ down_EDF[e]
            dgate_R[start:stop] = (dhidden * hidden).sum(-1)
            dhidden.mul_(g)
            dpre = torch.cat((dhidden * up * (sig + act * (1 - sig)), dhidden * act), -1)
            if write_up is not None:
                write_up(e, dpre.T, x_ND[row])
            if dx_ND is not None:
                dx_ND.index_add_(0, row, dpre @ gate_up_E2FD[e])
        for write in (write_up, write_down):
            if write is not None:
                write.close(rows)
        dgate_NK = None
        if need_gate:
            dgate_NK = torch.empty_like(gate_NK.reshape(-1))
            dgate_NK[rows.slot_R] = dgate_R.to(gate_NK.dtype)
            dgate_NK = dgate_NK.view_as(gate_NK)
        up = write_up.gradient if write_up is not None else None
        down = write_down.gradient if write_down is not None else None
        return dx_ND, dgate_NK, up, down, None, None


class Writer:
    """Puts one expert's weight gradient where it is kept: into a slot (overwriting once, then adding), or anew."""

    def __init__(self, weight: Tensor, slot: Any):
        self.slot = slot
        self.gradient = None if slot is not None else torch.empty_like(weight)
        self.target = self.gradient if slot is None else slot.view
        self.add = slot is not None and slot.filled

    def __call__(self, expert: int, left: Tensor, right: Tensor) -> None:
        """target[expert] (+)= left @ right."""
        target = self.target[expert]
        if target.dtype != left.dtype:
            product = left @ right
            target.add_(product) if self.add else target.copy_(product)
        elif self.add:
            target.addmm_(left, right)
        else:
            torch.mm(left, right, out=target)

    def close(self, rows: Sorted) -> None:
        """Experts without rows have gradient zero."""
        if not self.add:
            for e, (start, stop) in enumerate(rows.bounds):
                if start == stop:
                    self.target[e].zero_()
        if self.slot is not None:
            self.slot.filled = True


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`."""
    return MoEFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows, slots)
