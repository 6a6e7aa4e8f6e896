"""Read a checkpoint into any layout: each rank reads the intervals that it wants, and no more.

A wanted piece is intersected with the pieces that the files hold. Each overlap is read block by block, straight into
the target where its dtype and device allow, and checked against the block's sum while it is still in the cache.
"""

import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import BLOCK, Stored, block_sum, open_file, raw, read_entry
from .intervals import Piece, check_cover, intersect
from .save import find, read_manifest

THREADS = 4
RUN = 8  # blocks that one task reads


@dataclass(frozen=True)
class Report:
    """What a load that is not strict left out: wanted names that are not there, names that nobody wanted."""

    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()


def compare(wanted: Iterable[str], there: Iterable[str]) -> Report:
    """Names that only one side has, sorted.

    >>> compare({"a", "miss"}, {"a", "extra"})
    Report(missing=('miss',), surplus=('extra',))
    """
    wanted, there = set(wanted), set(there)
    return Report(tuple(sorted(wanted - there)), tuple(sorted(there - wanted)))


class Checkpoint:
    """An open checkpoint; see `open_checkpoint`. `manifest` has everything but the tensors."""

    def __init__(self, path: Path, verify: bool) -> None:
        self.path, self.verify, self.manifest = path, verify, read_manifest(path)
        self.pieces: dict[str, list[tuple[str, Stored]]] = {}  # by kind: file and piece
        try:
            kinds = self.manifest["tensors"].items()
            self.shapes = {kind: {n: tuple(t["shape"]) for n, t in group.items()} for kind, group in kinds}
            for file, entry in self.manifest["files"].items():
                for s in read_entry(entry, self.shapes):
                    self.pieces.setdefault(s.kind, []).append((file, s))
            for kind, shapes in self.shapes.items():
                check_cover([s.piece for _, s in self.pieces.get(kind, ())], shapes)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"the manifest of {path} is broken: {e}") from None
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="moekit-load")

    def close(self) -> None:
        """Give files and threads back."""
        self._pool.shutdown(cancel_futures=True)
        for fd in self._open.values():
            os.close(fd)

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The tensors of a kind, with their shapes."""
        return dict(self.shapes.get(kind, {}))

    def read(
        self, kind: str, targets: Sequence[tuple[Piece, Tensor]], *, names: Iterable[str] = (), strict: bool = True,
        cast: bool = False,
    ) -> Report:  # fmt: skip
        """Read pieces of one kind.

        Args:
            targets: pieces and flat contiguous tensors of their size, on any device.
            names: all that are wanted, by this rank or another, besides those of `targets`.
            strict: missing or surplus names are an error. Otherwise they are returned, and the targets of missing ones
                are not touched.
            cast: round to the target's dtype. Otherwise another dtype is an error.
        Raises:
            CheckpointError: names (strict), a shape or dtype that differs: nothing was read. Damage, with the file
                and the place: targets may have been written in part.
        """
        there, have = self.names(kind), self.pieces.get(kind, [])
        report = compare([*names, *(p.name for p, _ in targets)], there)
        if strict and report != Report():
            lists = [f"{word}: {', '.join(found)}" for word, found in vars(report).items() if found]
            raise CheckpointError(f"{self.path} does not fit: {kind} {'; '.join(lists)}")
        targets = [(p, t.detach()) for p, t in targets if p.name in there]
        for p, t in targets:
            if p.shape != there[p.name]:
                shapes = f"{list(there[p.name])} in {self.path}, {list(p.shape)} wanted"
                raise CheckpointError(f"{kind} of {p.name} has another shape: {shapes}")
            if t.shape != (len(p),) or not t.is_contiguous():
                raise CheckpointError(f"{p.name}: a contiguous flat tensor of {len(p)} elements is needed")
        tasks = []
        for i, j, begin, end in intersect([s.piece for _, s in have], [p for p, _ in targets]):
            (file, s), (p, out) = have[i], targets[j]
            if s.dtype != out.dtype and not cast:
                raise CheckpointError(f"{kind} of {p.name} is {s.dtype} in {self.path}, {out.dtype} is wanted")
            tasks += self._tasks(file, s, out[begin - p.start : end - p.start], begin - s.piece.start)
        list(self._pool.map(lambda task: self._blocks(*task), tasks))
        return report

    def _tasks(self, file: str, s: Stored, out: Tensor, start: int = 0) -> list[tuple[str, Stored, Tensor, int, range]]:
        """What to give `_blocks` so that elements from `start` on of a stored piece come into `out`."""
        size, stop = BLOCK // s.dtype.itemsize, start + len(out)
        firsts = range(start // size * size, stop, RUN * size)
        return [(file, s, out, start, range(low, min(low + RUN * size, stop), size)) for low in firsts]

    def _blocks(self, file: str, s: Stored, out: Tensor, start: int, lows: range) -> None:
        """Read and check the blocks of a stored piece that begin at `lows`; what `out` wants of them goes there."""
        fd = self._descriptor(file)
        stop, straight = start + len(out), out.device.type == "cpu" and out.dtype == s.dtype
        for low in lows:
            high = min(low + lows.step, len(s.piece))
            whole = straight and start <= low and high <= stop
            block = out[low - start : high - start] if whole else torch.empty(high - low, dtype=s.dtype)
            data = raw(block)
            if os.preadv(fd, [data], s.at + low * s.dtype.itemsize) != len(data):
                raise CheckpointError(f"{self.path / file} is truncated")
            if self.verify and block_sum(data) != s.sums[low // lows.step]:
                place = f"{s.kind} of {s.piece.name}, elements {s.piece.start + low} to {s.piece.start + high}"
                raise CheckpointError(f"{self.path / file} is damaged: {place}")
            if not whole and out.device.type != "meta":
                a, z = max(low, start), min(high, stop)
                out[a - start : z - start].copy_(block[a - low : z - low])

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = open_file(self.path / file, self.manifest["files"][file])
            return self._open[file]


@contextmanager
def open_checkpoint(path: str | Path, *, verify: bool = True) -> Iterator[Checkpoint]:
    """Open a checkpoint, or the newest one of a run folder or a folder of checkpoints, to read from it.

    Args:
        verify: check each block that is read against its sum. Lengths and headers are always checked.
    Raises:
        CheckpointError: no checkpoint, a broken manifest; later a missing, truncated or altered file, by name.
    """
    checkpoint = Checkpoint(find(path), verify)
    try:
        yield checkpoint
    except OSError as e:
        raise CheckpointError(f"{checkpoint.path} cannot be read: {e}") from None
    finally:
        checkpoint.close()


def verify(path: str | Path) -> str:
    """Compare every byte of a checkpoint with its manifest; returns one line.

    Raises:
        CheckpointError: every file that is missing, truncated, altered or not of this checkpoint, by name.
    """
    with open_checkpoint(path) as c:
        files = c.manifest["files"]
        strange = {p.name for p in c.path.glob("*.safetensors")} - files.keys()
        wrong = {name: f"{c.path / name} is not of this checkpoint" for name in sorted(strange)}

        def check(file: str, *task: Any) -> None:
            try:
                c._blocks(file, *task) if task else c._descriptor(file)
            except CheckpointError as e:
                wrong.setdefault(file, str(e))

        tasks: list[tuple[Any, ...]] = [(file,) for file in files]
        for file, s in [p for group in c.pieces.values() for p in group]:
            tasks += c._tasks(file, s, torch.empty(len(s.piece), dtype=s.dtype, device="meta"))
        list(c._pool.map(lambda task: check(*task), tasks))
        if wrong:
            raise CheckpointError("; ".join(wrong.values()))
        size = sum(entry["bytes"] for entry in files.values())
        return f"{c.path}: {len(files)} files, {size:,} bytes, all as they were written"


def show(path: str | Path) -> str:
    """What a checkpoint holds, as a table: steps, layout, dtype, sizes, kinds, and when it was saved."""
    with open_checkpoint(path) as c:
        m, files = c.manifest, c.manifest["files"].values()
        joined = lambda key, sign: ", ".join(f"{k}{sign}{v}" for k, v in m.get(key, {}).items())
        count = {kind: sum(map(math.prod, shapes.values())) for kind, shapes in c.shapes.items()}
        rows = {
            "checkpoint": c.path,
            "steps": f"{m['updates']} (and {m.get('skipped', 0)} skipped)" if "updates" in m else "",
            "layout": joined("layout", "="),
            "dtype": m.get("dtype", ""),
            "parameters": f"{count['master']:,}" if "master" in count else "",
            "bytes": f"{sum(entry['bytes'] for entry in files):,} in {len(files)} files",
            **{f"  {kind}": f"{len(c.shapes[kind])} tensors, {n:,} elements" for kind, n in count.items()},
            "saved": f"{m['saved']} with {joined('versions', ' ')}",
        }
    return "\n".join(f"{k:<{max(map(len, rows))}}  {v}" for k, v in rows.items() if v)
