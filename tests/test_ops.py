"""The door to kernels: small operations against their definitions, and the choice of backend."""

from __future__ import annotations

import pytest
import torch

from moekit import ops
from moekit.errors import BackendError, ConfigError, MoekitError
from moekit.kernels import reference
from moekit.kernels.attention import ShortCausal

torch.set_num_threads(1)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def plain():
    before = ops.set_backend("reference")
    yield
    ops.set_backend(before)


def leaves(*shapes, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_rms_norm_value():
    """Mean square of (3, 4) is 12.5: x / sqrt(12.5)."""
    got = ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(got, torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]]))


def test_rope_value():
    """A quarter turn sends (1, 0) to (0, 1); pairs are (i, i + d/2), so [1, 5, 0, 0] with angles (pi/2, 0)."""
    x = torch.tensor([[[1.0, 5.0, 0.0, 0.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    q, k = ops.rope(x, 2 * x, cos, sin)
    torch.testing.assert_close(q, torch.tensor([[[0.0, 5.0, 1.0, 0.0]]]))
    torch.testing.assert_close(k, 2 * q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_embedding_of_a_frequent_token_gets_its_whole_gradient(dtype):
    """In bfloat16 torch's own backward on a CPU stops adding when a sum is 256 times what comes: 2 % off here."""
    table, upstream = leaves((10, 8), (4096, 8), dtype=dtype)
    ids = torch.arange(4096) % 9
    y = ops.embedding(ids, table)
    (got,) = torch.autograd.grad(y, table, upstream)
    want = torch.zeros(10, 8, dtype=torch.float64).index_add(0, ids, upstream.double())
    assert torch.equal(y, table[ids]) and got.dtype == dtype and not got[9].any()
    assert (got.double() - want).norm() < max(1e-5, torch.finfo(dtype).eps) * want.norm()


@pytest.mark.parametrize("rows", [0, 1, 5, 65], ids=str)
def test_gradients_in_float64(rows):
    x, w, gate_up, q, k = leaves((rows, 6), (6,), (rows, 8), (rows, 3, 4), (rows, 1, 4))
    angle = torch.rand(rows, 2, dtype=torch.float64)
    check = torch.autograd.gradcheck
    assert check(lambda x, w: ops.rms_norm(x, w, 1e-5), (x, w)) if rows else True
    assert check(ops.swiglu, (gate_up,))
    assert check(lambda q, k: ops.rope(q, k, angle.cos(), angle.sin()), (q, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 64), (7, 3, 16), (0, 8), (1, 100)], ids=str)
def test_fast_forms_equal_the_reference(shape, dtype):
    """Same inputs; float64 to 1e-12, float32 to 1e-5, bfloat16 to its rounding. Strided inputs as attention makes."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    wide, w = leaves((*shape[:-1], 3 * shape[-1]), shape[-1:], dtype=dtype)
    x = wide[..., shape[-1] : 2 * shape[-1]]
    angle = torch.rand(shape[0], shape[-1] // 2, dtype=torch.float64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = x if x.ndim == 3 else x[:, None]
    pairs = [
        (lambda: ops.rms_norm(x, w, 1e-5), lambda: reference.rms_norm(x, w, 1e-5)),
        (lambda: ops.swiglu(x), lambda: reference.swiglu(x)),
        (lambda: ops.rope(heads, heads, cos, sin)[0], lambda: reference.rope(heads, cos, sin)),
    ]
    for fast, plain in pairs:
        got, want = fast(), plain()
        assert got.dtype == dtype and got.shape == want.shape
        dy = torch.randn(got.shape, dtype=torch.float64).to(dtype)
        a = torch.autograd.grad(got, (wide, w), dy, allow_unused=True)
        b = torch.autograd.grad(want, (wide, w), dy, allow_unused=True)
        for p, q in zip((got, *a), (want, *b)):
            assert (p is None) == (q is None)
            if p is not None:
                assert (p - q).double().norm() <= tolerance * q.double().norm() + 1e-30


def test_backend_is_chosen_put_back_and_explained(plain):
    assert ops.backend() == "reference"
    plain = ops.explain()
    assert plain.pop("rows_by_address").startswith("refused: set_backend('reference')")
    assert all(why.startswith("reference") for why in plain.values())
    assert ops.set_backend("auto") == "reference"
    assert all(not why.startswith("reference") for why in ops.explain().values())
    fused = {"moe_ffn", "expert_ffn", "choose_experts", "sort_rows", "token_logprobs", "rows_by_address", "mxfp8"}
    assert set(ops.explain()) == fused | {"rms_norm", "swiglu", "rope", "causal_attention"}
    assert ops.explain(dtype=torch.bfloat16, length=128)["causal_attention"].startswith("products")
    assert ops.explain(dtype=torch.bfloat16, length=2048)["causal_attention"].startswith("flash")
    assert ops.explain(dtype=torch.float32, length=128)["causal_attention"].startswith("flash")
    assert "padded to 16" in ops.explain(dtype=torch.bfloat16)["moe_ffn"]


@pytest.mark.parametrize(
    "capability, says",
    [
        ((8, 0), "torch: exact emulation, codes are read back (compute capability 8.0 has no E4M3, 8.9 has)"),
        ((9, 0), "triton: exact emulation, codes are read back (compute capability 9.0)"),
        ((10, 0), "triton: block-scaled dot on the matrix unit (compute capability 10.0)"),
    ],
)
def test_which_form_of_mxfp8_a_gpu_runs(capability, says, monkeypatch):
    """By compute capability; weight gradients stay wide and it says so."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(ops, "find_spec", lambda _: True)
    said = ops.explain("cuda", torch.bfloat16)["mxfp8"]
    assert said.startswith(says) and "dgrad in MXFP8, wgrad in torch.bfloat16" in said
    before = ops.set_backend("torch")
    try:
        assert ops.explain("cuda", torch.bfloat16)["mxfp8"].startswith("torch: exact emulation")
    finally:
        ops.set_backend(before)


def test_what_runs_on_cuda_depends_on_the_dtype(monkeypatch):
    """float16 has no fused log-probs, float64 no Triton matmul: that one reads the host, and both still sort there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for dtype, kernels in (
        (torch.bfloat16, {"moe_ffn", "expert_ffn", "choose_experts", "token_logprobs"}),
        (torch.float16, {"moe_ffn", "expert_ffn", "choose_experts"}),
        (torch.float64, set()),
    ):
        said = ops.explain("cuda", dtype)
        found = {name for name, what in said.items() if what.startswith("triton") and name != "mxfp8"}
        assert found == kernels | {"sort_rows", "rows_by_address"}
        assert ("reads row counts on the host" in said["moe_ffn"]) == (dtype == torch.float64)
    assert "float32 or bfloat16" in ops.explain("cuda", torch.float16)["token_logprobs"]


def test_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="'cuda'.*'auto', 'triton', 'torch' or 'reference'"):
        ops.set_backend("cuda")
    assert ops.backend() == "auto"


def test_weights_that_do_not_fit_are_named():
    rows = ops.sort_rows(torch.tensor([[0]]), 2)
    with pytest.raises(ConfigError, match=r"gate_up \(2, 6, 4\)") as caught:
        ops.moe_ffn(torch.zeros(1, 3), rows, torch.ones(1, 1), torch.zeros(2, 6, 4), torch.zeros(2, 3, 3))
    assert isinstance(caught.value, MoekitError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_attention_forms_equal_the_reference_in_float64(heads, groups):
    """The product form is chosen in bfloat16 only, but it is right in any dtype (its softmax is float32)."""
    tensors = leaves((3, 7, heads, 6), (3, 7, groups, 6), (3, 7, groups, 6))
    want = reference.causal_attention(*tensors)
    dy = torch.randn(want.shape, dtype=torch.float64)
    want = (want, *torch.autograd.grad(want, tensors, dy))
    for form, tolerance in ((ShortCausal.apply, 1e-6), (ops.causal_attention, 1e-12)):
        got = form(*tensors)
        for a, b in zip((got, *torch.autograd.grad(got, tensors, dy)), want):
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("length", [1, 5, 64, 600], ids=str)
def test_attention_in_bf16_stays_near_float64(length):
    """On both sides of the limit at 512 positions."""
    tensors = leaves((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 8), dtype=torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    dy = torch.randn(2, length, 4, 8).bfloat16()
    got, want = ops.causal_attention(*tensors), ops.causal_attention(*wide)
    pairs = zip((got, *torch.autograd.grad(got, tensors, dy)), (want, *torch.autograd.grad(want, wide, dy.double())))
    for a, b in pairs:
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() <= 1e-2 * b.norm() + 1e-12
