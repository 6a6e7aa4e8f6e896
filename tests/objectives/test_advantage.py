"""Advantages: hand-computed values, sums of products written out, and what has nothing to learn from."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from moekit.errors import ConfigError, DataError
from moekit.objectives.advantage import (
    gae,
    group_advantages,
    overlong_penalty,
    overlong_valid,
    token_rewards,
    whiten,
)

MODES = [(scale, loo) for scale in ("std", "none") for loo in (False, True)]


# ------------------------------------------------------------------ groups
@pytest.mark.parametrize("scale,leave_one_out", MODES)
def test_bc_076_equal_rewards_give_zero(scale, leave_one_out):
    """BC-076: [1,1,1,1], [0,0], four copies of 0.3 in fp32, 0.1 + 0.2 beside 0.3: exactly 0 everywhere."""
    for dtype in (torch.float32, torch.float64):
        groups = [[1.0] * 4, [0.0] * 2, [0.3] * 4, [0.1] * 3, [0.1 + 0.2, 0.3], [1e9 / 3] * 7]
        reward = torch.tensor([r for g in groups for r in g], dtype=dtype)
        group = torch.tensor([i for i, g in enumerate(groups) for _ in g])
        a = group_advantages(reward, group, scale=scale, leave_one_out=leave_one_out)
        assert a.advantage_A.dtype == dtype and torch.equal(a.advantage_A, torch.zeros_like(reward))
        assert (a.equal, a.single, a.masked, a.not_finite) == (6, 0, 0, 0) and not a.learns_A.any()


@pytest.mark.parametrize("scale", ["std", "none"])
def test_bc_078_a_group_of_one(scale):
    """BC-078: zero and counted; leave-one-out refuses."""
    reward, group = torch.tensor([7.0, 1.0, 3.0]), torch.tensor([5, 9, 9])
    a = group_advantages(reward, group, scale=scale)
    assert a.advantage_A[0] == 0.0 and a.single == 1 and a.equal == 0 and a.advantage_A.isfinite().all()
    with pytest.raises(DataError, match=r"groups \[5\]"):
        group_advantages(reward, group, scale=scale, leave_one_out=True)
    # masking left one: the run goes on
    b = group_advantages(reward[1:], group[1:], torch.tensor([True, False]), scale=scale, leave_one_out=True)
    assert b.advantage_A.tolist() == [0.0, 0.0] and (b.single, b.masked) == (1, 1)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("junk", [8.0, 1e30, math.inf, math.nan])
def test_bc_080_masked_answers_are_in_no_statistic(scale, junk):
    """BC-080: rewards [2, 8, 0, 1], the second masked: [1, -, -1, 0], whatever the masked reward is."""
    valid = torch.tensor([True, False, True, True])
    a = group_advantages(torch.tensor([2.0, junk, 0.0, 1.0]), torch.zeros(4), valid, scale=scale)
    torch.testing.assert_close(a.advantage_A, torch.tensor([1.0, 0.0, -1.0, 0.0]), atol=1e-4, rtol=0)
    assert a.advantage_A[1] == 0 and a.masked == 1 and a.learns_A.tolist() == valid.tolist()


@pytest.mark.parametrize("scale,leave_one_out", MODES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_reward_that_is_no_number_is_masked_and_counted(scale, leave_one_out, junk):
    with_junk = torch.tensor([2.0, junk, 0.0, 1.0, junk, junk])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    a = group_advantages(with_junk, group, scale=scale, leave_one_out=leave_one_out)
    b = group_advantages(with_junk[[0, 2, 3]], group[[0, 2, 3]], scale=scale, leave_one_out=leave_one_out)
    assert torch.equal(a.advantage_A[[0, 2, 3]], b.advantage_A) and a.advantage_A[[1, 4, 5]].tolist() == [0.0] * 3
    assert (a.not_finite, a.masked, a.empty) == (3, 3, 1) and a.valid_A.tolist() == [True, False, True, True] + [
        False
    ] * 2


def test_leave_one_out_is_the_mean_of_the_others():
    reward = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0], dtype=torch.float64)
    a = group_advantages(reward, torch.zeros(5), scale="none", leave_one_out=True).advantage_A
    others = [(reward.sum() - r) / 4 for r in reward]
    torch.testing.assert_close(a, reward - torch.stack(others), rtol=1e-14, atol=1e-14)
    b = group_advantages(reward, torch.zeros(5), leave_one_out=True, eps=0.0).advantage_A
    torch.testing.assert_close(b, a / reward.std(), rtol=1e-14, atol=1e-14)


def test_groups_do_not_depend_on_their_order_or_names():
    g = torch.Generator().manual_seed(0)
    reward, group = torch.randn(12, generator=g), torch.tensor([0, 1, 2, 3] * 3)
    want = group_advantages(reward, group).advantage_A
    order = torch.randperm(12, generator=g)
    got = group_advantages(reward[order], group[order] * 7 - 100).advantage_A
    torch.testing.assert_close(got, want[order], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(want.view(3, 4).sum(0), torch.zeros(4), atol=1e-6, rtol=0)


def test_no_answers_and_wrong_input():
    a = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert a.advantage_A.shape == (0,) and a.equal == a.single == a.empty == 0
    with pytest.raises(ConfigError, match="'std' or 'none'"):
        group_advantages(torch.zeros(2), torch.zeros(2), scale="batch")
    with pytest.raises(DataError, match="group_A has shape"):
        group_advantages(torch.zeros(2), torch.zeros(3))


def test_overlong():
    assert overlong_valid(["stop", "length", "abort"], mask_length=False).tolist() == [True, True, False]
    with pytest.raises(DataError, match="eos"):
        overlong_valid(["eos"])
    # equation 13 with L_max = 20, L_cache = 4
    got = overlong_penalty(torch.tensor([1, 16, 17, 19, 20, 21]), limit=20, cushion=4).tolist()
    assert got == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    with pytest.raises(ConfigError, match="cushion=0"):
        overlong_penalty(torch.tensor([1]), limit=20, cushion=0)


# ------------------------------------------------------------------ token rewards and GAE
def test_bc_091_the_reward_is_at_the_last_generated_token():
    """BC-091: width 5, an answer of 3 tokens and one of 5: places 2 and 4, advantages [1,1,1,0,0] and ones."""
    answer = torch.tensor([0] * 5 + [1] * 5)
    valid = torch.tensor([True] * 3 + [False] * 2 + [True] * 5)
    reward = token_rewards(torch.ones(2), answer, valid)
    assert torch.nonzero(reward)[:, 0].tolist() == [2, 5 + 4]
    advantage, returns = gae(reward, torch.zeros(10), answer, gamma=1.0, lam=1.0, valid_N=valid)
    assert advantage.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1] and torch.equal(returns, advantage)


@pytest.mark.parametrize("junk", [9.0, math.nan, math.inf])
def test_bc_093_tool_tokens_are_no_time_steps(junk):
    """BC-093: mask [1,0,0,1], gamma .9, lambda 1: [0.9, 0, 0, 1.0], whatever stands at the tool's tokens."""
    valid = torch.tensor([True, False, False, True])
    value = torch.tensor([0.0, junk, junk, 0.0])
    answer = torch.zeros(4, dtype=torch.long)
    reward = token_rewards(torch.ones(1), answer, valid, kl_N=value, beta=0.5)
    for r in (reward, torch.tensor([0.0, junk, junk, 1.0])):
        advantage, returns = gae(r, value, answer, gamma=0.9, lam=1.0, valid_N=valid)
        assert torch.equal(advantage, torch.tensor([0.9, 0.0, 0.0, 1.0])) and torch.equal(returns, advantage)


def gae_written_out(reward, value, after, gamma, lam):
    """The definition, one answer: a sum of discounted differences for each t."""
    v = [*value, after]
    delta = [r + gamma * v[t + 1] - v[t] for t, r in enumerate(reward)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_against_the_double_sum(gamma, lam):
    """Ragged answers with gaps; some ended, some cut off with a value after them."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 37, 5, 64, 33, 1]
    answer = torch.from_numpy(np.repeat(np.arange(7), lengths))
    n = len(answer)
    reward, value = torch.from_numpy(rng.normal(size=n)), torch.from_numpy(rng.normal(size=n))
    valid = torch.from_numpy(rng.random(n) < 0.7)
    valid[answer == 6] = False  # an answer with nothing to train on
    ended = torch.tensor([True, False, False, True, False, True, True])
    after = torch.from_numpy(rng.normal(size=7))
    got, returns = gae(
        reward, value, answer, gamma=gamma, lam=lam, valid_N=valid, terminated_A=ended, bootstrap_A=after
    )
    want = torch.zeros(n, dtype=torch.float64)
    for a in range(7):
        at = torch.nonzero((answer == a) & valid)[:, 0]
        last = 0.0 if ended[a] else after[a].item()
        want[at] = torch.tensor(
            gae_written_out(reward[at].tolist(), value[at].tolist(), last, gamma, lam), dtype=torch.float64
        )
    assert not want[~valid].any()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns[valid], (got + value)[valid], rtol=1e-12, atol=1e-12)
    assert not returns[~valid].any()


def test_gae_is_exact_to_double_precision_over_a_long_answer():
    rng = np.random.default_rng(1)
    reward, value = rng.normal(size=1000), rng.normal(size=1000)
    got, _ = gae(torch.from_numpy(reward), torch.from_numpy(value), torch.zeros(1000, dtype=torch.long), lam=0.97)
    want = np.array(gae_written_out(reward.tolist(), value.tolist(), 0.0, 1.0, 0.97))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-11, atol=1e-11)


def test_gae_refuses():
    one = torch.zeros(2)
    with pytest.raises(DataError, match="1 answers did not end"):
        gae(one, one, torch.zeros(2).long(), terminated_A=torch.tensor([False]))
    with pytest.raises(DataError, match="must not fall"):
        gae(one, one, torch.tensor([1, 0]))
    with pytest.raises(DataError, match="one entry a token"):
        gae(one, torch.zeros(3), torch.zeros(2).long())
    with pytest.raises(ConfigError, match="gamma=1.5"):
        gae(one, one, torch.zeros(2).long(), gamma=1.5)
    with pytest.raises(ConfigError, match="needs kl_N"):
        token_rewards(torch.zeros(1), torch.zeros(2).long(), beta=0.1)
    nothing = gae(one[:0], one[:0], torch.zeros(0).long())
    assert [x.shape for x in nothing] == [(0,), (0,)]


def test_kl_in_the_reward():
    """-beta KL at every token, the score once: 1 - 0.1 * 0.3 at the last."""
    answer = torch.tensor([0, 0, 1, 1, 1])
    got = token_rewards(torch.tensor([1.0, -2.0]), answer, kl_N=torch.tensor([0.5, 0.3, 0.0, -1.0, 2.0]), beta=0.1)
    torch.testing.assert_close(got, torch.tensor([-0.05, 0.97, 0.0, 0.1, -2.2]))


# ------------------------------------------------------------------ whitening
@pytest.mark.parametrize("pad", [[], [0.0, 0.0], [1e30], [math.nan, math.inf, -5.0]])
def test_bc_095_whitening_sees_valid_tokens_only(pad):
    """BC-095: [1, 3, pad, ...] gives -+0.7071068 (sample std) and zeros, whatever the padding and its length."""
    x = torch.tensor([1.0, 3.0, *pad])
    valid = torch.tensor([True, True] + [False] * len(pad))
    want = torch.tensor([-0.7071068, 0.7071068] + [0.0] * len(pad))
    torch.testing.assert_close(whiten(x, valid), want, atol=1e-6, rtol=0)
    kept = whiten(x, valid, shift_mean=False)
    torch.testing.assert_close(kept, (want + 2) * valid, atol=1e-6, rtol=0)


def test_whitening_over_ranks_equals_one_process():
    """Three ranks, uneven, one without a valid token; a large mean, where sums of squares would cancel."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, generator=g) + 1000
    valid = torch.rand(40, generator=g) < 0.6
    valid[:7] = False
    parts = [slice(0, 7), slice(7, 12), slice(12, 40)]
    want = whiten(x, valid)
    torch.testing.assert_close(want[valid], (x[valid] - x[valid].mean()) / x[valid].std(), atol=1e-3, rtol=0)
    exact = x[valid].double()
    torch.testing.assert_close(want[valid].double(), (exact - exact.mean()) / exact.std(), atol=1e-6, rtol=0)

    gate, slots = threading.Barrier(len(parts), timeout=30), [[0.0]] * len(parts)

    def rank(i):
        def all_reduce(mine):
            slots[i] = mine
            gate.wait()
            total = [math.fsum(column) for column in zip(*slots)]
            gate.wait()
            return total

        return whiten(x[parts[i]], valid[parts[i]], all_reduce=all_reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        got = torch.cat(list(pool.map(rank, range(len(parts)))))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_whitening_with_nothing_to_measure():
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.full((4,), 0.3)).tolist() == [0.0] * 4
    assert whiten(torch.zeros(0)).shape == (0,)
