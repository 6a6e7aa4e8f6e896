"""The whole model on Triton's kernels, interpreted: its router, sorting, experts and log-probs equal the torch forms;
and on a GPU nothing between router and combine would read the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction

from moekit import ops
from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.errors import BackendError
from moekit.kernels import reference
from moekit.measure.tokens import RowCounter
from moekit.model.moe import MoE
from moekit.model.transformer import Transformer
from moekit.objectives.logprobs import token_logprobs

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def put_back():
    before = ops.backend()
    yield
    ops.set_backend(before)


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that are launched."""
    seen, inner = [], InterpretedFunction.__getitem__

    def noted(self, grid):
        seen.append(self.fn.__name__)
        return inner(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", noted)
    return seen


EXPERTS = {"_rows_kernel", "_weight_kernel", "_forward_kernel", "_backward_kernel"}


@pytest.mark.parametrize("gate, bias", [("softmax", False), ("sigmoid", True), ("topk_softmax", False)])
def test_a_model_equals_the_torch_forms(launches, gate, bias):
    """Loss, all gradients, routes and rows by class and expert; two documents, padding, odd widths; fp32 to 1e-5."""
    config = ModelConfig(
        vocab=37, layers=2, heads=2, width=20, expert_width=11, experts=5, top_k=2, gate=gate, selection_bias=bias
    )
    model = Transformer(config, seed=3)
    if bias:
        for block in model.layers:
            block.moe.router.selection_bias.uniform_(-0.3, 0.3)
    g = torch.Generator().manual_seed(0)
    ids, segment = torch.randint(3, 37, (2, 9), generator=g), torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [-1] * 3])
    batch, weight, found = Batch.make(ids, segment=segment), torch.randn(12, generator=g), {}
    for backend in ("torch", "triton"):
        ops.set_backend(backend)
        counter = RowCounter.of(config)
        model.zero_grad()
        launches.clear()
        flat = batch.flat
        counter.positions(flat)
        out = model(flat, observer=counter, record=True)
        loss = (out.logprob_M * weight).sum()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[backend] = (loss.detach(), grads, [r.expert_NK for r in out.routes], counter, set(launches))
    (a, grad_a, routes_a, rows_a, none), (b, grad_b, routes_b, rows_b, kernels) = found.values()
    assert not none and kernels == EXPERTS | {"_choose", "_rank_kernel", "_forward", "_backward"}
    assert (a - b).abs() <= 1e-5 * a.abs()
    assert all(torch.equal(x, y) for x, y in zip(routes_a, routes_b))
    assert rows_a.metrics() == rows_b.metrics() and counted(rows_a) == counted(rows_b)
    for name, want in grad_a.items():
        assert (grad_b[name] - want).norm() <= 1e-5 * want.norm(), name


def counted(counter):
    """Every count of every pass, as plain numbers."""
    return {name: value.tolist() for name, value in counter.arrays().items()}


def test_every_operation_is_switched_by_the_backend(launches):
    """ "torch" and "reference" launch nothing, "triton" refuses what Triton has no form for, by name."""
    expert, logits, hidden = torch.tensor([[1, 0]]), torch.randn(1, 3), torch.randn(1, 4)
    calls = {
        "choose_experts": lambda: ops.choose_experts(logits, logits.softmax(-1), 2, "softmax"),
        "sort_rows": lambda: ops.sort_rows(expert, 3).slot_R,
        "token_logprobs": lambda: token_logprobs(hidden, torch.ones(5, 4), torch.tensor([3])),
    }
    found = {}
    for backend in ("reference", "torch", "triton"):
        ops.set_backend(backend)
        launches.clear()
        found[backend] = [call() for call in calls.values()]
        assert bool(launches) == (backend == "triton")
        said = ops.explain()
        assert all(said[name].startswith("triton") == (backend == "triton") for name in calls)
    for others in ("reference", "torch"):
        assert all(torch.allclose(a.float(), b.float()) for a, b in zip(found[others], found["triton"]))
    wide = logits.double()
    with pytest.raises(BackendError, match="choose_experts.*float64"):
        ops.choose_experts(wide, wide, 2, "softmax")
    many = torch.zeros(1, 1025)
    with pytest.raises(BackendError, match="16 of 1024 experts at most, not 2 of 1025"):
        ops.choose_experts(many, many, 2, "softmax")
    with pytest.raises(BackendError, match="token_logprobs.*one dtype, float32 or bfloat16"):
        token_logprobs(hidden.half(), torch.ones(5, 4).half(), torch.tensor([3]))
    assert ops.rows_by_address("cpu").__name__.endswith("rowwise")
    ops.set_backend("torch")
    with pytest.raises(BackendError, match=r"set_backend\('torch'\); use transport='padded'"):
        ops.rows_by_address("cpu")


def test_launches_are_on_the_device_of_the_tensor(monkeypatch):
    """Every operation that may launch enters `torch.cuda.device_of` with its first tensor."""
    entered, inner = [], torch.cuda.device_of

    def noted(x):
        entered.append(x)
        return inner(x)

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    x, expert = torch.randn(2, 32), torch.tensor([[1], [0]])
    rows, weights = ops.sort_rows(expert, 2), (torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    logits = torch.randn(2, 3)
    ops.moe_ffn(x, rows, torch.ones(2, 1), *weights)
    ops.expert_ffn(x, rows.offset_E, *weights)
    ops.choose_experts(logits, logits, 2, "softmax")
    token_logprobs(x, weights[1][0], torch.tensor([0, 1]))
    ops.quantise(x)
    ops.operands(weights[0])
    assert [id(t) for t in entered] == [id(t) for t in (expert, x, x, logits, x, x, weights[0])]


@pytest.mark.parametrize("precision", ["model", "mxfp8"])
def test_nothing_from_router_to_combine_reads_the_host(monkeypatch, precision):
    """A layer and the log-probs, forward and backward, on tensors without values, in the forms that CUDA takes: what
    asks for a value raises. The kernels themselves are not run. The torch forms fail the same; explain() says so."""
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def layer():
        config = ModelConfig(
            vocab=64, layers=1, heads=2, width=32, expert_width=32, experts=6, top_k=2, selection_bias=True
        )
        with FakeTensorMode():
            moe = MoE(config, 0, torch.bfloat16)
            if precision == "mxfp8":
                for weight in (moe.gate_up, moe.down):
                    made = ops.operands(weight)
                    weight.mx_cache = type("Cache", (), {"current": lambda self, made=made: made})()
            x = torch.randn(7, 32, dtype=torch.bfloat16, requires_grad=True)
            y, route = moe(x, None, real=7)
            head = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
            loss = token_logprobs(y, head, torch.zeros(7, dtype=torch.int64)).sum()
            (loss + route.gate_NK.sum()).backward()
            offset, order = torch.zeros(6, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
            ops.expert_ffn(x, offset, moe.gate_up, moe.down).sum().backward()
            ops.expert_ffn(x, offset, moe.gate_up, moe.down, order)
            assert x.grad.shape == x.shape and moe.router.weight.grad.shape == (6, 32)

    ops.set_backend("triton")
    layer()
    ops.set_backend("auto")
    assert "reads" not in ops.explain("cuda", torch.bfloat16)["moe_ffn"]
    ops.set_backend("torch")
    assert "reads row counts on the host" in ops.explain("cuda", torch.bfloat16)["expert_ffn"]
    with pytest.raises(DataDependentOutputException):
        layer()


def test_log_probs_of_the_reference():
    """The plain form that tests compare with, against torch's own cross-entropy in float64."""
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 5, generator=g, dtype=torch.float64) for n in (9, 11))
    label = torch.randint(0, 11, (9,), generator=g)
    want = -torch.nn.functional.cross_entropy(hidden @ head.T / 0.7, label, reduction="none")
    torch.testing.assert_close(reference.token_logprobs(hidden, head, label, 0.7), want)
