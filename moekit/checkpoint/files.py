"""One rank's file of a checkpoint: flat pieces in the safetensors format, and how damage to it is found.

Each piece is a 1-D tensor called ``kind/name/start``. The order of the pieces fixes every byte of the header, so the
manifest needs no offsets and the header is checked by making it again. Each block of 4 MiB has a sum of its own in the
manifest: a rank checks just the blocks that it reads, at memory speed. Cryptographic sums of whole files (1.7 GB/s on a
core that has instructions for SHA-256) would limit saves and make loads several times slower.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .intervals import Piece

BLOCK = 1 << 22  # bytes that share one sum; a multiple of every item size
ROW = 4096  # bytes of a row within a block
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """A piece of one kind ("master", "exp_avg", ...) as it lies in a file: dtype, first byte, sums of its blocks."""

    kind: str
    piece: Piece
    dtype: torch.dtype
    at: int
    sums: Sequence[str] = ()


def read_entry(entry: Mapping[str, Any], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> list[Stored]:
    """A file's pieces, from its entry in the manifest and the shapes of all tensors by kind and name."""
    found, at = [], len(header(entry["pieces"]))
    for kind, name, start, stop, code, sums in entry["pieces"]:
        piece, dtype = Piece(name, shapes[kind][name], start, stop), DTYPES[code]
        found.append(Stored(kind, piece, dtype, at, [sums[i : i + 16] for i in range(0, len(sums), 16)]))
        at += len(piece) * dtype.itemsize
    return found


def header(pieces: Sequence[Sequence[Any]]) -> bytes:
    """The bytes before the data of a safetensors file with these pieces: kind, name, start, stop, code, ..."""
    at, entries = 0, {}
    for kind, name, start, stop, code, *_ in pieces:
        end = at + (stop - start) * DTYPES[code].itemsize
        entries[f"{kind}/{name}/{start}"] = {"dtype": code, "shape": [stop - start], "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor."""
    return flat.detach().view(torch.uint8).numpy().data


def block_sum(data: memoryview) -> str:
    """16 hexadecimal digits that change when a block of bytes is damaged.

    The block is a matrix of 64-bit words in rows of 4 KiB; the wrapping sums of its rows and of its columns, and the
    bytes that fill no row, are hashed with SHA-256. Damage that spans at most 4 KiB changes a column's sum: a flipped
    bit, a lost sector or page is always found. Other damage is missed only if it cancels in all rows and columns.

    >>> block_sum(memoryview(bytes(8192))) == block_sum(memoryview(bytes(8191) + b"1"))
    False
    """
    whole = len(data) - len(data) % ROW
    words = np.frombuffer(data[:whole], dtype="<u8").reshape(-1, ROW // 8)
    sums = [words.sum(axis, dtype=np.uint64).tobytes() for axis in (0, 1)]
    return hashlib.sha256(b"".join([*sums, data[whole:], len(data).to_bytes(8, "little")])).hexdigest()[:16]


def push(fd: int, data: memoryview | bytes) -> None:
    """Write all of `data`, and let the disk begin with it while the rest is written."""
    view = memoryview(data)
    while view:
        at, n = os.lseek(fd, 0, os.SEEK_CUR), os.write(fd, view[: 2 * BLOCK])
        os.posix_fadvise(fd, at, n, os.POSIX_FADV_DONTNEED)  # begins write-back; pages that are dirty stay cached
        view = view[n:]


def write_file(path: Path, entries: Sequence[tuple[str, Piece, Tensor]]) -> dict[str, Any]:
    """Write (kind, piece, flat CPU tensor) and sync them to disk; a second thread makes the sums. Returns the entry."""
    entries = sorted(entries, key=lambda e: -e[2].dtype.itemsize)  # every tensor stays aligned to its items
    pieces = [[kind, p.name, p.start, p.stop, CODES[t.dtype]] for kind, p, t in entries]
    views, head = [raw(t) for *_, t in entries], header(pieces)
    sums, stop = [""] * len(views), threading.Event()

    def check() -> None:
        for i, view in enumerate(views):
            for at in range(0, len(view), BLOCK):
                if stop.is_set():
                    return
                sums[i] += block_sum(view[at : at + BLOCK])

    second = threading.Thread(target=check, name="moekit-checksum")
    second.start()
    try:
        with open(path, "xb", buffering=0) as f:
            for data in (head, *views):
                push(f.fileno(), data)
            os.fsync(f.fileno())
    except BaseException:
        stop.set()
        raise
    finally:
        second.join()
    size = len(head) + sum(map(len, views))
    return {"bytes": size, "pieces": [[*p, s] for p, s in zip(pieces, sums)]}


def open_file(path: Path, entry: Mapping[str, Any]) -> int:
    """A descriptor to read a file whose length and header are those of its entry.

    Raises:
        CheckpointError: missing, truncated or altered, with the file's name.
    """
    head = header(entry["pieces"])
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} lacks {path.name}") from None
    size, wrong = os.fstat(fd).st_size, ""
    if size != entry["bytes"]:
        what = "truncated" if size < entry["bytes"] else "too long"
        wrong = f"{what}: {size} bytes, its manifest says {entry['bytes']}"
    elif os.pread(fd, len(head), 0) != head:
        wrong = "damaged: its header is not the one that was written"
    if wrong:
        os.close(fd)
        raise CheckpointError(f"{path} is {wrong}")
    return fd
