"""The policy and value objectives: hand-computed losses, gradients and metrics, and independence of padding and cut."""

from math import exp, log, nan
from types import SimpleNamespace

import pytest
import torch

from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError, DataError
from moekit.model.transformer import Transformer
from moekit.objectives.denominator import step_counts, token_weights
from moekit.objectives.grpo import GRPO
from moekit.objectives.logprobs import token_logprobs
from moekit.objectives.ppo import PPO, ValueLoss, explained_variance


def answers(lengths, width=None, **extra):
    """A batch of one answer a row, its sampled tokens predicted by positions 0..length-1, and padding after them."""
    width = width or max(lengths) + 1
    segment = torch.full((len(lengths), width), -1)
    for row, n in enumerate(lengths):
        segment[row, : n + 1] = 0
    return Batch.make(torch.zeros_like(segment), segment=segment, extra=extra)


def per_row(values, width):
    return torch.tensor(values, dtype=torch.float64)[:, None].expand(-1, width).clone()


def loss_of(objective, batch, logprob_BT, rows=None, attribute="logprob_M"):
    """Loss of a step and sums of the metrics, cut into microbatches of `rows` rows, as the learner adds them."""
    parts = batch.split(rows or batch.rows)
    scores = logprob_BT.split(rows or batch.rows)
    counts = step_counts([p.flat for p in parts])
    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(objective.metrics, 0.0)
    for part, x_BT in zip(parts, scores):
        flat = part.flat
        x_M = x_BT.reshape(-1)[flat.order_N][flat.label_index_M]
        terms = objective(flat, SimpleNamespace(**{attribute: x_M}))
        weight = token_weights(flat, counts, objective.denominator, objective.constant_length)
        total = total + (terms.loss_M * weight).sum()
        assert set(terms.sums) == set(objective.metrics) and not any(x.requires_grad for x in terms.sums.values())
        sums = {name: sums[name] + terms.sums[name].item() for name in sums}
    return total, {name: x / counts.supervised for name, x in sums.items()}


# ------------------------------------------------------------------ denominators
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "mode,length,want", [("sequence_mean", None, 3.5), ("global_tokens", None, 2.25), ("constant", 4, 1.125)]
)
def test_bc_017_three_normalisations(mode, length, want, rows):
    """BC-017: token losses [6] and [1,1,1], longest 4: 3.5, 2.25, 1.125, in one microbatch and in two."""
    batch = answers([1, 3], width=5, advantage=per_row([-6.0, -1.0], 5))
    objective = GRPO(denominator=mode, constant_length=length)
    loss, _ = loss_of(objective, batch, torch.full((2, 5), -1.0, dtype=torch.float64), rows)
    assert loss.item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("junk", [100.0, 1e30, nan])
def test_bc_021_nothing_at_padding_is_read(junk):
    """BC-021: policy losses [1, 1, junk], KL [.5, .5, junk], beta .1: 1.05."""
    logp = torch.tensor([[-1.0, -1.0, junk, junk]], dtype=torch.float64, requires_grad=True)
    values = {
        "advantage": torch.tensor([[-1.0, -1.0, junk, junk]], dtype=torch.float64),
        "ref_logprob": torch.tensor([[-1.5, -1.5, junk, junk]], dtype=torch.float64),
        "old_logprob": torch.tensor([[-1.0, -1.0, junk, junk]], dtype=torch.float64),
        "weight": torch.tensor([[1.0, 1.0, junk, junk]], dtype=torch.float64),
    }
    loss, metrics = loss_of(GRPO(beta=0.1, kl="k1"), answers([2], width=4, **values), logp)
    loss.backward()
    assert loss.item() == pytest.approx(1.05, abs=1e-12) and metrics["kl_ref"] == pytest.approx(0.5, abs=1e-12)
    assert logp.grad[0].tolist() == pytest.approx([0.55, 0.55, 0, 0], abs=1e-12)


# ------------------------------------------------------------------ the ratio
def test_bc_084_the_kl_term_reaches_the_gradient():
    """BC-084: advantage 0, beta .1, k3, logp = ln .5, ref = ln .8: -0.06."""
    logp = torch.full((1, 2), log(0.5), dtype=torch.float64, requires_grad=True)
    batch = answers([1], advantage=per_row([0.0], 2), ref_logprob=per_row([log(0.8)], 2))
    loss, _ = loss_of(GRPO(beta=0.1), batch, logp)
    loss.backward()
    assert logp.grad[0, 0].item() == pytest.approx(-0.06, abs=1e-7)


@pytest.fixture(scope="module")
def model():
    shape = ModelConfig(
        vocab=31, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, experts=4, top_k=2, expert_width=8
    )
    return Transformer(shape, seed=0)


@pytest.mark.parametrize("objective", [GRPO(), PPO(), GRPO(ratio="sequence")], ids=["grpo", "ppo", "gspo"])
def test_bc_085_the_first_update(model, objective):
    """BC-085: old log-probs scored again with the same weights: ratio 1 bitwise, no clip, KL 0, loss 0, -A/n.

    moekit's models have no dropout. Under another cut of the microbatch, and with recomputed blocks, within 1e-6.
    """
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 31, (2, 9), generator=g)
    make = lambda **extra: Batch.make(ids, extra={"advantage": per_row([1.0, -1.0], 9).float(), **extra})
    batch = make()
    with torch.no_grad():
        scored = model(batch).logprob_M
    old = batch.flat.to_rows(torch.zeros(18).index_put((batch.flat.label_index_M,), scored))
    alone = [b.flat.to_rows(torch.zeros(9).index_put((b.flat.label_index_M,), model(b).logprob_M.detach()))
             for b in batch.split(1)]  # fmt: skip
    for old_BT, recompute, tolerance in (
        (old, "none", 0.0), (None, "none", 0.0), (torch.cat(alone), "none", 1e-6), (old, "block", 1e-6),
    ):  # fmt: skip
        batch = make() if old_BT is None else make(old_logprob=old_BT)
        out = model(batch, recompute=recompute)
        logp = out.logprob_M.detach().requires_grad_()
        terms = objective(batch.flat, SimpleNamespace(logprob_M=logp))
        n = len(logp)
        (terms.loss_M.sum() / n).backward()
        advantage = batch.flat.at_labels("advantage")
        if tolerance == 0.0:
            assert torch.equal(terms.loss_M, -advantage) and terms.sums["ratio"].item() == n
            assert terms.sums["clip_low"] == terms.sums["clip_high"] == terms.sums["kl_old"] == 0.0
        assert abs(terms.loss_M.sum().item()) <= n * tolerance
        torch.testing.assert_close(logp.grad, -advantage / n, rtol=1e-6 + 10 * tolerance, atol=0)


def test_bc_085_two_tokens():
    """BC-085, the numbers: advantages [1, -1], one token each: loss 0, gradient [-.5, .5]."""
    logp = torch.tensor([[-0.3, 0.0], [-2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(GRPO(), answers([1, 1], advantage=per_row([1.0, -1.0], 2)), logp)
    loss.backward()
    assert loss.item() == 0.0 and logp.grad[:, 0].tolist() == [-0.5, 0.5] and metrics["ratio"] == 1.0
    assert metrics["entropy"] == pytest.approx(1.15)


def test_bc_087_both_sides_at_the_sampling_temperature():
    """BC-087: logits [2, 0], T = .5: -0.0181499 on both sides, ratio 1; the wrong side would give 0.8969."""
    hidden, head = torch.tensor([[2.0, 0.0]]), torch.eye(2)
    objective = GRPO(temperature=0.5)
    side = [token_logprobs(hidden, head, torch.tensor([0]), temperature=objective.temperature) for _ in range(2)]
    wrong = token_logprobs(hidden, head, torch.tensor([0]))
    assert side[0].item() == pytest.approx(-0.0181499, abs=1e-6)
    for old, want in ((side[1], 1.0), (wrong, exp(-0.0181499 + 0.1269280))):
        batch = answers([1], advantage=torch.ones(1, 2), old_logprob=torch.full((1, 2), old.item()))
        terms = objective(batch.flat, SimpleNamespace(logprob_M=side[0]))
        assert terms.sums["ratio"].item() == pytest.approx(want, abs=0 if want == 1.0 else 1e-6)
    assert not hasattr(ValueLoss(), "temperature")  # values are not scaled


@pytest.mark.parametrize("temperature", [0.0, -1.0, nan])
def test_bc_088_greedy_sampling_is_refused(temperature):
    """BC-088: a policy at temperature 0 has no density to learn from."""
    with pytest.raises(ConfigError, match="temperature > 0"):
        GRPO(temperature=temperature)


@pytest.mark.parametrize("length", [4, 40])
def test_bc_090_sequence_ratio(length):
    """BC-090: log-ratios of .1: 1.1051709 at both lengths; the sum only in the mode named so."""
    batch = answers(
        [length, 3], advantage=per_row([1.0, 1.0], length + 1), old_logprob=per_row([-1.1, -1.0], length + 1)
    )
    logp = torch.full((2, length + 1), -1.0, dtype=torch.float64)
    n = length + 3
    for ratio, want in (("sequence", 1.1051709), ("sequence_sum", {4: 1.4918247, 40: 54.59815}[length])):
        _, metrics = loss_of(GRPO(ratio=ratio, clip_high=1e9), batch, logp)
        assert metrics["ratio"] == pytest.approx((length * want + 3) / n, abs=1e-5)


def test_bc_113_a_stale_sample_is_clipped():
    """BC-113: sampled with ln .2, now ln .3, A = 1, clip .2: ratio 1.5, loss -1.2, clip fraction 1, gradient 0."""
    logp = torch.full((1, 2), log(0.3), dtype=torch.float64, requires_grad=True)
    batch = answers([1], advantage=per_row([1.0], 2), old_logprob=per_row([log(0.2)], 2))
    loss, metrics = loss_of(GRPO(clip_low=0.2, clip_high=0.2), batch, logp)
    loss.backward()
    assert metrics["ratio"] == pytest.approx(1.5) and loss.item() == pytest.approx(-1.2)
    assert (metrics["clip_high"], metrics["clip_low"]) == (1.0, 0.0) and logp.grad[0, 0] == 0.0
    assert metrics["kl_old"] == pytest.approx(0.5 - log(1.5))


@pytest.mark.parametrize(
    "ratio,advantage,loss,slope,clip",
    [
        (1.25, 1.0, -1.25, -1.25, None),  # DAPO's higher upper bound leaves it alone
        (1.4, 1.0, -1.28, 0.0, "clip_high"),
        (1.4, -1.0, 1.4, 1.4, None),
        (0.7, 1.0, -0.7, -0.7, None),
        (0.7, -1.0, 0.8, 0.0, "clip_low"),
        (1.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_asymmetric_clip(ratio, advantage, loss, slope, clip):
    logp = torch.full((1, 2), log(ratio) - 1, dtype=torch.float64, requires_grad=True)
    batch = answers([1], advantage=per_row([advantage], 2), old_logprob=per_row([-1.0], 2), weight=per_row([0.5], 2))
    got, metrics = loss_of(GRPO(clip_low=0.2, clip_high=0.28), batch, logp)
    got.backward()
    assert got.item() == pytest.approx(loss / 2) and logp.grad[0, 0].item() == pytest.approx(slope / 2)
    assert [name for name in ("clip_low", "clip_high") if metrics[name]] == ([clip] if clip else [])
    assert metrics["weight"] == 0.5


def test_sequence_ratio_gives_each_token_of_an_answer_the_same_gradient():
    """GSPO: d/dlogp_t of -mean over answers of s A is -s A / (S n): the answer's length twice in no other form."""
    logp = torch.tensor([[-1.0, -2.0, -0.5, 0], [-1.0, -1.0, 0, 0]], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor([[0.3, -0.1, 0.1, 0], [0.0, 0.0, 0, 0]], dtype=torch.float64)
    batch = answers([3, 2], advantage=per_row([2.0, -1.0], 4), old_logprob=old)
    loss, _ = loss_of(GRPO(ratio="sequence", denominator="sequence_mean"), batch, logp, rows=1)
    loss.backward()
    s = exp(0.1)
    assert loss.item() == pytest.approx((-2 * s + 1) / 2)
    want = [[-2 * s / 6] * 3 + [0.0], [1 / 4, 1 / 4, 0.0, 0.0]]
    torch.testing.assert_close(logp.grad, torch.tensor(want, dtype=torch.float64))


def test_no_value_is_lost_to_infinity():
    """A log-ratio of 500 beside an advantage of 0 is 0 and not inf * 0."""
    logp = torch.tensor([[-1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    batch = answers([1, 1], advantage=torch.tensor([[0.0, 0], [1.0, 0]]), old_logprob=torch.full((2, 2), -501.0))
    for objective in (GRPO(), GRPO(ratio="sequence_sum")):
        loss, metrics = loss_of(objective, batch, logp)
        assert loss.item() == pytest.approx(-0.6) and torch.autograd.grad(loss, logp)[0].isfinite().all()
        assert all(abs(x) < 1e9 for x in metrics.values())


@pytest.mark.parametrize("objective", [GRPO(beta=0.1, ratio="sequence"), PPO()])
def test_a_microbatch_without_labels(objective):
    """It has no extra values when another rank's batch was longer; the graph and the metrics' names stay."""
    empty = Batch.make(torch.zeros(1, 2, dtype=torch.long)).empty()
    logp = torch.zeros(0, requires_grad=True)
    terms = objective(empty.flat, SimpleNamespace(logprob_M=logp))
    terms.loss_M.sum().backward()
    assert terms.loss_M.shape == (0,) and all(terms.sums[name] == 0 for name in objective.metrics)


def test_refusals():
    flat = answers([2]).flat
    out = SimpleNamespace(logprob_M=torch.zeros(2))
    with pytest.raises(DataError, match="'advantage'"):
        GRPO()(flat, out)
    with pytest.raises(DataError, match="ref_logprob"):
        GRPO(beta=0.1)(answers([2], advantage=torch.ones(1, 3)).flat, out)
    assert GRPO(beta=0.1).needs == ("advantage", "ref_logprob") and PPO().needs == ("advantage",)
    for bad in ({"clip_low": 1.5}, {"clip_high": -0.1}, {"beta": -1.0}, {"ratio": "mean"}, {"kl": "k4"}):
        with pytest.raises(ConfigError, match=str(next(iter(bad.values())))):
            GRPO(**bad)
    assert (PPO().name, PPO().clip_low, PPO().clip_high, PPO().beta) == ("ppo", 0.2, 0.2, 0.0)


# ------------------------------------------------------------------ the critic
@pytest.mark.parametrize("new,loss,slope", [(1.0, 1.62, 0.0), (0.1, 1.805, -1.9), (-1.0, 4.5, -3.0), (3.0, 1.62, 0.0)])
def test_bc_094_value_clipping(new, loss, slope):
    """BC-094: V_old 0, return 2, eps .2: V 1 costs 1.62 without gradient, V .1 costs 1.805 with -1.9.

    A value that moved away from the return keeps its gradient; one past the return is still behind the clip.
    """
    value = torch.full((1, 2), new, dtype=torch.float64, requires_grad=True)
    batch = answers([1], **{"old_value": per_row([0.0], 2), "return": per_row([2.0], 2)})
    got, metrics = loss_of(ValueLoss(clip=0.2), batch, value, attribute="value_M")
    got.backward()
    assert got.item() == pytest.approx(loss) and value.grad[0, 0].item() == pytest.approx(slope)
    assert metrics["clipped"] == (slope == 0.0) and metrics["error_sq"] == pytest.approx((2 - new) ** 2)


def test_value_loss_without_clip_and_explained_variance():
    g = torch.Generator().manual_seed(0)
    value, returns = torch.randn(3, 6, generator=g, dtype=torch.float64), torch.randn(3, 6, generator=g).double()
    value = value + returns
    batch = answers([5, 2, 4], width=6, **{"return": returns})
    valid = batch.labels != -100
    loss, metrics = loss_of(ValueLoss(clip=None), batch, value, rows=2, attribute="value_M")
    v, r = value[valid], returns[valid]
    assert loss.item() == pytest.approx(((v - r) ** 2).mean().item() / 2) and metrics["clipped"] == 0
    assert metrics["value"] == pytest.approx(v.mean().item())
    named = {f"critic/{name}": x for name, x in metrics.items()}
    want = 1 - (r - v).var(correction=0) / r.var(correction=0)
    assert explained_variance(named) == pytest.approx(want.item(), abs=1e-12)
    same = {"critic/error": 0.5, "critic/error_sq": 1.0, "critic/return": 0.3, "critic/return_sq": 0.3 * 0.3}
    assert explained_variance(same) == 0.0
    batch = answers([300], **{"return": torch.full((1, 301), 0.3)})  # float32, as a critic's are
    value = 0.3 + 0.1 * torch.randn(1, 301, generator=g)
    metrics = loss_of(ValueLoss(clip=None), batch, value, attribute="value_M")[1]
    assert explained_variance({f"critic/{name}": x for name, x in metrics.items()}) == 0.0
    with pytest.raises(ConfigError, match="clip=0"):
        ValueLoss(clip=0.0)
    with pytest.raises(DataError, match="'old_value'"):
        loss_of(ValueLoss(), batch, value, attribute="value_M")
