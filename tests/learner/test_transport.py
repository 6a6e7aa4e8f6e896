"""What carries rows, and what it costs: memory shared by processes, padded blocks; and what happens when it cannot."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from moekit.errors import BackendError, ConfigError, StorageError
from moekit.learner.mesh import Wire, World
from moekit.learner.rowwise import RowwiseDispatcher
from moekit.learner.transport import FOLDER, Plan, SharedMemory, map_segment, one_host, places

sys.path.insert(0, str(Path(__file__).parent))
d = importlib.import_module("dispatching")
torch.set_num_threads(1)


def ours():
    return set(FOLDER.glob("moekit-*"))


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_no_collective_carries_rows(size):
    """Forward and backward make one gather of counts and four barriers of a byte; nothing of floating point."""
    for got in d.results(size):
        calls = got["shared_memory", "counted"]["calls"]
        assert [name for name, _ in calls] == ["_allgather_base_"] + ["barrier"] * 4
        assert calls[0][1] == [(torch.int64, 8 * d.E * size), (torch.int64, 8 * d.E)]
        assert all(given == [(torch.uint8, 1)] for _, given in calls[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_counts_what_crosses(size):
    """A row put into, or read by, another rank is a row on the wire: as many bytes as the synchronized path sends.

    The counts differ: all of them go to everybody, [E] integers to W - 1 ranks.
    """
    for got in d.results(size):
        sync, shared = (got[name, "counted"]["sent"] for name in ("sync", "shared_memory"))
        assert shared["rows"] == sync["rows"] > 0
        counts = 8 * (d.E - d.E // size)
        assert shared["metadata"] - 8 * d.E * (size - 1) == sync["metadata"] - counts


@pytest.mark.parametrize("size", [2, 4])
def test_padding_is_counted(size):
    """W - 1 blocks of min(room, K * largest P) rows leave, four times; and their bytes of class, once."""
    sizes = d.POSITIONS[size]
    block = min(math.ceil(8.0 * 2 * sum(sizes) / size), 2 * max(sizes))
    for got in d.results(size):
        counted = got["padded", "counted"]
        assert counted["sent"]["rows"] == 4 * (size - 1) * block * d.D * 8
        assert counted["sent"]["metadata"] == (size - 1) * (block + 8 * d.E)
        assert [n for n, _ in counted["calls"]] == ["_allgather_base_"] + ["alltoall_base_"] * 5


@pytest.mark.parametrize("size", [2, 4])
def test_waiting_sleeps(size):
    """Rank 0 comes 0.7 s late: the others wait that long, and use a fraction of it as processor time."""
    for wall, busy in [r["timing"] for r in d.results(size)][1:]:
        assert wall >= 0.7 and busy < 0.2
    assert not d.results(size)[0]["files"]  # no file of a segment in use has a name


def test_a_peer_that_is_gone_is_an_error(tmp_path):
    """Rank 1 is killed: rank 0 is told so, in no time, and no file stays."""
    before = ours()
    codes, found = d.start(tmp_path, 2, "gone", timeout=60)
    assert codes == [0, -9] and found[0].startswith("BackendError: rank 0 of 2")
    assert "a peer is gone" in found[0] and ours() == before


def test_too_little_room_is_one_clear_error():
    """A petabyte does not fit: asked, free and the remedy are named, nothing stays, the process lives."""
    before = ours()
    with pytest.raises(StorageError, match=r"asked for 1,125,899,906,842,624 bytes.* free .*transport='padded'"):
        map_segment(World(), 1 << 50)
    assert ours() == before


def test_the_name_goes_when_a_peer_does():
    """A peer dies while the segment is being mapped: the gather raises, and the file has no name any more."""
    calls = []

    class Dying(World):
        def gather(self, value):
            calls.append(value)
            if len(calls) == 2:
                assert len(ours()) == len(before) + 1
                raise RuntimeError("Connection closed by peer")
            return [value]

    before = ours()
    with pytest.raises(RuntimeError, match="closed"):
        map_segment(Dying(), 4096)
    assert ours() == before


def plan(room):
    """All of 2 positions' rows in order, the third is dropped."""
    return Plan(torch.tensor([[0, 1, room]]), torch.tensor([2]), room=room, sent=torch.tensor(0), served=0)


def test_windows_alternate_grow_and_keep_what_was_copied():
    """Three exchanges: the third writes the first one's window, and what was kept of the first does not change."""
    transport = SharedMemory(World())
    x = torch.arange(12.0).view(3, 4)

    def exchange(x, room, keep):
        p = plan(room)
        (target,) = transport.targets(p, [x])
        target.index_copy_(0, p.index_KP[0], x)
        return target, transport.deliver(p, [target], keep)[0]

    first, kept = exchange(x, 2, True)
    second, _ = exchange(x + 100, 2, True)
    third, seen = exchange(x + 200, 2, False)
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert torch.equal(kept, x[:2]) and torch.equal(seen, x[:2] + 200) and seen.data_ptr() == third.data_ptr()
    memory = transport.memory
    _, kept = exchange(x, 5000, True)
    assert transport.memory.shape[0] >= 2 * 5001 * 16 > memory.shape[0] and torch.equal(kept[:2], x[:2])
    grown = transport.memory
    exchange(x, 2, True)
    assert transport.memory is grown  # warm: a smaller buffer takes no new memory
    assert torch.equal(seen, x[:2] + 200)  # a view of what was replaced still stands
    transport.close()


def test_dropped_rows_come_home_as_zero():
    """The trash row of the window holds what was written there; coming home it reads zero, not that."""
    transport, p, x = SharedMemory(World()), plan(2), torch.full((3, 4), torch.nan)
    for _ in range(2):
        (target,) = transport.targets(p, [x])
        target.index_copy_(0, p.index_KP[0], x)
    window = transport.give_back(p, torch.ones(2, 4))
    assert window.index_select(0, p.index_KP[0]).tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


def test_shared_memory_needs_one_host(monkeypatch):
    assert one_host(places(World())) and not one_host(["host a/no /dev/shm"] * 2)
    monkeypatch.setattr("moekit.learner.transport.places", lambda ep: ["host a/25", "host b/25"])
    with pytest.raises(ConfigError, match="host a/25.*host b/25.*transport='padded'"):
        SharedMemory(World())


def test_symmetric_memory_is_refused_on_cpu():
    with pytest.raises(BackendError, match="symmetric.*needs CUDA.*'padded'"):
        RowwiseDispatcher(World(), 4, "symmetric", 1.0)


def test_wire_reads_what_the_device_counted_when_asked():
    wire = Wire()
    wire.add("rows", torch.tensor(40))
    wire.add("rows", 2)
    wire.add("rows", torch.tensor(8))
    assert wire.sent == {"rows": 50} and wire.calls["rows"] == 3 and wire.sent["rows"] == 50
    wire.add("rows", torch.tensor(8))
    wire.reset()
    assert not wire.sent and not wire.calls
