"""Triton's MXFP8 in the interpreter: every byte equals the torch form's, and the grouped matmul its product."""

from __future__ import annotations

import pytest
import torch

from moekit.kernels import mxfp8

triton_form = pytest.importorskip("moekit.kernels.mxfp8_triton", reason="triton is not installed")
torch.set_num_threads(1)
NAN = torch.nan


def equal(a: mxfp8.Quantised, b: mxfp8.Quantised) -> None:
    """Bytes; a NaN has two codes, of which the sign says nothing."""
    assert a.code.shape == b.code.shape and torch.equal(a.scale, b.scale)
    codes = [q.code.view(torch.uint8).where((q.code.view(torch.uint8) & 0x7F) != 0x7F, 0x7F) for q in (a, b)]
    assert torch.equal(*codes)


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (96, 64), generator=g)
    one = torch.randint(1, 254, (96, 1), generator=g) << 23 | (bits & 0x7FFFFF) | (bits & 1) << 31
    wide = torch.randn(96, 64, generator=g) * torch.exp2(torch.randint(-20, 20, (96, 1), generator=g))
    special = torch.zeros(6, 32)
    special[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    special[1, :3] = torch.tensor([448.0, -1.0, 3.0]) * 2.0**-127
    special[2, :5] = torch.tensor([torch.inf, -torch.inf, 2.0**127, -(2.0**120), 1.0])
    special[3, :2] = torch.tensor([NAN, 1.0])
    special[4, :32] = torch.arange(32) * 2.0**-10 + 448 * (torch.arange(32) == 31)  # subnormal codes, ties among them
    special[5, 0] = 250.0
    return {
        "any bits": bits.to(torch.int32).view(torch.float32),  # NaN, infinities, subnormals
        "one exponent": one.to(torch.int32).view(torch.float32),
        "normal": wide,
        "bfloat16": wide.bfloat16(),
        "transposed": wide.T.contiguous().T,
        "odd rows of a stack": wide[:90].view(2, 45, 64)[:, :37],
        "special": special,
        "one row": wide[:1],
        "no rows": wide[:0],
    }


@pytest.mark.parametrize("mode", ["ceil", "floor"])
@pytest.mark.parametrize("name", list(inputs()))
def test_quantise_equals_the_torch_form(name, mode):
    x = inputs()[name]
    equal(triton_form.quantise(x, mode), mxfp8.quantise(x, mode))
    equal(triton_form.quantise_columns(x, mode), mxfp8.quantise_columns(x, mode))
    for a, b in zip(triton_form.quantise_both(x, mode), mxfp8.quantise_both(x, mode)):
        equal(a, b)


def test_every_code_is_rounded_to_even():
    """All E4M3 values, all midpoints between them and their neighbours, in blocks whose scale is 1."""
    value = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (value[1:] + value[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(t)) for t in (0.0, 1e9)]
    x = torch.cat((value, middle, *near))
    x = torch.cat((x, -x, torch.zeros(-2 * len(x) % 31))).view(-1, 31)
    x = torch.cat((x, torch.full((len(x), 1), 448.0)), 1)
    q = triton_form.quantise(x)
    assert (q.scale == 127).all()
    assert torch.equal(q.code.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("offset", [[5, 5, 150], [0, 0, 180], [0, 0, 0], [1, 1, 1], [130, 140, 141]])
def test_grouped_mm_equals_dequantise_then_multiply(offset):
    """Ragged groups by device offsets, rows past the last one poisoned, K no multiple of the tile's depth."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(180, 96, generator=g), torch.randn(3, 40, 96, generator=g)
    x[offset[-1] :] = NAN
    w[0, :, :32] *= 2.0**20
    stops = torch.tensor(offset)
    y = triton_form.grouped_mm(mxfp8.quantise(x), mxfp8.quantise(w), stops)
    expected = mxfp8.grouped_mm(mxfp8.quantise(x), mxfp8.quantise(w), stops)
    assert (y - expected).norm() <= 1e-5 * expected.norm()
    assert (y[offset[-1] :] == 0).all()
    half = triton_form.grouped_mm(mxfp8.quantise(x), mxfp8.quantise(w), stops.int(), torch.bfloat16)
    assert torch.equal(half, y.bfloat16())


@pytest.mark.parametrize("mode, scale, back", [("floor", 126, 224.0), ("ceil", 127, 256.0)])
def test_bc_046_the_kernel_has_the_mode_of_the_truth(mode, scale, back):
    """BC-046: one 250 and 31 zeros. Floor: 2^-1, read back 224; round-up: 2^0, 256; zeros exact, the mode is kept."""
    x = torch.zeros(1, 32)
    x[0, 7] = 250.0
    for q in (triton_form.quantise(x, mode), triton_form.quantise_columns(x.T.contiguous(), mode)):
        assert q.mode == mode and q.scale.tolist() == [[scale]]
        want = torch.zeros(1, 32)
        want[0, 7] = back
        assert torch.equal(q.dequantise(), want)


def test_a_nan_block_reaches_its_own_rows_only():
    x, w = torch.ones(40, 32), torch.ones(2, 16, 32)
    x[7, 3] = NAN
    y = triton_form.grouped_mm(mxfp8.quantise(x), mxfp8.quantise(w), torch.tensor([20, 40]))
    assert y[7].isnan().all() and y[torch.arange(40) != 7].isfinite().all()


def test_wrong_widths_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        triton_form.quantise(torch.zeros(4, 33))
    with pytest.raises(ValueError, match="grouped_mm"):
        q = mxfp8.quantise(torch.zeros(4, 32))
        triton_form.grouped_mm(q, mxfp8.quantise(torch.zeros(2, 8, 64)), torch.tensor([1, 2]))


def test_expert_layer_on_triton_forms():
    """The whole layer, forward and backward, on these forms; NaN in the room. Sums in another order flip few codes."""
    g = torch.Generator().manual_seed(2)
    shapes = ((45, 64), (3, 64, 64), (3, 64, 32), (45, 64))
    x, up, down, dy = (torch.randn(s, generator=g).mul(0.3).requires_grad_() for s in shapes)
    offset = torch.tensor([7, 7, 40])
    with torch.no_grad():
        x[40:], dy[40:] = NAN, NAN
    found = []
    for form in (mxfp8, triton_form):
        operands = mxfp8.Operands.of(up, form=form), mxfp8.Operands.of(down, form=form)
        y = mxfp8.expert_ffn(x, offset, up, down, *operands, form=form)
        found.append((y, *torch.autograd.grad(y, (x, up, down), dy.detach())))
    for a, b in zip(*found):
        assert b.isfinite().all() and (a - b).norm() <= 5e-3 * a.norm()
    assert (found[1][0][40:] == 0).all() and (found[1][1][40:] == 0).all()


def test_the_door_interprets_triton(monkeypatch):
    """`set_backend("triton")` on CPU takes these forms for MXFP8: quantised bytes, output and gradients."""
    from moekit import ops

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    calls = []
    watched = triton_form.grouped_mm
    monkeypatch.setattr(triton_form, "grouped_mm", lambda *a: calls.append(0) or watched(*a))
    g = torch.Generator().manual_seed(3)
    x, up, down = (torch.randn(s, generator=g).mul(0.3).requires_grad_() for s in ((20, 32), (2, 64, 32), (2, 32, 32)))
    wide = {}
    for name in ("torch", "triton"):
        before = ops.set_backend(name)
        try:
            assert ops.explain()["mxfp8"].startswith(f"{name}: exact emulation")
            equal(ops.quantise(up), mxfp8.quantise(up))
            for w in (up, down):
                made = ops.operands(w)
                w.mx_cache = type("Cache", (), {"current": lambda self, made=made: made})()
            y = ops.expert_ffn(x, torch.tensor([8, 17]), up, down)
        finally:
            ops.set_backend(before)
        wide[name] = (y, *torch.autograd.grad(y.sum(), (x, up, down)))  # the backward keeps the forward's form
        assert len(calls) == (4 if name == "triton" else 0)
    for a, b in zip(*wide.values()):
        assert (a - b).norm() <= 5e-3 * a.norm()
