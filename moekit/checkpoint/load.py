"""Read a checkpoint into any layout: each rank reads the intervals that it wants, and no more.

A wanted piece is intersected with the pieces that the files hold. Each overlap is read block by block, straight into
the target where its dtype and device allow, and checked against the block's sum while it is still in the cache.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import BLOCK, Stored, block_sum, check_file, raw
from .intervals import Piece, check_cover, intersect
from .save import find, read_manifest

THREADS = 4
RUN = 8  # blocks that one task reads
Targets = Sequence[tuple[Piece, Tensor]]


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
    """An open checkpoint; see `open_checkpoint`."""

    def __init__(self, path: Path, verify: bool) -> None:
        self.path, self.verify = path, verify
        self.manifest = read_manifest(path)
        self.pieces: dict[str, list[tuple[str, int, Stored]]] = {}  # by kind: file, offset in its data, piece
        self.files: dict[str, list[Stored]] = {}
        try:
            tensors = self.manifest["tensors"]
            self.shapes = {k: {n: tuple(w["shape"]) for n, w in group.items()} for k, group in tensors.items()}
            for name, entry in self.manifest["files"].items():
                at, stored = 0, [Stored.from_json(p, self.shapes) for p in entry["pieces"]]
                self.files[name] = stored
                for s in stored:
                    self.pieces.setdefault(s.kind, []).append((name, at, s))
                    at += s.nbytes
            for kind, shapes in self.shapes.items():
                check_cover([s.piece for *_, s in self.pieces.get(kind, [])], shapes)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"the manifest of {path} is broken: {e}") from None
        self._open: dict[str, tuple[int, int]] = {}  # file: descriptor, where its data begin
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="moekit-load")

    def close(self) -> None:
        """Give files and threads back."""
        self._pool.shutdown(cancel_futures=True)
        for fd, _ in self._open.values():
            os.close(fd)
        self._open.clear()

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The tensors of a kind, with their shapes."""
        return dict(self.shapes.get(kind, {}))

    def read_into(self, kind: str, piece: Piece, out: Tensor) -> None:
        """Read one piece into a flat contiguous tensor of the stored dtype."""
        self.read(kind, [(piece, out)], names=self.names(kind))

    def read(
        self,
        kind: str,
        targets: Targets,
        *,
        names: Iterable[str] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> Report:
        """Read pieces of one kind.

        Args:
            targets: pieces and flat contiguous tensors of their size, on any device.
            names: all names that are wanted, by this rank or another (default: those of `targets`).
            strict: names that are missing or surplus are an error. Otherwise they are returned, and the targets of
                missing ones are not touched.
            cast: allow targets of another dtype; values are rounded. Otherwise a dtype that differs is an error.

        Raises:
            CheckpointError: names (strict), a shape or dtype that differs: nothing was read. Damage, with the file
                and the place: targets may have been written in part.
        """
        there = self.names(kind)
        report = compare([*(names or ()), *(p.name for p, _ in targets)], there)
        if strict and (report.missing or report.surplus):
            lists = [f"{word}: {', '.join(found)}" for word, found in vars(report).items() if found]
            raise CheckpointError(f"{self.path} does not fit: {kind} {'; '.join(lists)}")
        targets = [(p, t.detach()) for p, t in targets if p.name in there]
        have = self.pieces.get(kind, [])
        overlaps = intersect([s.piece for *_, s in have], [p for p, _ in targets])
        for piece, t in targets:
            if piece.shape != there[piece.name]:
                shapes = f"{list(there[piece.name])} in {self.path}, {list(piece.shape)} wanted"
                raise CheckpointError(f"{kind} of {piece.name} has another shape: {shapes}")
            if t.shape != (len(piece),) or not t.is_contiguous():
                raise CheckpointError(f"{piece.name}: a contiguous flat tensor of {len(piece)} elements is needed")
        for o in overlaps:
            stored, out = have[o.have][2], targets[o.want][1]
            if stored.dtype != out.dtype and not cast:
                name = stored.piece.name
                raise CheckpointError(f"{kind} of {name} is {stored.dtype} in {self.path}, {out.dtype} is wanted")
        tasks = []
        for o in overlaps:
            file, at, stored = have[o.have]
            size, origin = BLOCK // stored.dtype.itemsize, stored.piece.start
            first, last = (o.start - origin) // size, math.ceil((o.stop - origin) / size)
            piece, out = targets[o.want]
            part = out[o.start - piece.start : o.stop - piece.start]
            for b in range(first, last, RUN):
                tasks.append((file, at, stored, range(b, min(b + RUN, last)), o.start - origin, part))
        for _ in self._pool.map(lambda task: self._blocks(*task), tasks):
            pass
        return report

    def _blocks(self, file: str, at: int, stored: Stored, blocks: range, start: int, out: Tensor) -> None:
        """Read blocks of a stored piece into `out`, which holds the piece's elements from `start` on."""
        fd, begin = self._descriptor(file)
        size, stop = BLOCK // stored.dtype.itemsize, start + len(out)
        straight = out.device.type == "cpu" and out.dtype == stored.dtype
        for b in blocks:
            low, high = b * size, min((b + 1) * size, len(stored.piece))
            whole = straight and start <= low and high <= stop
            block = out[low - start : high - start] if whole else torch.empty(high - low, dtype=stored.dtype)
            data, done = raw(block), 0
            while done < len(data):
                try:
                    n = os.preadv(fd, [data[done:]], begin + at + b * BLOCK + done)
                except OSError as e:
                    raise CheckpointError(f"{self.path / file} cannot be read: {e}") from None
                if n == 0:
                    raise CheckpointError(f"{self.path / file} is truncated")
                done += n
            if self.verify and block_sum(data) != stored.sums[b]:
                place = f"{stored.kind} of {stored.piece.name}, elements {stored.piece.start + low} to"
                raise CheckpointError(f"{self.path / file} is damaged: {place} {stored.piece.start + high}")
            if not whole:
                a, z = max(low, start), min(high, stop)
                out[a - start : z - start].copy_(block[a - low : z - low])

    def _descriptor(self, file: str) -> tuple[int, int]:
        with self._lock:
            if file not in self._open:
                begin = check_file(self.path / file, self.manifest["files"][file], self.files[file])
                self._open[file] = os.open(self.path / file, os.O_RDONLY), begin
            return self._open[file]


@contextmanager
def open_checkpoint(path: str | Path, *, verify: bool = True) -> Iterator[Checkpoint]:
    """Open a checkpoint to read from it.

    Args:
        path: its folder; of a run folder or a folder of checkpoints, the newest.
        verify: check each block that is read against its sum. Lengths and headers are always checked.

    Raises:
        CheckpointError: no checkpoint, a broken manifest, a missing, truncated or altered file, by name.
    """
    checkpoint = Checkpoint(find(path), verify)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def load_weights(
    path: str | Path, named: Mapping[str, tuple[Piece, Tensor]], *, strict: bool = True, kind: str = "master"
) -> Report:
    """Read the parameters alone, rounded to the dtype of each target (a bf16 parameter is bf16(its master)).

    Args:
        path: a checkpoint, or a folder that has some.
        named: by name, the piece that is wanted and its flat contiguous target.
        strict: names that are missing or surplus are an error, and nothing is read; else both lists are returned.

    Raises:
        CheckpointError: see `Checkpoint.read`.
    """
    with open_checkpoint(path) as checkpoint:
        return checkpoint.read(kind, list(named.values()), names=named, strict=strict, cast=True)


# ------------------------------------------------------------------ `moekit checkpoint`


def verify(path: str | Path) -> str:
    """Read every byte of a checkpoint and compare it with the manifest; returns one line.

    Raises:
        CheckpointError: every file that is missing, truncated, altered or not of this checkpoint, by name.
    """
    with open_checkpoint(path) as c:

        def bad(name: str) -> str:
            try:
                check_file(c.path / name, c.manifest["files"][name], c.files[name], whole=True)
            except CheckpointError as e:
                return str(e)
            return ""

        wrong = [message for message in c._pool.map(bad, c.files) if message]
        strange = {p.name for p in c.path.iterdir() if p.suffix == ".safetensors"} - c.files.keys()
        wrong += [f"{c.path / name} is not of this checkpoint" for name in sorted(strange)]
        if wrong:
            raise CheckpointError("; ".join(wrong))
        size = sum(entry["bytes"] for entry in c.manifest["files"].values())
        return f"{c.path}: {len(c.files)} files, {size:,} bytes, all as they were written"


def show(path: str | Path) -> str:
    """What a checkpoint holds, as a table: steps, layout, dtype, sizes, kinds, and when it was saved."""
    with open_checkpoint(path) as c:
        m = c.manifest
        count = lambda kind: sum(math.prod(shape) for shape in c.shapes[kind].values())
        layout = m.get("layout", "")
        rows: dict[str, Any] = {
            "checkpoint": c.path,
            "steps": f"{m['updates']} (and {m.get('skipped', 0)} skipped)" if "updates" in m else "",
            "layout": ", ".join(f"{k}={v}" for k, v in layout.items()) if isinstance(layout, dict) else layout,
            "dtype": m.get("dtype", ""),
            "parameters": f"{count('master'):,}" if "master" in c.shapes else "",
            "bytes": f"{sum(entry['bytes'] for entry in m['files'].values()):,}",
            "files": len(c.files),
            **{f"  {kind}": f"{len(c.shapes[kind])} tensors, {count(kind):,} elements" for kind in c.shapes},
            "saved": m.get("saved", ""),
            "with": ", ".join(f"{k} {v}" for k, v in m.get("versions", {}).items()),
        }
    rows = {k: v for k, v in rows.items() if v != ""}
    width = max(map(len, rows))
    return "\n".join(f"{k:<{width}}  {v}" for k, v in rows.items())
