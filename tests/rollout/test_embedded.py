"""The embedded engine against whole forward passes: log-probs, greedy answers, routes, forks, refills, counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit.data.batch import Batch
from moekit.errors import ConfigError, EngineError
from moekit.rollout import embedded, kv_cache, slots
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.slots import requests


def answers(rollouts) -> list[list[int]]:
    return [a.ids for r in rollouts for a in r.answers]


def expected(logits_V: torch.Tensor, how: Sampling) -> torch.Tensor:
    """log-probs after temperature, top-k and top-p, written out on sorted probabilities."""
    z = logits_V / (how.temperature or 1)
    p = z.softmax(-1)
    if how.temperature:
        order = p.argsort(descending=True)
        kept = order[: how.top_k or len(order)]
        q = p[kept] / p[kept].sum()
        kept = kept[: int((q.cumsum(0) < how.top_p).sum()) + 1]
        p = torch.zeros_like(p).scatter(0, kept, p[kept] / p[kept].sum())
    return p.log()


HOWS = [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 12, "top_p": 0.9}, {"top_p": 0.7}]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("variant", ["plain", "olmoe", "qwen3", "mixtral", "sigmoid", "dense+shared"])
def test_log_probs_and_routes_are_those_of_whole_forwards(small, variant, how):
    """BC-108's kind as well: prompts of mixed lengths in one batch, each as if alone. Sampled, scored, written out."""
    made = small.model(variant)
    engine, sampling = EmbeddedEngine(made, slots=4), Sampling(max_new_tokens=12, n=2, **how)
    found = engine.generate(small.prompts, sampling)
    scored = engine.score(small.prompts, [[a.ids for a in r.answers] for r in found], sampling)
    for rollout, other in zip(found, scored):
        P = len(rollout.prompt)
        for answer, given in zip(rollout.answers, other.answers):
            whole = [*rollout.prompt, *answer.ids]
            z = small.following(made, whole)
            want = torch.stack([expected(z[P - 1 + j], sampling)[t] for j, t in enumerate(answer.ids)])
            if how == {"temperature": 0.0}:
                assert answer.ids == z[P - 1 : -1].argmax(-1).tolist()
            for got in (answer.logprobs, given.logprobs):
                assert got.dtype == torch.float32 and (got - want).abs().max() < 1e-5
            routed = small.routes(made, whole).to(torch.int16)
            for r, a in ((rollout, answer), (other, given)):
                assert torch.equal(r.prompt_experts, routed[:P])
                assert torch.equal(a.experts[:-1], routed[P:-1]) and (a.experts[-1] == -1).all()
            assert answer.version.tolist() == [0] * 12 and answer.finish == "length"
    engine.counter.check()


def test_cached_decode_equals_full_recompute_in_float64(small):
    """1e-12 after 40 tokens, attention in several groups: nothing but rounding separates the cache from a recompute."""
    made = small.model("qwen3", torch.float64)
    prompts = [[3] * 20, [4], [5, 6, 7]]
    prefixes = kv_cache.prefill(made, prompts)
    cache = kv_cache.KVCache(made.config, 3, 64, torch.float64, made.device)
    for s, (prefix, prompt) in enumerate(zip(prefixes, prompts)):
        cache.fill(s, prefix)
        assert (prefix.logits_V - small.following(made, prompt)[-1]).abs().max() < 1e-12
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(40):
            token = torch.randint(50, (3,), generator=g)
            length = torch.tensor([len(p) for p in prompts]).numpy()
            z, experts = kv_cache.decode(made, cache, token, length)
            prompts = [[*p, int(t)] for p, t in zip(prompts, token)]
            for s, p in enumerate(prompts):
                assert (z[s] - small.following(made, p)[-1]).abs().max() < 1e-12
                assert torch.equal(experts[s].long(), small.routes(made, p)[-1])


def test_groups_of_similar_length_change_nothing(small, monkeypatch):
    """One call for each slot, and one for all with sorting at every step, give the answers of the default."""
    engine, how = EmbeddedEngine(small.model(), slots=5), Sampling(max_new_tokens=30, n=2, temperature=0.9)
    limits = [30, 9, 4, 17, 22]
    want = engine.generate(small.prompts, how, limits=limits)
    for worth in (-1, 10**9):
        monkeypatch.setattr(kv_cache, "WORTH", worth)
        monkeypatch.setattr(slots, "SORT", 0)
        got = engine.generate(small.prompts, how, limits=limits)
        assert answers(got) == answers(want)
        for a, b in zip(got, want):
            assert all(torch.allclose(x.logprobs, y.logprobs, atol=1e-5) for x, y in zip(a.answers, b.answers))
            assert all(torch.equal(x.experts, y.experts) for x, y in zip(a.answers, b.answers))


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_answers_do_not_depend_on_slots_neighbours_or_order(small, slots):
    """Draws are keyed by seed, prompt id, sample and position. Ids are equal, log-probs within rounding: a matrix
    product may round a row differently in a batch of another size."""
    made = small.model()
    how = Sampling(max_new_tokens=10, n=3, temperature=1.2, seed=4)
    want = EmbeddedEngine(made).generate(small.prompts, how)
    order = [3, 0, 4, 2, 1]
    shuffled = EmbeddedEngine(made, slots=slots, ahead=7).generate(
        [small.prompts[i] for i in order], how, prompt_ids=order
    )
    alone = [EmbeddedEngine(made).generate([p], how, prompt_ids=[i])[0] for i, p in enumerate(small.prompts)]
    for other in ([shuffled[order.index(i)] for i in range(5)], alone):
        assert answers(other) == answers(want)
        for a, b in zip(other, want):
            assert all(torch.allclose(x.logprobs, y.logprobs, atol=1e-5) for x, y in zip(a.answers, b.answers))
    assert answers(EmbeddedEngine(made).generate(small.prompts, replace(how, seed=5))) != answers(want)
    assert len({tuple(a) for a in answers(want)}) == 15


def test_forked_samples_are_those_of_separate_prompts(small, monkeypatch):
    """n = 4 of a prompt against four prompts of one sample, keyed by hand: ids equal, and the first token's log-prob
    bitwise where the prompt is read alone both times; the forked prompt is read once."""
    made, prompt = small.model(), [9, 8, 7, 6]
    how = Sampling(max_new_tokens=9, n=4, temperature=1.1)
    engine = EmbeddedEngine(made)
    (forked,) = engine.generate([prompt], how)
    assert engine.counter.measures["engine", "prefill"].positions_C.tolist() == [0, 4, 0, 0]
    assert engine.metrics()["engine/prompts_read"] == 1
    for sample, answer in enumerate(forked.answers):
        groups = requests(made.config, [prompt], replace(how, n=sample + 1), None, None)
        groups[0].key = groups[0].key[-1:]
        monkeypatch.setattr(embedded, "requests", lambda *_, groups=groups: groups)
        ((one,),) = [r.answers[-1:] for r in engine.generate([prompt], replace(how, n=1))]
        assert one.ids == answer.ids and torch.equal(one.logprobs[:1], answer.logprobs[:1])
        assert torch.allclose(one.logprobs, answer.logprobs, atol=1e-5) and torch.equal(one.experts, answer.experts)


def test_a_prompt_is_read_once_whatever_the_slots(small):
    """5 prompts of 27 tokens in all, 6 samples each, 4 slots, reading 8 tokens ahead: 27 positions in prefill."""
    engine = EmbeddedEngine(small.model(), slots=4, ahead=8)
    engine.generate(small.prompts, Sampling(max_new_tokens=5, n=6))
    m = engine.counter.measures["engine", "prefill"]
    assert sum(map(len, small.prompts)) == 27 and m.positions_C.tolist() == [0, 27, 0, 0]
    # per layer 27 x 2 rows; in the last layer only the rows of the 5 positions that are sampled from run
    assert m.dispatched_LC[:, 1].tolist() == [54, 54, 10] and m.elided_LC[:, 1].tolist() == [0, 0, 44]
    decoded = engine.counter.measures["engine", "decode"]
    assert decoded.positions_C.tolist() == [0, 30 * 4, 0, 0]  # the last of 5 tokens is not read
    assert decoded.dispatched_LC[:, 1].tolist() == [240] * 3
    # attention: token j of an answer sees the prompt, and the j tokens before it and itself
    assert int(decoded.pairs) == sum(6 * (len(p) + j + 1) for p in small.prompts for j in range(4))
    engine.counter.check()
    assert engine.metrics()["engine/prompts_read"] == 5


def test_slots_refill_at_once_under_ragged_lengths(small):
    """Answers of 1 to 40 tokens in 4 slots: no step has a free slot while an answer waits, so the count of steps is
    that of list scheduling in the given order."""
    limits = torch.randint(1, 41, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = EmbeddedEngine(small.model(), slots=4)
    found = engine.generate([[5, 6]] * 30, Sampling(max_new_tokens=40), limits=limits)
    assert [len(a) for a in answers(found)] == limits
    for a in (r.answers[0] for r in found):  # nothing is left over from a longer answer that had the slot before
        assert (a.experts[-1] == -1).all() and (a.experts[:-1] >= 0).all()
    free = [0] * 4
    for length in limits:  # a token a step, the first without one
        free.sort()
        free[0] += length - 1
    stats = engine.stats
    assert stats.steps == max(free) and stats.slot_steps == sum(limits) - 30
    assert stats.steps < 1.2 * stats.slot_steps / 4
    assert engine.metrics()["engine/occupancy"] == pytest.approx((sum(limits) - 30) / (4 * max(free)))


def test_stop_ids_and_sequences(small):
    """Stops are looked for in the answer only, across tokens, and what was sampled stays."""
    made = small.model()
    engine = EmbeddedEngine(made, slots=2)
    free = answers(engine.generate(small.prompts, Sampling(max_new_tokens=12, temperature=0)))
    ids = (free[0][3], free[1][0])
    sequences = (tuple(free[2][4:7]), tuple(free[3][1:3]), (small.prompts[4][-1], free[4][0]), (1,) * 20)
    how = Sampling(max_new_tokens=12, temperature=0, stop_ids=ids, stop_sequences=sequences)

    def cut(answer):  # the shortest beginning that ends with a stop
        ends = [e for e in range(1, len(answer) + 1) if how.stopped(answer[:e])]
        return answer[: ends[0]] if ends else answer

    found = engine.generate(small.prompts, how)
    assert answers(found) == [cut(a) for a in free]
    assert len({len(a) for a in answers(found)}) >= 3 and len(found[1].answers[0].ids) == 1
    for rollout in found:
        for a in rollout.answers:
            assert a.finish == ("stop" if how.stopped(a.ids) else "length") and len(a.logprobs) == len(a.ids)


def test_rollout_precision_is_its_own(small):
    """A bfloat16 engine beside float32 weights: its log-probs are bfloat16's, near float32's; its copy is its own."""
    made = small.model()
    engine = EmbeddedEngine(made, dtype="bfloat16")
    assert engine.model.head_weight.dtype == torch.bfloat16 and made.head_weight.dtype == torch.float32
    how = Sampling(max_new_tokens=8)
    found = engine.generate(small.prompts, how)
    exact = EmbeddedEngine(made).score(small.prompts, [[a.ids for a in r.answers] for r in found], how)
    gap = torch.cat([(a.answers[0].logprobs - b.answers[0].logprobs).abs() for a, b in zip(found, exact)])
    assert 1e-4 < gap.mean() < 0.3
    assert all(a.logprobs.dtype == torch.float32 for r in found for a in r.answers)


def test_bad_requests_are_refused_before_any_work(small):
    engine = EmbeddedEngine(small.model())
    for prompts, how, words in (
        ([[1], [1] * 60], {}, "prompt 1 has 60 tokens; with max_new_tokens=8 .* 64 positions it needs 1 to 56"),
        ([[1], []], {}, "prompt 1 has 0 tokens"),
        ([[1], [50]], {}, r"prompt 1 holds a token outside 0\.\.49: 50 or 50"),
        ([[1]], {"prompt_ids": [1, 2]}, "1 prompts, but 2 prompt_ids"),
        ([[1]], {"limits": [0]}, "prompt 0 has 1 tokens; with max_new_tokens=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.generate(prompts, Sampling(max_new_tokens=8), **how)
    assert engine.counter.host() == {} and engine.stats.steps == 0
    assert engine.generate([], Sampling()) == [] and engine.score([], [], Sampling()) == []
    with pytest.raises(ConfigError, match="1 prompts, answers to 2"):
        engine.score([[1]], [[[1]], [[2]]], Sampling())
    with pytest.raises(ConfigError, match="value head"):
        EmbeddedEngine(replace(small.config, value_head=True))
    with pytest.raises(ConfigError, match="running='wait'"):
        EmbeddedEngine(small.model(), running="wait")
    stream = engine.stream([[1], [2]], Sampling(max_new_tokens=2))
    next(stream)
    with pytest.raises(EngineError, match="generating already"):
        engine.generate([[1]], Sampling(max_new_tokens=2))
    stream.close()
    assert len(engine.generate([[1]], Sampling(max_new_tokens=2))) == 1


def test_an_empty_answer_is_scored_and_an_answer_can_be_one_token(small):
    engine = EmbeddedEngine(small.model())
    (rollout,) = engine.score([[5, 6]], [[[], [7]]], Sampling())
    assert [len(a.logprobs) for a in rollout.answers] == [0, 1] and rollout.answers[1].experts.tolist() == [
        [[-1] * 2] * 3
    ]
    assert rollout.prompt_experts.shape == (2, 3, 2)
    told = []
    engine.generate([[1], [2]], Sampling(max_new_tokens=1, n=2), told=lambda *x: told.append(x))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def ordinary(t: torch.Tensor) -> bool:
    """Autograd takes it, it may be written to, and it has a version counter: none of it holds in inference mode."""
    scale = torch.ones((), requires_grad=True)
    (t.float() * scale).sum().backward()
    t.add_(0)
    return not t.is_inference() and t._version >= 0 and bool(scale.grad == t.float().sum())


def test_the_engine_runs_in_inference_mode_and_hands_out_ordinary_tensors(small, monkeypatch):
    """Everything of an answer, of a score and of an abort serves autograd; the shared model trains on afterwards."""
    made, seen = small.model(), []
    route = type(made.blocks[0].moe.router).forward
    monkeypatch.setattr(type(made.blocks[0].moe.router), "forward",
                        lambda *a, **k: seen.append(torch.is_inference_mode_enabled()) or route(*a, **k))  # fmt: skip
    engine, how = EmbeddedEngine.of(made, lambda: 0, slots=3), Sampling(max_new_tokens=6, n=2)
    found = engine.generate(small.prompts, how)
    found += engine.score(small.prompts, [[a.ids for a in r.answers] for r in found], how)
    stream = engine.stream(small.prompts, how)
    handed = [next(stream)]
    engine.abort()
    handed += stream
    assert seen and all(seen) and {f.answer.finish for f in handed} == {"length", "abort"}
    parts = [r.prompt_experts for r in found] + [f.prompt_experts for f in handed if f.prompt_experts is not None]
    parts += [
        t for a in [a for r in found for a in r.answers] + [f.answer for f in handed]
        for t in (a.logprobs, a.experts, a.version)
    ]  # fmt: skip
    assert len(parts) > 60 and all(map(ordinary, parts))
    engine.counter.reset()
    out = made(Batch.make(torch.tensor([[5, 6, 7]])))
    out.logprob_M.sum().backward()
    assert not out.logprob_M.is_inference() and all(p.grad is not None for p in made.parameters())
