"""Grouped products in Triton's interpreter: against a loop over experts in float64, and the whole feed-forward against
the reference, with odd sizes, empty experts, NaN in the room and strides."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode

from moekit import ops
from moekit.errors import BackendError
from moekit.kernels import grouped_gemm as gg
from moekit.kernels import reference, triton_ffn
from moekit.kernels.permute import Sorted, sort_rows
from moekit.kernels.tuning import Tile

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LOADS = {
    "odd": [3, 0, 21, 1, 17],
    "all on one": [0, 0, 37, 0, 0],
    "one row": [0, 0, 0, 1, 0],
    "no rows": [0, 0, 0, 0, 0],
    "whole tiles": [16, 16, 32, 0, 16],
}
SMALL = Tile(16, 32, 16, 4, 2)  # several tiles in every direction


def near(got, want, dtype, name=""):
    """Relative error of a tensor, in float64; NaN is far from everything."""
    got, want = got.detach().double(), want.detach().double()
    error = float((got - want).norm() / (want.norm() + 1e-30))
    assert error <= TOLERANCE[dtype], (name, error)


def operands(counts, dtype, room=9, K=37, M=45, seed=0):
    """x with NaN in the room, w, end offsets."""
    g = torch.Generator().manual_seed(seed)
    R = sum(counts)
    x = torch.randn(R + room, K, generator=g).to(dtype)
    x[R:] = torch.nan
    return x, torch.randn(len(counts), M, K, generator=g).to(dtype), torch.tensor(counts).cumsum(0)


def by_loop(x, w, offset):
    y, start = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64), 0
    for e, stop in enumerate(offset.tolist()):
        y[start:stop] = x[start:stop].double() @ w[e].double().T
        start = stop
    return y


@pytest.mark.parametrize("tile", [SMALL, None], ids=["small tiles", "shipped tiles"])
@pytest.mark.parametrize(
    "load, dtype", [("odd", torch.float16), *((n, d) for n in LOADS for d in list(TOLERANCE)[:2])], ids=str
)
def test_direct_rows(load, dtype, tile):
    """Forward, and dgrad by strides; the room is zero when asked, and untouched when not."""
    x, w, offset = operands(LOADS[load], dtype)
    want, R = by_loop(x, w, offset), int(offset[-1])
    y = gg.grouped_gemm(x, w, offset, clear=True, tile=tile, programs=4)
    assert y.dtype == dtype and not y[R:].any()
    near(y, want, dtype)
    out = torch.full_like(y, 7.0)
    gg.grouped_gemm(x, w, offset.int(), out=out, tile=tile, programs=1)
    assert (out[R:] == 7).all() and torch.equal(out[:R], y[:R])
    back = gg.grouped_gemm(y, w.mT, offset, clear=True, tile=tile)
    near(back, by_loop(y, w.mT, offset), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather_scatter_and_strides(dtype):
    """y[place_r] = w_e x[row_r] with x, w, y all strided and positions without a row holding NaN."""
    counts = LOADS["odd"]
    R = sum(counts)
    _, w, offset = operands(counts, dtype)
    g = torch.Generator().manual_seed(1)
    wide = torch.full((60, 80), torch.nan).to(dtype)
    x = wide[::2, 1:75:2]  # 30 positions of width 37, strides (160, 2)
    x[:20] = torch.randn(20, 37, generator=g).to(dtype)
    row, place = torch.randint(0, 20, (R + 5,), generator=g), torch.randperm(R + 5, generator=g)
    row[R:] = 25  # room points at NaN
    strided_w = torch.empty(5, 37, 90, dtype=dtype)[..., ::2].copy_(w.mT).mT
    out = torch.full((45, R + 8), 3.0).to(dtype).T
    gg.grouped_gemm(x, strided_w, offset, row, place, out=out, clear=True, tile=SMALL)
    want = torch.zeros(R + 5, 45, dtype=torch.float64).index_copy(0, place, by_loop(x[row], w, offset))
    near(out[: R + 5], want, dtype)
    assert (out[R + 5 :] == 3).all()


@pytest.mark.parametrize("tile", [SMALL, None], ids=["small tiles", "shipped tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_weight_gradient(load, dtype, tile):
    """Overwrites NaN (exact zero for empty experts), then adds the same again; rows in the room hold NaN."""
    x, w, offset = operands(LOADS[load], dtype)
    R = int(offset[-1])
    dy = torch.randn(x.shape[0], w.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    dy[R:] = torch.nan
    want, start = torch.zeros(w.shape, dtype=torch.float64), 0
    for e, stop in enumerate(offset.tolist()):
        want[e] = dy[start:stop].double().T @ x[start:stop].double()
        start = stop
    out = torch.full(w.shape, torch.nan)
    gg.grouped_wgrad(dy, x, offset, out, tile=tile)
    near(out, want, torch.float32)
    assert all(torch.equal(out[e], torch.zeros_like(out[e])) for e, n in enumerate(LOADS[load]) if not n)
    gg.grouped_wgrad(dy, x, offset, out, add=True, tile=tile)
    near(out, 2 * want, torch.float32)
    row = torch.arange(x.shape[0]).flip(0)
    narrow = gg.grouped_wgrad(dy.flip(0), x.flip(0), offset, torch.empty_like(w), row, row, tile=tile, programs=2)
    near(narrow, want, dtype)


@pytest.mark.parametrize("again", range(2))
def test_bc_034_an_expert_without_rows(again):
    """BC-034: rows [[1,2],[3,4],[5,6]], group sizes [2,0,1], loss = sum of outputs: dW1 is zero, in poisoned memory."""
    torch.full((1 << 14,), torch.nan)  # freed at once: the allocator hands out NaN
    x, dy, offset = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.ones(3, 2), torch.tensor([2, 2, 3])
    dw = gg.grouped_wgrad(dy, x, offset, torch.full((3, 2, 2), torch.nan))  # [E, out, in]: the case's, transposed
    assert dw.mT.tolist() == [[[4, 4], [6, 6]], [[0, 0], [0, 0]], [[5, 5], [6, 6]]]


def test_bc_036_all_positions_on_one_expert():
    """BC-036: all 7 positions on expert 2 of 4: out = gate * FFN_2(x), counts [0,0,7,0], other experts' gradients 0."""
    _, (x, gate, up, down), dy = moe_case(7, 1, 4, 6, 5, torch.float32)
    rows = sort_rows(torch.full((7, 1), 2), 4)
    y, *grads = run(triton_ffn.moe_ffn, rows, (x, gate, up, down), dy)
    near(y, gate.double() * (reference.swiglu(x.double() @ up[2].double().T) @ down[2].double().T), torch.float32)
    assert rows.count_E.tolist() == [0, 0, 7, 0]
    assert all(not g[[0, 1, 3]].any() and g[2].any() for g in grads[2:])


def test_wrong_operands_are_refused():
    x, w, offset = operands(LOADS["odd"], torch.float32)
    with pytest.raises(ValueError, match="float64"):
        gg.grouped_gemm(x.double(), w.double(), offset)
    with pytest.raises(ValueError, match=r"x \(51, 36\)"):
        gg.grouped_gemm(x[:, 1:], w, offset)
    with pytest.raises(ValueError, match="'tf16'"):
        gg.grouped_gemm(x, w, offset, precision="tf16")
    with pytest.raises(ValueError, match="do not fit"):
        gg.grouped_wgrad(x, x, offset, w)


def test_tf32_only_when_torch_is_asked_for_it():
    """The interpreter multiplies in float32 whatever is said, so this holds the choice, not its effect."""
    switch, x = torch.backends.cuda.matmul, torch.zeros(1)
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee"
        assert gg._check("x", None, x) == "ieee" and gg._check("x", "tf32", x) == "tf32"
        switch.fp32_precision = "tf32"
        assert gg._check("x", None, x) == "tf32" and gg._check("x", "ieee", x) == "ieee"
    finally:
        switch.fp32_precision = before


# the whole feed-forward
NAMES = ("y", "x", "gate", "gate_up", "down")
SHAPES = {"odd": (13, 3, 5, 21, 19), "one token": (1, 2, 4, 16, 8), "no token": (0, 2, 3, 8, 8), "few": (2, 1, 9, 7, 5)}


def moe_case(N, K, E, D, F, dtype, load="random"):
    g = torch.Generator().manual_seed(N)
    expert = torch.rand(N, E, generator=g).argsort(1)[:, :K]
    if load == "one":
        expert = torch.arange(1, K + 1).expand(N, K)
    shapes = ((N, D), (N, K), (E, 2 * F, D), (E, D, F))
    tensors = [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]
    return expert, tensors, torch.randn(N, D, generator=g).to(dtype)


def run(form, rows, tensors, dy):
    x, *rest = tensors
    y = form(x, rows, *rest)
    return y, *torch.autograd.grad(y, tensors, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, load", [*((s, "random") for s in SHAPES), ("odd", "one")])
def test_moe_ffn_equals_the_reference(shape, load, dtype):
    """Output and all four gradients; bf16 against float64 on the same rounded operands."""
    expert, tensors, dy = moe_case(*SHAPES[shape], dtype, load)
    rows = sort_rows(expert, SHAPES[shape][2])
    wide = [t.detach().double().requires_grad_() for t in tensors]
    got = run(triton_ffn.moe_ffn, rows, tensors, dy)
    for name, a, b in zip(NAMES, got, run(reference.moe_ffn, rows, wide, dy.double())):
        assert a.dtype == dtype
        near(a, b, dtype, name)


def test_expanded_gradient_and_choices_without_a_row():
    """Rows of 5 of the 7 positions only, as elision makes them; `.sum().backward()` hands down strides of zero."""
    expert, tensors, _ = moe_case(7, 2, 4, 11, 6, torch.float32)
    rows = sort_rows(expert[:5], 4)
    got, want = (run(f, rows, tensors, torch.ones(1, 1).expand(7, 11)) for f in (triton_ffn.moe_ffn, reference.moe_ffn))
    for name, a, b in zip(NAMES, got, want):
        near(a, b, torch.float32, name)
    assert not got[0][5:].any() and not got[1][5:].any() and not got[2][5:].any()


def test_no_number_is_read_on_the_host():
    """Every torch operation of forward and backward, seen on its way: none copies a value to Python or makes a shape of
    data. (On CUDA: torch.cuda.set_sync_debug_mode.)"""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    expert, tensors, dy = moe_case(*SHAPES["few"], torch.float32)
    rows = sort_rows(expert, SHAPES["few"][2])
    with Watch():
        run(triton_ffn.moe_ffn, rows, tensors, dy)
        triton_ffn.expert_ffn(tensors[0], rows.offset_E, *tensors[2:])
    reads = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "repeat_interleave", "unique")
    assert "aten.new_empty.default" in seen
    assert not [name for name in seen if any(read in name for read in reads)]


@pytest.fixture
def triton_backend():
    before = ops.set_backend("triton")
    yield
    ops.set_backend(before)


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "by order_R"])
def test_expert_ffn_with_nan_in_the_room(triton_backend, ordered):
    """NaN past the last offset, in x and in dy, reaches nothing; y and dx are zero there."""
    counts, room, D, F = [0, 20, 3, 0, 1], 7, 12, 10
    g, R = torch.Generator().manual_seed(3), sum(counts)
    x, dy = torch.randn(2, R + room, D, generator=g)
    x[R:], dy[R:] = torch.nan, torch.nan
    weights = [torch.randn(s, generator=g).requires_grad_() for s in ((5, 2 * F, D), (5, D, F))]
    offset, order = torch.tensor(counts).cumsum(0), None
    row = torch.arange(R)
    rows = Sorted(row, row, offset)
    if not ordered:
        order = torch.randperm(R + room, generator=g)[:R]
        x, dy = (torch.full_like(t, torch.nan).index_copy(0, order, t[:R]) for t in (x, dy))
    x.requires_grad_()
    y = ops.expert_ffn(x, offset, *weights, order)
    got = (y, *torch.autograd.grad(y, (x, *weights), dy))
    at = row if order is None else order
    inner = x.detach()[at].requires_grad_()
    want = reference.moe_ffn(inner, rows, torch.ones(R, 1), *weights)
    wants = (want, *torch.autograd.grad(want, (inner, *weights), dy[at]))
    rest = torch.ones(R + room, dtype=torch.bool).index_fill(0, at, False)
    for i, (a, b) in enumerate(zip(got, wants)):
        near(a[at] if i < 2 else a, b, torch.float32, i)
        assert i > 1 or not a[rest].any()


def test_gradients_go_to_slots(triton_backend):
    """Overwrite, then add; autograd gets none. A frozen weight gets nothing at all."""
    expert, tensors, dy = moe_case(9, 2, 4, 16, 8, torch.float32)
    rows = sort_rows(expert, 4)
    want = run(reference.moe_ffn, rows, tensors, dy)
    for t in tensors[2:]:
        t.grad_slot = ops.GradSlot(torch.full_like(t, torch.nan))
    for times in (1, 2):
        y = ops.moe_ffn(tensors[0], rows, *tensors[1:])
        got = torch.autograd.grad(y, tensors, dy, allow_unused=True)
        assert got[2] is None and got[3] is None
        for t, w in zip(tensors[2:], want[3:]):
            assert t.grad_slot.filled
            near(t.grad_slot.view, times * w, torch.float32)
    frozen = [t.detach().requires_grad_(i == 1) for i, t in enumerate(tensors)]
    ops.moe_ffn(frozen[0], rows, *frozen[1:]).backward(dy)
    near(frozen[1].grad, want[2], torch.float32)
    assert frozen[0].grad is None and frozen[2].grad is None


def test_the_backend_says_what_runs_and_refuses_the_rest(triton_backend, monkeypatch):
    assert ops.explain()["moe_ffn"].startswith("triton") and "interpreter" in ops.explain()["expert_ffn"]
    assert "float64" in ops.explain(dtype=torch.float64)["moe_ffn"]
    expert, tensors, _ = moe_case(2, 1, 9, 7, 5, torch.float64)
    with pytest.raises(BackendError, match="float64"):
        ops.moe_ffn(tensors[0], sort_rows(expert, 9), *tensors[1:])
    ops.set_backend("torch")
    assert "set_backend('torch')" in ops.explain()["moe_ffn"]
    ops.set_backend("auto")
    assert "ragged" in ops.explain()["moe_ffn"] and "needs CUDA" in ops.explain()["moe_ffn"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="CUDA device, or TRITON_INTERPRET=1"):
            ops.set_backend("triton")
    assert ops.backend() == "auto"
