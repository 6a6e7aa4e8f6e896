"""Intervals: which part of which global tensor somebody holds, and where two such lists meet.

A parameter is a global tensor with a name, seen flat in row-major order; what a rank holds of it is a list of
``[start, stop)``. Experts are contiguous on the first axis and optimizer shards are contiguous inside that, so a
checkpoint written in one layout and read in another is the intersection of two lists, whatever the layouts are.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of the global tensor `name` of shape `shape`, seen flat."""

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
    def whole(name: str, shape: Iterable[int]) -> "Piece":
        """All of a tensor."""
        return Piece(name, tuple(shape), 0, math.prod(shape := tuple(shape)))


def intersect(have: Sequence[Piece], want: Sequence[Piece]) -> list[tuple[int, int, int, int]]:
    """Every overlap of two lists of pieces: (i, j, start, stop) where have[i] and want[j] share [start, stop).

    Cost: a sort, then one sweep.

    >>> a, b = Piece("w", (10,), 0, 6), Piece("w", (10,), 6, 10)
    >>> intersect([a, b], [Piece("w", (10,), 4, 9)])
    [(0, 0, 4, 6), (1, 0, 6, 9)]
    """
    ours, theirs, found = _by_name(have), _by_name(want), []
    for name in sorted(ours.keys() & theirs.keys()):
        first, mine = 0, ours[name]
        for j, w in theirs[name]:
            while first < len(mine) and mine[first][1].stop <= w.start:
                first += 1  # `want` is sorted by start, so nothing later needs this one
            for i, h in mine[first:]:
                if h.start >= w.stop:
                    break
                if (start := max(h.start, w.start)) < (stop := min(h.stop, w.stop)):
                    found.append((i, j, start, stop))
    return found


def _by_name(pieces: Sequence[Piece]) -> dict[str, list[tuple[int, Piece]]]:
    found = defaultdict(list)
    for i, p in sorted(enumerate(pieces), key=lambda entry: entry[1].start):
        if len(p):
            found[p.name].append((i, p))
    return found


def check_cover(pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse pieces that do not hold every element of every tensor of `shapes` exactly once, and nothing else.

    Raises:
        CheckpointError: a gap or an overlap with its numbers, an unknown name, another shape.

    >>> check_cover([Piece("w", (4,), 0, 3)], {"w": (4,)})
    Traceback (most recent call last):
    moekit.errors.CheckpointError: nobody holds [3, 4) of w
    """
    groups = _by_name(pieces)
    wrong = [f"{name} is not one of the tensors to be covered" for name in sorted(groups.keys() - shapes.keys())]
    for name, shape in shapes.items():
        end, size = 0, math.prod(shape)
        for _, p in groups.get(name, ()):
            if p.shape != tuple(shape):
                wrong.append(f"a piece of {name} has shape {list(p.shape)}, the tensor has {list(shape)}")
            if p.start > end:
                wrong.append(f"nobody holds [{end}, {p.start}) of {name}")
            elif p.start < end:
                wrong.append(f"more than one holds [{p.start}, {min(end, p.stop)}) of {name}")
            end = max(end, p.stop)
        if end < size:
            wrong.append(f"nobody holds [{end}, {size}) of {name}")
    if wrong:
        raise CheckpointError("; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))
