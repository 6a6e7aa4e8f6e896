"""Plan, permute and combine in Triton's interpreter: against the sort, a loop over choices, and float64 gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moekit.kernels.permute import Sorted, sort_rows
from moekit.kernels.permute_triton import combine, permute, plan_rows

torch.set_num_threads(1)

# N, K, E: more than one block of 256 choices, exactly one, one token, zero tokens, one expert
SIZES = [(200, 3, 11), (128, 2, 5), (1, 2, 3), (0, 2, 4), (7, 1, 1), (300, 2, 40)]


def experts(N, K, E, load="random"):
    g = torch.Generator().manual_seed(N)
    if load == "one":  # all rows of the first choice on expert E - 1, expert 0 is empty if it can be
        return torch.arange(E - 1, E - 1 - K, -1).clamp(min=0).expand(N, K)
    return torch.rand(N, E, generator=g).argsort(1)[:, :K]


@pytest.mark.parametrize("load", ["random", "one"])
@pytest.mark.parametrize("N, K, E", SIZES)
def test_the_plan_is_the_sort_bit_for_bit(N, K, E, load):
    expert = experts(N, K, E, load)
    by_sort, (rows, place) = sort_rows(expert, E), plan_rows(expert, E)
    for name in ("row_R", "slot_R", "offset_E", "count_E"):
        a, b = getattr(rows, name), getattr(by_sort, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert place.dtype == torch.int64
    assert torch.equal(place.reshape(-1)[rows.slot_R], torch.arange(N * K))


def test_choices_that_are_sent_nowhere():
    """By a loop: expert by expert, position by position; -1, E and far values have no row."""
    expert = experts(150, 3, 6).clone()
    expert[::4, 1], expert[3, 0], expert[5, 2], expert[20:30] = -1, 6, 2**40, -(2**40)
    rows, place = plan_rows(expert, 6)
    want = [slot for e in range(6) for slot, found in enumerate(expert.flatten().tolist()) if found == e]
    kept = len(want)
    assert rows.slot_R.tolist() == want + [-1] * (450 - kept)
    assert rows.row_R.tolist() == [s // 3 for s in want] + [-1] * (450 - kept)
    assert rows.offset_E[-1] == kept
    assert place.flatten().tolist() == [want.index(s) if s in want else -1 for s in range(450)]


def case(N, K, E, D, dtype, room):
    """A plan with some choices dropped, in a static buffer with room at its end."""
    g = torch.Generator().manual_seed(D)
    expert = experts(N, K, E).clone()
    expert[1::3, 0] = -1
    rows, place = plan_rows(expert, E)
    tail = rows.row_R.new_full((room,), -1)
    rows = Sorted(torch.cat((rows.row_R, tail)), torch.cat((rows.slot_R, tail)), rows.offset_E)
    x = torch.randn(N, 2 * D, generator=g).to(dtype)[:, ::2]  # strided
    gate = torch.rand(K, N, generator=g).T
    scale = torch.rand(rows.rows, 1, generator=g).to(dtype)
    return rows, place, x, gate, scale, torch.randn(N, D, generator=g).to(dtype)


def close(a, b, tolerance):
    assert a.shape == b.shape and (a.double() - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("N, K, E, D", [(21, 3, 5, 33), (1, 2, 3, 1), (9, 1, 4, 300), (14, 4, 7, 16)])
def test_there_and_back_with_all_gradients(N, K, E, D, dtype, tolerance):
    """y_n = sum_k gate_nk scale_r x_n over kept choices, in float64 by indices; NaN in every row that has no choice."""
    rows, place, x, gate, scale, dy = case(N, K, E, D, dtype, room=5)
    valid = int(rows.offset_E[-1])
    slot, row = rows.slot_R[:valid], rows.row_R[:valid]
    x64, gate64, scale64 = (t.double().detach().requires_grad_() for t in (x, gate, scale))
    y64 = torch.zeros(N, D, dtype=torch.float64).index_add(
        0, row, gate64.reshape(-1)[slot, None] * scale64[:valid] * x64[row]
    )
    y64.backward(dy.double())

    x, gate = x.requires_grad_(), gate.requires_grad_()
    sent = permute(x, rows, place)
    assert sent.dtype == dtype and torch.equal(sent[:valid], x[row]) and not sent[valid:].any()
    cut = sent.detach().clone()
    cut[valid:] = torch.nan
    done = torch.where(torch.arange(rows.rows)[:, None] < valid, cut * scale, torch.nan).requires_grad_()
    y = combine(done, gate, rows, place)
    assert y.dtype == dtype
    dropped = (place < 0).all(1)
    assert not y[dropped].any()
    close(y, y64.detach(), tolerance)
    d_done, d_gate = torch.autograd.grad(y, (done, gate), dy)
    assert not d_done[valid:].any() and not d_gate[place < 0].any()
    close(d_gate, gate64.grad, tolerance)
    d_sent = d_done * scale
    d_sent[valid:] = torch.nan
    close(torch.autograd.grad(sent, x, d_sent)[0], x64.grad, 2 * tolerance if dtype == torch.bfloat16 else tolerance)


def test_zero_tokens_and_a_gradient_of_one_number():
    """N = 0 with a static buffer; and .sum().backward(), whose gradient has stride 0."""
    rows, place = plan_rows(torch.zeros(0, 2, dtype=torch.int64), 3)
    rows = Sorted(rows.row_R.new_full((4,), -1), rows.slot_R.new_full((4,), -1), rows.offset_E)
    x, gate = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    sent = permute(x, rows, place)
    y = combine(sent, gate, rows, place)
    y.sum().backward()
    assert sent.shape == (4, 5) and not sent.any() and y.shape == x.grad.shape == (0, 5) and gate.grad.shape == (0, 2)

    rows, place = plan_rows(torch.tensor([[1, 0], [0, 1], [2, 1]]), 3)
    x, gate = torch.ones(3, 2, requires_grad=True), torch.full((3, 2), 0.25, requires_grad=True)
    combine(permute(x, rows, place), gate, rows, place).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.5]] * 3 and gate.grad.tolist() == [[2.0, 2.0]] * 3


def test_bc_044_a_row_that_is_not_owned_is_removed_not_scaled():
    """BC-044: rows [[1,0],[NaN,NaN]], gates [0.6, 0], the second is not owned: forward 0.6, d gates [1, 0], finite."""
    rows, place = plan_rows(torch.tensor([[0, -1]]), 2)
    gate = torch.tensor([[0.6, 0.0]], requires_grad=True)
    done = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]], requires_grad=True)
    y = combine(done, gate, rows, place)
    y.sum().backward()
    assert y.sum().item() == pytest.approx(0.6) and gate.grad.tolist() == [[1.0, 0.0]]
    assert done.grad.tolist() == [[pytest.approx(0.6)] * 2, [0.0, 0.0]]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_all_rows_on_one_expert(dtype, tolerance):
    """Every other expert is empty: y = gate x, and its gradients."""
    rows, place = plan_rows(torch.full((9, 1), 3), 5)
    x, gate, dy = (torch.randn(9, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (17, 1, 17))
    x, gate = x.requires_grad_(), gate.requires_grad_()
    y = combine(permute(x, rows, place), gate, rows, place)
    assert rows.count_E.tolist() == [0, 0, 0, 9, 0]
    dx, dgate = torch.autograd.grad(y, (x, gate), dy)
    for got, want in ((y, gate.double() * x.double()), (dx, gate.double() * dy.double())):
        close(got, want.detach(), tolerance)
    close(dgate, (x.double() * dy.double()).sum(1, keepdim=True).detach(), tolerance)


def test_what_does_not_fit():
    rows, place = plan_rows(torch.tensor([[1, 0], [0, 1]]), 3)
    with pytest.raises(ValueError, match="3 positions, the plan 2"):
        permute(torch.zeros(3, 2), rows, place)
    with pytest.raises(ValueError, match="float64"):
        permute(torch.zeros(2, 2, dtype=torch.float64), rows, place)
    with pytest.raises(ValueError, match=r"\[3, 2\], \[4\], \[2, 2\]"):
        combine(torch.zeros(3, 2), torch.zeros(2, 2), rows, place)
