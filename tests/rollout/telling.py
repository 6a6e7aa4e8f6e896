"""A model that tells the version of its weights, and what tests of transfers do with it.

Imported by tests, so it is a module beside them and not a test itself.
"""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
import torch

from moekit.config import ModelConfig
from moekit.errors import EngineError
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.shared_ring import SharedRing
from moekit.rollout.weight_plan import Send, held
from moekit.rollout.weight_transfer import chunks, load

ALARM, SIZE = 15, 512  # the token of mixed weights; bytes of a chunk
SHAPE = ModelConfig(vocab=16, width=24, layers=2, heads=2, experts=2, top_k=2, expert_width=8, max_positions=64)
PROMPTS = [[3, 4, 5], [9], [7, 7, 7, 7, 7, 7]]
HOW = Sampling(max_new_tokens=8, temperature=0.0)
MODES = ("atomic", "in_place")


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


def everything(model: Transformer) -> list[Send]:
    return [Send(0, 0, n, p.start, p.stop) for n, (p, _) in held(model).items()]


def cut(model: Transformer, size: int = SIZE):
    return chunks(held(model), chunk_bytes=size)


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
