"""The objectives in a learner: the gradient of a step and its metrics do not depend on how it was cut."""

import math
from dataclasses import replace

import pytest
import torch

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.learner.learner import Learner
from moekit.learner.optimizer import KINDS
from moekit.model.transformer import Transformer
from moekit.objectives.grpo import GRPO
from moekit.objectives.ppo import PPO, ValueLoss, explained_variance
from moekit.objectives.reward_model import RewardModel
from moekit.objectives.sft import SFT

ROWS, WIDTH = 4, 12
SHAPE = ModelConfig(vocab=31, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, experts=4, top_k=2, expert_width=8)


def learner(objective, value_head=False, **settings):
    model = Transformer(replace(SHAPE, value_head=value_head), seed=0, dtype=torch.float64)
    return Learner(model, objective, LearnerConfig(lr=1e-3, **settings))


def rollout(seed=0):
    """Four rows of ragged answers after a prompt of three tokens; one row has no label at all (a masked answer)."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    length = torch.tensor([12, 6, 9, 11])
    place = torch.arange(WIDTH)
    segment = torch.where(place < length[:, None], 0, -1)
    ids = torch.randint(0, 31, (ROWS, WIDTH), generator=g)
    labels = Batch.make(ids, segment=segment).labels.masked_fill(place < 2, -100)
    labels[2] = -100
    extra = {
        "advantage": draw()[:, :1].expand(-1, WIDTH).clone(), "old_logprob": -3.4 + 0.2 * draw(),
        "ref_logprob": -3.4 + 0.2 * draw(), "weight": draw().abs(), "return": draw(), "old_value": 0.1 * draw(),
    }  # fmt: skip
    return Batch.make(ids, labels=labels, segment=segment, extra=extra)


def pairs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (ROWS, WIDTH), generator=g)
    segment = torch.arange(WIDTH).div(6, rounding_mode="floor").expand(ROWS, -1).clone()  # both answers in a row
    labels = torch.where(torch.arange(WIDTH) % 6 == 5, 0, -100).expand(ROWS, -1).clone()
    family = torch.arange(ROWS)[:, None].expand(-1, WIDTH).clone()
    return Batch.make(ids, labels=labels, segment=segment, extra={"family": family, "chosen": 1 - segment})


CASES = [
    (GRPO(beta=0.04, clip_high=0.28), False, rollout),
    (GRPO(ratio="sequence", denominator="sequence_mean"), False, rollout),
    (GRPO(denominator="constant", constant_length=10, kl="k2", beta=0.1), False, rollout),
    (PPO(), False, rollout),
    (ValueLoss(), True, rollout),
    (RewardModel(center=0.01), True, pairs),
]


@pytest.mark.parametrize("objective,value_head,make", CASES, ids=lambda x: getattr(x, "name", None))
def test_the_cut_does_not_matter(objective, value_head, make):
    whole, cut = learner(objective, value_head), learner(objective, value_head)
    a, b = whole.step([make()]), cut.step([*make().split(1), make().empty()])
    assert a["step/index"] == b["step/index"] == 1 and a["grad/norm"] > 0
    for name in (f"loss/{objective.name}", "grad/norm", *(f"{objective.name}/{m}" for m in objective.metrics)):
        assert math.isfinite(a[name]) and b[name] == pytest.approx(a[name], rel=1e-9, abs=1e-12), name
    other = cut.gradient()
    for name, x in whole.gradient().items():
        torch.testing.assert_close(other[name], x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_bc_085_old_log_probs_that_the_learner_scored(recompute):
    """BC-085 in a learner: scored with the weights that then train, in other microbatches: ratio 1 within 1e-6."""
    batch = rollout()
    del batch.extra["ref_logprob"], batch.extra["weight"]
    one = learner(GRPO(temperature=0.7), recompute=recompute)
    for rows in (ROWS, 1):
        old = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        parts = batch.split(rows)
        for i, (part, score) in enumerate(zip(parts, one.score(parts, temperature=0.7))):
            flat = part.flat
            at = torch.zeros(flat.positions, dtype=torch.float64).index_put((flat.label_index_M,), score)
            old[i * rows : i * rows + part.rows] = flat.to_rows(at)
        batch.extra["old_logprob"] = old
        again = learner(GRPO(temperature=0.7), recompute=recompute)
        metrics = again.step(
            [Batch.make(batch.input_ids, labels=batch.labels, segment=batch.segment, extra=batch.extra)]
        )
        assert metrics["grpo/clip_low"] == metrics["grpo/clip_high"] == 0.0
        assert metrics["grpo/ratio"] == pytest.approx(1.0, abs=0 if (rows, recompute) == (ROWS, "none") else 1e-6)
        assert abs(metrics["grpo/kl_old"]) <= (0 if (rows, recompute) == (ROWS, "none") else 1e-6)
        want = -(batch.extra["advantage"][batch.labels != -100]).mean().item()
        assert metrics["loss/grpo"] == pytest.approx(want, abs=1e-6)


def test_a_critic_learns_its_returns():
    """On one batch the explained variance rises from nothing to near 1."""
    batch, critic = rollout(), learner(ValueLoss(clip=None), value_head=True)
    first = critic.step([batch])
    found = [explained_variance(critic.step([batch])) for _ in range(150)]
    assert explained_variance(first) < 0.1 and 0.9 < found[-1] <= 1.0


def test_nothing_to_learn_from():
    """All answers masked: the step is skipped and counted, nothing is NaN."""
    batch = rollout()
    batch = Batch.make(batch.input_ids, labels=torch.full_like(batch.labels, -100), segment=batch.segment,
                       extra=batch.extra)  # fmt: skip
    metrics = learner(GRPO()).step([batch])
    assert metrics["step/skipped"] == 1 and metrics["loss/grpo"] == 0.0 and metrics["grpo/ratio"] == 0.0


def test_bc_014_router_losses_alone_move_nothing():
    """BC-014: in a step without a label the router losses and the selection bias have no part either."""
    model = Transformer(replace(SHAPE, selection_bias=True), seed=0, dtype=torch.float64)
    router = RouterLossConfig(balance=0.1, z=0.1)
    one = Learner(model, GRPO(), LearnerConfig(lr=0.1, weight_decay=0.1, router=router, bias_rate=0.1))
    batch = rollout()
    one.step([batch])
    held = lambda: (
        {f"{n} {kind}": x for kind in KINDS for n, x in one.gathered(kind).items()}
        | {n: b.clone() for n, b in model.named_buffers()}
    )
    before = held()
    assert all(x.any() for n, x in before.items() if "exp_avg" in n or "bias" in n)
    ignored = replace(batch, labels=torch.full_like(batch.labels, -100))
    metrics = one.step([ignored, ignored.empty()])
    assert metrics["step/skipped"] == 1 and metrics["loss/total"] == metrics["grad/norm"] == metrics["lr"] == 0.0
    assert not any(g.any() for g in one.gradient().values())
    assert all(torch.equal(before[n], x) for n, x in held().items())


def test_bc_040_every_layer_that_routes_moves_its_bias_by_this_steps_choices():
    """BC-040: layer 0 has no router; choices [5, 1, 0] move layer 1 by -u, u, u; the next step's count is its own."""
    shape = replace(SHAPE, layers=3, experts=3, top_k=1, dense_layers=(0,), dense_width=8, selection_bias=True)
    model = Transformer(shape, seed=0)
    one = Learner(model, SFT(), LearnerConfig(bias_rate=0.001))
    segment = torch.tensor([[0] * 4 + [-1] * 2, [0] * 2 + [-1] * 4])
    batches = Batch.make(torch.ones(2, 6, dtype=torch.long), segment=segment).split(1)
    steps = (  # choices of layers 1 and 2 in two microbatches, padding's behind them; how often each bias has moved
        ([[0, 0, 0, 1, 2, 2], [2, 2, 2, 1, 0, 0]], [[0, 0, 2, 2, 2, 2], [2, 2, 0, 0, 0, 0]], [-1, 1, 1], [1, 1, -1]),
        ([[1, 1, 1, 1, 2, 2], [0, 1, 2, 0, 0, 0]], [[1, 1, 2, 2, 2, 2], [1, 2, 0, 0, 0, 0]], [0, 0, 2], [1, 1, -1]),
    )
    for *choices, first, second in steps:
        replay = [[torch.tensor(chosen)[:, None] for chosen in layers] for layers in choices]
        assert one.step(batches, replay=replay)["step/skipped"] == 0
        for layer, want in ((1, first), (2, second)):
            bias = model.blocks[layer].moe.router.selection_bias
            torch.testing.assert_close(bias, torch.tensor(want) * 0.001, rtol=0, atol=1e-9)
