"""Updates and what carries them: the order of calls, memory, hashes, chunks, transports."""

from __future__ import annotations

import hashlib
import importlib
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
from telling import MODES, SHAPE, SIZE, beside, breaking, cut, serves_and_recovers, telling, telling_engine, tokens

from moekit.checkpoint import names
from moekit.checkpoint.families import FAMILIES
from moekit.config import ModelConfig
from moekit.errors import CapabilityError, ConfigError, EngineError, TransferError
from moekit.model.transformer import Part, Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.transports import FileDrop, PointToPoint
from moekit.rollout.weight_plan import Send, dtypes, held, plan
from moekit.rollout.weight_transfer import Chunk, Update, as_bytes, chunks, digest, load

transfers = importlib.import_module("transfers")


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
