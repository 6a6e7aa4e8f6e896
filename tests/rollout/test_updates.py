"""New weights under an engine: no token from mixed weights or from the keys of others, and failures that are seen."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moekit.errors import CapabilityError, ConfigError, EngineError
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling

LIMITS = [3, 30, 25, 9, 28]


class Halfway(dict):
    """Weights whose reading fails at one name."""

    def __getitem__(self, name):
        if name == "layers.1.moe.down":
            raise OSError("the wire broke")
        return super().__getitem__(name)


def crossing(engine, small, switch):
    """Answers to the prompts, with the weights switched after the first is finished."""
    found = []
    for one in engine.stream(small.prompts, Sampling(max_new_tokens=30), limits=LIMITS):
        found.append(one)
        if len(found) == 1:
            switch()
    return sorted(found, key=lambda f: f.prompt)


@pytest.mark.parametrize("mode", ["atomic", "in_place", "shared"])
def test_every_token_is_of_its_version_s_weights_and_keys(small, mode):
    """BC-109, within an answer: tokens before the update have the old weights' log-probs, those after it the new ones':
    with old keys under new weights the gap is far above 1e-5."""
    old, new = small.model(seed=1), small.model(seed=2)
    serving, version = small.model(seed=1), [5]
    if mode == "shared":
        engine = EmbeddedEngine.of(serving, lambda: version[0], slots=3)

        def switch():
            serving.load_state_dict(new.state_dict())
            version[0] = 9
    else:
        engine = EmbeddedEngine(serving, slots=3, version=5)
        switch = lambda: engine.update_weights(new, 9, mode)
    found = crossing(engine, small, switch)
    assert [len(f.answer.ids) for f in found] == LIMITS and engine.version == 9
    assert engine.stats.recomputed_tokens > 0
    mixed = 0
    for f in found:
        prompt, a = small.prompts[f.prompt], f.answer
        assert a.version.tolist() == sorted(a.version.tolist()) and set(a.version.tolist()) <= {5, 9}
        mixed += len(set(a.version.tolist())) == 2
        for made, stamp in ((old, 5), (new, 9)):
            z = small.following(made, [*prompt, *a.ids])[len(prompt) - 1 : -1].log_softmax(-1)
            want = z.gather(-1, torch.tensor(a.ids)[:, None])[:, 0]
            here = a.version == stamp
            if here.any():
                assert (a.logprobs - want)[here].abs().max() < 1e-5
    assert mixed >= 2 and set(found[-1].answer.version.tolist()) == {9}


def test_running_answers_may_end_instead(small):
    engine = EmbeddedEngine(small.model(seed=1), slots=3, running="abort")
    found = crossing(engine, small, lambda: engine.update_weights(small.model(seed=2), 1))
    ended = [f for f in found if f.answer.finish == "abort"]
    assert len(ended) == 2 and all(0 < len(f.answer.ids) < LIMITS[f.prompt] for f in ended)
    assert all(set(f.answer.version.tolist()) == {0} for f in ended)
    assert [set(f.answer.version.tolist()) for f in found[3:]] == [{1}, {1}]
    assert engine.stats.recomputed_tokens == 0


def test_running_answers_may_finish_first(small):
    """With the old weights; those that wait begin with the new ones."""
    engine = EmbeddedEngine(small.model(seed=1), slots=3, running="finish")
    found = crossing(engine, small, lambda: engine.update_weights(small.model(seed=2), 1))
    assert [sorted(set(f.answer.version.tolist())) for f in found] == [[0], [0], [0], [1], [1]]
    assert [len(f.answer.ids) for f in found] == LIMITS and engine.stats.recomputed_tokens == 0
    with pytest.raises(CapabilityError, match="running='finish'"):
        EmbeddedEngine.of(small.model(), lambda: 0, running="finish")


def test_bc_109_nothing_read_with_old_weights_is_used_after_an_update(small):
    """BC-109: prompt, update, prompt again equals an engine that never had the old weights."""
    how = Sampling(max_new_tokens=10, n=2)
    engine = EmbeddedEngine(small.model(seed=1))
    before = engine.generate(small.prompts, how)
    engine.update_weights(dict(small.model(seed=2).state_dict()), 3)
    got, want = engine.generate(small.prompts, how), EmbeddedEngine(small.model(seed=2)).generate(small.prompts, how)
    for a, b, c in zip(got, want, before):
        for x, y, z in zip(a.answers, b.answers, c.answers):
            assert x.ids == y.ids and torch.equal(x.logprobs, y.logprobs) and x.version.tolist() == [3] * 10
            assert not torch.equal(x.logprobs, z.logprobs)


def test_a_failed_update(small):
    """Atomic: the old version serves on. In place: nothing is generated until an update succeeds."""
    old, new, how = small.model(seed=1), small.model(seed=2), Sampling(max_new_tokens=4)
    engine = EmbeddedEngine(old, version=1)
    want = engine.generate(small.prompts, how)
    with pytest.raises(OSError, match="wire"):
        engine.update_weights(Halfway(new.state_dict()), 2)
    assert engine.version == 1
    assert [r.answers[0].ids for r in engine.generate(small.prompts, how)] == [r.answers[0].ids for r in want]
    with pytest.raises(OSError, match="wire"):
        engine.update_weights(Halfway(new.state_dict()), 2, "in_place")
    for work in (lambda: engine.generate([[1]], how), lambda: engine.score([[1]], [[[2]]], how)):
        with pytest.raises(EngineError, match="half-way; update the weights again"):
            work()
    engine.update_weights(new, 2, "in_place")
    assert engine.version == 2 and all(torch.equal(p, q) for p, q in zip(engine.model.parameters(), new.parameters()))


def test_updates_are_checked_before_anything_is_written(small):
    engine, weights = EmbeddedEngine(small.model()), dict(small.model(seed=2).state_dict())
    before = [p.clone() for p in engine.model.parameters()]
    missing = {n: w for n, w in weights.items() if n != "layers.2.moe.down"}
    for bad, words in ((missing, "has no layers.2.moe.down"), (weights | {"x": torch.zeros(1)}, "unknown x"),
                       (weights | {"head.weight": torch.zeros(3, 3)}, r"head.weight has shape \(3, 3\)")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            engine.update_weights(bad, 1)
    assert all(torch.equal(p, q) for p, q in zip(before, engine.model.parameters())) and engine.version == 0
    engine.model.get_parameter("head.weight").data.zero_()  # a copy: the source is untouched
    assert weights["head.weight"].any()


def test_an_engine_that_waits_for_its_first_weights(small):
    engine = EmbeddedEngine(small.config, dtype="float64")
    with pytest.raises(EngineError, match="no weights were given"):
        engine.generate([[1]], Sampling(max_new_tokens=1))
    made = small.model("sigmoid", seed=3)
    engine = EmbeddedEngine(made.config, dtype="bfloat16")
    engine.update_weights(made, 4)
    assert engine.version == 4 and engine.model.get_parameter("head.weight").dtype == torch.bfloat16
    bias = dict(engine.model.named_buffers())["layers.0.moe.router.selection_bias"]
    assert bias.dtype == torch.float32 and torch.equal(
        bias, dict(made.named_buffers())["layers.0.moe.router.selection_bias"]
    )


def test_sharing_holds_no_second_copy(small):
    made = small.model()
    engine = EmbeddedEngine.of(made, lambda: 7)
    assert engine.model is made and engine.shared and engine.version == 7
    engine.update_weights(made, 7)
    with pytest.raises(ConfigError, match="float32 cannot be shared with an engine in bfloat16"):
        EmbeddedEngine.of(made, lambda: 0, dtype="bfloat16")
    (rollout,) = engine.generate([[5, 6]], Sampling(max_new_tokens=3))
    assert rollout.answers[0].version.tolist() == [7] * 3
    out = rollout.answers[0].logprobs.requires_grad_() * 2  # training may use them
    out.sum().backward()


def test_pause_update_and_abort_from_another_thread(small):
    engine = EmbeddedEngine(small.model(seed=1), slots=2)
    engine.pause()
    with pytest.raises(EngineError, match="paused by this thread"):
        engine.generate([[1]], Sampling(max_new_tokens=1))
    engine.resume()
    found, begun = [], threading.Event()

    def work():
        for one in engine.stream(small.prompts * 40, Sampling(max_new_tokens=50)):
            found.append(one)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(30)
    engine.pause()
    steps = engine.stats.steps
    time.sleep(0.05)
    assert engine.stats.steps == steps and thread.is_alive()
    engine.resume()
    engine.update_weights(small.model(seed=2), 1)
    while engine.stats.steps < steps + 10:
        time.sleep(0.001)
    engine.abort()
    thread.join(30)
    assert len(found) == 200 and not thread.is_alive()
    assert {f.answer.finish for f in found} == {"length", "abort"}
    assert {v for f in found for v in f.answer.version.tolist()} == {0, 1}
    with pytest.raises(EngineError, match="this thread samples"):
        for _ in engine.stream([[1], [2]], Sampling(max_new_tokens=2)):
            engine.pause()
