"""Weights between processes: every bit arrives, bytes are the plan's, and no failure lets a mixed token be sampled."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moekit.checkpoint import names
from moekit.checkpoint.families import FAMILIES
from moekit.config import ModelConfig
from moekit.errors import CapabilityError, ConfigError, EngineError, StorageError, TransferError
from moekit.model.transformer import Part, Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.slots import Slots
from moekit.rollout.transports import FileDrop, PointToPoint
from moekit.rollout.weight_plan import Send, dtypes, held, plan
from moekit.rollout.weight_transfer import Chunk, Update, as_bytes, chunks, digest, load

HERE = Path(__file__).parent / "transfers.py"
spec = importlib.util.spec_from_file_location("transfers", HERE)
transfers = importlib.util.module_from_spec(spec)
sys.modules["transfers"] = transfers  # dataclasses look their module up
spec.loader.exec_module(transfers)
CASES, QUICK = transfers.CASES, [n for n, c in transfers.CASES.items() if c.world == 2][:3]
ALARM, SIZE = 15, 512  # the token of mixed weights; bytes of a chunk
SHAPE = ModelConfig(vocab=16, width=24, layers=2, heads=2, experts=2, top_k=2, expert_width=8, max_positions=64)
PROMPTS = [[3, 4, 5], [9], [7, 7, 7, 7, 7, 7]]
HOW = Sampling(max_new_tokens=8, temperature=0.0)
MODES = ("atomic", "in_place")


# ---------------------------------------------------------------- the transfer matrix
@functools.cache
def matrix(world: int, names: tuple[str, ...], threads: bool) -> tempfile.TemporaryDirectory:
    """Run cases of one world of learners: each process one of them, or a server. Servers may be threads of this one."""
    kept = tempfile.TemporaryDirectory(prefix="moekit-")  # gone with the last reference, the cache's
    folder = Path(kept.name)
    roles = [("learn", r) for r in range(world)] + [("serve", t) for t in range(0 if threads else 3)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = lambda role, rank: [sys.executable, HERE, role, str(rank), str(world), folder, *names]
    all_of = [subprocess.Popen(command(*r), env=env) for r in roles]
    servers = [threading.Thread(target=transfers.main, args=("serve", t, 1, folder, names)) for t in range(3)]
    try:
        for server in servers if threads else ():
            server.start()
        for server in servers if threads else ():
            server.join(60)
        assert [p.wait(timeout=150) for p in all_of] == [0] * len(roles)
    finally:
        for p in all_of:
            p.kill()
    return kept


def check_pair(folder: tempfile.TemporaryDirectory, name: str) -> None:
    """Bitwise equal to the export; bytes of every pair those of the plan; extra memory within the mode's bound."""
    case, here = CASES[name], Path(folder.name, str(list(CASES).index(name)))
    sent = [pickle.loads((here / f"sent_{r}").read_bytes()) for r in range(case.world)]
    got = [pickle.loads((here / f"got_{t}").read_bytes()) for t in range(len(case.serve))]
    for rows, planned in sent:
        assert rows == [planned, planned]
    for t, told in enumerate(got):
        assert told["wrong"] == []
        assert told["bytes"] == [told["plan"]] * 2 == [told["size"]] * 2 == [sum(p[t] for _, p in sent)] * 2
        most = told["size"] if case.mode == "atomic" else 0
        if case.wire == "files":  # a chunk that is read, and the one before
            most += 2 * (transfers.CHUNK + 256)
        assert max(told["peak"]) <= most, (told["peak"], most)
    if case.world > 1 and not case.layout.get("pp"):  # replicas share the work
        work = [sum(planned) for _, planned in sent]
        assert max(work) < 1.5 * sum(work) / len(work)


@pytest.mark.parametrize("name", QUICK)
def test_every_bit_arrives(name):
    check_pair(matrix(2, tuple(QUICK), True), name)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_bit_arrives_in_every_pair_of_layouts(name):
    """15 pairs, learners and servers in processes of their own."""
    world = CASES[name].world
    check_pair(matrix(world, tuple(n for n, c in CASES.items() if c.world == world), False), name)


# ---------------------------------------------------------------- a model that tells its version
def telling(version: int, shape: ModelConfig = SHAPE) -> Transformer:
    """Its most likely token is `version`, and ALARM as soon as one tensor, or one cached value, is of another version.

    Width: 6 places each for what the embedding, attention and the experts say, and one for a contradiction. Each part
    writes 1 at its version's place; each that reads another's, and the head, answers a wrong place with an alarm.
    """
    m = Transformer(shape, seed=0)
    D, v, bad = shape.width, version, 18
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.fill_(1.0) if p.ndim == 1 else p.zero_()
        m.embed.weight[:, v] = 1.0
        for block in m.blocks.values():
            block.attention.qkv.weight[2 * D + v, :18] = 1.0  # the value has a 1 at v, whatever is read
            block.attention.out.weight[bad, :] = 100.0
            block.attention.out.weight[bad, v] = 0.0
            block.attention.out.weight[6 + v, v] = 1.0
            F = shape.expert_width
            block.moe.gate_up[:, v, :18] = block.moe.gate_up[:, F + v, :18] = 1.0
            block.moe.down[:, bad, :] = 100.0
            block.moe.down[:, bad, v] = 0.0
            block.moe.down[:, 12 + v, v] = 1.0
        m.head.weight[v, [v, 6 + v, 12 + v]] = 1.0
        m.head.weight[ALARM, :19] = 1e5
        m.head.weight[ALARM, [v, 6 + v, 12 + v]] = 0.0
    return m


def tokens(engine: EmbeddedEngine) -> set[tuple[int, int]]:
    """(token, version) of everything that the engine samples."""
    return {(t, v) for r in engine.generate(PROMPTS, HOW) for a in r.answers for t, v in zip(a.ids, a.version.tolist())}


def telling_engine(version: int = 1, **how) -> EmbeddedEngine:
    return EmbeddedEngine(telling(version), version=version, **how)


def test_the_model_tells_its_version_and_any_mixture():
    for v in range(6):
        assert tokens(telling_engine(v)) == {(v, v)}
    new = dict(telling(2).named_parameters())
    mixtures = 0
    for name, p in telling(1).named_parameters():
        if not torch.equal(p, new[name]):
            mixed = telling(2)
            mixed.get_parameter(name).data.copy_(p)
            assert {t for t, _ in tokens(EmbeddedEngine(mixed))} != {2}, name
            mixtures += 1
    assert mixtures == 2 + 2 * 4  # embedding, head; qkv, out, gate_up and down of both layers


def test_old_keys_and_values_would_be_seen(monkeypatch):
    """The control: with the recomputing of the cache left out, running answers sound the alarm."""
    engine = telling_engine(1, slots=3)
    monkeypatch.setattr(Slots, "renew", lambda self, abort=False: setattr(self, "stale", False) or setattr(
        self, "weights", self.version()))  # fmt: skip
    found = {t for a in crossing(engine, telling(2), "atomic") for t in a.ids}
    assert ALARM in found


def crossing(engine: EmbeddedEngine, new: Transformer, mode: str) -> list:
    """Answers of a stream into which an update is written, chunk by chunk in atomic mode, while it samples."""
    found, version = [], engine.version + 1
    stream = engine.stream([[3, 4]] * 12, Sampling(max_new_tokens=30, temperature=0.0), limits=[2, 30, 25] * 4)
    if mode == "atomic":
        engine.begin_update(version)
        for chunk in chunks(held(new), chunk_bytes=4096):
            found.extend(f.answer for f in [next(stream, None)] if f)
            engine.write(chunk)
            if len(found) == 3:
                break
        rest = [s for s in everything(new) if s.name != chunk.name]
        at = [Send(0, 0, chunk.name, chunk.start + len(chunk.data), held(new)[chunk.name][0].stop)]
        before = [Send(0, 0, s.name, s.start, s.stop) for s in rest if engine._update.runs[s.name] == []]
        for chunk in chunks(held(new), [*at, *before]):
            engine.write(chunk)
        engine.finish_update()
    else:
        found.append(next(stream).answer)
        engine.update_weights(new, version, mode)
    return found + [f.answer for f in stream]


def everything(model: Transformer) -> list[Send]:
    return [Send(0, 0, n, p.start, p.stop) for n, (p, _) in held(model).items()]


@pytest.mark.parametrize("running", ["recompute", "abort", "finish"])
@pytest.mark.parametrize("mode", MODES)
def test_an_update_under_running_answers(mode, running):
    """Every token is of the version that it is stamped with; both versions occur."""
    engine = telling_engine(1, slots=3, running=running)
    found = crossing(engine, telling(2), mode)
    pairs = {(t, v) for a in found for t, v in zip(a.ids, a.version.tolist())}
    assert pairs == {(1, 1), (2, 2)} and engine.version == 2
    both = [a for a in found if len(set(a.version.tolist())) == 2]
    assert bool(both) == (running == "recompute")


# ---------------------------------------------------------------- faults
class Cut(FileDrop):
    """Cuts its third file short."""

    def _put(self, head, data):
        super()._put(head, data)
        if self.count == 3:
            os.truncate(self._file(2), 150)


class Short(SharedRing):
    """Says less than its third chunk should have, as if a write had been cut."""

    def _put(self, head, data):
        cut = head.get("n") == 2
        super()._put(head | {"bytes": head["bytes"] - 4} if cut else head, data)


class Flipped(FileDrop):
    """One bit of the second file is another."""

    def _put(self, head, data):
        super()._put(head, data)
        if self.count == 2:
            raw = bytearray(self._file(1).read_bytes())
            raw[-1] ^= 1
            self._file(1).write_bytes(raw)


def cut(model: Transformer, size: int = SIZE):
    return chunks(held(model), chunk_bytes=size)


def dying(model: Transformer, after: int = 5):
    """Chunks whose reader is killed."""
    for n, chunk in enumerate(cut(model)):
        if n == after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield chunk


def breaking(model: Transformer, after: int = 5):
    for n, chunk in enumerate(cut(model)):
        if n == after:
            raise RuntimeError("the cast failed")
        yield chunk


@contextmanager
def beside(call):
    """Run `call` in a thread; what it raised is in the list."""
    raised: list[BaseException] = []

    def work():
        try:
            call()
        except BaseException as problem:  # noqa: BLE001
            raised.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    yield raised
    thread.join(30)
    assert not thread.is_alive()


def forked(call) -> int:
    """Run `call` in a process of its own, which does nothing else; its id."""
    if pid := os.fork():
        return pid
    try:
        call()
    finally:
        os._exit(1)


def serves_and_recovers(engine: EmbeddedEngine, mode: str) -> None:
    """After a failed update to version 2: the old version or nothing; then version 3 arrives and serves."""
    if mode == "atomic":
        assert engine.version == 1 and tokens(engine) == {(1, 1)}
    else:
        for work in (lambda: engine.generate(PROMPTS, HOW), lambda: engine.score([[1]], [[[2]]], HOW)):
            with pytest.raises(EngineError, match="in place is under way or failed half-way; update the weights again"):
                work()
    a, b = socket.socketpair()
    with beside(lambda: SharedRing.make(a, chunk_bytes=SIZE).send(cut(telling(3)))) as raised:
        load(engine, 3, mode, SharedRing.open(b))
    assert not raised and engine.version == 3 and tokens(engine) == {(3, 3)}


@pytest.mark.parametrize("mode", MODES)
def test_a_sender_is_killed(mode, tmp_path):
    engine = telling_engine()
    a, b = socket.socketpair()
    new = telling(2)

    def send():
        b.close()
        SharedRing.make(a, chunk_bytes=SIZE).send(dying(new))

    pid = forked(send)
    a.close()
    with pytest.raises(TransferError, match="other end of the ring is gone; restart it and send all again"):
        load(engine, 2, mode, SharedRing.open(b))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    serves_and_recovers(engine, mode)
    engine = telling_engine()
    pid = forked(lambda: FileDrop(tmp_path, "u").send(dying(new)))
    with pytest.raises(TransferError, match="nothing was written in .* for 0.4 s; is the other side up"):
        load(engine, 2, mode, FileDrop(tmp_path, "u", timeout=0.4))
    os.waitpid(pid, 0)
    serves_and_recovers(engine, mode)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_a_receiver_is_killed_and_restarted(mode):
    """The sender hears of it; the new engine has no weights, and refuses, until it was given all of them."""
    a, b = socket.socketpair()
    engine, new = telling_engine(), telling(2)

    def take():
        a.close()
        ring, left = SharedRing.open(b), [5]
        write = engine.write

        def count(chunk):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            write(chunk)

        engine.write = count
        load(engine, 2, mode, ring)

    pid = forked(take)
    b.close()
    ring = SharedRing.make(a, chunk_bytes=SIZE)
    with pytest.raises(TransferError, match="gone|cannot be reached|heard nothing"):
        ring.send(cut(new))
    os.waitpid(pid, 0)
    again = EmbeddedEngine(SHAPE)
    with pytest.raises(EngineError, match="no weights were given"):
        again.generate(PROMPTS, HOW)
    a, b = socket.socketpair()
    with beside(lambda: SharedRing.make(a, chunk_bytes=SIZE).send(cut(new))) as raised:
        load(again, 2, mode, SharedRing.open(b))
    assert not raised and tokens(again) == {(2, 2)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["file", "ring", "flipped"])
def test_a_chunk_is_cut_or_altered(mode, way, tmp_path):
    """Both sides say so; a flipped bit is seen where hashes were asked for."""
    engine = telling_engine()
    if way == "ring":
        a, b = socket.socketpair()
        words = r"chunk 2 \(embed.weight\) has 508 bytes; its head says 128 elem"
        sender = beside(lambda: Short.make(a, chunk_bytes=SIZE).send(cut(telling(2))))
        with sender as raised, pytest.raises(TransferError, match=words):
            load(engine, 2, mode, SharedRing.open(b))
        assert "chunk 2" in str(raised[0]) and isinstance(raised[0], TransferError)
    else:
        kind, words = {"file": (Cut, r"chunk 2 \(embed.weight\) has \d+ bytes|cut or damaged"),
                       "flipped": (Flipped, r"by its SHA-256: embed.weight; send all again")}[way]  # fmt: skip
        kind(tmp_path, "u").send(cut(telling(2)), verify=True)
        with pytest.raises(TransferError, match=words):
            load(engine, 2, mode, FileDrop(tmp_path, "u"))
    serves_and_recovers(engine, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change, words", [
    ({"width": 26}, r"embed.weight is \[256, 384\)|is \[384, 512\)|here are \[0, 384\)"),
    ({"expert_width": 4}, "lacks 192 of 384 elements of layers.0.moe.gate_up|gate_up"),
    ({"layers": 3}, "unknown layers.2"),
    ({"layers": 1}, "lacks .* of layers.1"),
])  # fmt: skip
def test_weights_of_another_shape(mode, change, words, tmp_path):
    engine = telling_engine()
    FileDrop(tmp_path, "u").send(cut(Transformer(replace(SHAPE, **change))))
    with pytest.raises(TransferError, match=words):
        load(engine, 2, mode, FileDrop(tmp_path, "u"))
    serves_and_recovers(engine, mode)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_that_do_not_belong(mode):
    """Another dtype, twice, out of bounds, not flat: refused by name; the update can be dropped and sent again."""
    w = torch.zeros(100)
    for bad, words in (
        (Chunk("embed.weight", 0, w.bfloat16()), r"embed.weight is \(100,\) torch.bfloat16; send it flat, in torch.f"),
        (Chunk("embed.weight", 0, w.view(10, 10)), "send it flat"),
        (Chunk("embed.weight", 300, w), r"embed.weight is \[300, 400\); here are \[0, 384\) of its 384"),
        (Chunk("embed.weight", -1, w), r"is \[-1, 99\)"),
        (Chunk("embed.weight", 50, w), r"elements of embed.weight in \[50, 150\) were sent before"),
        (Chunk("embed", 0, w), "unknown embed"),
    ):
        engine = telling_engine()
        engine.begin_update(2, mode)
        engine.write(Chunk("embed.weight", 100, w))
        with pytest.raises(TransferError, match=words):
            engine.write(bad)
        engine.abort_update()
        serves_and_recovers(engine, mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_sender_s_own_failure_is_told(mode, tmp_path):
    a, b = socket.socketpair()
    engine = telling_engine()
    sender = beside(lambda: SharedRing.make(a, chunk_bytes=SIZE).send(breaking(telling(2))))
    with sender as raised, pytest.raises(TransferError, match="gave up after . chunks: RuntimeError: the cast failed"):
        load(engine, 2, mode, SharedRing.open(b))
    assert str(raised[0]) == "the cast failed"
    serves_and_recovers(engine, mode)
    engine = telling_engine()
    with pytest.raises(RuntimeError, match="the cast failed"):
        FileDrop(tmp_path, "u").send(breaking(telling(2)))
    with pytest.raises(TransferError, match="gave up after 0 chunks: RuntimeError: the cast failed"):
        load(engine, 2, mode, FileDrop(tmp_path, "u"))
    serves_and_recovers(engine, mode)


@contextmanager
def little_room(size: int):
    """No file of this process may grow past `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("mode", MODES)
def test_a_full_memory_file_system(mode, tmp_path):
    """The kernel refuses the bytes (a limit of this process); the sender says what did not fit, and nothing is left."""
    engine = telling_engine()
    drop = FileDrop(tmp_path, "u")
    with little_room(1000), pytest.raises(StorageError, match=r"u did not take 1,664 more bytes .*ahead="):
        drop.send(
            chunks(
                held(telling(2)), [Send(0, 0, "final_norm.weight", 0, 24), *everything(telling(2))], chunk_bytes=2048
            )
        )
    with pytest.raises(TransferError, match="gave up after 0 chunks: StorageError"):
        load(engine, 2, mode, FileDrop(tmp_path, "u", timeout=1))
    serves_and_recovers(engine, mode)
    a, b = socket.socketpair()
    with (
        little_room(1000),
        pytest.raises(StorageError, match=r"a ring of 2,048 bytes .* fewer slots or smaller chunks"),
    ):
        SharedRing.make(a, chunk_bytes=SIZE, folder=tmp_path)
    a.close()
    with pytest.raises(TransferError, match="made no ring"):
        SharedRing.open(b)
    assert not list(tmp_path.iterdir())


def test_a_ring_without_room_is_refused_before_any_write(monkeypatch):
    def full(fd, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(StorageError, match=r"in /dev/shm cannot be made \(No space left on device\); make it larger"):
        SharedRing.make(socket.socketpair()[0])
    assert set(Path("/dev/shm").iterdir()) == before


# ---------------------------------------------------------------- the order of calls
def test_an_engine_takes_one_update_at_a_time():
    engine = telling_engine()
    for call in (lambda: engine.write(Chunk("embed.weight", 0, torch.zeros(1))), engine.finish_update):
        with pytest.raises(EngineError, match="no update is open; call begin_update first"):
            call()
    assert engine.begin_update(2)
    with pytest.raises(EngineError, match="an update to version 2 is open; abort_update"):
        engine.begin_update(3)
    engine.abort_update()
    engine.abort_update()
    assert tokens(engine) == {(1, 1)}
    with pytest.raises(CapabilityError, match="updates='sideways'"):
        engine.begin_update(2, "sideways")
    shared = EmbeddedEngine.of(telling(1), lambda: 1)
    with pytest.raises(CapabilityError, match="updates='atomic'"):
        shared.begin_update(2)


def test_nothing_moves_when_nothing_changed():
    """The version that serves is not taken again: no copy is made, no chunk read, the sender is told."""
    engine = telling_engine(4)
    before, same = [t.data_ptr() for t in engine.model.parameters()], dict(telling(4).state_dict())

    def never():
        raise AssertionError("a chunk was asked for")
        yield

    with transfers.Peak() as peak:
        got = load(engine, 4, "atomic", never())
        engine.update_weights(same, 4)
        assert not engine.begin_update(4, "in_place")
    assert got.bytes == 0 and peak.peak == 0 and tokens(engine) == {(4, 4)}
    assert before == [t.data_ptr() for t in engine.model.parameters()]
    a, b = socket.socketpair()
    with beside(lambda: SharedRing.make(a, chunk_bytes=SIZE).send(cut(telling(4)))) as raised:
        assert load(engine, 4, "atomic", SharedRing.open(b)).bytes == 0
    assert "version 4 serves already" in str(raised[0])


def test_memory_of_an_update():
    """Atomic: one more copy, once, which stays warm; in place: nothing but the chunk that a cast needs."""
    big = ModelConfig(vocab=64, width=32, layers=2, heads=2, experts=4, top_k=2, expert_width=64)
    engine, new = EmbeddedEngine(Transformer(big)), Transformer(big, seed=5, dtype=torch.float64)
    size = sum(p.nbytes for p in engine.model.parameters())
    for version, mode, most in ((1, "atomic", size), (2, "atomic", 0), (3, "in_place", 0), (4, "atomic", size)):
        with transfers.Peak() as peak:
            for kind in ("begin", "write"):
                if kind == "begin":
                    engine.begin_update(version, mode)
                    continue
                for name, (piece, flat) in held(new).items():
                    for at in range(0, len(piece), 512):
                        engine.write(Chunk(name, at, flat[at : at + 512].float()))
            engine.finish_update()
        assert most <= peak.peak <= most + 2 * 512 * 4, (mode, peak.peak, size)
        assert all(torch.equal(p, q.float()) for p, q in zip(engine.model.parameters(), new.parameters()))


def test_hashes_of_what_serves():
    """`finish_update` compares the engine's tensors with what the sender says they must be."""
    new = telling(2)
    right = {n: digest(t) for n, (_, t) in held(new).items()}
    for mode in MODES:
        engine = telling_engine()
        load(engine, 2, mode, cut(new), digests=right)
        assert tokens(engine) == {(2, 2)}
        engine = telling_engine()
        with pytest.raises(TransferError, match="not what was sent, by its SHA-256: head.weight; send all again"):
            load(engine, 2, mode, cut(new), digests=right | {"head.weight": "0" * 64})
        serves_and_recovers(engine, mode)
    assert digest(torch.arange(3.0)) == hashlib.sha256(struct.pack("<3f", 0, 1, 2)).hexdigest()


# ---------------------------------------------------------------- chunks and transports
def test_chunks_are_cut_and_cast():
    """24 x 16 float32 cut at 1000 bytes: 250 elements at most, before the cast as after it; two buffers in turn."""
    m = telling(1)
    flat = held(m)["head.weight"][1]
    found = [(c.start, len(c.data)) for c in chunks(held(m), [Send(0, 0, "head.weight", 5, 384)], chunk_bytes=1000)]
    assert found == [(5, 250), (255, 129)]
    got, places = torch.empty(384, dtype=torch.bfloat16), set()
    for c in chunks(held(m), [Send(0, 0, "head.weight", 0, 384)], torch.bfloat16, 200):
        got[c.start : c.start + len(c.data)] = c.data
        places.add(c.data.data_ptr())
        assert c.data.nbytes <= 100
    assert torch.equal(got, flat.bfloat16()) and len(places) == 2
    straight = next(chunks(held(m), [Send(0, 0, "head.weight", 8, 384)]))
    assert straight.data.data_ptr() == flat[8:].data_ptr()  # nothing was copied
    for bad in (Send(0, 0, "head.weight", 0, 385), Send(0, 0, "tail", 0, 1)):
        with pytest.raises(ConfigError, match=f"of {bad.name} is to be sent, and"):
            next(chunks(held(m), [bad]))


def test_a_selection_bias_is_not_rounded():
    shape = replace(SHAPE, selection_bias=True)
    m = Transformer(shape)
    for b in m.buffers():
        b.copy_(torch.tensor([1 / 3, -1 / 7]))
    engine = EmbeddedEngine(shape, dtype="bfloat16")
    load(engine, 1, "atomic", chunks(held(m), dtype=dtypes(shape, torch.bfloat16)))
    assert all(torch.equal(a, b) for a, b in zip(engine.model.buffers(), m.buffers()))
    assert engine.model.embed.weight.dtype == torch.bfloat16


def test_a_ring_stays_warm():
    """Three updates, two of them hashed, over one ring; a chunk that fits no slot is refused."""
    a, b = socket.socketpair()
    made, engine = [], telling_engine(0)

    def send():
        made.append(SharedRing.make(a, chunk_bytes=SIZE, slots=2))
        for version in (1, 2, 3):
            made.append(made[0].send(cut(telling(version)), verify=version > 1))

    with beside(send) as raised:
        ring = SharedRing.open(b)
        for version in (1, 2, 3):
            got = load(engine, version, MODES[version % 2], ring)
            assert tokens(engine) == {(version, version)}
            assert set(got.seconds) == {"wire", "load", "verify"} and (got.seconds["verify"] > 0) == (version > 1)
    size = sum(t.nbytes for _, t in held(telling(1)).values())
    assert not raised and [s.bytes for s in made[1:]] == [size] * 3 and got.bytes == size
    assert set(made[1].seconds) == {"cast", "wire", "verify"} and (made[1] + made[2]).bytes == 2 * size
    with pytest.raises(ConfigError, match="a chunk of 1,024 bytes does not fit a slot of 512"):
        made[0].send(cut(telling(1), 1024))
    with pytest.raises(TransferError):
        made[0].send(cut(telling(1)))  # closed: a failed update ends the ring


def test_files_wait_for_their_reader(tmp_path):
    """With ahead=2 never more than 2 whole files; with nobody there the sender gives up."""
    engine, most = telling_engine(), []
    with beside(lambda: FileDrop(tmp_path, "u", ahead=2).send(cut(telling(2)))) as raised:

        def seen():
            for chunk in FileDrop(tmp_path, "u").receive():
                most.append(sum(f.name.isdigit() for f in (tmp_path / "u").iterdir()))
                yield chunk

        load(engine, 2, "atomic", seen())
    assert not raised and max(most) <= 2 and tokens(engine) == {(2, 2)}
    with pytest.raises(TransferError, match="nothing was read in .* for 0.2 s"):
        FileDrop(tmp_path, "w", ahead=2, timeout=0.2).send(cut(telling(2)))
    FileDrop(tmp_path, "x").send(cut(telling(2)))
    with pytest.raises(ConfigError, match="x is there already; give every update a name of its own"):
        FileDrop(tmp_path, "x").send(cut(telling(2)))
    for name in ("", "..", "a/b", "/tmp/x"):
        with pytest.raises(ConfigError, match="plain name"):
            FileDrop(tmp_path, name)


class Threads(PointToPoint):
    """gloo between two threads of this process, which torch.distributed's own calls do not allow."""

    def _do(self, call, tensor, **where):
        try:
            work = self.pg.send if call is dist.send else self.pg.recv
            work([tensor], self.peer, 0).wait()
        except RuntimeError as problem:
            raise TransferError(f"rank {self.peer} of the transfer cannot be reached: {problem}") from None


def test_point_to_point(tmp_path):
    """An update that is refused half-way leaves the pair ready for the next."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    engine, ends, sent = telling_engine(), [Threads(1), Threads(0)], []

    def join(rank):
        ends[rank].pg = dist.ProcessGroupGloo(store, rank, 2)

    with beside(lambda: join(1)):
        join(0)

    def send():
        for source in (Transformer(replace(SHAPE, width=26)), telling(2)):
            try:
                sent.append(ends[0].send(cut(source), verify=True).bytes)
            except TransferError as problem:
                sent.append(str(problem))
        with pytest.raises(RuntimeError):
            ends[0].send(breaking(telling(3)))
        sent.append(ends[0].send(cut(telling(4))).bytes)

    with beside(send) as raised:
        with pytest.raises(TransferError, match="embed.weight"):
            load(engine, 2, "atomic", ends[1])
        load(engine, 2, "atomic", ends[1])
        assert tokens(engine) == {(2, 2)}
        with pytest.raises(TransferError, match="gave up after 5 chunks: RuntimeError: the cast failed"):
            load(engine, 3, "atomic", ends[1])
        load(engine, 4, "in_place", ends[1])
    assert not raised and tokens(engine) == {(4, 4)}
    size = sum(t.nbytes for _, t in held(telling(1)).values())
    assert "refused the update: a chunk of embed.weight" in sent[0] and sent[1:] == [size, size]


@pytest.mark.long
def test_point_to_point_between_processes(tmp_path):
    """2 learners by experts, 2 servers by layers, one gloo world; then a learner is killed half-way."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import transfers; transfers.points"
    ranks = [subprocess.Popen([sys.executable, "-c", f"{code}({r}, {str(tmp_path)!r})"], env=env) for r in range(4)]
    try:
        assert [p.wait(timeout=100) for p in ranks] == [0, -signal.SIGKILL, 0, 0]
    finally:
        for p in ranks:
            p.kill()
    for r in (2, 3):
        told = pickle.loads((tmp_path / f"told_{r}").read_bytes())
        assert told["wrong"] == [] and told["bytes"] == told["plan"] and "cannot be reached" in told["problem"]


# ---------------------------------------------------------------- public cases
@pytest.mark.parametrize("mode", MODES)
def test_bc_109_the_cache_of_old_weights_is_not_used(small, mode):
    """BC-109: prompt, update by chunks, prompt again: ids and log-probs of a fresh engine."""
    how = Sampling(max_new_tokens=10, n=2)
    engine, new = EmbeddedEngine(small.model(seed=1)), small.model(seed=2)
    before = engine.generate(small.prompts, how)
    load(engine, 3, mode, chunks(held(new)))
    got, want = engine.generate(small.prompts, how), EmbeddedEngine(new).generate(small.prompts, how)
    for a, b, c in zip(got, want, before):
        for x, y, z in zip(a.answers, b.answers, c.answers):
            assert x.ids == y.ids and torch.equal(x.logprobs, y.logprobs) and not torch.equal(x.logprobs, z.logprobs)


def test_bc_110_a_tied_head_reaches_both_ends():
    """BC-110: a tied 2 x 2 matrix, a receiver whose first and last stage hold copies of their own: none is stale, no
    name is unmatched; without the second copy's sends the update is refused by name."""
    tied = ModelConfig(vocab=2, width=2, layers=2, heads=1, experts=1, top_k=1, expert_width=2, tied_head=True)
    learner = Transformer(tied, seed=3)
    ends = [Transformer(tied, seed=9, part=Part((run,), (0, 1))) for run in ((0, 1), (1, 2))]
    way = plan([[p for p, _ in held(learner).values()]], [[p for p, _ in held(e).values()] for e in ends], 4)
    whole = {n: digest(t) for n, (_, t) in held(learner).items()}
    matched = set()
    for t, end in enumerate(ends):
        update = Update(end, 1)
        for chunk in chunks(held(learner), way.to(t)):
            update.write(chunk)
        update.check(digests := {n: digest(flat) for n, (_, flat) in held(learner).items() if n in held(end)})
        update.switch()
        have = {n: digest(flat) for n, (_, flat) in held(end).items()}
        assert have == digests and torch.equal(end.embed.weight, learner.embed.weight)
        matched |= have.keys()
    assert matched == whole.keys()
    update = Update(ends[1], 2)
    for chunk in chunks(held(learner), [s for s in way.to(1) if s.name != "embed.weight"]):
        update.write(chunk)
    with pytest.raises(TransferError, match="lacks 4 of 4 elements of embed.weight"):
        update.check()


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_bc_115_fused_and_per_expert_streams_give_one_state(family):
    """BC-115: E=2, D=2, F=3, coded values: gate and up of every expert land alike, and a per-expert stream into the
    weights needs less memory than one fused tensor."""
    shape = ModelConfig(vocab=3, width=2, layers=1, heads=1, experts=2, top_k=1, expert_width=3, qk_norm="none")
    m, states = Transformer(shape, seed=None), {}
    with torch.no_grad():
        for i, p in enumerate(m.parameters()):
            p.copy_((1000.0 * i + torch.arange(p.numel())).view(p.shape))
    for naming in ("fused", "per_expert"):
        engine = EmbeddedEngine(shape)
        runs = names.pieces(shape, FAMILIES[family], naming)
        largest = max((r.stop - r.start for r in runs if ".experts." in r.name), default=0)
        assert largest == {"fused": 24, "per_expert": 6}[naming]  # gate_up of both experts; one matrix
        with transfers.Peak() as peak:
            load(engine, 1, "in_place", chunks(held(m), [Send(0, 0, r.parameter, r.start, r.stop) for r in runs]))
        states[naming] = {n: t.clone() for n, t in engine.model.state_dict().items()}
        if naming == "per_expert":
            assert peak.peak < 24 * 4
    assert states["fused"].keys() == states["per_expert"].keys() == m.state_dict().keys()
    for n, t in m.state_dict().items():
        assert torch.equal(states["fused"][n], t) and torch.equal(states["per_expert"][n], t)
    gate, up = states["fused"]["layers.0.moe.gate_up"][1].view(2, 3, 2)
    parameters = dict(m.named_parameters())["layers.0.moe.gate_up"]
    assert torch.equal(gate, parameters[1, :3]) and torch.equal(up, parameters[1, 3:])


def test_what_is_hashed_is_every_byte():
    assert as_bytes(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).tolist() == [0x80, 0x3F, 0, 0x40]
