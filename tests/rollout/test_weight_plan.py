"""Plans by hand: who sends what, how replicas share it, what is refused, and the floor."""

from __future__ import annotations

import itertools

import pytest
import torch

from moekit.checkpoint.intervals import Piece
from moekit.config import LearnerConfig, ModelConfig
from moekit.errors import ConfigError
from moekit.learner.mesh import place
from moekit.learner.stages import part_of
from moekit.model.transformer import Part, Transformer
from moekit.rollout.weight_plan import GRAIN, dtypes, held, plan

torch.set_num_threads(1)
SHAPE = ModelConfig(vocab=11, width=8, layers=3, heads=2, experts=6, top_k=2, expert_width=4, selection_bias=True)
W = Piece.whole("w", (10, 3))


def sends(found) -> list[tuple]:
    return [(s.source, s.target, s.name, s.start, s.stop) for s in found.sends]


def pieces(shape: ModelConfig, part: Part | None = None) -> list[Piece]:
    return [p for p, _ in held(Transformer(shape, device="meta", seed=None, part=part)).values()]


def test_one_to_one_is_the_whole_tensor():
    found = plan([[W]], [[W]], 2)
    assert sends(found) == [(0, 0, "w", 0, 30)] and found.bytes_ST.tolist() == [[60]]


def test_experts_of_two_ranks_go_to_three_unequal_parts():
    """6 experts of 5 numbers: [0, 15) and [15, 30) to [0, 5), [5, 20) and [20, 30)."""
    part = lambda a, b: [Piece("w", (6, 5), a, b)]
    found = plan([part(0, 15), part(15, 30)], [part(0, 5), part(5, 20), part(20, 30)], 4)
    assert set(sends(found)) == {(0, 0, "w", 0, 5), (0, 1, "w", 5, 15), (1, 1, "w", 15, 20), (1, 2, "w", 20, 30)}
    assert found.bytes_ST.tolist() == [[20, 40, 0], [0, 20, 40]]
    # sources send 60 and 60, targets take 20, 60 and 40
    assert found.floor(10.0) == 6.0


def test_replicas_share_what_they_hold_alike():
    """One tensor of 2^20 elements on four replicas: a quarter each; nobody sends more."""
    whole = Piece.whole("w", (1 << 20,))
    found = plan([[whole]] * 4, [[whole]], 2)
    assert found.bytes_ST.tolist() == [[1 << 19]] * 4
    assert sorted((s.start, s.stop) for s in found.sends) == [(i << 18, (i + 1) << 18) for i in range(4)]


def test_small_tensors_go_whole_and_in_turn():
    """16 tensors of 100 elements on 4 replicas, 1 target: 4 each, none of them cut."""
    mine = [Piece.whole(f"w{i}", (100,)) for i in range(16)]
    found = plan([mine] * 4, [mine], 4)
    assert len(found.sends) == 16 and found.bytes_ST.tolist() == [[1600]] * 4 and GRAIN > 100


def test_who_has_no_choice_counts_first():
    """Source 0 alone holds `a` (90 elements), both hold `b` (60): source 1 sends `b`, whatever the order of names."""
    a, b = Piece.whole("a", (90,)), Piece.whole("b", (60,))
    assert plan([[a, b], [b]], [[b, a]], 1).bytes_ST.tolist() == [[90], [60]]


def test_what_is_near_does_not_travel():
    """Two processes that learn and serve: each has half, wants all, and gets the other half."""
    half = [[Piece("w", (10, 3), 0, 15)], [Piece("w", (10, 3), 15, 30)]]
    found = plan(half, [[W], [W]], 4, near=(0, 1))
    assert found.bytes_ST.tolist() == [[60, 60], [60, 60]] and found.wire_ST.tolist() == [[0, 60], [60, 0]]
    assert found.floor(60.0) == 1.0 and plan([[W]], [[W]], 4, near=(0,)).floor(1.0) == 0.0
    both = plan([[W], [W]], [[W], [W]], 4, near=(0, 1))
    assert int(both.wire_ST.sum()) == 0


def test_every_source_has_one_partner_at_a_time():
    """3 sources, 3 targets, everything to everybody: at turn k source s sends to (s + k) mod 3."""
    third = [[Piece("w", (3,), i, i + 1)] for i in range(3)]
    found = plan(third, [[Piece.whole("w", (3,))]] * 3, 1)
    assert [[s.target for s in found.of(r)] for r in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert [[s.source for s in found.to(t)] for t in range(3)] == [[0, 2, 1], [1, 0, 2], [2, 1, 0]]


def test_bytes_by_name():
    """The float32 bias of a bfloat16 engine has 4 bytes an element."""
    kinds = dtypes(SHAPE, torch.bfloat16)
    assert {n for n, d in kinds.items() if d == torch.float32} == {
        f"layers.{i}.moe.router.selection_bias" for i in range(3)
    }
    mine = pieces(SHAPE)
    found = plan([mine], [mine], {n: d.itemsize for n, d in kinds.items()})
    parameters = sum(p.numel() for p in Transformer(SHAPE, device="meta", seed=None).parameters())
    assert int(found.bytes_ST) == 2 * parameters + 4 * 3 * 6


@pytest.mark.parametrize("dp,ep,pp", [(1, 1, 1), (4, 2, 1), (2, 2, 2), (3, 3, 1), (1, 1, 3), (6, 3, 1)])
def test_layouts_of_the_learner_cover_uneven_servers(dp, ep, pp):
    """Every element once for each target; the busiest source sends at most what an even share and grains allow."""
    config, world = LearnerConfig(ep=ep, pp=pp), dp * pp
    have = [pieces(SHAPE, part_of(config, SHAPE, *place(config, r, world))) for r in range(world)]
    parts = [Part(((0, 3),), (0, 4)), Part(((0, 3),), (4, 6)), Part(((0, 1),), (0, 6)), Part(((1, 3),), (0, 6))]
    want = [pieces(SHAPE, p) for p in parts]
    found = plan(have, want, 4)
    for target, wanted in enumerate(want):
        for w in wanted:
            got = sorted((s.start, s.stop) for s in found.to(target) if s.name == w.name)
            assert got[0][0] == w.start and got[-1][1] == w.stop
            assert all(a[1] == b[0] for a, b in itertools.pairwise(got))
    for s in found.sends:
        assert any(p.name == s.name and p.start <= s.start and s.stop <= p.stop for p in have[s.source])
    assert int(found.bytes_ST.sum()) == 4 * sum(len(w) for wanted in want for w in wanted)
    if pp == 1:
        sent = found.bytes_ST.sum(1)
        assert sent.max() <= 1.5 * sent.float().mean()


def test_a_tied_head_is_wanted_by_both_ends():
    """BC-110 (the plan): the embedding goes to the first stage and, as the head, to the last."""
    tied = ModelConfig(vocab=11, width=8, layers=2, heads=2, experts=2, top_k=1, expert_width=4, tied_head=True)
    want = [pieces(tied, Part((run,), (0, 2))) for run in ((0, 1), (1, 2))]
    found = plan([pieces(tied)], want, 4)
    assert [s.target for s in found.sends if s.name == "embed.weight"] == [0, 1]
    assert {s.name for s in found.to(1)} == {p.name for p in want[1]}


@pytest.mark.parametrize("have, want, words", [
    ([[Piece("w", (10, 3), 0, 20)]], [[W]], r"nobody holds \[20, 30\) of w, which target 0 wants"),
    ([[W]], [[W], [Piece.whole("v", (2,))]], r"nobody holds \[0, 2\) of v, which target 1 wants"),
    ([[W]], [[Piece.whole("w", (3, 10))]], r"w has shape \[10, 3\], target 0 wants \[3, 10\]"),
    ([[W]], [[W, Piece("w", (10, 3), 5, 8)]], r"target 0 wants \[5, 30\) of w twice"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_by_name(have, want, words):
    with pytest.raises(ConfigError, match=words):
        plan(have, want, 4)


def test_nobody_wants_anything():
    found = plan([[W]], [[]], 4)
    assert found.sends == () and found.floor(1.0) == 0.0 and found.bytes_ST.tolist() == [[0]]
    assert "sum |" in found.table()
