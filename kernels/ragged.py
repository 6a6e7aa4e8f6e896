"""Expert feed-forward over ragged rows, expert by expert, with a backward written by hand.

Built for few passes over memory. Rows are taken in blocks of whole experts, gathered into scratch that stays in cache;
a block shares its element-wise passes, an expert has its own matmuls. Forward keeps the pre-activations [P, 2F] only,
backward recomputes the activation from them, and weight gradients are written straight to where they are kept.
Nothing of size [R, D] exists.

On CPU in bfloat16 the row counts of experts are padded to multiples of `PAD`: oneDNN compiles a matmul for every shape
and keeps 1024 of them, which as many row counts as there are experts and layers overflow (a first call with a new row
count reached 0.6 of the rate). A padding row reads a zero row and is added to a row that is thrown away.

Works on any device and float dtype; reads E row counts on the host.

Axis letters: N positions, K experts per position, R routed rows, P routed rows with padding, E experts, D width,
F expert width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .permute import Sorted

PAD = 16  # rows
BLOCK = 512  # rows that share their element-wise passes; an expert with more is a block of its own
aten = torch.ops.aten


def padding_unit(device: torch.device, dtype: torch.dtype) -> int:
    """Experts with at least this many rows are padded to a multiple of it."""
    return PAD if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) else 1


@dataclass(frozen=True)
class Block:
    """Neighbouring experts that have rows."""

    part: slice  # of P
    experts: list[int]
    heights: list[int]  # padded rows of each

    def split(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """(expert, its rows of each tensor); the tensors are as tall as the block."""
        return zip(self.experts, *(t.split(self.heights) for t in tensors))


class Walk:
    """The rows of a batch in padded order, cut into blocks."""

    def __init__(self, rows: Sorted, positions: int, slots: int, unit: int):
        counts = [stop - start for start, stop in rows.bounds]
        heights = [-(-n // unit) * unit if n >= unit else n for n in counts]
        self.blocks: list[Block] = []
        at = 0
        for expert, height in enumerate(heights):
            if not height:
                continue
            last = self.blocks[-1] if self.blocks else None
            if last is None or at + height - last.part.start > BLOCK:
                self.blocks.append(Block(slice(at, at + height), [expert], [height]))
            else:
                self.blocks[-1] = Block(
                    slice(last.part.start, at + height), [*last.experts, expert], [*last.heights, height]
                )
            at += height
        self.total = at
        self.tallest = max((b.part.stop - b.part.start for b in self.blocks), default=0)
        self.padded = at > rows.rows
        self.row_P, self.slot_P = rows.row_R, rows.slot_R  # padding: row `positions`, slot `slots`
        if self.padded:
            height_E = torch.tensor(heights, device=rows.row_R.device)
            shift_E = (height_E.cumsum(0) - height_E) - (rows.offset_E - rows.count_E)
            place_R = torch.arange(rows.rows, device=rows.row_R.device) + shift_E[rows.expert_R]
            self.row_P = torch.full((at,), positions, device=rows.row_R.device).index_copy_(0, place_R, rows.row_R)
            self.slot_P = torch.full((at,), slots, device=rows.row_R.device).index_copy_(0, place_R, rows.slot_R)

    def source(self, x_ND: Tensor) -> Tensor:
        """x, with the zero row that padding reads."""
        return torch.cat((x_ND, x_ND.new_zeros(1, x_ND.shape[1]))) if self.padded else x_ND

    def gates(self, gate_NK: Tensor, dtype: torch.dtype) -> Tensor:
        """[P, 1]; zero for padding."""
        gate = gate_NK.reshape(-1, 1).to(dtype)
        return self.source(gate)[self.slot_P]

    def scratch(self, like: Tensor, *widths: int) -> list[Tensor]:
        """Uninitialised [rows of the tallest block, width] buffers."""
        return [like.new_empty(self.tallest, width) for width in widths]


class MoEFFN(torch.autograd.Function):
    """y_n = sum_k gate_nk * down_e @ (silu(g) * u), (g, u) = gate_up_e @ x_n.

    Without gates every row of x is of one expert or of none, and y is as wide as x; rows of none are not read.
    """

    @staticmethod
    def forward(ctx, x_ND, gate_NK, gate_up_E2FD, down_EDF, rows: Sorted, slots: tuple[Any, Any]):
        (N, D), F = x_ND.shape, down_EDF.shape[2]
        once = gate_NK is None
        walk = Walk(rows, N, N if once else gate_NK.numel(), padding_unit(x_ND.device, x_ND.dtype))
        wide = x_ND.dtype if once else torch.promote_types(x_ND.dtype, torch.float32)  # K terms are added in this
        source, gate_P1 = walk.source(x_ND), None if once else walk.gates(gate_NK, x_ND.dtype)
        pre_P2F = x_ND.new_empty(walk.total, 2 * F)
        y_ND = x_ND.new_zeros(source.shape, dtype=wide)
        gate_up_E, down_E = gate_up_E2FD.unbind(), down_EDF.unbind()
        buffers = walk.scratch(x_ND, D, F, D)
        for block in walk.blocks:
            row, pre = walk.row_P[block.part], pre_P2F[block.part]
            x, hidden, y = (b[: len(row)] for b in buffers)
            torch.index_select(source, 0, row, out=x)
            for e, x_e, pre_e in block.split(x, pre):
                torch.mm(x_e, gate_up_E[e].t(), out=pre_e)
            aten.silu.out(pre[:, :F], out=hidden)
            hidden.mul_(pre[:, F:])
            if gate_P1 is not None:
                hidden.mul_(gate_P1[block.part])
            for e, hidden_e, y_e in block.split(hidden, y):
                torch.mm(hidden_e, down_E[e].t(), out=y_e)
            y_ND.index_copy_(0, row, y) if once else y_ND.index_add_(0, row, y.to(wide))
        ctx.save_for_backward(x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_P2F, walk.row_P, walk.slot_P)
        ctx.walk, ctx.rows, ctx.slots = walk, rows, slots
        return y_ND[:N].to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        x_ND, gate_NK, gate_up_E2FD, down_EDF, pre_P2F, row_P, slot_P = ctx.saved_tensors
        walk, (slot_up, slot_down), need = ctx.walk, ctx.slots, ctx.needs_input_grad
        (N, D), F = x_ND.shape, down_EDF.shape[2]
        once = gate_NK is None
        wide = x_ND.dtype if once else torch.promote_types(x_ND.dtype, torch.float32)
        source, dsource = walk.source(x_ND), walk.source(dy_ND)
        gate_P1 = None if once else walk.gates(gate_NK, x_ND.dtype)
        dgate_P = x_ND.new_empty(0 if once else walk.total, dtype=wide)
        dx_ND = x_ND.new_zeros(source.shape, dtype=wide) if need[0] else None
        write_up = Writer(gate_up_E2FD, slot_up) if need[2] else None
        write_down = Writer(down_EDF, slot_down) if need[3] else None
        gate_up_E, down_E = gate_up_E2FD.unbind(), down_EDF.unbind()
        buffers = walk.scratch(x_ND, D, D, F, F, F, 2 * F)
        for block in walk.blocks:
            row, pre = row_P[block.part], pre_P2F[block.part]
            x, dy, act, hidden, dhidden, dpre = (b[: len(row)] for b in buffers)
            g, u, dg, du = pre[:, :F], pre[:, F:], dpre[:, :F], dpre[:, F:]
            torch.index_select(dsource, 0, row, out=dy)
            aten.silu.out(g, out=act)
            torch.mul(act, u, out=hidden)
            for e, dy_e, dhidden_e in block.split(dy, dhidden):
                torch.mm(dy_e, down_E[e], out=dhidden_e)
            if gate_P1 is not None:
                torch.sum(torch.mul(dhidden, hidden, out=dg), -1, dtype=wide, out=dgate_P[block.part])
                hidden.mul_(gate_P1[block.part])
                dhidden.mul_(gate_P1[block.part])
            if write_down is not None:
                for e, dy_e, hidden_e in block.split(dy, hidden):
                    write_down(e, dy_e.t(), hidden_e)
            if write_up is None and dx_ND is None:
                continue
            torch.mul(dhidden, act, out=du)
            aten.silu_backward.grad_input(dhidden.mul_(u), g, grad_input=dg)
            if write_up is not None:
                torch.index_select(source, 0, row, out=x)
                for e, dpre_e, x_e in block.split(dpre, x):
                    write_up(e, dpre_e.t(), x_e)
            if dx_ND is not None:
                for e, dpre_e, dx_e in block.split(dpre, dy):  # into dy: it is not needed any more
                    torch.mm(dpre_e, gate_up_E[e], out=dx_e)
                dx_ND.index_copy_(0, row, dy) if once else dx_ND.index_add_(0, row, dy.to(wide))
        grads = [None if w is None else w.close(ctx.rows) for w in (write_up, write_down)]
        dx_ND = None if dx_ND is None else dx_ND[:N].to(x_ND.dtype)
        if not need[1]:
            return dx_ND, None, *grads, None, None
        dgate = gate_NK.new_zeros(gate_NK.numel() + 1)  # choices without a row have no gradient; the last is padding's
        dgate[slot_P] = dgate_P.to(gate_NK.dtype)
        return dx_ND, dgate[:-1].view_as(gate_NK), *grads, None, None


class Writer:
    """Puts one expert's weight gradient where it is kept: into a slot (overwriting once, then adding), or anew."""

    def __init__(self, weight: Tensor, slot: Any):
        self.slot = slot
        target = torch.empty_like(weight) if slot is None else slot.view
        self.gradient, self.target_E = target, target.unbind()
        self.add = slot is not None and slot.filled
        self.product = weight.new_empty(weight.shape[1:]) if target.dtype != weight.dtype else None

    def __call__(self, expert: int, left: Tensor, right: Tensor) -> None:
        """target[expert] (+)= left @ right."""
        target = self.target_E[expert]
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
            for target, (start, stop) in zip(self.target_E, rows.bounds):
                if start == stop:
                    target.zero_()
        if self.slot is None:
            return self.gradient
        self.slot.filled = True
        return None


def moe_ffn(x_ND, rows: Sorted, gate_NK, gate_up_E2FD, down_EDF, slots=(None, None)) -> Tensor:
    """See `moekit.ops.moe_ffn`, and with `gate_NK=None` `moekit.ops.expert_ffn`."""
    return MoEFFN.apply(x_ND, gate_NK, gate_up_E2FD, down_EDF, rows, slots)
