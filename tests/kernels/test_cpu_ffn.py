"""The CPU forms of the expert feed-forward, C++ and torch, against the plain reference in float64; which of them runs;
where large gradients live."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from moekit import ops
from moekit.errors import BackendError
from moekit.kernels import cpu_choice, cpu_ffn, recycle, reference
from moekit.ops import GradSlot, sort_rows

torch.set_num_threads(1)
NATIVE, WHY = cpu_ffn.fits(torch.bfloat16)
native = pytest.mark.skipif(not NATIVE, reason=WHY)
FORMS = [pytest.param("native", marks=native), "torch"]
KINDS = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
NAMES = ("y", "x", "gate", "gate_up", "down")
# N, K, E, D, F: one position, none, more experts than rows, tails of 8, 16, 48 and 64, experts past one chunk and 320
SHAPES = [(7, 2, 5, 6, 4), (1, 3, 4, 6, 8), (0, 2, 3, 4, 2), (2, 1, 9, 4, 6), (70, 3, 4, 8, 16), (400, 2, 3, 70, 50)]
ODD = [(7, 2, 5, 7, 3), (90, 2, 3, 67, 33)]


@pytest.fixture
def form(request, monkeypatch):
    """ops runs this form, whatever is faster."""
    monkeypatch.setattr(cpu_choice, "_choose", lambda *_: request.param)
    return request.param


@pytest.fixture
def fresh(monkeypatch):
    """No choice made yet, and every shape is measured."""
    monkeypatch.setattr(cpu_choice, "_choices", {})
    monkeypatch.setattr(cpu_choice, "SMALL", 0)


def case(N, K, E, D, F, dtype, load="random", seed=2):
    g = torch.Generator().manual_seed(seed)
    expert = torch.rand(N, E, generator=g).argsort(1)[:, :K]
    if load == "one":  # all positions have expert 1 first, and expert 0 has none
        expert = torch.arange(1, K + 1).expand(N, K)
    shapes = (((N, D), 1), ((N, K), 1), ((E, 2 * F, D), D**-0.5), ((E, D, F), F**-0.5), ((N, D), 1))
    *tensors, dy = ((torch.randn(s, generator=g) * scale).to(dtype) for s, scale in shapes)
    return expert, [t.requires_grad_() for t in tensors], dy


def run(expert, tensors, dy, moe_ffn=ops.moe_ffn):
    y = moe_ffn(tensors[0], sort_rows(expert, tensors[2].shape[0]), *tensors[1:])
    return (y.detach(), *torch.autograd.grad(y, tensors, dy))


def exact(expert, tensors, dy):
    return run(expert, [t.detach().double().requires_grad_() for t in tensors], dy.double(), reference.moe_ffn)


def assert_near(got, want, tolerance, names=NAMES):
    for name, a, b in zip(names, got, want, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm(), name


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("load", ["random", "one"])
@pytest.mark.parametrize("dtype, tolerance", KINDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(form, shape, dtype, tolerance, load):
    inputs = case(*shape, dtype, load)
    assert_near(run(*inputs), exact(*inputs), tolerance)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_widths_in_float32(form, shape):
    inputs = case(*shape, torch.float32)
    assert_near(run(*inputs), exact(*inputs), 1e-5)


@native
def test_odd_widths_in_bfloat16_run_in_torch_and_it_is_said():
    """Pairs of bfloat16 along an odd row would reach into the next one."""
    assert cpu_ffn.fits(torch.bfloat16, 7, 4) == (False, "native form: bfloat16 needs even widths, not 7 and 4")
    inputs = case(*ODD[0], torch.bfloat16)
    assert_near(run(*inputs), exact(*inputs), 1e-2)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("dtype, tolerance", KINDS, ids=["fp32", "bf16"])
def test_strided_inputs(form, dtype, tolerance):
    """x and gates as columns of wider tensors, weights transposed, dy expanded from one number."""
    expert, (x, gate, up, down), _ = case(20, 2, 4, 12, 6, dtype)
    strided = [
        torch.stack((x, x), 2)[:, :, 0], torch.stack((gate, gate), 2)[:, :, 1],
        up.transpose(1, 2).contiguous().transpose(1, 2), torch.cat((down, down), 2)[:, :, : down.shape[2]],
    ]  # fmt: skip
    inputs = [t.detach().requires_grad_() for t in strided]
    assert not any(t.is_contiguous() for t in inputs)
    dy = torch.ones((), dtype=dtype).expand(20, 12)
    assert_near(run(expert, inputs, dy), exact(expert, [x, gate, up, down], dy), tolerance)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("dtype, tolerance", KINDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "order_R"])
def test_nan_in_the_room_reaches_nothing(form, ordered, dtype, tolerance):
    """Rows past the last expert's, and their dy, hold NaN; odd counts, so that pairs of rows meet the room."""
    counts, room, D, F = (0, 51, 3, 0, 1), 9, 20, 10
    total, g = sum(counts), torch.Generator().manual_seed(1)
    x, up, down, dy = (
        torch.randn(s, generator=g).to(dtype) for s in ((total + room, D), (5, 2 * F, D), (5, D, F), (total + room, D))
    )
    order = torch.arange(total) if ordered else torch.randperm(total + room, generator=g)[:total]
    for t in (x, dy):
        filled = t[:total].clone()
        t.fill_(torch.nan)[order] = filled
    tensors, offset = [t.requires_grad_() for t in (x, up, down)], torch.tensor(counts).cumsum(0)
    y = ops.expert_ffn(x, offset, up, down, None if ordered else order)
    got = (y.detach(), *torch.autograd.grad(y, tensors, dy))
    wide = [t.detach().double() for t in (x[order], up, down)]
    wide = [t.requires_grad_() for t in wide]
    rows = ops.Sorted(torch.arange(total), torch.arange(total), offset)
    want = reference.moe_ffn(wide[0], rows, torch.ones(total, 1, dtype=torch.float64), *wide[1:])
    wants = (want.detach(), *torch.autograd.grad(want, wide, dy[order].double()))
    room_rows = torch.ones(total + room, dtype=torch.bool).index_fill(0, order, False)
    for a in got[:2]:
        assert not a[room_rows].any()
    assert_near((got[0][order], got[1][order], *got[2:]), wants, tolerance, ("y", "x", "gate_up", "down"))
    assert not got[2][0].any() and not got[3][3].any()


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_poisoned_memory_reaches_nothing(form, monkeypatch):
    """All buffers come from recycled blocks full of NaN."""
    monkeypatch.setattr(recycle, "LEAST", 0)
    monkeypatch.setattr(recycle, "_idle", {})
    inputs = case(60, 2, 5, 16, 12, torch.float32, "one")
    want = exact(*inputs)
    for _ in range(3):
        del _
        got = run(*inputs)
        assert_near(got, want, 1e-5)
        for t in got:
            t.fill_(torch.nan)
        del got, t
        for size, blocks in recycle._idle.items():
            for block in blocks:
                torch.frombuffer(block, dtype=torch.uint8, count=size).fill_(255)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("needs", range(1, 16))
def test_inputs_that_need_no_gradient_get_none(form, needs):
    expert, tensors, dy = case(9, 2, 4, 6, 4, torch.float32)
    want = run(expert, tensors, dy)[1:]
    cut = [t.detach().requires_grad_(bool(needs >> i & 1)) for i, t in enumerate(tensors)]
    ops.moe_ffn(cut[0], sort_rows(expert, 4), *cut[1:]).backward(dy)
    for t, w in zip(cut, want):
        assert torch.equal(t.grad, w) if t.requires_grad else t.grad is None


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("dtype, tolerance", KINDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_slots_are_overwritten_then_added_to(form, dtype, tolerance, contiguous):
    expert, tensors, dy = case(500, 1, 6, 16, 12, dtype)
    expert = expert.clamp(min=2)  # experts 0 and 1 get nothing, expert 2 more rows than one stretch of the sum
    want = exact(expert, tensors, dy)
    views = [torch.full(t.shape if contiguous else (*t.shape, 2), torch.nan) for t in tensors[2:]]
    for t, view in zip(tensors[2:], views):
        t.grad_slot = GradSlot(view if contiguous else view[..., 0])
    for times in (1, 2):
        y = ops.moe_ffn(tensors[0], sort_rows(expert, 6), *tensors[1:])
        got = torch.autograd.grad(y, tensors, dy, allow_unused=True)
        assert got[2] is got[3] is None
        assert_near((y.detach(), *got[:2]), want[:3], tolerance, NAMES[:3])
        for t, w in zip(tensors[2:], want[3:]):
            assert (t.grad_slot.view - times * w).norm() <= tolerance * times * w.norm()
            assert not t.grad_slot.view[:2].any() and t.grad_slot.filled


@native
@pytest.mark.parametrize("dtype, tolerance", KINDS, ids=["fp32", "bf16"])
def test_bits_depend_neither_on_threads_nor_on_other_rows(dtype, tolerance):
    """Every sum has one order. A position alone gives the bits that it gives in a batch, so cuts do not matter."""
    expert, tensors, dy = case(300, 2, 4, 36, 20, dtype)
    first = run(expert, tensors, dy, cpu_ffn.moe_ffn)
    try:
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            again = run(expert, tensors, dy, cpu_ffn.moe_ffn)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
    finally:
        torch.set_num_threads(1)
    for part in (slice(0, 1), slice(100, 170)):
        cut = [t[part] if i < 2 else t for i, t in enumerate(tensors)]
        some = run(expert[part], cut, dy[part], cpu_ffn.moe_ffn)
        assert all(torch.equal(a, b[part]) for a, b in zip(some[:3], first[:3]))


@native
def test_silu_at_its_ends_and_nan():
    """silu(-200) = 0, silu(200) = 200, silu(nan) = nan: one expert that is the identity up to the gate."""
    x = torch.tensor([[-200.0, 1], [200, 1], [torch.nan, 1], [-20, 1], [0.5, 1]])
    up = torch.tensor([[[1.0, 0], [0, 1]]])  # gate = x0, up = x1 = 1
    down = torch.tensor([[[1.0], [0]]])
    y = cpu_ffn.moe_ffn(x, sort_rows(torch.zeros(5, 1, dtype=torch.int64), 1), torch.ones(5, 1), up, down)[:, 0]
    want = torch.nn.functional.silu(x[:, 0].double())
    torch.testing.assert_close(y.double(), want, rtol=3e-7, atol=1e-30, equal_nan=True)


# ---------------------------------------------------------------------- which form runs


def test_the_faster_form_is_taken_recorded_and_replayed(fresh, monkeypatch):
    """torch must be 10 % faster; the key says the shape; a replayed choice is not measured again."""
    inputs = case(64, 2, 4, 16, 8, torch.float32)
    monkeypatch.setattr(cpu_ffn, "fits", lambda *_: (True, ""))
    key = "float32 E4 D16 F8 rows32 threads1"
    for took, best in (((1.0, 0.95), "native"), ((1.0, 0.9), "torch"), ((1.0, 3.0), "native")):
        cpu_choice._choices.clear()
        turns = dict(zip((cpu_choice.FORMS["native"], cpu_choice.FORMS["torch"]), took))
        monkeypatch.setattr(cpu_choice, "_seconds", lambda form, *_, turns=turns: turns[form])
        assert cpu_choice._choose(inputs[1][0], sort_rows(inputs[0], 4), *inputs[1][1:]) == best
        recorded = json.loads(json.dumps(ops.choices()))
        assert recorded == {key: {"form": best, "seconds": {"native": took[0], "torch": took[1]}}}
        assert f"{key}: {best}" in ops.explain()["moe_ffn"]
    monkeypatch.setattr(cpu_choice, "_seconds", None)
    for name in ("torch", "native"):
        ops.replay_choices({key: {"form": name, "seconds": {}}})
        assert cpu_choice._choose(inputs[1][0], sort_rows(inputs[0], 4), *inputs[1][1:]) == name


@native
def test_measuring_leaves_no_trace(fresh):
    """No gradient, no slot filled, no random number drawn, and the result is the chosen form's."""
    expert, tensors, _ = case(64, 2, 4, 16, 8, torch.float32)
    tensors[2].grad_slot = GradSlot(torch.full(tensors[2].shape, torch.nan))
    state = torch.get_rng_state()
    y = ops.moe_ffn(tensors[0], sort_rows(expert, 4), *tensors[1:])
    (chosen,) = ops.choices().values()
    assert all(v > 0 for v in chosen["seconds"].values()) and set(chosen["seconds"]) == {"native", "torch"}
    assert torch.equal(torch.get_rng_state(), state) and not tensors[2].grad_slot.filled
    assert all(t.grad is None for t in tensors) and tensors[2].grad_slot.view.isnan().all()
    assert torch.equal(y, cpu_choice.FORMS[chosen["form"]].moe_ffn(tensors[0], sort_rows(expert, 4), *tensors[1:]))


def test_choices_that_cannot_be_replayed_are_refused(fresh, monkeypatch):
    with pytest.raises(BackendError, match="no form 'fast'"):
        ops.replay_choices({"float32 E4 D16 F8 rows32 threads1": {"form": "fast", "seconds": {}}})
    monkeypatch.setattr(cpu_ffn, "fits", lambda *_: (False, "no compiler"))
    with pytest.raises(BackendError, match="no compiler"):
        ops.replay_choices({"float32 E4 D16 F8 rows32 threads1": {"form": "native", "seconds": {}}})
    assert ops.choices() == {}


def test_float64_and_the_torch_backend_run_in_torch():
    assert "torch, because native form: float32 and bfloat16" in ops.explain(dtype=torch.float64)["moe_ffn"]
    before = ops.set_backend("torch")
    try:
        assert ops.explain()["moe_ffn"].startswith("ragged")
    finally:
        ops.set_backend(before)


# ---------------------------------------------------------------------- building it

USE = """
import torch
from moekit import ops
rows = ops.sort_rows(torch.zeros(3, 1, dtype=torch.int64), 1)
y = ops.moe_ffn(torch.ones(3, 2), rows, torch.ones(3, 1), torch.ones(1, 4, 2), torch.ones(1, 2, 2))
print(ops.explain()["moe_ffn"], y.sum().item())
maps = {line.split()[-1] for line in open("/proc/self/maps") if "omp.so" in line or "omp-" in line or "omp5" in line}
print("RUNTIMES", len(maps))
"""


def start(code: str, cache, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "MOEKIT_CACHE": str(cache), **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@native
def test_two_processes_build_at_once_into_an_empty_cache(tmp_path):
    """Both run; one library stays and nothing beside it; torch's OpenMP runtime is the only one."""
    jobs = [start(USE, tmp_path / "cache") for _ in range(2)]
    for job in jobs:
        text, _ = job.communicate(timeout=200)
        assert job.returncode == 0 and "native or torch" in text and "RUNTIMES 1" in text, text
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".so"]


@pytest.mark.parametrize(
    "env, why",
    [({"CXX": "no-such-compiler"}, "no-such-compiler is not on the path"), ({"CXX": "false"}, "could not be built")],
    ids=["none", "broken"],
)
def test_without_a_compiler_torch_runs_and_explain_says_why(tmp_path, env, why):
    text, _ = (job := start(USE, tmp_path, **env)).communicate(timeout=100)
    assert job.returncode == 0 and "torch, because native form" in text, text
    assert why in text or not NATIVE


def test_import_builds_nothing(tmp_path):
    job = start("import moekit, moekit.ops; moekit.ops.backend()", tmp_path / "cache")
    assert job.communicate(timeout=100)[0] == "" and not (tmp_path / "cache").exists()


# ---------------------------------------------------------------------- recycled tensors


def test_blocks_come_back_when_storages_go_and_are_distinct_while_held(monkeypatch):
    monkeypatch.setattr(recycle, "_idle", {})
    monkeypatch.setattr(recycle, "_total", 0)
    monkeypatch.setattr(recycle, "IDLE", 3 << 20)
    a, b = (recycle.empty((512, 1024), torch.float32) for _ in range(2))
    assert a.data_ptr() != b.data_ptr() and a.untyped_storage().data_ptr() % 64 == 0
    place, view = a.data_ptr(), a[3]
    del a
    assert recycle._total == 0, "a view still holds the storage"
    view.fill_(7)
    assert recycle.empty((512, 1024), torch.float32).data_ptr() not in (place, b.data_ptr())
    del view
    recycle._idle.clear()
    monkeypatch.setattr(recycle, "_total", 0)
    del b
    assert recycle._total == 2 << 20
    recycle.empty((700, 1024), torch.float32)  # over the bound together: it is not kept
    assert recycle._total == 2 << 20 and [len(v) for v in recycle._idle.values() if v] == [1]


def test_a_forked_child_writes_into_its_own_copy():
    t = recycle.empty((1024, 1024), torch.float32).fill_(1)
    pid = os.fork()
    if pid == 0:
        t.numpy()[:] = 2
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and t[0, 0] == 1


@native
def test_the_fresh_gradient_of_a_large_weight_is_recycled_and_never_shared():
    expert, tensors, dy = case(4, 1, 4, 256, 256, torch.float32)
    y = ops.moe_ffn(tensors[0], sort_rows(expert, 4), *tensors[1:])
    first, second = (torch.autograd.grad(y, tensors[2], dy, retain_graph=True)[0] for _ in range(2))
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)
    place = first.data_ptr()
    del first
    assert torch.autograd.grad(y, tensors[2], dy)[0].data_ptr() == place
