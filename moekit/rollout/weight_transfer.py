"""Weights on their way: chunks of them, what carries chunks between processes, and how a model takes them.

A sender cuts what a plan asks of it into chunks and casts the next one while this one travels. A transport carries
chunks with their name, place, dtype and number, ends with their count, and on request with a SHA-256 of every tensor's
bytes; the receiver's word that all is well ends the sender's call. A model takes chunks into a copy of its weights
("atomic") or straight into them ("in_place"), and only when every element was written exactly once do they serve.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.intervals import Piece
from ..errors import ConfigError, TransferError
from ..model.transformer import Transformer
from .weight_plan import Send, held

CHUNK = 4 << 20  # bytes
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Chunk:
    """Elements [start, start + len(data)) of a parameter seen flat. `data` lives until the next chunk is asked for."""

    name: str
    start: int
    data: Tensor  # 1-D


@dataclass(frozen=True)
class Sent:
    """Bytes that were moved, counted as they were, and seconds by phase; those of one side add up to its time.

    Phases: cast (waiting for it: what overlap did not hide), wire, load (into the model), verify (hashes).
    """

    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Sent) -> Sent:
        phases = self.seconds.keys() | other.seconds.keys()
        seconds = {p: self.seconds.get(p, 0.0) + other.seconds.get(p, 0.0) for p in phases}
        return Sent(self.bytes + other.bytes, seconds)


class Phases(dict[str, float]):
    """Seconds by phase, each measured from the end of the one before."""

    def __init__(self, *names: str):
        super().__init__(dict.fromkeys(names, 0.0))
        self.mark = time.perf_counter()

    def end(self, name: str) -> None:
        """What was done since the last call was `name`."""
        before, self.mark = self.mark, time.perf_counter()
        self[name] += self.mark - before


def pieces_of(
    source: Mapping[str, Tensor] | Transformer, own: Mapping[str, tuple[Piece, Tensor]]
) -> dict[str, tuple[Piece, Tensor]]:  # fmt: skip
    """Of whole tensors, by the model's names, the pieces that `own` holds (`weight_plan.held`): what `chunks` takes.

    Raises ConfigError: a name is missing or unknown, or a shape differs.
    """
    values = source.state_dict() if isinstance(source, Transformer) else source
    if wrong := sorted(own.keys() ^ set(values)):
        kind = "has no" if wrong[0] in own else "has an unknown"
        raise ConfigError(f"the update {kind} {wrong[0]} ({len(wrong)} names differ); send every parameter and buffer")
    for name, (piece, _) in own.items():
        if (got := tuple(values[name].shape)) != piece.shape:
            raise ConfigError(f"the update's {name} has shape {got}, not {piece.shape}")
    return {n: (p, values[n].detach().reshape(-1)[p.start : p.stop]) for n, (p, _) in own.items()}


def chunks(
    held: Mapping[str, tuple[Piece, Tensor]], sends: Iterable[Send] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None, chunk_bytes: int = CHUNK,
) -> Iterator[Chunk]:  # fmt: skip
    """What a source sends, cut and cast; the next chunk is cast, in a thread, while the caller sends this one.

    Args:
        held: `weight_plan.held(model)`.
        sends: this source's for one target (`plan.of`); None = everything held.
        dtype: on the wire, of all tensors or by name (`weight_plan.dtypes`); None = as they are.
        chunk_bytes: the most that a chunk holds, on the wire and before its cast.

    Raises:
        ConfigError: a name or an interval that is not held.

    Cost: no copy of what needs no cast; else two chunks of memory.
    """
    buffers: dict[tuple[int, torch.device], Tensor] = {}

    def cut() -> Iterator[tuple[str, int, Tensor, torch.dtype]]:
        for s in [Send(0, 0, n, p.start, p.stop) for n, (p, _) in held.items()] if sends is None else sends:
            piece, flat = held.get(s.name, (None, None))
            if piece is None or flat is None or not piece.start <= s.start <= s.stop <= piece.stop:
                has = f"[{piece.start}, {piece.stop})" if piece else "nothing"
                raise ConfigError(f"[{s.start}, {s.stop}) of {s.name} is to be sent, and {has} of it is here")
            out = dtype.get(s.name, flat.dtype) if isinstance(dtype, Mapping) else dtype or flat.dtype
            step = max(1, chunk_bytes // max(out.itemsize, flat.dtype.itemsize))
            for start in range(s.start, s.stop, step):
                yield s.name, start, flat[start - piece.start : min(start + step, s.stop) - piece.start], out

    def cast(turn: int, part: Tensor, out: torch.dtype) -> Tensor:
        if (key := (turn, part.device)) not in buffers:
            buffers[key] = torch.empty(max(chunk_bytes, 8), dtype=torch.uint8, device=part.device)
        return buffers[key][: part.numel() * out.itemsize].view(out).copy_(part)

    with ThreadPoolExecutor(1, thread_name_prefix="moekit-cast") as pool:
        ahead: deque[tuple[str, int, Any]] = deque()
        for turn, (name, start, part, out) in enumerate(cut()):
            ahead.append((name, start, part if part.dtype == out else pool.submit(cast, turn % 2, part, out)))
            if turn:
                yield _made(*ahead.popleft())
        while ahead:
            yield _made(*ahead.popleft())


def _made(name: str, start: int, data: Any) -> Chunk:
    return Chunk(name, start, data if isinstance(data, Tensor) else data.result())


def digest(flat: Tensor) -> str:
    """SHA-256 of a flat tensor's bytes."""
    return hashlib.sha256(as_bytes(flat).cpu().numpy().data).hexdigest()


def as_bytes(flat: Tensor) -> Tensor:
    """A 1-D tensor as uint8."""
    return flat.detach().contiguous().view(torch.uint8)


class Update:
    """New weights for a model, on their way in.

    Args:
        model: whole, or the part of one that serves here.
        mode: "atomic" writes a copy, which `switch` makes the weights; "in_place" writes the weights.
        spare: memory for the copy, of an update before; absent = new, whose first use is several times slower.
    """

    def __init__(
        self, model: Transformer, version: int, mode: str = "atomic", spare: dict[str, Tensor] | None = None
    ):  # fmt: skip
        self.model, self.version, self.mode = model, version, mode
        self.own = held(model)
        new = {n: t if mode == "in_place" else torch.empty_like(t) for n, (_, t) in self.own.items() if not spare}
        self.into = spare or new
        self.runs: dict[str, list[tuple[int, int]]] = {n: [] for n in self.own}  # written, apart

    @torch.no_grad()
    def write(self, chunk: Chunk) -> None:
        """Take a chunk.

        Raises:
            TransferError: an unknown name, another dtype, elements that are not of this model or came before.
        """
        if chunk.name not in self.own:
            raise TransferError(f"the update has an unknown {chunk.name}; the model has no such tensor here")
        piece, flat = self.own[chunk.name]
        start, stop = chunk.start, chunk.start + chunk.data.numel()
        if chunk.data.ndim != 1 or chunk.data.dtype != flat.dtype:
            what = f"{tuple(chunk.data.shape)} {chunk.data.dtype}"
            raise TransferError(f"a chunk of {chunk.name} is {what}; send it flat, in {flat.dtype}")
        if not piece.start <= start <= stop <= piece.stop:
            here = f"[{piece.start}, {piece.stop}) of its {math.prod(piece.shape)} elements"
            raise TransferError(f"a chunk of {chunk.name} is [{start}, {stop}); here are {here}")
        runs = self.runs[chunk.name]
        if any(a < stop and start < b for a, b in runs):
            raise TransferError(f"elements of {chunk.name} in [{start}, {stop}) were sent before")
        self.into[chunk.name][start - piece.start : stop - piece.start].copy_(chunk.data)
        if runs and runs[-1][1] == start:  # as nearly always
            start = runs.pop()[0]
        runs.append((start, stop))

    def check(self, digests: Mapping[str, str] | None = None) -> None:
        """Refuse to serve unless every element was written, and (on request) hashes to what was sent.

        Args:
            digests: `digest` of tensors as they are held here, by name.

        Raises:
            TransferError: elements that did not come, by name; a hash that differs.
        """
        lost = {n: len(p) - sum(b - a for a, b in self.runs[n]) for n, (p, _) in self.own.items()}
        if missing := [f"{n} of {len(self.own[name][0])} elements of {name}" for name, n in lost.items() if n]:
            raise TransferError(f"the update lacks {_few(missing)}; send all of them again")
        wrong = [n for n, d in (digests or {}).items() if n not in self.into or digest(self.into[n]) != d]
        if wrong:
            raise TransferError(f"not what was sent, by its SHA-256: {_few(wrong)}; send all again")

    def switch(self) -> None:
        """Make the new weights the model's; the copy is then of the old ones."""
        if self.mode == "atomic":
            for name, t in (*self.model.named_parameters(), *self.model.named_buffers()):
                t.data, self.into[name] = self.into[name].view(t.shape), self.own[name][1]


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Transport:
    """What carries chunks from one process to one other, again and again.

    A kind of transport writes `_put(head, data)` and `_get() -> (head, data)`; `settle` and `_settled`, by which the
    receiver says how it ended, and `_fail`, by which the sender does. Heads are JSON: nothing is unpickled.
    """

    verify_s, receiving = 0.0, False  # seconds that the last `receive` spent on hashes; whether it goes on
    _put: Callable[[dict[str, Any], Tensor | None], None]
    _get: Callable[[], tuple[dict[str, Any], Tensor | None]]

    def send(self, chunks: Iterable[Chunk], *, verify: bool = False) -> Sent:
        """Send all chunks; returns when the receiver took the last one.

        Args:
            verify: hash what is sent, by tensor; the receiver hashes what it gets and compares.

        Raises:
            TransferError: the receiver is gone, or refused; its reason is in the message.
            StorageError: memory that is needed does not fit.
        """
        count, size, seconds, hashes, source = 0, 0, Phases("cast", "wire", "verify"), {}, iter(chunks)
        try:
            while (chunk := next(source, None)) is not None:
                seconds.end("cast")
                data, dtype = as_bytes(chunk.data), str(chunk.data.dtype).removeprefix("torch.")
                if verify:
                    hashes.setdefault(chunk.name, hashlib.sha256()).update(data.cpu().numpy().data)
                    seconds.end("verify")
                head = {"n": count, "name": chunk.name, "start": chunk.start, "len": len(chunk.data), "dtype": dtype}
                self._put(head | {"bytes": len(data), "hash": verify}, data)
                count, size = count + 1, size + len(data)
                seconds.end("wire")
            self._put({"end": count, "size": size, "digests": {n: h.hexdigest() for n, h in hashes.items()}}, None)
            refused = self._settled()
            seconds.end("wire")
        except BaseException as problem:
            with suppress(Exception):  # what went wrong first is what is told
                self._fail(f"{type(problem).__name__}: {problem}")
            raise
        if refused:
            raise TransferError(f"the receiver refused the update: {refused}")
        return Sent(size, dict(seconds))

    def receive(self) -> Iterator[Chunk]:
        """Chunks as they come; ends when the sender says so and everything is there.

        Raises:
            TransferError: the sender is gone or gave up; a chunk is missing, out of order, cut or altered.
        """
        self.verify_s, self.receiving, count, size, hashes = 0.0, True, 0, 0, {}
        try:
            while True:
                head, data = self._get()
                if "failed" in head:
                    raise TransferError(f"the sender gave up after {count} chunks: {head['failed']}")
                if data is None or "end" in head:
                    break
                name, n, dtype = str(head.get("name")), head.get("len", -1), DTYPES.get(head.get("dtype", ""))
                if head.get("n") != count:
                    raise TransferError(f"chunk {head.get('n')} of {name} came where chunk {count} was due")
                if dtype is None or n * dtype.itemsize != head.get("bytes") or len(data) != head["bytes"]:
                    want = f"{n} elements of {head.get('dtype')}, {head.get('bytes')} bytes"
                    raise TransferError(f"chunk {count} ({name}) has {len(data)} bytes; its head says {want}")
                if head.get("hash"):
                    mark = time.perf_counter()
                    hashes.setdefault(name, hashlib.sha256()).update(data.cpu().numpy().data)
                    self.verify_s += time.perf_counter() - mark
                count, size = count + 1, size + len(data)
                yield Chunk(name, head["start"], data.view(dtype))
            if (head["end"], head["size"]) != (count, size):
                raise TransferError(f"{count} chunks ({size} bytes) came of {head['end']} ({head['size']} bytes)")
            wrong = [n for n, h in hashes.items() if head["digests"].get(n) != h.hexdigest()]
            if wrong:
                raise TransferError(f"altered on the way, by its SHA-256: {_few(wrong)}; send all again")
            self.settle("")
        except BaseException as problem:
            if self.receiving:
                self.settle("the receiver stopped" if isinstance(problem, GeneratorExit) else str(problem))
            raise

    def settle(self, problem: str) -> None:
        """As the receiver: tell the sender that all is well (""), or why nothing more is wanted."""
        self.receiving = False
        self._settle(problem)

    def _settle(self, problem: str) -> None: ...

    def _settled(self) -> str:
        return ""

    def _fail(self, problem: str) -> None:
        self._put({"failed": problem}, None)


def load(
    engine: Any, version: int, mode: str, *sources: Transport | Iterable[Chunk],
    digests: Mapping[str, str] | None = None,
) -> Sent:  # fmt: skip
    """Give an engine a version whose chunks come from several sources, one after the other.

    Args:
        engine: has `begin_update`, `write`, `finish_update`, `abort_update` (`EmbeddedEngine`).
        sources: transports, in the order of `plan.to`, or chunks made in this process.
        digests: see `Update.check`.

    Returns:
        Bytes and seconds; nothing of a version that serves already.

    Raises:
        TransferError, EngineError: the update is off on both sides; see the engine's mode for what serves.
    """
    size, at, opened, seconds = 0, 0, False, Phases("wire", "load", "verify")
    ways = [s for s in sources if isinstance(s, Transport)]
    try:
        opened = engine.begin_update(version, mode)
        if not opened:
            for way in ways:
                way.settle(f"version {version} serves already; ask for the engine's version before sending")
            return Sent(0, dict(seconds))
        for source in sources:
            at += isinstance(source, Transport)
            incoming = source.receive() if isinstance(source, Transport) else source  # held until it was told
            for chunk in incoming:
                seconds.end("wire")
                engine.write(chunk)
                size += chunk.data.nbytes
                seconds.end("load")
            seconds.end("wire")
        engine.finish_update(digests)
        seconds.end("verify" if digests else "load")
    except BaseException as problem:
        if opened:
            engine.abort_update()
        for way in ways[at - 1 :] if at and ways[at - 1].receiving else ways[at:]:  # no sender is left waiting
            way.settle(str(problem))
        raise
    hashed = sum(way.verify_s for way in ways)
    return Sent(size, {"wire": seconds["wire"] - hashed, "load": seconds["load"], "verify": seconds["verify"] + hashed})
