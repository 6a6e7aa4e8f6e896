"""Load statistics against scipy, against their definitions, and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from moekit.measure import routing

COUNTS = [[5, 1, 0, 2], [3, 3, 3, 3], [8, 0, 0, 0], [1, 2, 3, 94]]


@pytest.mark.parametrize("counts", COUNTS)
def test_against_scipy_and_definitions(counts):
    c, t = np.array(counts, float), torch.tensor(counts)
    assert routing.entropy(t).item() == pytest.approx(stats.entropy(c, base=4), rel=1e-12)
    assert routing.max_over_mean(t).item() == pytest.approx(c.max() / c.mean(), rel=1e-12)
    assert routing.dead_experts(t).item() == counts.count(0)


def test_even_collapsed_and_idle():
    """Even: 1 and 1. All rows on one expert: E and 0. No rows: 0 and 0, all experts dead, never NaN."""
    count = torch.tensor([[7, 7, 7], [0, 9, 0], [0, 0, 0]])
    assert routing.max_over_mean(count).tolist() == [1, 3, 0]
    assert routing.entropy(count).tolist() == [pytest.approx(1, abs=1e-15), 0, 0]
    assert routing.dead_experts(count).tolist() == [0, 2, 3]
    assert routing.entropy(torch.tensor([[4], [0]])).tolist() == [1, 0], "a single expert"


def test_aggregate_leaves_idle_layers_out_of_means():
    got = routing.load_metrics(torch.tensor([[7, 7, 7], [0, 9, 0], [0, 0, 0]]), "load")
    assert got["load/max_over_mean"] == 2 and got["load/max_over_mean_worst"] == 3
    assert got["load/entropy"] == pytest.approx(0.5, abs=1e-15) and got["load/dead_experts"] == 5
    idle = routing.load_metrics(torch.zeros(2, 3, dtype=torch.long))
    assert all(np.isfinite(v) for v in idle.values()) and idle["load/dead_experts"] == 6
    assert routing.load_metrics(torch.zeros(0, 3, dtype=torch.long))["load/max_over_mean_worst"] == 0


@pytest.mark.parametrize("seed", range(10))
def test_bounds_and_symmetry(seed):
    """Statistics do not depend on the order of experts nor on the scale, and stay inside their ranges."""
    g = torch.Generator().manual_seed(seed)
    count_LE = torch.randint(0, 6, (5, 7), generator=g)
    count_LE[:, 0] += 1
    shuffled = count_LE[:, torch.randperm(7, generator=g)] * 3
    for statistic, least, most in (
        (routing.max_over_mean, 1, 7), (routing.entropy, 0, 1), (routing.dead_experts, 0, 6),
    ):  # fmt: skip
        value = statistic(count_LE)
        torch.testing.assert_close(statistic(shuffled), value)
        assert bool(((value >= least) & (value <= most)).all())


def test_large_counts_are_exact():
    """2^31 rows on each of two experts: no overflow, no loss."""
    assert routing.max_over_mean(torch.tensor([2**33, 2**33])).item() == 1.0
