"""One rank's file of a checkpoint: flat pieces in the safetensors format, and how damage to it is found.

The file is plain safetensors: 8 bytes of length, a JSON header, the tensors' bytes; each piece is a 1-D tensor called
``kind/name/start``. The order of the pieces fixes every byte of the header, so the manifest needs no offsets and the
header is checked by making it again.

Two checks are kept in the manifest. The SHA-256 of the file says which file it is (`moekit checkpoint verify`, or
sha256sum). A load would be limited by it (1.7 GB/s a core where the CPU has instructions for it, against 13 for the
copy), so each block of 1 MiB also has a sum of its own: a rank checks just the blocks it reads, at memory speed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .intervals import Piece

BLOCK = 1 << 20  # bytes that share one sum; a multiple of every item size
ROW = 4096  # bytes of a row within a block
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A piece of one kind ("master", "exp_avg", ...) as it lies in a file; `sums` has one entry a block."""

    kind: str
    piece: Piece
    dtype: torch.dtype
    sums: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return len(self.piece) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """For the manifest, which holds the shapes once for all files."""
        return [self.kind, self.piece.name, self.piece.start, self.piece.stop, CODES[self.dtype], "".join(self.sums)]

    @staticmethod
    def from_json(entry: Sequence[Any], shapes: Mapping[str, Mapping[str, Sequence[int]]]) -> Stored:
        """The inverse of `to_json`."""
        kind, name, start, stop, code, sums = entry
        piece = Piece(name, tuple(shapes[kind][name]), start, stop)
        found = Stored(kind, piece, DTYPES[code], tuple(sums[i : i + 16] for i in range(0, len(sums), 16)))
        if len(found.sums) != math.ceil(found.nbytes / BLOCK):
            raise ValueError(f"{len(found.sums)} block sums for {found.nbytes} bytes of {kind} {name}")
        return found


def header(stored: Sequence[Stored]) -> bytes:
    """The bytes before the data of a safetensors file that holds `stored` in this order."""
    at, entries = 0, {}
    for s in stored:
        span = [at, at + s.nbytes]
        entries[f"{s.kind}/{s.piece.name}/{s.piece.start}"] = {
            "dtype": CODES[s.dtype], "shape": [len(s.piece)], "data_offsets": span,
        }  # fmt: skip
        at = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, writable if it is."""
    return flat.detach().view(torch.uint8).numpy().data


def block_sum(data: memoryview) -> str:
    """16 hexadecimal digits that change when a block is damaged.

    The block is a matrix of 64-bit words in rows of 4 KiB; the wrapping sums of its rows and of its columns (and the
    bytes that fill no row) are hashed with SHA-256. A column sum changes with any damage that spans at most 4 KiB, so
    a flipped bit, a lost sector or a lost page is always found; other damage goes unseen only where it cancels in
    every row and every column.

    >>> block_sum(memoryview(bytes(8192))) == block_sum(memoryview(bytes(8191) + b"1"))
    False
    """
    whole = len(data) - len(data) % ROW
    words = np.frombuffer(data[:whole], dtype="<u8").reshape(-1, ROW // 8)
    found = hashlib.sha256(words.sum(0, dtype=np.uint64).tobytes() + words.sum(1, dtype=np.uint64).tobytes())
    found.update(data[whole:])
    found.update(len(data).to_bytes(8, "little"))
    return found.hexdigest()[:16]


def push(fd: int, data: memoryview | bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 8 * BLOCK]) :]


def write_file(path: Path, entries: Sequence[tuple[str, Piece, Tensor]]) -> dict[str, Any]:
    """Write one file and sync it to disk, with both checks made in a second thread meanwhile.

    Args:
        entries: kind, piece and its contiguous 1-D CPU tensor.

    Returns:
        Its entry in the manifest.
    """
    entries = sorted(entries, key=lambda e: -e[2].dtype.itemsize)  # every tensor stays aligned to its items
    stored = [Stored(kind, piece, t.dtype) for kind, piece, t in entries]
    views, head = [raw(t) for *_, t in entries], header(stored)
    whole, sums, stop = hashlib.sha256(head), [], threading.Event()

    def check() -> None:
        for view in views:
            of_view = []
            for at in range(0, len(view), BLOCK):
                if stop.is_set():
                    return
                block = view[at : at + BLOCK]
                of_view.append(block_sum(block))
                whole.update(block)
            sums.append(tuple(of_view))

    second = threading.Thread(target=check, name="moekit-checksum")
    second.start()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for data in (head, *views):
                push(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        stop.set()
        raise
    finally:
        second.join()
    pieces = [Stored(s.kind, s.piece, s.dtype, of).to_json() for s, of in zip(stored, sums, strict=True)]
    size = len(head) + sum(map(len, views))
    return {"bytes": size, "sha256": whole.hexdigest(), "pieces": pieces}


def check_file(path: Path, entry: dict[str, Any], stored: Sequence[Stored], *, whole: bool = False) -> int:
    """Compare a file with the manifest: its length and its header; with `whole`, its SHA-256. Returns where data begin.

    Raises:
        CheckpointError: missing, truncated or altered, with the file's name.
    """
    head = header(stored)
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            what = "truncated" if size < entry["bytes"] else "too long"
            raise CheckpointError(f"{path} is {what}: {size} bytes, its manifest says {entry['bytes']}")
        with open(path, "rb") as f:
            if f.read(len(head)) != head:
                raise CheckpointError(f"{path} is damaged: its header is not the one that was written")
            f.seek(0)
            if whole and hashlib.file_digest(f, "sha256").hexdigest() != entry["sha256"]:
                raise CheckpointError(f"{path} is damaged: it does not match the SHA-256 in its manifest")
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} lacks {path.name}") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    return len(head)
