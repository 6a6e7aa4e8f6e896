"""SwiGLU in Triton's interpreter: values and gradients against autograd through the definition; prefix only."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moekit.kernels import reference
from moekit.kernels.swiglu import swiglu, swiglu_backward

torch.set_num_threads(1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("rows, room, F", [(9, 4, 37), (1, 0, 1), (0, 5, 8), (0, 0, 8), (4, 0, 600)], ids=str)
def test_equals_the_definition(rows, room, F, dtype, tolerance, gated):
    """NaN in the room of every operand; strided rows; more slots than rows; two blocks of columns at F = 600."""
    g, R = torch.Generator().manual_seed(rows), rows + room
    pre = torch.randn(R, 2 * F + 6, generator=g).to(dtype)[:, 4:-2]
    dh = torch.randn(R, F, generator=g).to(dtype)
    pre[rows:], dh[rows:] = torch.nan, torch.nan
    slot = torch.randperm(R + 3, generator=g)[:R]
    gate = torch.randn(R + 3, generator=g)
    gate[slot[rows:]] = torch.nan
    offset = torch.tensor([0, rows // 2, rows])
    wide = pre[:rows].double().requires_grad_()
    wide_gate = gate.double().requires_grad_()
    want = reference.swiglu(wide) * (wide_gate[slot[:rows], None] if gated else 1)
    args = (pre, offset, gate, slot) if gated else (pre, offset)
    h = swiglu(*args)
    dpre, again, dgate = swiglu_backward(dh, *args)
    pairs = [(h, want), (again, want)]
    if gated:
        wants = torch.autograd.grad(want, (wide, wide_gate), dh[:rows].double())
        left = torch.ones(R + 3, dtype=torch.bool).index_fill(0, slot[:rows], False)
        assert not dgate[left].any()
        assert (dgate[~left].double() - wants[1][~left]).norm() <= tolerance * wants[1][~left].norm()
    else:
        wants = torch.autograd.grad(want, wide, dh[:rows].double())
        assert dgate is None
    for a, b in [*pairs, (dpre, wants[0])]:
        assert a.dtype == dtype and (a[:rows].double() - b).norm() <= tolerance * b.norm()


def test_a_known_value():
    """silu(1) * 2 = 2 / (1 + e^-1); of the second row nothing is asked."""
    h = swiglu(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1]))
    torch.testing.assert_close(h[:1], torch.tensor([[2 / (1 + torch.e**-1)]]))


def test_columns_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        swiglu(torch.zeros(4, 6).T, torch.tensor([1]))
