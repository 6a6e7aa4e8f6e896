"""Pipeline stages by cost against every possible cut; experts that a layout cannot divide."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from moekit.config import LearnerConfig, ModelConfig
from moekit.errors import ConfigError
from moekit.learner.layouts import Layout, legal_layouts
from moekit.learner.mesh import check_layout
from moekit.learner.stages import LENGTH, layer_costs, part_of, plan_stages, stages_of

SHAPE = ModelConfig(
    vocab=100, width=16, layers=7, heads=2, experts=6, top_k=2, expert_width=12, dense_layers=(0, 3), dense_width=4000
)


def test_layer_costs_by_hand():
    """Forward and backward, 2 FLOPs a multiply-add, at every token: projections, causal pairs, feed-forward, head."""
    pairs = LENGTH * (LENGTH + 1) // 2
    attention = 2 * LENGTH * 16 * (4 * 16) + 4 * 16 * pairs
    moe = 2 * LENGTH * 16 * 6 + 6 * LENGTH * 2 * 16 * 12
    dense = 6 * LENGTH * 16 * 4000
    head = 2 * 100 * 16 * LENGTH
    want = [3 * (attention + (dense if i in (0, 3) else moe)) for i in range(7)]
    want[-1] += 3 * head
    assert layer_costs(SHAPE) == want


VARIANTS = {
    "dense layers": {},
    "no dense layer": {"dense_layers": ()},
    "all dense": {"dense_layers": tuple(range(7)), "dense_width": 50},
    "big vocabulary": {"vocab": 60_000},
    "one big layer": {"dense_layers": (2,), "dense_width": 30_000},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stages", range(1, 8))
def test_no_cut_is_better(name, stages):
    """Over all cuts: the largest stage cost is the smallest, then the sum of squares; ties go to the earliest cuts."""
    shape = replace(SHAPE, **VARIANTS[name])
    costs = layer_costs(shape)

    def key(cuts):
        each = [sum(costs[a:b]) for a, b in pairwise((*cuts, 7))]
        return max(each), sum(c * c for c in each), cuts

    best = min(((0, *cuts) for cuts in combinations(range(1, 7), stages - 1)), key=key)
    got = plan_stages(shape, stages)
    assert got == tuple(pairwise((*best, 7)))
    assert got[0][0] == 0 and got[-1][1] == 7 and all(a[1] == b[0] for a, b in pairwise(got))


def test_a_big_vocabulary_lightens_the_last_stage():
    """Equal layers; a head that costs two layers leaves the last of two stages two layers fewer."""
    shape = ModelConfig(vocab=8, width=64, layers=8, heads=2, experts=4, top_k=1, expert_width=16)
    layer = layer_costs(shape)[0]
    head = 3 * 2 * 64 * LENGTH
    assert [b - a for a, b in plan_stages(shape, 2)] == [4, 4]
    assert [b - a for a, b in plan_stages(replace(shape, vocab=2 * layer // head), 2)] == [5, 3]
    assert [b - a for a, b in plan_stages(replace(shape, vocab=9 * layer // head), 2)] == [7, 1]


def test_more_stages_than_layers():
    for stages in (8, 0):
        with pytest.raises(ConfigError, match=rf"7 layers cannot fill {stages} "):
            plan_stages(SHAPE, stages)


def test_every_schedule_covers_the_layers_once():
    for c in (LearnerConfig(pp=2), LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=3),
              LearnerConfig(pp=3, pipeline="zbv", stages_per_rank=2)):  # fmt: skip
        parts = [part_of(c, SHAPE, r) for r in range(c.pp)]
        layers = sorted(i for p in parts for start, stop in p.stages for i in range(start, stop))
        assert layers == list(range(7))
        assert sorted(s for r in range(c.pp) for s in stages_of(c, r)) == list(range(c.pp * c.stages_per_rank))


def test_bc_054_experts_that_ep_does_not_divide():
    """BC-054: 6 experts at EP=4 refused with both numbers before any process starts; EP=3 and 2 hold all six."""
    for world in (4, 6, 12):
        with pytest.raises(ConfigError, match=r"\b6 (experts|ranks)\b.*\bep=4\b"):
            check_layout(LearnerConfig(ep=4), SHAPE, world)
    with pytest.raises(ValueError, match=r"\b6 experts\b.*\bep=4\b"):  # also for a caller who knows ValueError only
        check_layout(LearnerConfig(ep=4), SHAPE, 4)
    for ep, each in ((3, 2), (2, 3)):
        check_layout(LearnerConfig(ep=ep), SHAPE, 6)
        slices = [range(*part_of(LearnerConfig(ep=ep), SHAPE, 0, r).experts) for r in range(ep)]
        assert [len(s) for s in slices] == [each] * ep
        assert sorted(e for s in slices for e in s) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("world", (1, 2, 6, 8, 12))
def test_legal_layouts_are_those_that_check_layout_takes(world):
    legal = {(x.dp, x.ep, x.pp) for x in legal_layouts(SHAPE, world)}
    assert all(x.dp * x.pp == world for x in legal_layouts(SHAPE, world)) and len(legal) >= 1
    taken = set()
    for pp in range(1, world + 1):
        for ep in range(1, world + 1):
            try:
                check_layout(LearnerConfig(ep=ep, pp=pp), SHAPE, world)
            except ConfigError:
                continue
            taken.add((world // pp, ep, pp))
    assert legal == taken


def test_layouts_of_six_experts_on_twelve_ranks_by_hand():
    """pp in {1, 2, 3, 4, 6} (7 layers), ep a divisor of 6 and of 12 / pp."""
    want = {(12, 1): [1, 2, 3, 6], (6, 2): [1, 2, 3, 6], (4, 3): [1, 2], (3, 4): [1, 3], (2, 6): [1, 2]}
    assert legal_layouts(SHAPE, 12) == [Layout(dp, ep, pp) for (dp, pp), eps in want.items() for ep in eps]
    with pytest.raises(ConfigError, match="world=0"):
        legal_layouts(SHAPE, 0)
