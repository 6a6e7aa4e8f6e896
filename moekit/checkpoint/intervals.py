"""Intervals: which part of which global tensor somebody holds, and which parts of two such lists meet.

A parameter is a global tensor with a name, seen flat in row-major order. What a rank holds of it is a list of
``[start, stop)`` intervals: experts are contiguous on the first axis, optimizer shards are contiguous inside that. A
checkpoint written in one layout and read in another is the intersection of two such lists, whatever the layouts are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of the global tensor `name` of shape `shape`, seen flat.

    Raises:
        CheckpointError: an interval outside the tensor.

    >>> len(Piece("w", (4, 6), 6, 18))
    12
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= math.prod(self.shape):
            raise CheckpointError(
                f"{self.name}: [{self.start}, {self.stop}) does not lie in a tensor of shape {list(self.shape)}, "
                f"which has {math.prod(self.shape)} elements"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    @staticmethod
    def whole(name: str, shape: Iterable[int]) -> Piece:
        """All of a tensor."""
        shape = tuple(shape)
        return Piece(name, shape, 0, math.prod(shape))


@dataclass(frozen=True)
class Overlap:
    """Elements [start, stop) of a global tensor that `have[i]` and `want[j]` share; never empty."""

    have: int
    want: int
    start: int
    stop: int


def intersect(have: Sequence[Piece], want: Sequence[Piece]) -> list[Overlap]:
    """Every overlap of two lists of pieces, by name and then by start.

    Args:
        have, want: pieces in any order, of any number of tensors. Pieces of one list may themselves overlap.

    Cost: a sort of each list, then linear in their lengths and in the overlaps where a list's pieces are disjoint.

    >>> a, b = Piece("w", (10,), 0, 6), Piece("w", (10,), 6, 10)
    >>> [(o.have, o.start, o.stop) for o in intersect([a, b], [Piece("w", (10,), 4, 9)])]
    [(0, 4, 6), (1, 6, 9)]
    """
    ours, theirs = _by_name(have), _by_name(want)
    found = []
    for name in sorted(ours.keys() & theirs.keys()):
        first, mine = 0, ours[name]
        for j, w in theirs[name]:
            while first < len(mine) and mine[first][1].stop <= w.start:
                first += 1  # `want` is sorted by start, so nothing later needs this one
            for i, h in mine[first:]:
                if h.start >= w.stop:
                    break
                start, stop = max(h.start, w.start), min(h.stop, w.stop)
                if start < stop:
                    found.append(Overlap(i, j, start, stop))
    return found


def _by_name(pieces: Sequence[Piece]) -> dict[str, list[tuple[int, Piece]]]:
    found = defaultdict(list)
    for i, p in enumerate(pieces):
        if len(p):
            found[p.name].append((i, p))
    return {name: sorted(group, key=lambda entry: entry[1].start) for name, group in found.items()}


def check_cover(pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a list of pieces that does not hold every element of every named tensor exactly once.

    Args:
        pieces: in any order.
        shapes: every tensor that must be covered, and nothing else.

    Raises:
        CheckpointError: a gap or an overlap with its numbers, a name that is missing or not known, another shape.

    >>> check_cover([Piece("w", (4,), 0, 3)], {"w": (4,)})
    Traceback (most recent call last):
    moekit.errors.CheckpointError: nobody holds [3, 4) of w
    """
    groups = _by_name(pieces)
    wrong = [f"{name} is not one of the tensors to be covered" for name in sorted(groups.keys() - shapes.keys())]
    for name, shape in shapes.items():
        end = 0
        for _, p in groups.get(name, ()):
            if p.shape != tuple(shape):
                wrong.append(f"a piece of {name} has shape {list(p.shape)}, the tensor has {list(shape)}")
            if p.start > end:
                wrong.append(f"nobody holds [{end}, {p.start}) of {name}")
            elif p.start < end:
                wrong.append(f"more than one holds [{p.start}, {min(end, p.stop)}) of {name}")
            end = max(end, p.stop)
        if end < math.prod(shape):
            wrong.append(f"nobody holds [{end}, {math.prod(shape)}) of {name}")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError("; ".join(wrong[:8]) + more)
