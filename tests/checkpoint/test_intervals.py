"""Intervals against the plainest oracle: a mark on every element."""

import random
from itertools import pairwise

import pytest

from moekit.checkpoint.intervals import Piece, check_cover, intersect
from moekit.errors import CheckpointError


def pieces(rng, shapes, count):
    """Random pieces, empty ones included."""
    found = []
    for _ in range(count):
        name = rng.choice(list(shapes))
        size = shapes[name][0] * shapes[name][1]
        start, stop = sorted(rng.choices(range(size + 1), k=2))
        found.append(Piece(name, shapes[name], start, stop))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_intersect_finds_every_shared_element_and_no_other(seed):
    rng = random.Random(seed)
    shapes = {"a": (3, 5), "b": (7, 4), "c": (1, 1)}
    have, want = pieces(rng, shapes, rng.randrange(8)), pieces(rng, shapes, rng.randrange(8))
    expected = {
        (i, j, at)
        for i, h in enumerate(have)
        for j, w in enumerate(want)
        if h.name == w.name
        for at in set(range(h.start, h.stop)) & set(range(w.start, w.stop))
    }
    overlaps = intersect(have, want)
    found = [(i, j, at) for i, j, start, stop in overlaps for at in range(start, stop)]
    assert len(found) == len(set(found)) and set(found) == expected
    assert all(start < stop for *_, start, stop in overlaps)


def test_experts_cut_over_ranks_meet_shards_cut_anywhere():
    """[E=4, 2F=6, D=5] by EP=2 against ZeRO shards of 50 elements: 120 elements, two halves of 60."""
    shape = (4, 6, 5)
    have = [Piece("w", shape, 0, 60), Piece("w", shape, 60, 120)]
    want = [Piece("w", shape, i, min(i + 50, 120)) for i in (0, 50, 100)]
    assert intersect(have, want) == [
        (0, 0, 0, 50),
        (0, 1, 50, 60),
        (1, 1, 60, 100),
        (1, 2, 100, 120),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_cover_is_accepted_exactly_when_each_element_is_held_once(seed):
    rng = random.Random(seed)
    shapes = {"a": (3, 4), "b": (2, 3)}
    found = []
    for name, shape in shapes.items():
        cuts = sorted(rng.choices(range(shape[0] * shape[1] + 1), k=3))
        ends = [0, *cuts, shape[0] * shape[1]]
        found += [Piece(name, shape, a, b) for a, b in pairwise(ends)]
    rng.shuffle(found)
    check_cover(found, shapes)
    broken = list(found)
    at = rng.randrange(len(broken))
    p = broken[at]
    start, stop = sorted(rng.choices(range(p.shape[0] * p.shape[1] + 1), k=2))
    broken[at] = Piece(p.name, p.shape, start, stop)
    held = {(n, e): 0 for n, s in shapes.items() for e in range(s[0] * s[1])}
    for q in broken:
        for e in range(q.start, q.stop):
            held[q.name, e] += 1
    if set(held.values()) == {1}:
        check_cover(broken, shapes)
    else:
        with pytest.raises(CheckpointError):
            check_cover(broken, shapes)


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([(0, 5), (7, 12)], r"nobody holds \[5, 7\) of w"),
        ([(0, 5), (4, 12)], r"more than one holds \[4, 5\) of w"),
        ([(0, 12), (3, 5)], r"more than one holds \[3, 5\) of w"),
        ([(0, 9)], r"nobody holds \[9, 12\) of w"),
        ([], r"nobody holds \[0, 12\) of w"),
    ],
)
def test_gaps_and_overlaps_are_told_with_their_numbers(spans, told):
    with pytest.raises(CheckpointError, match=told):
        check_cover([Piece("w", (3, 4), a, b) for a, b in spans], {"w": (3, 4)})


def test_other_shapes_unknown_names_and_impossible_intervals_are_refused():
    with pytest.raises(CheckpointError, match=r"\[4, 3\], the tensor has \[3, 4\]"):
        check_cover([Piece("w", (4, 3), 0, 12)], {"w": (3, 4)})
    with pytest.raises(CheckpointError, match="x is not one of the tensors"):
        check_cover([Piece.whole("w", (2,)), Piece.whole("x", (2,))], {"w": (2,)})
    with pytest.raises(CheckpointError, match=r"\[5, 13\) does not lie in .* 12 elements"):
        Piece("w", (3, 4), 5, 13)
    check_cover([], {"empty": (0, 4)})
    check_cover([Piece.whole("scalar", ())], {"scalar": ()})
