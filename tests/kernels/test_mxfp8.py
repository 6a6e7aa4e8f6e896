"""MXFP8 on CPU: the format, against torchao's own code; grouped matmul and expert layer against what is read back."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moekit.kernels import mxfp8, reference
from moekit.kernels.mxfp8 import Operands, quantise, quantise_both, quantise_columns
from moekit.kernels.permute import sort_rows

torch.set_num_threads(1)
INF, NAN = torch.inf, torch.nan


def exponents(seed: int, blocks: int = 20000) -> torch.Tensor:
    """Random mantissas and signs, one random exponent a block, from the smallest normal number to the largest."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=g)
    bits = draw(254, blocks, 1) + 1 << 23 | draw(2**23, blocks, 64) | draw(2, blocks, 64) << 31
    return bits.to(torch.int32).view(torch.float32)


def every_bfloat16() -> torch.Tensor:
    """Each finite bfloat16 as the largest of a block, beside a small and a zero one."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 0)
    return torch.stack((x, -x / 300, *[torch.zeros_like(x)] * 30), -1)


def test_bc_046_scale_mode_is_part_of_the_format():
    """BC-046: a block of one 250 and zeros. Floor: 2^-1 and 448 * 2^-1 = 224; round-up: 2^0 and 256. Zeros exact."""
    x = torch.zeros(32)
    x[3] = 250.0
    for mode, scale, value in (("floor", 126, 224.0), ("ceil", 127, 256.0)):
        q = quantise(x, mode)
        back = q.dequantise()
        assert (q.mode, q.scale.item(), back[3].item()) == (mode, scale, value)
        assert (back[torch.arange(32) != 3] == 0).all()


def test_bc_046_normal_codes_are_within_a_sixteenth():
    """Round-up mode: entries at least 2^-6 of the scale keep 3 bits of mantissa: relative error at most 2^-4."""
    x = exponents(1)[torch.arange(20000) % 7 > 0]
    q = quantise(x)
    power = torch.exp2(q.scale.double() - 127).repeat_interleave(32, -1)
    normal = (x.abs() >= 2**-6 * power) & (q.scale > 0).repeat_interleave(32, -1) & (x.abs() < 248 * 2.0**120)
    error = ((q.dequantise().double() - x) / x).abs()
    assert normal.float().mean() > 0.9 and error[normal].max() <= 2**-4
    assert (q.code.float().abs().amax(-1) <= 448).all()


@pytest.mark.parametrize("name", ["exponents", "bits", "bfloat16", "normal", "tiny"])
def test_equal_to_torchao_bit_for_bit(name):
    """torchao.prototype.mx_formats.mx_tensor.to_mx, round-up scale, codes and scales, on finite data."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    g = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31 - 1, (20000, 64), generator=g).to(torch.int32).view(torch.float32)
    x = {
        "exponents": exponents(3),
        "bits": torch.where(bits.isfinite(), bits, 0),
        "bfloat16": every_bfloat16(),
        "normal": torch.randn(4096, 64, generator=g).bfloat16(),
        "tiny": torch.randn(4096, 64, generator=g) * torch.logspace(-45, -30, 4096)[:, None],
    }[name]
    scale, code = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    q = quantise(x)
    assert torch.equal(q.scale, scale.view(torch.uint8))
    assert torch.equal(q.code.view(torch.uint8), code.view(torch.uint8))
    if name == "exponents":  # the other mode, where the scale is no subnormal
        x = x[x.abs().amax(-1) > 1e-35].contiguous()
        scale, code = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.FLOOR)
        q = quantise(x, "floor")
        assert torch.equal(q.scale, scale.view(torch.uint8))
        assert torch.equal(q.code.view(torch.uint8), code.view(torch.uint8))


@pytest.mark.parametrize("power", [-110, -9, 0, 9, 60, 110])
def test_scales_are_exact_next_to_a_power_of_two(power):
    """448 * 2^k needs 2^k, the next float32 above it needs 2^(k + 1). (A float32 logarithm cannot tell them apart.)"""
    edge = torch.tensor(448.0) * 2.0**power
    above = torch.nextafter(edge, torch.tensor(INF))
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = edge, above
    assert quantise(x).scale[:, 0].tolist() == [127 + power, 128 + power]


def test_zero_tiny_infinite_and_nan_blocks():
    """The table of kernels/mxfp8.py, one block after the other."""
    zero, tiny, infinite, poisoned = blocks = torch.zeros(4, 32)
    zero[1] = -0.0
    tiny[:3] = torch.tensor([448.0, -1.0, 2.0**-10]) * 2.0**-127  # the last line still a subnormal float32
    infinite[:5] = torch.tensor([INF, -INF, 2.0**127, -(2.0**120), 1.0])
    poisoned[:3] = torch.tensor([NAN, INF, 1.0])
    for mode in ("ceil", "floor"):
        q = quantise(blocks, mode)
        assert q.scale[:, 0].tolist() == [0, 0, 254, 255]
        back = q.dequantise()
        assert (back[:2] == 0).all() and torch.equal(torch.signbit(back[0]), torch.signbit(zero))
        assert torch.signbit(back[1]).tolist()[:3] == [False, True, False]
        assert back[2, :5].tolist() == [INF, -INF, 2.0**127, -(2.0**120), 0.0]
        assert back[3].isnan().all()
    barely = torch.zeros(32)
    barely[0] = torch.nextafter(torch.tensor(448 * 2.0**-127), torch.tensor(1.0))  # scale 2^-126: not flushed
    assert quantise(barely).scale.item() == 1 and quantise(barely).dequantise()[0] == 448 * 2.0**-127
    largest = torch.full((32,), torch.finfo(torch.float32).max)
    assert quantise(largest).dequantise().isinf().all()
    assert quantise(largest, "floor").dequantise()[0].item() == 448 * 2.0**119


def test_columns_are_rows_of_the_transpose_filled_up_with_zeros():
    x = exponents(5, 45).view(3, 15, 64)
    q = quantise_columns(x)
    padded = torch.cat((x, torch.zeros(3, 17, 64)), 1).transpose(1, 2).contiguous()
    assert q.code.shape == (3, 64, 32) and q.scale.shape == (3, 64, 1)
    assert torch.equal(q.code.view(torch.uint8), quantise(padded).code.view(torch.uint8))
    assert (q.dequantise()[:, :, 15:] == 0).all()
    for a, b in zip(quantise_both(x), (quantise(x), q)):
        assert torch.equal(a.scale, b.scale) and torch.equal(a.code.view(torch.uint8), b.code.view(torch.uint8))


def test_wrong_widths_and_modes_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise(torch.zeros(4, 33))
    with pytest.raises(ValueError, match="mode='even'"):
        quantise(torch.zeros(4, 32), "even")  # type: ignore[arg-type]


def test_error_of_normal_data():
    """Uniform noise of a rounding step gives about 2.6 % of the norm on normal data, the same for every scale."""
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    errors = [((quantise(s * x).dequantise() / s - x).norm() / x.norm()).item() for s in (1.0, 4.0**10)]
    assert errors[0] == errors[1] and 0.024 < errors[0] < 0.029


OFFSETS = [[3, 3, 40, 41], [0, 0, 0, 45], [0, 0, 0, 0], [1, 1, 1, 1], [10, 20, 30, 45]]


def case(seed=0, R=45, D=64, F=32, E=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = ((R, D), (E, 2 * F, D), (E, D, F), (R, D))
    return [torch.randn(s, generator=g).mul(0.3).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("offset", OFFSETS)
def test_grouped_mm_is_dequantise_then_multiply(offset):
    x, w, *_ = case()
    x = x.detach().clone()
    x[offset[-1] :] = NAN
    y = mxfp8.grouped_mm(quantise(x), quantise(w), torch.tensor(offset))
    xd, wd = quantise(x).dequantise().double(), quantise(w).dequantise().double()
    expected = torch.zeros_like(y, dtype=torch.float64)
    for r in range(offset[-1]):
        e = next(e for e, stop in enumerate(offset) if r < stop)
        expected[r] = wd[e] @ xd[r]
    assert (y - expected).norm() <= 1e-5 * expected.norm()
    assert (y[offset[-1] :] == 0).all()


def by_hand(x, gate_up, down, dy, offset):
    """Output and gradients with the definition: matmuls of what is read back, weight gradients of the wide values."""
    read = lambda t: quantise(t).dequantise()
    turned = lambda w: quantise_columns(w).dequantise().transpose(1, 2)
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    dup, ddown, start = torch.zeros_like(gate_up), torch.zeros_like(down), 0
    for e, stop in enumerate(offset):
        pre = (read(x[start:stop]) @ read(gate_up)[e].T).requires_grad_()
        hidden = F.silu(pre[:, : down.shape[2]]) * pre[:, down.shape[2] :]
        y[start:stop] = read(hidden) @ read(down)[e].T
        hidden.backward(read(dy[start:stop]) @ turned(down)[e])
        dx[start:stop] = read(pre.grad) @ turned(gate_up)[e]
        dup[e], ddown[e] = pre.grad.T @ x[start:stop], dy[start:stop].T @ hidden.detach()
        start = stop
    return y, dx, dup, ddown


@pytest.mark.parametrize("offset", OFFSETS)
def test_expert_ffn_and_its_gradients(offset):
    x, gate_up, down, dy = case(1)
    with torch.no_grad():
        x[offset[-1] :] = NAN
        dy[offset[-1] :] = NAN
    y = mxfp8.expert_ffn(x, torch.tensor(offset), gate_up, down, Operands.of(gate_up), Operands.of(down))
    found = (y, *torch.autograd.grad(y, (x, gate_up, down), dy.detach()))
    for name, a, b in zip(
        ("y", "dx", "dup", "ddown"), found, by_hand(*(t.detach() for t in (x, gate_up, down, dy)), offset)
    ):
        assert a.isfinite().all(), name
        assert (a - b).norm() <= 1e-5 * b.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_close_to_the_wide_one(dtype):
    """MXFP8 against the plain reference: noise of a few percent in output and in all gradients, gates included."""
    x, gate_up, down, dy = case(2, R=60, D=96, F=64, dtype=dtype)
    g = torch.Generator().manual_seed(3)
    rows = sort_rows(torch.rand(60, 4, generator=g).argsort(1)[:, :2], 4)
    gate = torch.rand(60, 2, generator=g).to(dtype).requires_grad_()
    leaves = (x, gate, gate_up, down)
    y = mxfp8.moe_ffn(x, rows, gate, gate_up, down, Operands.of(gate_up), Operands.of(down))
    wide = reference.moe_ffn(x, rows, gate, gate_up, down)
    pairs = [(y, wide), *zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wide, leaves, dy))]
    for a, b in pairs:
        assert 1e-3 < ((a - b).float().norm() / b.float().norm()).item() < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backend_steers_the_form(dtype):
    """Reference and torch through `moekit.ops`: one arithmetic, output and all gradients; who gets them differs."""
    from moekit import ops

    class Cache:
        def __init__(self, weight):
            self.weight = weight

        def current(self):
            return ops.operands(self.weight.detach())

    x, gate_up, down, dy = case(7, R=60, D=96, F=64, dtype=dtype)
    g = torch.Generator().manual_seed(3)
    rows = sort_rows(torch.rand(60, 4, generator=g).argsort(1)[:, :2], 4)
    gate = torch.rand(60, 2, generator=g).to(dtype).requires_grad_()
    offset = torch.tensor([5, 5, 30, 44])
    found = {}
    for w in (gate_up, down):
        w.mx_cache, w.grad_slot = Cache(w), ops.GradSlot(torch.full_like(w, NAN, dtype=torch.float32))
    for name in ("reference", "torch"):
        before = ops.set_backend(name)
        try:
            layer, experts = ops.moe_ffn(x, rows, gate, gate_up, down), ops.expert_ffn(x, offset, gate_up, down)
        finally:
            ops.set_backend(before)
        assert (experts[44:] == 0).all()
        found[name] = [layer, experts]
        for y, leaves in ((layer, (x, gate, gate_up, down)), (experts, (x, gate_up, down))):
            for w in (gate_up, down):
                w.grad_slot.filled = False
            grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
            slotted = [t.grad_slot for t in leaves if hasattr(t, "grad_slot")]
            assert all(s.filled == (name == "torch") for s in slotted)
            found[name] += [s.grad_slot.view.clone() if t is None else t for s, t in zip(leaves, grads)]
    for a, b in zip(*found.values()):
        assert (a.float() - b.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * a.float().norm()


def test_slots_and_order():
    """Weight gradients go into slots, overwriting once and then adding; `order_R` takes rows from where they stand."""
    from moekit.ops import GradSlot

    x, gate_up, down, dy = case(4)
    offset = torch.tensor([5, 5, 30, 45])
    operands = Operands.of(gate_up), Operands.of(down)
    slots = GradSlot(torch.full_like(gate_up, NAN)), GradSlot(torch.full_like(down, NAN))
    y = mxfp8.expert_ffn(x, offset, gate_up, down, *operands)
    dup, ddown = torch.autograd.grad(y, (gate_up, down), dy)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(0))
    place = order.argsort()
    for times in (1, 2):
        y2 = mxfp8.expert_ffn(x[place], offset, gate_up, down, *operands, slots, order)
        assert torch.equal(y2, y[place])
        y2.backward(dy[place].detach())
        assert gate_up.grad is None and down.grad is None
        for slot, whole in zip(slots, (dup, ddown)):
            torch.testing.assert_close(slot.view, times * whole)


def test_changed_operands_are_noticed_before_the_backward():
    x, gate_up, down, dy = case(6)
    y = mxfp8.expert_ffn(x, torch.tensor([5, 5, 30, 45]), gate_up, down, Operands.of(gate_up), Operands.of(down))
    with torch.no_grad():
        gate_up.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_forms():
    assert mxfp8.forms(False) is importlib.import_module("moekit.kernels.mxfp8")


def test_blackwell_runs_the_block_scaled_unit():
    """Ahead of time for sm_100: the PTX asks for mxf8f6f4 products with block scales, no upcast to bfloat16 beside."""
    pytest.importorskip("triton")
    code = """
import re, runpy, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
_, fn, signature, constants, warps, stages = runpy.run_path(sys.argv[1])["mxfp8"]()[0]
types = {a: "constexpr" if a in constants else signature[a].partition(":")[0] for a in fn.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names) if signature.get(a, "").endswith(":16")}
made = triton.compile(ASTSource(fn, types, constants, aligned), target=GPUTarget("cuda", 100, 32),
                      options={"num_warps": warps, "num_stages": stages})
print(*set(re.findall(r"tcgen05[.]mma[^ ]*", made.asm["ptx"])))
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    shipped = str(Path(__file__).with_name("shipped.py"))
    done = subprocess.run(
        [sys.executable, "-c", code, shipped], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kind::mxf8f6f4.block_scale" in done.stdout and "kind::f16" not in done.stdout, done.stdout
