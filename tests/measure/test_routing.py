"""Load statistics against scipy, against their definitions, and at the edges."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy import stats

from moekit.errors import ConfigError
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


def counts_of(experts: int, layers: int = 40) -> torch.Tensor:
    """Skewed counts: a few experts take most rows, some take none; the last layer is idle."""
    g = torch.Generator().manual_seed(experts)
    count = (torch.rand(layers, experts, generator=g) ** 6 * 300).long()
    count[-1] = 0
    return count


def test_ranks_hold_the_rows_of_their_experts_and_wait_for_the_busiest():
    """Rows 6 and 2: the second rank works 2 of 6 units, so a third of the two ranks' 12 units is lost."""
    count = torch.tensor([[5, 1, 0, 2], [0, 0, 0, 0], [0, 0, 0, 9], [3, 3, 3, 3]])
    rows = routing.rank_rows(count, ep=2)
    assert rows.tolist() == [[6, 2], [0, 0], [0, 9], [6, 6]]
    assert routing.lost_share(rows).tolist() == [pytest.approx(1 / 3), 0, pytest.approx(1 / 2), 0]
    assert routing.lost_share(rows, over=(0,)).item() == pytest.approx(1 - (4 + 0 + 4.5 + 6) / (6 + 0 + 9 + 6))
    other = routing.rank_rows(count, 2, torch.tensor([0, 1, 1, 1]))  # one placement for all layers
    assert other.tolist() == [[5, 3], [0, 0], [0, 9], [3, 9]]
    assert (routing.lost_share(routing.rank_rows(count, 1)) == 0).all(), "one rank waits for nobody"


def test_the_numbers_of_the_notebooks_picture():
    """Experts of 9 5 3 1 | 2 1 1 2 rows: 33 % lost, 8 % with experts 0 5 6 7 together; 20 of 44 rows fill tiles."""
    count = torch.tensor([9, 5, 3, 1, 2, 1, 1, 2])
    assert routing.max_over_mean(count).item() == 3 and routing.rank_rows(count, 2).tolist() == [18, 6]
    laid = routing.placement(count, 2)
    assert laid.tolist() == [0, 1, 1, 1, 1, 0, 0, 0] and routing.rank_rows(count, 2, laid).tolist() == [13, 11]
    lost = [routing.lost_share(routing.rank_rows(count, 2, rank)).item() for rank in (None, laid)]
    assert [round(100 * share) for share in lost] == [33, 8] and routing.tile_waste(count, 4).item() == 44 - 24


def test_waiting_adds_up_over_steps_and_is_hidden_by_added_counts():
    step = torch.tensor([[8, 0], [0, 8]])
    assert routing.lost_share(routing.rank_rows(step, 2), over=(0,)).item() == 0.5
    assert routing.lost_share(routing.rank_rows(step.sum(0), 2)).item() == 0


@pytest.mark.parametrize("tile", [1, 7, 128])
def test_tile_waste_counts_the_rows_that_fill_up_tiles(tile):
    count = counts_of(8)
    slow = [sum(-int(n) % tile for n in line) for line in count]
    assert routing.tile_waste(count, tile).tolist() == slow
    assert routing.tile_waste(torch.tensor([0, 0, 1024])).item() == 0 and routing.tile_waste(count, 1).sum() == 0


@pytest.mark.parametrize(("experts", "ep"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 2)])
def test_greedy_placement_against_every_placement_there_is(experts, ep):
    """Never below the best of all placements nor above contiguous; the best itself with two experts a rank."""
    count = counts_of(experts)
    laid = routing.placement(count, ep)
    assert laid.shape == count.shape and laid.dtype == torch.int64
    for line in laid:
        assert torch.bincount(line, minlength=ep).tolist() == [experts // ep] * ep
    every = {tuple(p) for p in permutations([w for w in range(ep) for _ in range(experts // ep)])}
    best = torch.stack([routing.rank_rows(count, ep, torch.tensor(p)).amax(-1) for p in every]).amin(0)
    busiest = lambda rank: routing.rank_rows(count, ep, rank).amax(-1)
    greedy, contiguous = busiest(laid), busiest(None)
    assert bool((best <= greedy).all()) and bool((greedy <= contiguous).all()) and bool((greedy < contiguous).any())
    assert bool((greedy <= 4 / 3 * best).all())  # Graham's bound, which held on all of these
    if experts == 2 * ep:
        assert torch.equal(greedy, best)


def test_placement_keeps_axes_and_refuses_what_does_not_divide():
    count = counts_of(8).view(2, 20, 8)
    assert torch.equal(routing.placement(count, 4).view(40, 8), routing.placement(count.view(40, 8), 4))
    assert routing.placement(count, 4, "contiguous")[1, 3].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert routing.placement(torch.tensor([1, 1, 1, 1]), 2).tolist() == [0, 0, 1, 1], "no better: stays contiguous"
    with pytest.raises(ConfigError, match="divide 8 experts"):
        routing.placement(count, 3)
    with pytest.raises(ConfigError, match="'contiguous', 'greedy'"):
        routing.placement(count, 4, "best")
