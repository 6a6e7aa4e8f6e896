"""Who sends which part of which weight to whom: intervals that learners hold against intervals that engines want.

Every process names the pieces of global tensors that it holds or wants (`checkpoint.intervals`); a plan is their
intersection. Where several sources hold an element, the one with the fewest bytes so far sends it, so nothing is
gathered anywhere and no source sends more than it must. A plan follows from the pieces alone: every process makes it.

Axis letters: S sources, T targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..checkpoint.huggingface import first
from ..checkpoint.intervals import Piece
from ..config import ModelConfig
from ..errors import ConfigError
from ..model.transformer import Transformer

GRAIN = 1 << 16  # elements: what replicas share is not cut finer than this
CUTS = 64  # nor into more parts


@dataclass(frozen=True)
class Send:
    """Elements [start, stop) of a parameter seen flat, from one process to another."""

    source: int
    target: int
    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class WeightPlan:
    """All sends of an update, in an order that neither blocks: every process has one partner at a time."""

    sends: tuple[Send, ...]
    itemsize: int | Mapping[str, int]  # bytes of an element on the wire, of all tensors or by name
    sources: int
    targets: int
    near: tuple[int | None, ...] = ()  # for every target, the source that lives in its process

    @property
    def bytes_ST(self) -> Tensor:
        """[S, T] int64, bytes of every pair of processes."""
        out = torch.zeros(self.sources, self.targets, dtype=torch.int64)
        for s in self.sends:
            out[s.source, s.target] += len(s) * _size(self.itemsize, s.name)
        return out

    @property
    def wire_ST(self) -> Tensor:
        """`bytes_ST` without what stays in a process."""
        out = self.bytes_ST
        for target, source in enumerate(self.near):
            if source is not None:
                out[source, target] = 0
        return out

    def floor(self, bytes_per_s: float) -> float:
        """Seconds below which no transfer can be: the most bytes that one process sends, or takes, over a bandwidth."""
        wire_ST = self.wire_ST
        return max(int(wire_ST.sum(dim).max()) if wire_ST.numel() else 0 for dim in (0, 1)) / bytes_per_s

    def of(self, source: int) -> tuple[Send, ...]:
        """What a source sends, in order."""
        return tuple(s for s in self.sends if s.source == source)

    def to(self, target: int) -> tuple[Send, ...]:
        """What a target gets, in order."""
        return tuple(s for s in self.sends if s.target == target)

    def table(self) -> str:
        """Megabytes by source (rows) and target, with sums.

        >>> whole = [Piece.whole("w", (4, 250_000))]
        >>> print(plan([whole], [whole, whole], 4).table())
             MB |      0      1    sum
              0 |  4.000  4.000  8.000
            sum |  4.000  4.000  8.000
        """
        rows = self.bytes_ST.tolist()
        rows = [[*row, sum(row)] for row in rows]
        rows.append([sum(column) for column in zip(*rows)] if rows else [0] * (self.targets + 1))
        cells = [[f"{n / 1e6:,.3f}" for n in row] for row in rows]
        wide = max(6, *(len(c) for row in cells for c in row))
        lines = [["MB", *map(str, range(self.targets)), "sum"]]
        lines += [[name, *row] for name, row in zip([*map(str, range(self.sources)), "sum"], cells)]
        return "\n".join(f"{name:>7} |" + "".join(f" {c:>{wide}}" for c in row) for name, *row in lines)


def held(model: Transformer) -> dict[str, tuple[Piece, Tensor]]:
    """What a process's model holds, by name: the piece of the whole tensor and the numbers, flat. Buffers too.

    Parameters are as the forward uses them: under every ZeRO stage they are whole after the optimizer's all-gather, on
    each of their replicas. A tied head is the embedding, under that name, on the first and on the last stage.
    """
    shapes, out = _shapes(model.config), {}
    for name, t in _tensors(model).items():
        start = first(model, t)
        out[name] = Piece(name, shapes[name], start, start + t.numel()), t.detach().view(-1)
    return out


def dtypes(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """By name, what an engine in `dtype` keeps tensors in: selection biases stay float32."""
    return {n: t.dtype for n, t in _tensors(Transformer(config, dtype=dtype, device="meta", seed=None)).items()}


def plan(
    have: Sequence[Sequence[Piece]], want: Sequence[Sequence[Piece]], itemsize: int | Mapping[str, int],
    near: Sequence[int | None] = (),
) -> WeightPlan:  # fmt: skip
    """Every wanted element exactly once, from the source with the fewest bytes so far of those that hold it.

    Args:
        have: pieces of every source.
        want: pieces of every target; a target wants an element once.
        itemsize: bytes of an element on the wire, of all tensors or by name.
        near: for every target, the source in the same process (None = none): what it holds comes from it.

    Returns:
        The plan; the same in every process that calls this with the same pieces.

    Raises:
        ConfigError: elements that nobody holds, a target that wants an element twice, shapes that differ: all by name.

    Cost: a sort of all pieces; what k sources hold alike is cut into k runs at most.

    >>> a, b = Piece("w", (10,), 0, 6), Piece("w", (10,), 4, 10)
    >>> [(s.source, s.start, s.stop) for s in plan([[a], [b]], [[Piece.whole("w", (10,))]], 4).sends]
    [(0, 0, 6), (1, 6, 10)]
    """
    holders: dict[str, list[tuple[int, Piece]]] = {}
    for source, pieces in enumerate(have):
        for p in pieces:
            holders.setdefault(p.name, []).append((source, p))
    wrong, runs = [], []  # runs: (sources, target, name, start, stop)
    for target, pieces in enumerate(want):
        end: dict[str, int] = {}
        for w in sorted(pieces, key=lambda p: (p.name, p.start)):
            if w.start < end.get(w.name, 0):
                wrong.append(f"target {target} wants [{w.start}, {end[w.name]}) of {w.name} twice")
            end[w.name] = max(w.stop, end.get(w.name, 0))
            found = [(s, h) for s, h in holders.get(w.name, []) if h.start < w.stop and w.start < h.stop]
            if other := next((h for _, h in found if h.shape != w.shape), None):
                wrong.append(f"{w.name} has shape {list(other.shape)}, target {target} wants {list(w.shape)}")
            edges = {w.start, w.stop} | {e for _, h in found for e in (h.start, h.stop) if w.start < e < w.stop}
            for start, stop in zip(ordered := sorted(edges), ordered[1:]):
                of = tuple(dict.fromkeys(s for s, h in found if h.start <= start and stop <= h.stop))
                if not of:
                    wrong.append(f"nobody holds [{start}, {stop}) of {w.name}, which target {target} wants")
                runs.append((of, target, w.name, start, stop))
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"no plan: {'; '.join(wrong[:8])}{more}")
    size = lambda name: _size(itemsize, name)
    sends, turns = _balanced(runs, len(have), size, near), max(len(have), len(want), 1)
    out: list[Send] = []
    for s in sorted(sends, key=lambda s: ((s.target - s.source) % turns, s.source, s.name, s.start)):
        if out and replace(out[-1], start=s.start, stop=s.stop) == s and out[-1].stop == s.start:
            s = replace(out.pop(), stop=s.stop)
        out.append(s)
    return WeightPlan(tuple(out), itemsize, len(have), len(want), tuple(near))


def _balanced(runs, sources: int, size: Callable[[str], int], near: Sequence[int | None]) -> list[Send]:
    """A source for every run; those with no choice first, then large ones, which replicas share."""
    load, sends = [0] * sources, []
    runs.sort(key=lambda r: (len(r[0]), r[3] - r[4]))
    for of, target, name, start, stop in runs:
        if near and near[target] in of:
            sends.append(Send(near[target], target, name, start, stop))
            continue
        grain = max(GRAIN, -(-(stop - start) // CUTS))
        mine = dict.fromkeys(of, 0)
        for at in range(start, stop, grain):
            n = min(grain, stop - at)
            least = min(of, key=load.__getitem__)
            load[least] += n * size(name)
            mine[least] += n
        for source, n in mine.items():
            if n:
                sends.append(Send(source, target, name, start, start + n))
                start += n
    return sends


def _size(itemsize: int | Mapping[str, int], name: str) -> int:
    return itemsize if isinstance(itemsize, int) else itemsize[name]


def _tensors(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in _tensors(Transformer(config, device="meta", seed=None)).items()}
