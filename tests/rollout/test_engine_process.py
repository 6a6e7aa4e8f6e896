"""An engine in its own process: the embedded engine's answers, whatever happens to the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from moekit.config import ModelConfig
from moekit.errors import CapabilityError, ConfigError, EngineError, TransferError
from moekit.launch.processes import stamp
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Engine, Sampling
from moekit.rollout.engine_process import EngineProcess
from moekit.rollout.weight_plan import held
from moekit.rollout.weight_transfer import Chunk, chunks

SHAPE = ModelConfig(vocab=64, width=16, layers=2, heads=2, experts=4, top_k=2, expert_width=12, max_positions=256,
                    selection_bias=True)  # fmt: skip
PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7], [10]]
HOW = Sampling(max_new_tokens=60, n=3, stop_ids=(2, 11), seed=4)


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.set_num_threads(1)
    return Transformer(SHAPE, dtype=torch.float64, seed=3)


@pytest.fixture(scope="module")
def engine(model):
    """One process for all tests; each begins with the model's weights."""
    one = EngineProcess(SHAPE, dtype="float64", slots=5, weights=lambda: chunks(held(model)), stall_s=30.0)
    yield one
    one.close()


@pytest.fixture(scope="module")
def want(model):
    return EmbeddedEngine(model, version=1, slots=5).generate(PROMPTS, HOW, prompt_ids=[3, 1, 4, 1])


@pytest.fixture(autouse=True)
def weights(engine, model):
    engine.update(chunks(held(model)), engine.version + 1)


def same(found, wanted, versions: set[int] | None = None) -> None:
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted):
        assert one.prompt == two.prompt and torch.equal(one.prompt_experts, two.prompt_experts)
        assert len(one.answers) == len(two.answers)
        for a, b in zip(one.answers, two.answers):
            assert a.ids == b.ids and a.finish == b.finish and torch.equal(a.experts, b.experts)
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
            assert versions is None or set(a.version.tolist()) <= versions


def answers(engine, **how):
    return engine.generate(PROMPTS, HOW, prompt_ids=[3, 1, 4, 1], **how)


def test_it_answers_as_the_embedded_engine(engine, model, want):
    assert isinstance(engine, Engine)
    told: list[tuple[int, int]] = []
    engine.counter.reset()
    engine.metrics()
    same(answers(engine, told=lambda n, total: told.append((n, total))), want, {engine.version})
    assert told == [(n, 12) for n in range(1, 13)]
    own = EmbeddedEngine(model, slots=5)
    answers(own)
    assert {k: m.buffer.tolist() for k, m in own.counter.host().items()} == {
        k: m.buffer.tolist() for k, m in engine.counter.host().items()
    }
    assert engine.stats.prompts_read == own.stats.prompts_read and engine.stats.prefill_seconds > 0
    assert engine.metrics()["engine/answer_tokens"] == own.metrics()["engine/answer_tokens"]
    given = [[a.ids for a in r.answers] for r in want]
    same(engine.score(PROMPTS, given, HOW), own.score(PROMPTS, given, HOW))
    assert [len(a.ids) for r in engine.generate([[5]], HOW, limits=[2]) for a in r.answers] <= [2, 2, 2]
    assert engine.generate([], HOW) == []


def test_a_crash_changes_no_answer(engine, want):
    restarts, dead = engine.restarts, engine.pid
    first: list[int] = []

    def kill(done: int, total: int) -> None:
        first.append(done)
        if done == 1:
            os.kill(dead, signal.SIGSTOP)  # so that the rest is not on its way already
            os.kill(dead, signal.SIGKILL)

    same(answers(engine, told=kill), want, {engine.version})
    assert engine.restarts == restarts + 1 and engine.pid != dead
    assert first == list(range(1, 13))
    os.kill(engine.pid, signal.SIGKILL)  # while nobody asks for anything
    same(answers(engine), want, {engine.version})
    assert engine.restarts == restarts + 2 and engine.metrics()["engine/restarts"] == engine.restarts


@pytest.mark.long
def test_a_crash_in_a_transfer(engine, model, want):
    version, seen = engine.version + 1, []

    def source():
        for chunk in chunks(held(model)):
            seen.append(chunk.name)
            if len(seen) == 3:
                os.kill(engine.pid, signal.SIGKILL)
            yield chunk

    engine.update(source(), version)
    assert len(seen) == len(held(model)) and engine.version == version  # it was taken to its end, then asked again
    same(answers(engine), want, {version})


def test_a_refused_update_leaves_the_old_weights(engine, model, want):
    before, pid = engine.version, engine.pid
    short = dict(list(held(model).items())[:-1])
    wrong = [Chunk("embed.weight", 0, torch.zeros(3))]  # not the engine's dtype
    for source, says in ((chunks(short), "lacks"), (iter(wrong), "send it flat, in torch.float64")):
        with pytest.raises(TransferError, match=says):
            engine.update(source, before + 1)
        assert engine.version == before and engine.pid == pid

    def fails():
        yield from list(chunks(held(model)))[:2]
        raise ConfigError("the learner is out of order")

    with pytest.raises(ConfigError, match="^the learner is out of order"):
        engine.update(fails(), before + 1)
    same(answers(engine), want, {before})
    with pytest.raises(TransferError, match="lacks"):
        engine.update(chunks(short), before + 1, "in_place")
    with pytest.raises(EngineError, match="update the weights"):
        answers(engine)
    engine.update(chunks(held(model)), before + 2, "in_place", verify=True)
    same(answers(engine), want, {before + 2})


def test_other_weights_give_other_answers(engine, model, want):
    other = Transformer(SHAPE, dtype=torch.float32, seed=9)
    engine.update_weights(other, engine.version + 1)
    same(
        answers(engine), EmbeddedEngine(other, dtype="float64", slots=5).generate(PROMPTS, HOW, prompt_ids=[3, 1, 4, 1])
    )
    assert engine.update(fail(), engine.version).bytes == 0  # nothing moves where nothing changed


def fail():
    raise AssertionError("not to be read")
    yield


def test_what_it_refuses(engine):
    with pytest.raises(CapabilityError, match="sideways"):
        engine.update(iter(()), 99, "sideways")
    with pytest.raises(ConfigError, match="outside"):
        engine.generate([[64]], HOW)
    with pytest.raises(ConfigError, match="prompt_ids"):
        engine.generate([[5]], HOW, prompt_ids=[1, 2])
    with pytest.raises(ConfigError, match="send every parameter"):
        engine.update_weights({}, 99)
    engine.pause()
    with pytest.raises(EngineError, match="paused by this thread"):
        answers(engine)
    engine.resume()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers(engine, told=stop)
    assert len(engine.generate([[5]], HOW)[0].answers) == 3  # what was given up is not taken for this


@pytest.mark.long
def test_a_stopped_process_is_replaced(model, want):
    one = EngineProcess(SHAPE, dtype="float64", slots=5, weights=lambda: chunks(held(model)), stall_s=2.0)
    one.update(chunks(held(model)), 1)
    os.kill(one.pid, signal.SIGSTOP)
    began = time.monotonic()
    same(answers(one), want, {1})
    assert one.restarts == 1 and 2.0 <= time.monotonic() - began < 20
    os.kill(one.pid, signal.SIGSTOP)
    one.update(chunks(held(model)), 2)
    same(answers(one), want, {2})
    assert one.restarts == 2
    one.close()
    with pytest.raises(EngineError, match="died"):
        answers(one)


OWNER = """
import sys, time, torch
from moekit.config import ModelConfig
from moekit.rollout.engine_process import EngineProcess
one = EngineProcess(ModelConfig.from_dict({shape}))
print(one.pid, flush=True)
{then}
"""


@pytest.mark.long
@pytest.mark.parametrize("then", ["time.sleep(100)", "sys.exit(0)", "raise RuntimeError", "del one; time.sleep(100)"])
def test_nothing_is_left_behind(then):
    code = OWNER.format(shape=SHAPE.to_dict(), then=then)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    if then == "time.sleep(100)":
        assert stamp(pid)
        owner.kill()
    elif "del" not in then:
        owner.wait(30)
    end = time.monotonic() + 10
    while stamp(pid):  # a zombie has none: in a container nobody may collect it
        assert time.monotonic() < end
        time.sleep(0.02)
    owner.kill()
    owner.wait()


@pytest.mark.long
def test_without_weights_to_give_it_a_crash_is_an_error(model):
    one = EngineProcess(SHAPE, dtype="float64")
    with pytest.raises(EngineError, match="no weights were given"):
        answers(one)
    one.update(chunks(held(model)), 1)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="give weights= to start another one"):
        answers(one)
