"""No failure of a transfer, and no update under running answers, lets a token of mixed weights be sampled."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from telling import (
    ALARM,
    HOW,
    MODES,
    PROMPTS,
    SHAPE,
    SIZE,
    beside,
    breaking,
    cut,
    everything,
    serves_and_recovers,
    telling,
    telling_engine,
    tokens,
)

from moekit.errors import EngineError, StorageError, TransferError
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.slots import Slots
from moekit.rollout.transports import FileDrop
from moekit.rollout.weight_plan import Send, held
from moekit.rollout.weight_transfer import Chunk, chunks, load


# ---------------------------------------------------------------- running answers
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


def dying(model: Transformer, after: int = 5):
    """Chunks whose reader is killed."""
    for n, chunk in enumerate(cut(model)):
        if n == after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield chunk


def forked(call) -> int:
    """Run `call` in a process of its own, which does nothing else; its id."""
    if pid := os.fork():
        return pid
    try:
        call()
    finally:
        os._exit(1)


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
    os.waitpid(forked(lambda: FileDrop(tmp_path, "u").send(dying(new))), 0)  # it is dead, however slowly it started
    with pytest.raises(TransferError, match="nothing was written in .* for 0.4 s; is the other side up"):
        load(engine, 2, mode, FileDrop(tmp_path, "u", timeout=0.4))
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
    with (
        little_room(1000),
        pytest.raises(StorageError, match=r"u did not take 1,536 more bytes .*File too large.*ahead="),
    ):
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
