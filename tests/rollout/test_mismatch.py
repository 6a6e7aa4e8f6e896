"""Learner against engine: planted flips are routing's, planted arithmetic is arithmetic's, and every number by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.errors import DataError
from moekit.model.router import Route
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Answer, Rollout, Sampling
from moekit.rollout.mismatch import Mismatch, agreement, divergence, inspect, margin
from moekit.viz import static, theme
from moekit.viz.mismatch import mismatch_figure

torch.set_num_threads(1)
SHAPE = ModelConfig(vocab=61, width=32, layers=3, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=24,
                    dense_layers=(1,), dense_width=48, init_std=0.1)  # fmt: skip
LENGTHS = ((5, (7, 3)), (1, (4,)), (9, (1, 0, 12)))  # prompts, answers


def scored(model: Transformer, prompt: list[int], ids: list[int], temperature: float, routes=None) -> tuple:
    """Log-probs of the answer and choices [P + len, L, K] of one sequence, alone: what an engine would tell."""
    whole = torch.tensor([prompt + ids])
    labels = torch.full_like(whole, -100)
    labels[0, len(prompt) - 1 : -1] = torch.tensor(ids)
    flat = Batch.make(whole, labels=labels).flat
    out = model(flat, record=True, temperature=temperature, replay=routes)
    return out.logprob_M.detach(), torch.stack([r.expert_NK for r in out.routes], 1)


def rolled(model: Transformer, temperature: float = 1.0, change=None) -> list[Rollout]:
    """Rollouts of random tokens; `change(r, a, choices [P + len, L, K])` may alter what the engine chose."""
    g, out = torch.Generator().manual_seed(0), []
    for r, (P, lengths) in enumerate(LENGTHS):
        prompt, answers, known = torch.randint(0, 61, (P,), generator=g).tolist(), [], None
        for a, n in enumerate(lengths):
            ids = torch.randint(0, 61, (n,), generator=g).tolist()
            if not n:
                answers.append(Answer([], torch.zeros(0), torch.zeros(0, 2, 2), torch.zeros(0), "abort"))
                continue
            logprobs, chosen = scored(model, prompt, ids, temperature)
            if change is not None:
                chosen = change(r, a, chosen.clone())
                logprobs, again = scored(model, prompt, ids, temperature, list(chosen.unbind(1)))
                assert torch.equal(again, chosen)
            known = chosen[:P] if known is None else known
            chosen = chosen[P:].clone()
            chosen[-1] = -1  # the last token was never read
            answers.append(Answer(ids, logprobs, chosen.to(torch.int16), torch.full((n,), 7), "length"))
        out.append(Rollout(prompt, known.to(torch.int16), answers))
    return out


def test_an_engine_with_the_learners_numbers_shows_no_mismatch():
    """Ragged answers in several forwards, a dense layer between, an empty answer, a temperature: all come out equal."""
    model = Transformer(SHAPE, dtype=torch.float64)
    rollouts = rolled(model, 0.7)
    report = inspect(model, rollouts, temperature=0.7, rows=2)
    t = report.tokens
    assert t.id.tolist() == [i for r in rollouts for a in r.answers for i in a.ids] and set(t.version) == {7}
    where = [(r, a, j) for r, (_, n) in enumerate(LENGTHS) for a, k in enumerate(n) for j in range(k)]
    assert list(t[["rollout", "answer", "token"]].itertuples(index=False, name=None)) == where
    assert t.difference.abs().max() < 1e-12 and t.changed.sum() == 0
    told = report.summary()
    assert told["mismatch/agreement"] == 1 and told["mismatch/changed"] == 0 and told["mismatch/k3"] < 1e-12
    # one line for every position that was read, in each layer that routes: all but the last token of each answer
    assert len(report.choices) == 2 * sum(P + n - 1 for P, ns in LENGTHS for n in ns if n)
    assert report.layers.index.tolist() == [0, 2]
    assert inspect(model, rollouts, temperature=1.0).tokens.difference.abs().mean() > 0.1  # the wrong temperature


def test_a_planted_flip_is_routings_and_only_where_it_can_reach():
    """The engine took the third-best expert at one position of the last layer: that token's error, all of it."""
    model = Transformer(SHAPE, dtype=torch.float64)

    def flip(r: int, a: int, chosen):
        if (r, a) == (2, 2):  # position 9 + 4 reads token 4 and predicts token 5
            free = [e for e in range(8) if e not in chosen[13, 1].tolist()]
            chosen[13, 1, 1] = free[0]
        return chosen

    report = inspect(model, rolled(model, change=flip))
    t = report.tokens
    hit = (t.rollout == 2) & (t.answer == 2) & (t.token == 5)
    assert t.changed[hit].tolist() == [1] and t.changed.sum() == 1
    assert abs(t.difference[hit].item()) > 1e-3 and t.difference[~hit].abs().max() < 1e-12
    assert t.arithmetic.abs().max() < 1e-12 and np.allclose(t.flips, t.difference, atol=1e-12)
    told = report.summary()
    assert told["mismatch/vanishes_with_replay"] == pytest.approx(1)
    wrong = report.choices[report.choices.changed]
    assert wrong.layer.tolist() == [2] and wrong.agreement.tolist() == [0.5]
    assert told["mismatch/margin_changed"] == pytest.approx(wrong.margin.item())
    assert report.layers.changed.tolist() == [0, 1 / len(report.choices) * 2]

    def early(r: int, a: int, chosen):  # in the first layer: later tokens attend to it, earlier ones cannot
        if r == 2:  # position 7 is in the prompt of 9
            chosen[7, 0] = torch.tensor([e for e in range(8) if e not in chosen[7, 0].tolist()][:2])
        return chosen

    t = inspect(model, rolled(model, change=early)).tokens
    later = (t.rollout == 2) & (t.answer == 2)
    assert (t.difference[later].abs() > 1e-9).all() and t.difference[t.rollout < 2].abs().max() < 1e-12
    assert t.flips[later].abs().sum() > 100 * t.arithmetic[later].abs().sum()


def test_planted_arithmetic_is_arithmetics():
    """The engine's head is off by 1 %: no route changes, and replay changes nothing."""
    model, engine = Transformer(SHAPE, dtype=torch.float64), Transformer(SHAPE, dtype=torch.float64)
    with torch.no_grad():
        engine.head.weight *= 1.01
    report = inspect(model, rolled(engine))
    t, told = report.tokens, report.summary()
    assert t.difference.abs().min() > 1e-6 and t.flips.abs().max() == 0 and t.changed.sum() == 0
    assert np.array_equal(t.arithmetic, t.difference) and told["mismatch/vanishes_with_replay"] == 0


def test_a_bfloat16_engine_against_its_float32_learner():
    """The real engine: flips happen, they happen at small margins, and replay takes their part of the error away."""
    shape = ModelConfig(vocab=61, width=64, layers=4, heads=4, experts=16, top_k=4, expert_width=48, init_std=0.1)
    model = Transformer(shape)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 61, (n,), generator=g).tolist() for n in (4, 9, 13)]
    sampling = Sampling(max_new_tokens=24, n=4, seed=5)
    report = inspect(model, EmbeddedEngine(model, dtype="bfloat16").generate(prompts, sampling))
    told = report.summary()
    assert len(report.tokens) == 3 * 4 * 24 and 0.001 < told["mismatch/changed"] < 0.2
    assert told["mismatch/margin_changed"] < 0.3 * told["mismatch/margin_same"]
    assert 0.05 < told["mismatch/vanishes_with_replay"] < 1 and 1e-4 < told["mismatch/difference_abs"] < 0.3
    assert np.allclose(report.tokens.flips + report.tokens.arithmetic, report.tokens.difference)
    same = inspect(model, EmbeddedEngine(model).generate(prompts, sampling))
    assert same.summary()["mismatch/difference_abs"] < 1e-5 < told["mismatch/difference_abs"] / 10
    assert same.summary()["mismatch/agreement"] > 0.9999

    for found in (report, same):
        fig = mismatch_figure(found)
        head = f"{100 * found.summary()['mismatch/vanishes_with_replay']:.0f} %"
        assert theme.heading(fig)[0].startswith(head) and static.render(fig)[:4] == b"\x89PNG"
        own, _, kept, changed, by_layer = fig.data
        assert np.isclose(max(own.x), found.tokens.difference.abs().max()) and max(own.y) == 100
        assert list(by_layer.y) == pytest.approx((100 * found.layers.changed).tolist())
    assert np.median(changed.x if len(changed.x) else [0.0]) < np.median(kept.x)
    with pytest.raises(DataError, match="no token"):
        mismatch_figure(Mismatch(report.tokens[:0], report.choices[:0]))


def test_distances_agreement_and_margins_by_hand():
    """BC-082: k1 = ln 2, k3 = ln 2 - 1/2 for r = 1/2; Schulman's k3 is never negative."""
    found = divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log())
    ln2 = math.log(2)
    assert found["k1"] == pytest.approx(ln2 / 2) and found["k3"] == pytest.approx((0.5 - 1 + ln2) / 2)
    assert found["difference_abs"] == pytest.approx(ln2 / 2) and found["difference_max"] == pytest.approx(ln2)
    assert found["ratio_q01"] == pytest.approx(0.505) and found["ratio_q99"] == pytest.approx(0.995)
    one, other = torch.tensor([[[0, 1, 2]], [[3, 4, 5]]]), torch.tensor([[[2, 0, 1]], [[5, 6, 7]]])
    assert agreement(one, other).tolist() == [[1.0], [pytest.approx(1 / 3)]]
    logits = torch.tensor([[3.0, 1.0, 2.5, 0.0]])
    route = Route(logits, logits.softmax(-1), torch.tensor([[0, 2]]), torch.ones(1, 2))
    assert margin(route, "softmax").item() == 1.5
    bias = torch.tensor([0.0, 0.5, 0.0, 0.0])  # scores .953 .731 .924 .5: with the bias 1.231 leads, then .953, .924
    assert margin(route, "sigmoid", bias).item() == pytest.approx(0.9525741 - 0.9241418, abs=1e-6)
    probs = logits.softmax(-1)[0]
    assert margin(route, "softmax", torch.zeros(4)).item() == pytest.approx((probs[2] - probs[1]).item())
    assert margin(Route(logits, logits, torch.tensor([[0, 1, 2, 3]]), logits), "softmax").isnan().all()


def test_what_cannot_be_compared_is_said():
    model = Transformer(SHAPE)
    with pytest.raises(DataError, match="no answer holds a token"):
        inspect(model, [Rollout([1], None, [])])
    answer = Answer([1], torch.zeros(1), None, torch.zeros(1), "stop")
    with pytest.raises(DataError, match="answer 0 to prompt 0 came with no routed experts.*'routes'"):
        inspect(model, [Rollout([1], torch.zeros(1, 2, 2), [answer])])
    answer = Answer([1], torch.zeros(1), torch.zeros(1, 3, 2), torch.zeros(1), "stop")
    with pytest.raises(DataError, match=r"experts \[layers, top_k\] = \[3, 2\], this model has \[2, 2\]"):
        inspect(model, [Rollout([1], torch.zeros(1, 2, 2), [answer])])
