"""The ragged expert feed-forward: against the definition written out row by row, and its gradients in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moekit import ops
from moekit.errors import ConfigError
from moekit.kernels import ragged, reference
from moekit.ops import GradSlot, sort_rows

torch.set_num_threads(1)
NAMES = ("x", "gate", "gate_up", "down")
FORMS = [reference.moe_ffn, ragged.moe_ffn, ops.moe_ffn]  # in float32 the last one is the C++ form where it runs
IDS = ["reference", "torch", "ops"]

# N, K, E, D, F: odd sizes, one position, one choice, more experts than rows, rows past one padding unit
SHAPES = [(7, 2, 5, 6, 3), (1, 3, 4, 5, 7), (0, 2, 3, 4, 2), (2, 1, 9, 3, 5), (70, 3, 4, 8, 16)]


def case(N, K, E, D, F, dtype=torch.float64, load="random", seed=0):
    g = torch.Generator().manual_seed(seed)
    if load == "one":  # every position has expert 1 first, so that it gets all of them and expert 0 none
        expert = torch.arange(1, K + 1).expand(N, K)
    else:
        expert = torch.rand(N, E, generator=g).argsort(1)[:, :K]
    shapes = ((N, D), (N, K), (E, 2 * F, D), (E, D, F))
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return expert, tensors, torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype)


def by_hand(x, expert, gate, gate_up, down):
    """y_n = sum_k gate_nk W2_e (silu(W1_e x) * (W3_e x)): a Python loop over positions and choices."""
    y = []
    for n in range(x.shape[0]):
        total = torch.zeros_like(x[n])
        for k in range(expert.shape[1]):
            e = int(expert[n, k])
            w1, w3 = gate_up[e].split(gate_up.shape[1] // 2)
            total = total + gate[n, k] * (down[e] @ (F.silu(w1 @ x[n]) * (w3 @ x[n])))
        y.append(total)
    return torch.stack(y) if y else x * 0 + 0 * (gate.sum() + gate_up.sum() + down.sum())


def run(form, expert, tensors, dy):
    x, gate, gate_up, down = tensors
    y = form(x, sort_rows(expert, gate_up.shape[0]), gate, gate_up, down)
    return y, torch.autograd.grad(y, tensors, dy)


@pytest.mark.parametrize("form", [reference.moe_ffn, ops.moe_ffn], ids=["reference", "ops"])
@pytest.mark.parametrize("load", ["random", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(form, shape, load):
    expert, tensors, dy = case(*shape, load=load)
    want = by_hand(tensors[0], expert, *tensors[1:])
    grads = torch.autograd.grad(want, tensors, dy)
    got, got_grads = run(form, expert, tensors, dy)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for name, a, b in zip(NAMES, got_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("rows", [1, 16, 40], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_the_cut_into_blocks_does_not_matter(monkeypatch, dtype, rows):
    """Blocks of 1, 16 and 40 rows against one block of all; in bf16 the experts are tall enough to be padded."""
    expert, tensors, dy = case(70, 3, 7, 8, 16, dtype=dtype)
    want = run(ops.moe_ffn, expert, tensors, dy)
    monkeypatch.setattr(ragged, "BLOCK", rows)
    assert len(ragged.Walk(sort_rows(expert, 7), 70, 210, 1).blocks) > 1
    got = run(ops.moe_ffn, expert, tensors, dy)
    for name, a, b in zip(("y", *NAMES), (got[0], *got[1]), (want[0], *want[1])):
        assert (a - b).norm() <= (1e-14 if dtype == torch.float64 else 2e-3) * b.norm(), name


def test_padding_rows_point_past_the_end():
    """17 rows of expert 0 are padded to 32, 3 of expert 2 are not: short experts have few different shapes anyway."""
    rows = sort_rows(torch.tensor([[0]] * 17 + [[2]] * 3), 4)
    walk = ragged.Walk(rows, 20, 20, 16)
    assert [(b.part, b.experts, b.heights) for b in walk.blocks] == [(slice(0, 35), [0, 2], [32, 3])]
    assert walk.row_P.tolist() == [*range(17), *[20] * 15, 17, 18, 19] == walk.slot_P.tolist()
    assert ragged.Walk(rows, 20, 20, 1).row_P is rows.row_R


@pytest.mark.parametrize("shape", [(5, 2, 4, 3, 2), (1, 1, 2, 3, 2)], ids=str)
def test_gradcheck_in_float64(shape):
    expert, tensors, _ = case(*shape)
    rows = sort_rows(expert, shape[2])
    assert torch.autograd.gradcheck(lambda x, g, a, b: ops.moe_ffn(x, rows, g, a, b), tensors)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(70, 3, 4, 64, 32), (33, 2, 6, 16, 48)], ids=str)
def test_narrow_dtypes_stay_near_float64(shape, dtype, tolerance):
    """Relative error per tensor, the same rounded inputs on both sides. bf16 keeps 8 bits: 2^-8 = 0.4 % a rounding."""
    expert, tensors, dy = case(*shape, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = run(reference.moe_ffn, expert, wide, dy.double())
    got = run(ops.moe_ffn, expert, tensors, dy)
    for name, a, b in zip(("y", *NAMES), (got[0], *got[1]), (want[0], *want[1])):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm(), name


@pytest.mark.parametrize("frozen", range(4), ids=NAMES)
def test_frozen_inputs_get_none_and_the_others_are_right(frozen):
    expert, tensors, dy = case(9, 2, 4, 5, 3)
    _, want = run(ops.moe_ffn, expert, tensors, dy)
    cut = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
    ops.moe_ffn(cut[0], sort_rows(expert, 4), *cut[1:]).backward(dy)
    for i, (t, w) in enumerate(zip(cut, want)):
        assert t.grad is None if i == frozen else torch.equal(t.grad, w)


def test_gradient_of_a_sum_is_an_expanded_tensor():
    """`.sum().backward()` hands down a stride-0 gradient, which torch's own grouped_mm refuses."""
    expert, tensors, _ = case(6, 2, 3, 4, 2)
    ops.moe_ffn(tensors[0], sort_rows(expert, 3), *tensors[1:]).sum().backward()
    _, want = run(reference.moe_ffn, expert, tensors, torch.ones(6, 4, dtype=torch.float64))
    for t, w in zip(tensors, want):
        torch.testing.assert_close(t.grad, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bc_034_an_expert_without_rows_has_gradient_zero(form, dtype):
    """BC-034: rows [[1,2],[3,4]] on expert 0, [5,6] on expert 2, loss = sum of outputs.

    A SwiGLU expert is the linear map of the case when its gate half is saturated and its down matrix is the identity:
    silu(z) -> z for large z, so the up half's weight gradient is z * (rows^T ones). Buffers are poisoned with NaN.
    """
    big = 40.0  # silu(40) = 40 to the last bit
    x = torch.tensor([[1.0, 2, 1], [3, 4, 1], [5, 6, 1]], dtype=dtype)  # third column drives the gate
    gate_up = torch.zeros(3, 4, 3, dtype=dtype)
    gate_up[:, :2, 2] = big
    gate_up[:, 2:, :2] = torch.randn(3, 2, 2, dtype=dtype)
    gate_up.requires_grad_()
    down = torch.zeros(3, 3, 2, dtype=dtype)
    down[:, :2] = torch.eye(2, dtype=dtype)
    rows, ones = sort_rows(torch.tensor([[0], [0], [2]]), 3), torch.ones(3, 1, dtype=dtype)
    for _ in range(3):
        poison = [torch.full((n,), torch.nan, dtype=dtype) for n in (9, 18, 36, 36, 36)]
        del poison
        (grad,) = torch.autograd.grad(form(x, rows, ones, gate_up, down).sum(), gate_up)
        want = torch.tensor([[[4, 4], [6, 6]], [[0, 0], [0, 0]], [[5, 5], [6, 6]]], dtype=dtype)
        assert torch.equal(grad[:, 2:, :2].transpose(1, 2) / big, want)
        assert torch.equal(grad[1], torch.zeros(4, 3, dtype=dtype))


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_bc_044_rows_that_are_not_owned_are_removed_not_scaled(form):
    """BC-044: slot outputs [[1,0],[NaN,NaN]], gates [0.6, 0]; the second is not in the sum, so it cannot reach it.

    The expert that would give NaN has NaN weights and no row. Forward 0.6, d gates [1, 0].
    """
    x = torch.tensor([[1.0, 0.0]])
    gate_up = torch.zeros(2, 2, 2)
    gate_up[0, 0, 0], gate_up[0, 1, 0] = 40.0, 1 / 40.0  # silu(40) / 40 = 1
    down = torch.zeros(2, 2, 1)
    down[0, 0, 0] = 1.0
    gate_up[1], down[1] = torch.nan, torch.nan
    gate = torch.tensor([[0.6, 0.0]], requires_grad=True)
    owned = ops.Sorted(torch.tensor([0]), torch.tensor([0]), torch.tensor([1, 1]))  # choice 1 lives elsewhere
    y = form(x, owned, gate, gate_up, down)
    (dgate,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(y, torch.tensor([[0.6, 0.0]]))
    torch.testing.assert_close(dgate, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_bc_068_gate_comes_first_and_axes_are_expert_row_column(form):
    """BC-068: gate 1, up 2 -> silu(1) * 2 = 1.4621172 (swapped: 1.7615942), with E=2, D=2, F=3 all different."""
    gate_up = torch.zeros(2, 6, 2)
    gate_up[1, 0, 0], gate_up[1, 3, 0] = 1.0, 2.0  # expert 1, hidden unit 0: gate row 0, up row 3
    down = torch.zeros(2, 2, 3)
    down[1, 1, 0] = 1.0
    y = form(torch.tensor([[1.0, 0.0]]), sort_rows(torch.tensor([[1]]), 2), torch.ones(1, 1), gate_up, down)
    torch.testing.assert_close(y, torch.tensor([[0.0, 1.4621172]]))


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_bc_069_w1_is_gate_w3_is_up_w2_is_down(form):
    """BC-069: w1=1, w3=2, w2=3, x=1 -> 4.3863515; w1 and w3 are [F, D], w2 is [D, F]."""
    w1, w3, w2 = (torch.full((1, 1), v) for v in (1.0, 2.0, 3.0))
    one = torch.ones(1, 1)
    y = form(one, sort_rows(torch.tensor([[0]]), 1), one, torch.cat((w1, w3))[None], w2[None])
    torch.testing.assert_close(y, torch.tensor([[4.3863515]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_written_to_slots_equal_autograds(dtype):
    """First backward overwrites what the slot holds (NaN here), the next adds, empty experts included."""
    expert, tensors, dy = case(40, 2, 6, 16, 8, dtype=dtype)
    expert = expert.clamp(min=2)  # experts 0 and 1 get nothing
    _, want = run(ops.moe_ffn, expert, tensors, dy)
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    slots = [GradSlot(torch.full(t.shape, torch.nan, dtype=wide)) for t in tensors[2:]]
    for t, slot in zip(tensors[2:], slots):
        t.grad_slot = slot
    for times in (1, 2, 3):
        x, gate, gate_up, down = tensors
        y = ops.moe_ffn(x, sort_rows(expert, 6), gate, gate_up, down)
        got = torch.autograd.grad(y, tensors, dy, allow_unused=True)
        assert got[2] is None and got[3] is None
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        for slot, w in zip(slots, want[2:]):
            assert slot.filled and slot.view.dtype == wide
            assert (slot.view - times * w.to(wide)).norm() <= tolerance * times * w.norm()
            assert torch.equal(slot.view[:2], torch.zeros_like(slot.view[:2]))


def test_an_empty_microbatch_fills_the_slots_with_zero():
    expert, tensors, _ = case(0, 2, 3, 4, 2)
    for t in tensors[2:]:
        t.grad_slot = GradSlot(torch.full(t.shape, torch.nan))
    ops.moe_ffn(tensors[0], sort_rows(expert, 3), *tensors[1:]).sum().backward()
    for t in tensors[2:]:
        assert t.grad_slot.filled and torch.equal(t.grad_slot.view, torch.zeros(t.shape))


def test_two_layers_alive_at_once_do_not_share_scratch():
    """Forward of A, forward of B, backward of A: whatever is reused between calls must not hold live data."""
    a, b = case(30, 2, 4, 8, 6, seed=1), case(50, 2, 4, 8, 6, seed=2)
    want = run(ops.moe_ffn, *a)[1]
    expert, (x, *rest), dy = a
    y = ops.moe_ffn(x, sort_rows(expert, 4), *rest)
    run(ops.moe_ffn, *b)
    got = torch.autograd.grad(y, (x, *rest), dy, retain_graph=True)
    again = torch.autograd.grad(y, (x, *rest), dy)
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(want, got, again))


def test_sort_is_stable_and_counts_add_up():
    expert = torch.tensor([[2, 0], [0, 2], [2, 3]])
    rows = sort_rows(expert, 5)
    assert rows.row_R.tolist() == [0, 1, 0, 1, 2, 2] and rows.slot_R.tolist() == [1, 2, 0, 3, 4, 5]
    assert rows.offset_E.tolist() == [2, 2, 5, 6, 6] and rows.count_E.tolist() == [2, 0, 3, 1, 0]
    assert rows.expert_R.tolist() == [0, 0, 2, 2, 2, 3]


# ---------------------------------------------------------------------- expert_ffn: rows that have come to their expert


def received(dtype=torch.float64, counts=(0, 40, 3, 0, 1), room=7, D=6, F=5, seed=0):
    """Rows of five experts, one with most of them and two with none, and room at the end that holds NaN."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((sum(counts) + room, D), (len(counts), 2 * F, D), (len(counts), D, F))
    x, gate_up, down = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    x[sum(counts) :] = torch.nan
    dy = torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)
    return torch.tensor(counts).cumsum(0), [t.requires_grad_() for t in (x, gate_up, down)], dy


def expert_by_hand(x, offset, gate_up, down):
    """Row after row."""
    out, expert = [], 0
    for r in range(int(offset[-1])):
        while r >= offset[expert]:
            expert += 1
        w1, w3 = gate_up[expert].chunk(2)
        out.append(down[expert] @ (F.silu(w1 @ x[r]) * (w3 @ x[r])))
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "by order_R"])
def test_expert_ffn_equals_the_definition(backend, ordered):
    """NaN in the room reaches neither y, nor dx, nor the weights' gradients; y and dx are zero there."""
    offset, tensors, dy = received()
    total = int(offset[-1])
    want = expert_by_hand(tensors[0], offset, *tensors[1:])
    wants = torch.autograd.grad(want, tensors, dy[:total])
    x, order = tensors[0], None
    if not ordered:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(3))
        x = torch.full_like(x, torch.nan).index_copy(0, order, x[:total])
        dy = dy.index_copy(0, order, dy[:total])
    before = ops.set_backend(backend)
    try:
        y = ops.expert_ffn(x, offset, *tensors[1:], order)
        got = torch.autograd.grad(y, tensors, dy)
    finally:
        ops.set_backend(before)
    back = y[:total] if ordered else y[order]
    torch.testing.assert_close(back, want, rtol=1e-12, atol=1e-12)
    assert not y[total:].any()
    for a, b in zip(got, wants):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert not got[0][total:].any() and not got[1][0].any()


def test_expert_ffn_in_bfloat16_pads_rows_and_changes_nothing():
    offset, tensors, dy = received(torch.bfloat16, counts=(17, 0, 33, 5))
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y = ops.expert_ffn(tensors[0], offset, *tensors[1:])
    want = expert_by_hand(wide[0], offset, *wide[1:])
    for a, b in zip(torch.autograd.grad(y, tensors, dy), torch.autograd.grad(want, wide, dy[: offset[-1]].double())):
        assert float((a.double() - b).norm() / b.norm()) < 2e-2
    assert float((y[: offset[-1]] - want).detach().norm() / want.detach().norm()) < 2e-2 and not y[offset[-1] :].any()


def test_expert_ffn_writes_into_slots_and_refuses_too_many_rows():
    offset, tensors, dy = received()
    want = torch.autograd.grad(ops.expert_ffn(tensors[0], offset, *tensors[1:]), tensors[1:], dy)
    for t in tensors[1:]:
        t.grad_slot = GradSlot(torch.full_like(t, torch.nan))
    ops.expert_ffn(tensors[0], offset, *tensors[1:]).backward(dy)
    assert all(torch.equal(t.grad_slot.view, w) and t.grad is None for t, w in zip(tensors[1:], want))
    with pytest.raises(ConfigError, match="60 rows"):
        ops.expert_ffn(tensors[0], offset + 16, *tensors[1:])
