"""What is drawn and with which probability, by the arithmetic of small distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from moekit.errors import CapabilityError, ConfigError, DataError
from moekit.objectives.logprobs import token_logprobs
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Answer, Capabilities, Engine, Sampling
from moekit.rollout.sampling import choose, distribution, draw_key, logprob_of, uniform

HALF = torch.tensor([0.5])


def test_bc_087_one_temperature_on_both_sides():
    """BC-087: logits [2, 0], token 0, T = 0.5: -0.0181499 from the engine and from the learner, ratio 1."""
    z = torch.tensor([[2.0, 0.0]])
    engine = logprob_of(z, torch.tensor([0]), Sampling(temperature=0.5))
    learner = token_logprobs(torch.tensor([[1.0]]), z.T.contiguous(), torch.tensor([0]), temperature=0.5)
    assert engine.item() == pytest.approx(-0.0181499, abs=1e-6)
    assert learner.item() == pytest.approx(-0.0181499, abs=1e-6)
    assert (learner - engine).exp().item() == pytest.approx(1, abs=1e-6)


def test_bc_088_greedy_reports_the_untempered_log_prob_and_is_refused_for_training():
    """BC-088: logits [2, 0], T = 0: -0.1269280, finite; `check_trainable` refuses."""
    token, logprob = choose(torch.tensor([[2.0, 0.0]]), Sampling(temperature=0), HALF)
    assert token.item() == 0 and logprob.item() == pytest.approx(-0.1269280, abs=1e-6)
    with pytest.raises(ConfigError, match="temperature=0 is no distribution"):
        Sampling(temperature=0).check_trainable()
    Sampling(temperature=0.5).check_trainable()


def test_top_k_then_top_p():
    """p = (.4, .3, .2, .1): top-k 3 gives (4, 3, 2)/9; top-p .7 of those keeps (4, 3), which reach 7/9."""
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for how, want in {
        (0, 1.0): [0.1, 0.4, 0.2, 0.3],
        (3, 1.0): [0, 4 / 9, 2 / 9, 3 / 9],
        (3, 0.7): [0, 4 / 7, 0, 3 / 7],
        (0, 0.69): [0, 4 / 7, 0, 3 / 7],
        (0, 0.71): [0, 4 / 9, 2 / 9, 3 / 9],
        (0, 1e-9): [0, 1, 0, 0],
        (9, 1.0): [0.1, 0.4, 0.2, 0.3],
    }.items():
        sampling = Sampling(top_k=how[0], top_p=how[1])
        got = [math.exp(logprob_of(z, torch.tensor([t]), sampling).item()) for t in range(4)]
        assert got == pytest.approx(want, abs=1e-6), how
        logprob_SC, _ = distribution(z, sampling)
        assert logprob_SC.exp().sum().item() == pytest.approx(1, abs=1e-6)
        for u in np.linspace(0.001, 0.999, 50):
            token, logprob = choose(z, sampling, torch.tensor([u]))
            assert logprob.exp().item() == pytest.approx(want[token.item()], abs=1e-6) and want[token.item()] > 0


def test_the_inverse_of_the_cumulative_distribution():
    """p = (.1, .4, .2, .3): where u falls in (.1, .5, .7, 1)."""
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for u, token in ((0.05, 0), (0.15, 1), (0.45, 1), (0.55, 2), (0.75, 3), (1 - 2.0**-49, 3)):
        assert choose(z, Sampling(), torch.tensor([u], dtype=torch.float64))[0].item() == token
    tail = torch.tensor([[0.0, -200.0, -200.0]])  # probability 0: never, however close u is to 1
    assert choose(tail, Sampling(), torch.tensor([1 - 2.0**-49], dtype=torch.float64))[0].item() == 0


def test_random_numbers_are_splitmix64_s_and_independent():
    """First outputs for state 0 (Vigna's splitmix64.c): 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f."""
    got = uniform(np.zeros(3, np.uint64), np.arange(3))
    want = [x / 2**64 for x in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)]
    assert got == pytest.approx(want, abs=2**-47)
    keys = [draw_key(s, p, n) for s in range(-2, 8) for p in range(10) for n in range(10)]
    assert len(set(keys)) == 1000 and draw_key(1, 2, 3) == draw_key(1, 2, 3)
    u = np.stack([uniform(np.array(keys, np.uint64), np.full(1000, t)) for t in range(50)])
    assert stats.kstest(u.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(u)[np.triu_indices(50, 1)]).max() < 0.15  # positions; sd 0.032
    assert abs(np.corrcoef(u.T[:100])[np.triu_indices(100, 1)]).max() < 0.65  # streams; sd 0.14


@pytest.mark.parametrize("how", [{"temperature": 0.7}, {"temperature": 1.4, "top_k": 20}, {"top_p": 0.8}], ids=str)
def test_frequencies_are_the_probabilities(small, how):
    """Chi-square of 20000 first tokens against the whole forward's distribution; another temperature is rejected."""
    made = small.model()
    engine = EmbeddedEngine(made, slots=20000)
    z = small.following(made, [5, 6])[-1]

    def fit(temperature: float) -> float:
        p = (z / temperature).softmax(-1).numpy()
        if "top_k" in how:
            p[np.argsort(-p)[how["top_k"] :]] = 0
        if "top_p" in how:
            order = np.argsort(-p)
            p[order[np.cumsum(p[order]) - p[order] >= how["top_p"]]] = 0
        expected = 20000 * p / p.sum()
        assert not counts[expected == 0].any() or temperature != how.get("temperature", 1.0)
        big = expected >= 5
        rest = [counts[~big].sum(), expected[~big].sum()]
        pairs = [(counts[big], expected[big]), ([rest[0]], [rest[1]])][: 1 + (rest[1] >= 5)]
        seen, want = (np.concatenate(x) for x in zip(*pairs))
        return stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue

    (rollout,) = engine.generate([[5, 6]], Sampling(max_new_tokens=1, n=20000, seed=3, **how))
    counts = np.bincount([a.ids[0] for a in rollout.answers], minlength=50)
    right = how.get("temperature", 1.0)
    assert fit(right) > 0.001
    assert fit(right * 1.15) < 1e-6


def test_settings_are_checked():
    for bad in ({"max_new_tokens": 0}, {"n": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0},
                {"stop_sequences": ((),)}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"Sampling.{next(iter(bad))}"):
            Sampling(**bad)
    how = Sampling(stop_ids=(1,), stop_sequences=((2, 3),), seed=-5)
    assert Sampling.from_dict(how.to_dict()) == how


def test_bc_106_the_sampled_stop_token_belongs_to_the_answer():
    """BC-106: [8, 9, 2(eos)] stopped, [8, 9, 10] cut: masks [1, 1, 1, 0] both, only the first is terminated."""
    answers = [Answer(ids, torch.zeros(3), None, torch.zeros(3), finish)
               for ids, finish in (([8, 9, 2], "stop"), ([8, 9, 10], "length"))]  # fmt: skip
    assert [a.mask(4).tolist() for a in answers] == [[1, 1, 1, 0]] * 2
    assert [len(a.ids) for a in answers] == [3, 3] and [a.terminated for a in answers] == [True, False]
    with pytest.raises(DataError, match="does not fit"):
        answers[0].mask(2)


def test_bc_104_ids_and_log_probs_stay_aligned():
    """BC-104: ids are the actions; a length that differs is an error and never padded."""
    answer = Answer([4, 1, 2], torch.tensor([-1.0, -2.0, -3.0]), None, torch.zeros(3), "length")
    assert [*answer.ids, 4] == [4, 1, 2, 4] and len(answer.logprobs) == len(answer.ids)
    with pytest.raises(DataError, match="3 tokens has 2 logprobs"):
        Answer([4, 1, 2], torch.zeros(2), None, torch.zeros(3), "length")
    with pytest.raises(DataError, match="3 tokens has 2 experts"):
        Answer([4, 1, 2], torch.zeros(3), torch.zeros(2, 1, 1), torch.zeros(3), "length")


def test_a_demand_that_an_engine_cannot_meet_raises(small):
    engine = EmbeddedEngine(small.model())
    assert isinstance(engine, Engine)
    engine.capabilities.need(logprobs=True, routes=True, versions=True, seeds=True, score=True, updates="in_place")
    poor = Capabilities("remote", logprobs=True, updates=("atomic",))
    for wish, words in (({"routes": True}, "'remote' was asked for routes=True and has it not at all; train without"),
                        ({"updates": "in_place"}, "only atomic"), ({"running": "abort"}, "only none")):  # fmt: skip
        with pytest.raises(CapabilityError, match=words):
            poor.need(**wish)
    poor.need(logprobs=True, routes=False)
    with pytest.raises(ConfigError, match="no engine has a capability 'route'"):
        poor.need(route=True)
    with pytest.raises(CapabilityError, match="updates='hot'"):
        engine.update_weights(engine.model, 1, mode="hot")
    shared = EmbeddedEngine.of(small.model(), lambda: 0)
    with pytest.raises(CapabilityError, match="only none"):
        shared.update_weights(small.model(), 1)
