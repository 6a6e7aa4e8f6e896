"""Expert parallelism is invisible: ranks that share the experts compute what one process computes."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from moekit import ops
from moekit.config import LearnerConfig
from moekit.errors import BackendError, ConfigError
from moekit.learner import dispatch, transport
from moekit.learner.dispatch import SyncDispatcher, make_dispatcher
from moekit.learner.mesh import World
from moekit.measure.memory import saved_bytes
from moekit.model.moe import LocalDispatcher

sys.path.insert(0, str(Path(__file__).parent))
d = importlib.import_module("dispatching")
torch.set_num_threads(1)
PARTS = ("y", "dx", "dgate", "dup", "ddown")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ALL = ("sync", "shared_memory", "padded", "symmetric")


def joined(ranks):
    """All ranks' positions, and all experts, under each other."""
    return {name: torch.cat([r[name] for r in ranks]) for name in PARTS}


def check(got, want, tolerance):
    for name in PARTS:
        a, b = got[name].double(), want[name].double()
        assert float((a - b).norm()) <= tolerance * float(b.norm()), name  # exactly zero where the oracle is


def test_the_fixture_is_not_symmetric():
    """Uneven positions, one rank without any, an expert with most rows of top-1 and one without a row."""
    for size, sizes in d.POSITIONS.items():
        (ranks, _), count = d.layer(sizes, 1, torch.float64), torch.zeros(d.E)
        for r in ranks:
            count += torch.bincount(r[1].reshape(-1), minlength=d.E)
        assert count[d.CROWDED] > count.sum() / 2 and count[d.EMPTY] == 0 and len(set(sizes)) == size
    assert 0 in d.POSITIONS[4]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_process(size, dtype, top_k):
    """Output, gradients of x, gates and weights, rows by class and expert: float64 to 1e-12."""
    ranks = [r["sync", dtype, top_k] for r in d.results(size)]
    want = d.alone(*d.layer(d.POSITIONS[size], top_k, dtype))
    check(joined(ranks), want, TOLERANCE[dtype])
    assert all(r[n].dtype == dtype for r in ranks for n in PARTS)
    assert torch.equal(sum(r["dispatched"] for r in ranks), want["dispatched"])
    held = d.E // size
    for at, r in enumerate(ranks):  # what a rank counts ran on it
        away = [e for e in range(d.E) if not at * held <= e < (at + 1) * held]
        assert not r["dispatched"][:, away].any() and not r["dropped"].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_all_rows_on_one_expert_and_no_rows_at_all(size, name):
    ranks = [r[name, "one expert"] for r in d.results(size)]
    want = d.alone(*d.layer(d.POSITIONS[size], 1, torch.float64, load="one"))
    check(joined(ranks), want, 1e-12)
    assert int(ranks[d.CROWDED * size // d.E]["dispatched"].sum()) == sum(d.POSITIONS[size])
    for r in (r[name, "nothing"] for r in d.results(size)):
        assert r["y"].shape == (0, d.D) and not r["dup"].any() and not r["ddown"].any()
        assert not r["dispatched"].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_two_microbatches_in_flight(size, name):
    """Both forwards, then both backwards in the order of the forwards, as a pipeline runs them; other sizes each."""
    for at, positions in enumerate((d.POSITIONS[size], tuple(reversed(d.POSITIONS[size])))):
        want = d.alone(*d.layer(positions, 2, torch.float64, seed=at))
        check(joined([r[name, "in flight"][at] for r in d.results(size)]), want, 1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_recomputation_reuses_the_plan(size, name):
    """Same bits and counts; the backward exchanges rows four times, and neither counts nor classes again."""
    for got in d.results(size):
        again, once = got[name, "recomputed"], got[name, "counted"]
        assert all(torch.equal(again[n], once[n]) for n in PARTS) and again["counted alike"]
        assert again["calls"] == {"barrier" if name in ("shared_memory", "symmetric") else "alltoall_base_": 4}
        assert again["sent"] == {"rows": once["sent"]["rows"]}  # one more forward, and the backward


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_backward_meets_on_all_ranks(size, name):
    """Rank 0's loss takes no value of its output; the last rank's x is a constant; rank 1 of 4 has no position.

    Nobody waits for a collective that never comes, and rank 0's rows add zero to the weights' gradients.
    """
    ranks = [r[name, "without labels"] for r in d.results(size)]
    layer, weights = d.layer(d.POSITIONS[size], 2, torch.float64)
    layer[0] = (*layer[0][:4], torch.zeros_like(layer[0][4]))
    want = d.alone(layer, weights)
    for part in ("dup", "ddown"):
        torch.testing.assert_close(torch.cat([r[part] for r in ranks]), want[part], rtol=1e-12, atol=1e-12)
    assert not ranks[0]["dx"].any() and ranks[-1]["dx"] is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [2, 4])
def test_without_gradient(size, name):
    for got in d.results(size):
        assert torch.equal(got[name, "no gradient"], got[name, torch.float64, 2]["y"])


@pytest.mark.parametrize("name", ALL)
def test_bc_049_an_expert_gradient_is_a_sum_over_ranks(name):
    """Tokens 1 and 3 on two ranks, y = w x, mean over both: dw = (1 + 3) / 2 = 2, on one process and on two."""
    alone = d.linear(LocalDispatcher(), World(), [[[1.0, 3.0]]])
    first, second = (r[name, "BC-049"] for r in d.results(2))
    assert alone["dw"] == pytest.approx(2.0, rel=1e-14) and first["dw"] == pytest.approx(2.0, rel=1e-14)
    assert second["dw"] == 0.0  # the expert that nobody chose lives there
    dense = [*first["dx"][0], *second["dx"][0], *alone["dx"][0]]  # w / 2 everywhere
    assert dense == pytest.approx([0.5] * 4, rel=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_bc_053_ranks_with_different_numbers_of_microbatches(name):
    """Rank 0 has [1], [2], [3], rank 1 has [6] and two empty rounds: loss 12 / 4, an empty round routes nothing."""
    ranks = [r[name, "BC-053"] for r in d.results(2)]
    assert sum(r["loss"] for r in ranks) == pytest.approx(3.0, rel=1e-14)
    assert ranks[0]["dw"] == pytest.approx(3.0, rel=1e-14)
    assert [r["rows"] for r in ranks] == [[2, 1, 1], [0, 0, 0]]  # of rank 1, only in round one


@pytest.mark.parametrize("size", [2, 4])
def test_rows_cross_the_wire_once_each_way(size):
    """Bytes by counting in plain Python: what leaves for another rank's expert, and comes back; forward and backward.

    Counts: E integers of which each rank keeps its share; one byte of class for each row that leaves.
    """
    ranks, _ = d.layer(d.POSITIONS[size], 2, torch.float64)
    held, left, served = d.E // size, [0] * size, [0] * size
    for at, (_, expert, *_) in enumerate(ranks):
        for e in expert.reshape(-1).tolist():
            if e // held != at:
                left[at] += 1
                served[e // held] += 1
    for at, got in enumerate(d.results(size)):
        sent = got["sync", "counted"]["sent"]
        assert sent["rows"] == 2 * (left[at] + served[at]) * d.D * 8
        assert sent["metadata"] == 8 * (d.E - held) + left[at]


def test_saved_bytes_are_the_rows_and_their_pre_activations():
    """Arrived rows, returned rows and [R, 2F]; besides them gates and indices: no further copy of rows."""
    (mine,), weights = d.layer((50,), 3, torch.float64)
    up, down = (nn.Parameter(w) for w in weights)
    x, gate = mine[0].requires_grad_(), mine[2].requires_grad_()
    with saved_bytes() as saved:
        y, _ = SyncDispatcher(World(), d.E)(x, mine[1], gate, up, down)
    rows = 150
    floats = rows * (d.D + d.D + 2 * d.F + 1) * 8  # the last is the gates
    indices = rows * 2 * 8  # where rows are in expert order, and at home
    assert saved.bytes == floats + indices
    y.sum().backward()
    assert torch.isfinite(gate.grad).all()


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="7 experts cannot be split over 2"):
        SyncDispatcher(World(0, 2), 7)
    (mine,), weights = d.layer((3,), 1, torch.float64)
    with pytest.raises(ConfigError, match="8 experts here, not 16"):
        SyncDispatcher(World(), 16)(*mine[:3], *weights)


def test_the_dispatcher_of_a_configuration(monkeypatch):
    """One process: local. Two processes here: shared memory. Several hosts: padded, and the reason is given."""
    alone = make_dispatcher(LearnerConfig(), World(), 8)
    assert isinstance(alone, LocalDispatcher) and alone.explain.startswith("local")
    for r in d.results(2):
        assert r["made sync"][0] == "SyncDispatcher" and r["made sync"][1].startswith("sync")
        assert r["made rowwise"] == ("RowwiseDispatcher", "rowwise, shared_memory: CPU ranks on one host")
    for module in (dispatch, transport):
        monkeypatch.setattr(module, "places", lambda ep: ["a/1", "b/1"])
    monkeypatch.setattr(World, "cuda", False)
    made = make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise"), World(0, 2), 8)
    assert made.explain.startswith("rowwise, padded: CPU ranks on several hosts")
    with pytest.raises(ConfigError, match="one host.*transport='padded'"):
        make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise", transport="shared_memory"), World(0, 2), 8)
    monkeypatch.setattr(World, "cuda", True)
    made = make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise"), World(0, 2), 8)
    assert made.explain.startswith("rowwise, padded: CUDA ranks on several hosts")
    monkeypatch.setattr(dispatch, "places", lambda ep: ["a/1", "a/1"])
    before = ops.set_backend("torch")
    try:
        made = make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise"), World(0, 2), 8)
        assert made.explain.startswith("rowwise, padded: CUDA ranks on one host, rows by address refused")
        with pytest.raises(BackendError, match=r"set_backend\('torch'\).*transport='padded'"):
            make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise", transport="symmetric"), World(0, 2), 8)
        ops.set_backend("auto")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        made = make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise"), World(0, 2), 8)
        assert made.explain == "rowwise, symmetric: CUDA ranks on one host"
    finally:
        ops.set_backend(before)
    with pytest.raises(ConfigError, match="not for GPUs.*'padded'"):
        make_dispatcher(LearnerConfig(ep=2, dispatch="rowwise", transport="shared_memory"), World(0, 2), 8)


def test_ranks_on_gpus_are_known_by_their_process_group(monkeypatch):
    """The launcher's group is cpu:gloo,cuda:nccl: rows are on GPUs, numbers of the host still go by gloo."""
    for backend, cuda, kind in (("cpu:gloo,cuda:nccl", True, "cpu"), ("gloo", False, "cpu")):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_backend", lambda group, backend=backend: backend)
        assert World(0, 2).cuda == cuda and World(0, 2).device.type == kind
