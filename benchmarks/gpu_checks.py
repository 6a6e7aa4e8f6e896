"""Whether every kernel is right, on a GPU or interpreted: the first part of `gpu.py`, which runs and reports it.

A check raises if something is wrong and returns what was found. Truth is plain torch in float64 (`kernels/reference.py`
where it has the operation); the relative error of a whole tensor is at most 1e-5 in float32 and 1e-2 in bfloat16. Odd
sizes, strides, empty experts, all rows on one, one token, none, and NaN in every row that nobody may read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAN = float("nan")
CHECKS: list[tuple[str, Callable[[], str]]] = []


def check(name: str):
    """Register a function that raises if something is wrong, and says what was found otherwise."""
    return lambda function: CHECKS.append((name, function)) or function


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def randn(*shape: int, g: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)


class Errors:
    """Largest relative error so far; a tensor that is too far off, or not finite, raises."""

    def __init__(self) -> None:
        self.worst = dict.fromkeys(TOLERANCE, 0.0)

    def near(self, name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        """norm(got - want) / norm(want), against the tolerance of `dtype`."""
        got, want = got.detach().double().cpu(), want.detach().double().cpu()
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, expected {tuple(want.shape)}"
        error = float((got - want).norm() / want.norm().clamp(min=1e-30))
        limit = TOLERANCE[dtype] * scale
        assert error <= limit, f"{name} ({dtype}): relative error {error:.2e}, at most {limit:.0e} is right"
        self.worst[dtype] = max(self.worst[dtype], error)

    def __str__(self) -> str:
        return ", ".join(f"{str(k)[6:]} {v:.1e}" for k, v in self.worst.items() if v)


def equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.cpu(), want.cpu()), f"{name}: not equal"


LOADS = {"odd": [3, 0, 21, 1, 17], "all on one": [0, 0, 37, 0, 0], "one row": [0, 0, 0, 1, 0], "no rows": [0] * 5}
TALL = {"tall": [130, 0, 257, 128, 5]}


@check("grouped GEMM: forward, dgrad, wgrad")
def grouped() -> str:
    from moekit.kernels.grouped_gemm import grouped_gemm, grouped_wgrad

    errors = Errors()
    for dtype in TOLERANCE:
        for load, counts in (LOADS | TALL).items():
            g, R, room = seed(1), sum(counts), 9
            K, M = (128, 272) if load == "tall" else (37, 45)
            x, dy = randn(R + room, K, g=g, dtype=dtype), randn(R + room, M, g=g, dtype=dtype)
            w, offset = randn(len(counts), M, K, g=g, dtype=dtype), torch.tensor(counts, device=DEVICE).cumsum(0)
            x[R:], dy[R:] = NAN, NAN
            starts = [0, *offset.tolist()]
            parts = [slice(a, b) for a, b in pairwise(starts)]
            y64 = torch.zeros(R + room, M, dtype=torch.float64, device=DEVICE)
            dx64, dw64 = y64.new_zeros(R + room, K), y64.new_zeros(w.shape)
            for e, part in enumerate(parts):
                y64[part], dx64[part] = x[part].double() @ w[e].double().T, dy[part].double() @ w[e].double()
                dw64[e] = dy[part].double().T @ x[part].double()
            y = grouped_gemm(x, w, offset, clear=True, precision="ieee")
            dx = grouped_gemm(dy, w.mT, offset, clear=True, precision="ieee")
            dw = grouped_wgrad(dy, x, offset, torch.full(w.shape, NAN, device=DEVICE), precision="ieee")
            for name, got, want in (("y", y, y64), ("dx", dx, dx64)):
                errors.near(f"{load} {name}", got, want, dtype)
                assert not got[R:].any(), f"{load} {name}: the room is not zero"
            errors.near(f"{load} dw", dw, dw64, dtype)
            assert all(not dw[e].any() for e, n in enumerate(counts) if not n), (
                f"{load}: an empty expert has a gradient"
            )
            if load == "odd":  # strided operands, gathered and scattered
                wide = torch.full((2 * x.shape[0], 2 * K + 3), NAN, dtype=dtype, device=DEVICE)
                wide[::2, 1 : 2 * K : 2] = x
                row = torch.randperm(R, generator=g).to(DEVICE)
                place = torch.argsort(row)
                strided = wide[::2, 1 : 2 * K : 2]
                turned = w.mT.contiguous().mT
                y = grouped_gemm(strided, turned, offset, row, place, precision="ieee")
                want = torch.zeros(R, M, dtype=torch.float64, device=DEVICE)
                for e, part in enumerate(parts):
                    want[place[part]] = x[row[part]].double() @ w[e].double().T
                errors.near("gather, scatter, strides", y, want, dtype)
    return str(errors)


def moe_case(N: int, K: int, E: int, D: int, width: int, dtype: torch.dtype, one: bool) -> tuple:
    from moekit import ops

    g = seed(N)
    expert = torch.rand(N, E, generator=g).argsort(1)[:, :K]
    expert = torch.arange(1, K + 1).expand(N, K).contiguous() if one else expert
    shapes = ((N, D), (N, K), (E, 2 * width, D), (E, D, width))
    tensors = [randn(*s, g=g, dtype=dtype).requires_grad_() for s in shapes]
    return ops.sort_rows(expert.to(DEVICE), E), tensors, randn(N, D, g=g, dtype=dtype)


@check("experts with gates: y, dx, d gates, both weights")
def experts() -> str:
    from moekit import ops
    from moekit.kernels import reference

    errors, cases = Errors(), {"odd": (13, 3, 5, 21, 19), "one token": (1, 2, 5, 21, 19), "no token": (0, 2, 5, 21, 19)}
    runs = [(name, shape, False) for name, shape in cases.items()] + [("all on one", cases["odd"], True)]
    for dtype in TOLERANCE:
        for name, shape, one in (*runs, ("tall", (150, 2, 3, 64, 48), False)):
            rows, tensors, dy = moe_case(*shape, dtype, one)
            wide = [t.detach().double().requires_grad_() for t in tensors]
            y, want = ops.moe_ffn(tensors[0], rows, *tensors[1:]), reference.moe_ffn(wide[0], rows, *wide[1:])
            grads = torch.autograd.grad(y, tensors, dy), torch.autograd.grad(want, wide, dy.double())
            for part, a, b in zip(("y", "dx", "d gates", "d gate_up", "d down"), (y, *grads[0]), (want, *grads[1])):
                errors.near(f"{name} {part}", a, b, dtype)
    return str(errors)


@check("experts behind a dispatch: NaN in the room, any order")
def dispatched() -> str:
    from moekit import ops
    from moekit.kernels import reference
    from moekit.kernels.permute import Sorted

    errors, counts, room, D, width = Errors(), [0, 20, 3, 0, 1], 7, 21, 19
    R = sum(counts)
    offset, row = torch.tensor(counts, device=DEVICE).cumsum(0), torch.arange(R, device=DEVICE)
    for dtype in TOLERANCE:
        for order in (None, torch.randperm(R + room, generator=seed())[:R].to(DEVICE)):
            g, at = seed(2), row if order is None else order
            x, dy = (torch.full((R + room, D), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
            x[at], dy[at] = randn(R, D, g=g, dtype=dtype), randn(R, D, g=g, dtype=dtype)
            weights = [randn(*s, g=g, dtype=dtype).requires_grad_() for s in ((5, 2 * width, D), (5, D, width))]
            y = ops.expert_ffn(x.requires_grad_(), offset, *weights, order)
            got = (y, *torch.autograd.grad(y, (x, *weights), dy))
            inner, *wide = (t.detach().double().requires_grad_() for t in (x[at], *weights))
            one = torch.ones(R, 1, dtype=torch.float64, device=DEVICE)
            y64 = reference.moe_ffn(inner, Sorted(row, row, offset), one, *wide)
            want = (y64, *torch.autograd.grad(y64, (inner, *wide), dy[at].double()))
            rest = torch.ones(R + room, dtype=torch.bool, device=DEVICE).index_fill(0, at, False)
            for i, (name, a, b) in enumerate(zip(("y", "dx", "d gate_up", "d down"), got, want)):
                errors.near(name, a[at] if i < 2 else a, b, dtype)
                assert i > 1 or not a[rest].any(), f"{name}: the room is not zero"
    return str(errors)


@check("SwiGLU with gates: strides, prefix only")
def gated() -> str:
    from moekit.kernels import reference
    from moekit.kernels.swiglu import swiglu, swiglu_backward

    errors = Errors()
    for dtype in TOLERANCE:
        for rows, room, width in ((9, 4, 37), (0, 5, 37), (1, 0, 600)):
            g, R = seed(3), rows + room
            pre, dh = randn(R, 2 * width + 6, g=g, dtype=dtype)[:, 4:-2], randn(R, width, g=g, dtype=dtype)
            pre[rows:], dh[rows:] = NAN, NAN
            slot, gate = torch.randperm(R + 3, generator=g)[:R].to(DEVICE), randn(R + 3, g=g)
            offset = torch.tensor([0, rows // 2, rows], device=DEVICE)
            pre64, gate64 = pre[:rows].double().requires_grad_(), gate.double().requires_grad_()
            want = reference.swiglu(pre64) * gate64[slot[:rows], None]
            dpre64, dgate64 = torch.autograd.grad(want, (pre64, gate64), dh[:rows].double())
            h = swiglu(pre, offset, gate, slot)
            dpre, again, dgate = swiglu_backward(dh, pre, offset, gate, slot)
            assert dgate is not None
            for name, a, b in (("h", h, want), ("h again", again, want), ("dpre", dpre, dpre64)):
                errors.near(name, a[:rows], b, dtype)
            errors.near("d gates", dgate, dgate64, dtype)
    return str(errors)


@check("plan, permute, combine")
def moved() -> str:
    from moekit.kernels.permute import sort_rows
    from moekit.kernels.permute_triton import combine, permute, plan_rows

    errors = Errors()
    for N, K, E, D in ((200, 3, 11, 33), (1, 2, 3, 33), (0, 2, 4, 33), (64, 4, 7, 64)):
        g = seed(N)
        expert = torch.rand(N, E, generator=g).argsort(1)[:, :K].to(DEVICE)
        (rows, place), by_sort = plan_rows(expert, E), sort_rows(expert, E)
        for name in ("row_R", "slot_R", "offset_E"):
            equal(name, getattr(rows, name), getattr(by_sort, name))
        for dtype in TOLERANCE if N else ():
            x, dy = randn(N, 2 * D, g=g, dtype=dtype)[:, ::2].requires_grad_(), randn(N, D, g=g, dtype=dtype)
            gate = randn(K, N, g=g).T.requires_grad_()
            sent = permute(x, rows, place)
            equal("permute", sent, x[rows.row_R])
            y = combine(sent, gate, rows, place)
            x64, gate64 = x.detach().double().requires_grad_(), gate.detach().double().requires_grad_()
            y64 = (gate64.sum(1, keepdim=True)) * x64
            got, want = torch.autograd.grad(y, (x, gate), dy), torch.autograd.grad(y64, (x64, gate64), dy.double())
            for name, a, b in zip(("y", "dx", "d gates"), (y, *got), (y64, *want)):
                errors.near(name, a, b, dtype, 2 if name == "dx" else 1)  # dx is rounded twice
    return str(errors)


@check("router: choices and counts")
def chosen() -> str:
    from moekit.kernels.router_topk import choose

    for N, E, K in ((300, 11, 3), (1, 5, 5), (0, 6, 2), (70, 64, 8)):
        for gate in ("softmax", "sigmoid"):
            for bias in (None, randn(E, g=seed(9))):
                logits = randn(N, E, g=seed(N))
                score = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
                want = (logits if bias is None else score + bias).topk(K, -1).indices
                expert, count = choose(logits, K, gate=gate, bias_E=bias)
                equal(f"choice {N} {E} {K} {gate}", expert, want)
                equal("count", count, torch.bincount(want.flatten().cpu(), minlength=E))
    nan = torch.full((3, 7), NAN, device=DEVICE)
    assert choose(nan, 7, gate="softmax", bias_E=nan[0])[0].sort(1).values.tolist() == [list(range(7))] * 3
    return "equal to torch.topk; distinct on NaN"


@check("log-probs and entropy: values, d hidden, d head")
def scored() -> str:
    from moekit.kernels import reference
    from moekit.kernels.token_logprobs_triton import token_logprobs

    errors = Errors()
    for dtype in TOLERANCE:
        for M, D, V in ((19, 21, 67), (1, 5, 17), (0, 5, 7), (70, 64, 300)):
            g = seed(M)
            hidden, head = (randn(n, D, g=g).mul(0.5).to(dtype).requires_grad_() for n in (M, V))
            label, weight = torch.randint(0, V, (M,), generator=g).to(DEVICE), randn(2, M, g=g)
            h64, w64 = (t.detach().double().requires_grad_() for t in (hidden, head))
            own64 = reference.token_logprobs(h64, w64, label, 0.7)
            log_p = (h64 @ w64.T / 0.7).log_softmax(-1)
            entropy64 = -(log_p.exp() * log_p).sum(-1)
            own, entropy = token_logprobs(hidden, head, label, temperature=0.7, chunk_bytes=M * 4 * 200)
            errors.near("log p", own, own64, torch.float32)
            errors.near("entropy", entropy, entropy64, torch.float32)
            got = torch.autograd.grad((weight * torch.stack((own, entropy))).sum(), (hidden, head))
            want = torch.autograd.grad((weight.double() * torch.stack((own64, entropy64))).sum(), (h64, w64))
            for name, a, b in zip(("d hidden", "d head"), got, want):
                errors.near(name, a, b, dtype)
    return str(errors)


def blocks() -> dict[str, torch.Tensor]:
    """Any bits, every exponent, bfloat16, odd rows."""
    g = seed(4)
    bits = torch.randint(-(2**31), 2**31 - 1, (96, 64), generator=g)
    wide = torch.randn(96, 64, generator=g) * torch.exp2(torch.randint(-20, 20, (96, 1), generator=g))
    special = torch.zeros(4, 64)
    special[1, :2], special[2, :3], special[3, 0] = torch.tensor([448 * 2.0**-127, 1e-45]), torch.inf, 250.0
    any_bits = bits.to(torch.int32).view(torch.float32)
    return {"any bits": any_bits, "normal": wide, "bf16": wide.bfloat16(), "odd": wide[:45], "special": special}


@check("MXFP8 quantise: the CPU's bytes, rows and columns, both modes")
def quantised() -> str:
    from moekit.kernels import mxfp8, mxfp8_triton

    def same(name: str, a: Any, b: Any) -> None:  # a NaN has two codes, of which the sign says nothing
        codes = [q.code.view(torch.uint8).cpu() for q in (a, b)]
        equal(f"{name} codes", *(c.where((c & 0x7F) != 0x7F, 0x7F) for c in codes))
        equal(f"{name} scales", a.scale, b.scale)

    for name, x in blocks().items():
        for mode in ("ceil", "floor"):
            here = x.to(DEVICE)
            same(f"{name} {mode}", mxfp8_triton.quantise(here, mode), mxfp8.quantise(x, mode))
            same(f"{name} {mode} columns", mxfp8_triton.quantise_columns(here, mode), mxfp8.quantise_columns(x, mode))
            for a, b in zip(mxfp8_triton.quantise_both(here, mode), mxfp8.quantise_both(x, mode)):
                same(f"{name} {mode} both", a, b)
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    except ImportError:
        return "equal in bits; torchao is not installed"
    x = blocks()["normal"]
    scale, code = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    q = mxfp8_triton.quantise(x.to(DEVICE))
    equal("torchao codes", q.code.view(torch.uint8), code.view(torch.uint8))
    equal("torchao scales", q.scale, scale.view(torch.uint8).view(q.scale.shape))
    return "equal in bits, to torchao's as well"


@check("MXFP8 grouped GEMM = dequantise, then multiply")
def scaled() -> str:
    from moekit.kernels import mxfp8, mxfp8_triton

    errors = Errors()
    for counts in ([5, 0, 145], [0, 0, 180], [0, 0, 0], [1, 0, 0], [130, 10, 1]):
        g = seed(5)
        x, w, offset = randn(180, 96, g=g), randn(3, 40, 96, g=g), torch.tensor(counts, device=DEVICE).cumsum(0)
        x[sum(counts) :] = NAN
        q, p = mxfp8_triton.quantise(x), mxfp8_triton.quantise(w)
        y = mxfp8_triton.grouped_mm(q, p, offset)
        want, start = torch.zeros(180, 40, dtype=torch.float64, device=DEVICE), 0
        for e, stop in enumerate(offset.tolist()):
            want[start:stop] = q[start:stop].dequantise().double() @ p[e].dequantise().double().T
            start = stop
        errors.near(str(counts), y, want, torch.float32)
        assert not y[start:].any(), "the room is not zero"
        half = mxfp8_triton.grouped_mm(q, p, offset, torch.bfloat16)
        errors.near(f"{counts} bf16", half, want, torch.bfloat16)
    x, up, down, dy = (randn(*s, g=seed(6)) * 0.3 for s in ((45, 64), (3, 64, 64), (3, 64, 32), (45, 64)))
    found, offset = [], torch.tensor([7, 7, 40])
    for form, place in ((mxfp8_triton, DEVICE), (mxfp8, "cpu")):
        leaves = [t.detach().to(place).requires_grad_() for t in (x, up, down)]
        made = [mxfp8.Operands.of(w, form=form) for w in leaves[1:]]
        y = mxfp8.expert_ffn(leaves[0], offset.to(place), *leaves[1:], *made, form=form)
        found.append((y, *torch.autograd.grad(y, leaves, dy.to(place))))
    for name, a, b in zip(("y", "dx", "d gate_up", "d down"), *found):  # sums in another order flip few codes
        errors.near(f"layer {name}", a, b.to(a), torch.bfloat16)
    return str(errors)


@check("rows by address: put and get in own memory")
def addressed() -> str:
    from moekit.kernels import rowwise

    for dtype, D in ((torch.float32, 33), (torch.bfloat16, 520), (torch.uint8, 1)):
        g, ranks, room, R = seed(7), 3, 40, 60
        place = torch.randperm(ranks * room, generator=g)[:R]
        rank, row = place // room, place % room
        row[::5] = -1
        rows = torch.randint(1, 100, (R, D), generator=g).to(dtype)
        buffers = [torch.full((room, D), 7, dtype=dtype, device=DEVICE) for _ in range(ranks)]
        want = [b.cpu().clone() for b in buffers]
        back = torch.zeros(R, D, dtype=dtype)
        for r, (w, at) in enumerate(zip(rank.tolist(), row.tolist())):
            if at >= 0:
                want[w][at] = back[r] = rows[r]
        peers = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
        to = (peers, rank.to(DEVICE), row.to(DEVICE))
        rowwise.put(rows.to(DEVICE), *to)
        for a, b in zip(buffers, want):
            equal(f"put {dtype}", a, b)
        equal(f"get {dtype}", rowwise.get(torch.full((R, D), 9, dtype=dtype, device=DEVICE), *to), back)
    return "equal"


def tiny(device: str) -> Any:
    from moekit import ModelConfig, Transformer

    config = ModelConfig(vocab=37, layers=2, heads=2, width=32, expert_width=24, experts=5, top_k=2)
    return Transformer(config, seed=3).to(device)


@check("a model, forward and backward, against plain torch on the CPU")
def whole() -> str:
    from moekit import Batch, ops

    ids = torch.randint(3, 37, (2, 9), generator=seed())
    batch = Batch.make(ids, segment=torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [-1] * 3]))
    errors, found, before = Errors(), [], ops.backend()
    for device, backend in ((DEVICE, before), ("cpu", "reference")):
        ops.set_backend(backend)  # type: ignore[arg-type]
        try:
            model = tiny(device)
            out = model(batch.flat.to(device), record=True)
            out.logprob_M.sum().backward()
            found.append((out.logprob_M, {n: p.grad for n, p in model.named_parameters()}, out.routes))
        finally:
            ops.set_backend(before)
    (a, grads, routes), (b, wants, plain) = found
    for one, two in zip(routes, plain):
        equal("routes", one.expert_NK, two.expert_NK)
    errors.near("log-probs", a, b, torch.float32)
    for name, want in wants.items():
        errors.near(name, grads[name], want, torch.float32, 3)
    return str(errors)


@check("no host read from router to combine (sync debug mode)")
def unread() -> str:
    if INTERPRETED:
        return "skipped: CUDA only"
    from moekit import ModelConfig, ops
    from moekit.model.moe import MoE
    from moekit.objectives.logprobs import token_logprobs

    config = ModelConfig(vocab=64, layers=1, heads=2, width=64, expert_width=32, experts=6, top_k=2)
    x = randn(50, 64, g=seed(), dtype=torch.bfloat16).requires_grad_()
    head, label = randn(96, 64, g=seed(1), dtype=torch.bfloat16), torch.zeros(50, dtype=torch.int64, device=DEVICE)
    offset = torch.tensor([3, 3, 9, 20, 30, 40], device=DEVICE)
    for scaled_too in (False, True):
        moe = MoE(config, 0, torch.bfloat16, DEVICE)
        for w in moe.parameters():
            torch.nn.init.normal_(w, std=0.1)
        if scaled_too:
            for w in (moe.gate_up, moe.down):
                made = ops.operands(w)
                w.mx_cache = type("Cache", (), {"current": lambda _, made=made: made})()  # type: ignore

        def step(moe=moe) -> None:
            y, _ = moe(x, None, real=50)
            loss = token_logprobs(y, head, label).sum() + ops.expert_ffn(x, offset, moe.gate_up, moe.down).sum()
            loss.backward()

        step()  # compile
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            try:
                int(offset[-1])
            except RuntimeError:
                pass
            else:
                raise AssertionError("the debug mode lets a host read pass")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "none, in bf16 and MXFP8"
