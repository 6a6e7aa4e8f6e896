"""Sync-free dispatch: the keep decision against a plain loop, the bits of the synchronized path, no host read."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moekit import ops
from moekit.errors import ConfigError
from moekit.learner import transport
from moekit.learner.dispatch import SyncDispatcher
from moekit.learner.mesh import World
from moekit.learner.rowwise import RowwiseDispatcher

sys.path.insert(0, str(Path(__file__).parent))
d = importlib.import_module("dispatching")
torch.set_num_threads(1)
PARTS = ("y", "dx", "dgate", "dup", "ddown")
TRANSPORTS = ("shared_memory", "padded", "symmetric")


class Gathered(World):
    """A rank that is told what the others' counts are."""

    def all_gather(self, out, part, kind="parameters"):
        assert torch.equal(part, self.counts[self.rank])
        return out.copy_(self.counts.reshape(-1))

    def gather(self, value):
        return [value] * self.size

    @property
    def device(self):
        return torch.device("cpu")


def plans(experts, total, capacity, name):
    """Every rank's plan of one layer, and the dispatchers that made them."""
    sizes, made = tuple(len(e) for e in experts), []
    counts = torch.stack([torch.bincount(e.reshape(-1), minlength=total) for e in experts])
    for rank, expert in enumerate(experts):
        world = Gathered(rank, len(experts))
        object.__setattr__(world, "counts", counts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(transport.TRANSPORTS, "symmetric", d.Peers)
            dispatcher = RowwiseDispatcher(world, total, name, capacity)
        made.append((dispatcher, dispatcher.plan(expert, sizes)))
    return made


def loop(experts, total, room):
    """Place of every choice (rank, slot) -> (destination, row) or None, and rows of each destination and expert."""
    held, place, rows = total // len(experts), {}, {}
    for destination in range(len(experts)):
        at = 0
        for e in range(destination * held, (destination + 1) * held):
            for source, expert in enumerate(experts):
                for slot, chosen in enumerate(expert.reshape(-1).tolist()):
                    if chosen == e:
                        place[source, slot] = (destination, at) if at < room else None
                        rows[e] = rows.get(e, 0) + (at < room)
                        at += 1
    return place, rows


FIXTURES = [(w, k, capacity, seed) for seed, (w, k, capacity) in enumerate(
    [(2, 1, 0.4), (2, 2, 1.0), (2, 3, 0.01), (4, 2, 0.7), (4, 2, 1.25), (4, 1, 0.3), (4, 3, 3.0), (3, 2, 0.9)]
)]  # fmt: skip


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("ranks, top_k, capacity, seed", FIXTURES, ids=str)
def test_keep_decision_against_a_plain_loop(ranks, top_k, capacity, seed, name):
    """Kept, dropped, offsets, rows for the wire and `need`, on every rank; what all ranks write is what arrives."""
    g = torch.Generator().manual_seed(seed)
    total, sizes = 2 * ranks, [int(n) for n in torch.randint(0, 12, (ranks,), generator=g)]
    sizes[seed % ranks] = 0
    experts = [(torch.rand(p, total, generator=g) ** 3).argsort(1)[:, :top_k] for p in sizes]
    room = max(1, math.ceil(capacity * top_k * sum(sizes) / ranks))
    place, rows = loop(experts, total, room)
    made = plans(experts, total, capacity, name)
    requested = [sum(int(e) // 2 == w for x in experts for e in x.reshape(-1)) for w in range(ranks)]
    for rank, (dispatcher, plan) in enumerate(made):
        assert plan.room == room and float(dispatcher.need) == max(requested) / room
        assert float(dispatcher.used) == min(max(requested), room) / room
        assert plan.offset_E.tolist() == [rows.get(2 * rank, 0), rows.get(2 * rank, 0) + rows.get(2 * rank + 1, 0)]
        mine = [place[rank, slot] for slot in range(sizes[rank] * top_k)]
        assert int(plan.sent) == sum(p is not None and p[0] != rank for p in mine)
        served = sum(p is not None and p[0] == rank and source != rank for (source, _), p in place.items())
        assert int(plan.served) == served
        lost = [sum(p is None for p in mine[i * top_k : (i + 1) * top_k]) for i in range(sizes[rank])]
        assert plan.dropped_P.tolist() == lost
        if name == "shared_memory":
            nowhere = rank * (room + 1) + room
            want = [nowhere if p is None else p[0] * (room + 1) + p[1] for p in mine]
            assert plan.index_KP.t().reshape(-1).tolist() == want
        if name == "symmetric":
            assert plan.index_KP.tolist() == torch.arange(sizes[rank] * top_k).view(top_k, -1).tolist()
            to = zip(*(t.view(top_k, -1).t().reshape(-1).tolist() for t in (plan.rank_S, plan.row_S)))
            assert [None if row < 0 else (home, row) for home, row in to] == mine
    if name == "padded":  # do by hand what the all-to-all does: tag every choice, swap blocks, see where tags are
        block = made[0][1].block
        sent = []
        for rank, (_, plan) in enumerate(made):
            buffer = torch.full((ranks * block + 1,), -1)
            buffer[plan.index_KP.t().reshape(-1)] = torch.arange(sizes[rank] * top_k)
            sent.append(buffer)
        for rank, (_, plan) in enumerate(made):
            got = torch.cat([s[rank * block : (rank + 1) * block] for s in sent] + [torch.tensor([-1])])[plan.at_R]
            want = [-1] * room
            for (_, slot), p in place.items():
                if p is not None and p[0] == rank:
                    want[p[1]] = slot
            assert got.tolist() == want


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_without_overflow_the_bits_of_sync(name, size, dtype, top_k):
    """Forward, dx, d gates, weight gradients and counts, on every rank."""
    for got in d.results(size):
        want = got["sync", dtype, top_k]
        assert all(torch.equal(got[name, dtype, top_k][n], want[n]) for n in (*PARTS, "dispatched", "dropped"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_dropped_rows_are_as_if_their_gate_were_zero(name, size):
    """Against one process with these gates zero: they add nothing and have no gradient, their gates neither."""
    layer, weights = d.layer(d.POSITIONS[size], 2, torch.float64)
    room = math.ceil(0.6 * 2 * sum(d.POSITIONS[size]) / size)
    place, _ = loop([r[1] for r in layer], d.E, room)
    kept = [torch.tensor([place[r, s] is not None for s in range(2 * p)], dtype=torch.bool).view(p, 2)
            for r, p in enumerate(d.POSITIONS[size])]  # fmt: skip
    assert not all(k.all() for k in kept)
    want = d.alone([(x, e, gate * k, c, dy) for (x, e, gate, c, dy), k in zip(layer, kept)], weights)
    want["dgate"] *= torch.cat(kept)
    got = [r[name, "overflow"] for r in d.results(size)]
    for part in PARTS:
        torch.testing.assert_close(torch.cat([r[part] for r in got]), want[part], rtol=1e-12, atol=1e-12, msg=part)
    assert not torch.cat([r["dgate"] for r in got])[~torch.cat(kept)].any()
    for at, r in enumerate(got):  # by class: kept of this rank's rows + dropped = requested
        positions = layer[at][3]
        assert r["dropped"].tolist() == [int((~kept[at])[positions == c].sum()) for c in range(4)]
    requested = torch.bincount(torch.cat([r[3] for r in layer]), minlength=4) * 2
    assert torch.equal(sum(r["dispatched"].sum(1) + r["dropped"] for r in got), requested)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_need_says_that_rows_were_dropped_alike_on_all_ranks(name, size):
    layer, _ = d.layer(d.POSITIONS[size], 2, torch.float64)
    chosen = torch.cat([r[1].reshape(-1) for r in layer]) // (d.E // size)
    room = math.ceil(0.6 * 2 * sum(d.POSITIONS[size]) / size)
    for r in d.results(size):
        assert r[name, "overflow"]["need"] == int(torch.bincount(chosen).max()) / room > 1
        assert r[name, "overflow"]["used"] == 1.0 and r[name, "overflow"]["reset"] == 0.0


def test_need_is_the_largest_since_reset():
    """One process, 6 rows each: capacities 1.0, 0.5 and 2.0 give needs 1, 2 and 0.5."""
    dispatcher = RowwiseDispatcher(World(), 4, "padded", 1.0)
    expert = torch.arange(6).view(6, 1) % 4
    for capacity, want in ((2.0, 0.5), (1.0, 1.0), (0.5, 2.0), (2.0, 2.0)):
        dispatcher.capacity = capacity
        dispatcher.plan(expert, (6,))
        assert float(dispatcher.need) == want and float(dispatcher.used) == min(want, 1.0)
    dispatcher.reset()
    assert float(dispatcher.need) == 0.0


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="'telepathy' is not one of shared_memory, padded, symmetric"):
        RowwiseDispatcher(World(), 4, "telepathy", 1.0)
    with pytest.raises(ConfigError, match=r"sizes=\(\), rank 0 has 6"):
        RowwiseDispatcher(World(), 4, "padded", 1.0).plan(torch.zeros(6, 1, dtype=torch.int64), ())


@pytest.fixture
def fake_world():
    """Two ranks of torch's fake backend: collectives are accepted and move nothing."""

    class Here(World):
        def gather(self, value):
            return [value] * self.size

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Here(0, 2, dist.group.WORLD)
    dist.destroy_process_group()


def faked(make, ep):
    """Forward and backward of a layer on tensors without values, the experts' matmuls replaced."""
    with FakeTensorMode(allow_non_fake_inputs=True):  # a shared window is a real tensor
        shapes = ((7, d.D), (7, 2), (2, 2 * d.F, d.D), (2, d.D, d.F))
        x, gate, up, down = (torch.randn(s, requires_grad=True) for s in shapes)
        expert, class_P = torch.zeros(7, 2, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
        y, counts = make()(x, expert, gate, up, down, class_P, (7, 3))
        y.sum().backward()
        assert x.grad.shape == x.shape and gate.grad.shape == gate.shape and counts.dispatched_CE.shape == (4, 4)


def test_no_host_read_and_no_shape_from_data(fake_world, monkeypatch):
    """Router to combine, forward and backward, under FakeTensorMode; the synchronized path fails the same test."""
    monkeypatch.setattr(ops, "expert_ffn", lambda x, offset, up, down, order=None: x * up.sum() * down.sum())
    monkeypatch.setattr(transport, "map_segment", lambda ep, size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setitem(transport.TRANSPORTS, "symmetric", d.Peers)
    monkeypatch.setattr("moekit.kernels.rowwise._launch", lambda *_: None)
    for name in TRANSPORTS:
        faked(lambda name=name: RowwiseDispatcher(fake_world, 4, name, 1.25), fake_world)
    with pytest.raises(DataDependentOutputException):
        faked(lambda: SyncDispatcher(fake_world, 4), fake_world)


@pytest.mark.parametrize("size", [1, 2])
def test_bc_033_a_buffer_keeps_rows_by_position(size):
    """BC-033: two positions want expert 0, gates 0.6 and 0.9. Room for one: the first is served, the second comes out
    as exactly 0, has no gradient and is counted. Room for both: both are served, none is dropped."""
    dispatcher = RowwiseDispatcher(World(), 2, "padded", 1.0)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    gate = torch.tensor([[0.6], [0.9]], dtype=torch.float64, requires_grad=True)
    g = torch.Generator().manual_seed(0)
    up, down = (torch.randn(*n, generator=g, dtype=torch.float64).requires_grad_() for n in ((2, 6, 2), (2, 2, 3)))
    served = torch.tensor([[True], [size == 2]])
    dispatcher.capacity = size / 2
    y, counts = dispatcher(x, torch.zeros(2, 1, dtype=torch.long), gate, up, down, torch.tensor([0, 1]), (2,))
    whole = ops.swiglu(x @ up[0].T) @ down[0].T
    torch.testing.assert_close(y, gate * whole * served)
    assert y[1].any() == (size == 2)
    assert counts.dropped_C.tolist() == [0, 2 - size, 0, 0]
    assert counts.dispatched_CE.tolist() == [[1, 0], [size - 1, 0], [0, 0], [0, 0]]
    leaves = (x, gate, up, down)
    got = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((gate * whole * served).sum(), leaves)):
        torch.testing.assert_close(a, b)
    assert (size == 2) == bool(got[0][1].any()) == bool(got[1][1].any())
