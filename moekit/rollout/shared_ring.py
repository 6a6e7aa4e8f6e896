"""A ring of chunks in the shared memory of a host, between two of its processes, kept warm from update to update.

The sender copies a chunk into a slot, the receiver takes it from there: one copy each, side by side. Who may touch
which slot is said over a socket that joins the two, so that each also learns at once that the other has died.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, StorageError, TransferError
from .weight_transfer import CHUNK, Transport

FOLDER = Path("/dev/shm")
SHAPE = struct.Struct("<QQ")  # how a ring is announced: bytes, slots
FREE, TAKEN, REFUSED = b"+", b".", b"!"  # what the receiver says: a slot is free, all was taken, or a reason follows


class SharedRing(Transport):
    """`Transport` through shared memory. One process calls `make`, the other `open`, each with its end of the line.

    After an update that failed the ring is closed on both sides; make a new one, on a new line.
    """

    def __init__(self, line: socket.socket, memory: Tensor, slots: int, timeout: float = 60.0):
        self.line, self.slots, self.flying, self.turn = line, memory.view(slots, -1), 0, 0
        self.held = False  # the receiver's hand is on the slot before
        line.settimeout(timeout)

    @classmethod
    def make(
        cls, line: socket.socket, *, chunk_bytes: int = CHUNK, slots: int = 4, folder: str | Path = FOLDER,
        timeout: float = 60.0,
    ) -> SharedRing:  # fmt: skip
        """Allocate the ring and hand it to the other end of a Unix socket. The file has no name when this returns.

        Args:
            chunk_bytes: the largest chunk.
            slots: chunks that may be under way.
            timeout: seconds of silence after which the other side is taken for dead.

        Raises:
            StorageError: the folder has no room; every page is allocated here, so that a later write cannot fail.
        """
        size, path = slots * chunk_bytes, Path(folder) / f"moekit-{uuid.uuid4().hex}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                path.unlink()
                os.posix_fallocate(fd, 0, size)
                memory = _map(fd, size)
                socket.send_fds(line, [SHAPE.pack(size, slots)], [fd])
            finally:
                os.close(fd)
        except OSError as problem:
            line.close()  # or the other end waits for one
            raise StorageError(
                f"a ring of {size:,} bytes of shared memory in {folder} cannot be made ({problem.strerror}); make it "
                "larger (docker: --shm-size), or take fewer slots or smaller chunks"
            ) from None
        return cls(line, memory, slots, timeout)

    @classmethod
    def open(cls, line: socket.socket, *, timeout: float = 60.0) -> SharedRing:
        """The ring that the other end of the line makes."""
        line.settimeout(timeout)
        try:
            data, fds, *_ = socket.recv_fds(line, SHAPE.size, 1)  # and no byte more: chunks may follow at once
            size, slots = SHAPE.unpack(data)
            memory = _map(fds[0], size)
        except (OSError, struct.error, IndexError, ValueError) as problem:
            raise TransferError(f"the other side made no ring ({problem}); see its error") from None
        os.close(fds[0])
        return cls(line, memory, slots, timeout)

    def close(self) -> None:
        """End the line; the other side's calls raise."""
        self.line.close()

    def _put(self, head: dict[str, Any], data: Tensor | None) -> None:
        if data is not None:
            if len(data) > self.slots.shape[1]:
                what = f"a chunk of {len(data):,} bytes does not fit a slot of {self.slots.shape[1]:,}"
                raise ConfigError(f"{what}; cut chunks with that chunk_bytes")
            while self.flying == len(self.slots):
                self._hear()
            self.slots[self.turn, : len(data)].copy_(data)
            self.turn, self.flying = (self.turn + 1) % len(self.slots), self.flying + 1
        try:
            self._say(_message(json.dumps(head).encode()))
        except TransferError:
            while True:  # the receiver may have said why, before it left
                self._hear()

    def _get(self) -> tuple[dict[str, Any], Tensor | None]:
        if self.held:
            with suppress(TransferError):  # a sender that left may have said why: its last words are read below
                self._say(FREE)
        self.held = False
        head = json.loads(self._message())
        if "bytes" not in head:
            return head, None
        self.held, turn = True, self.turn
        self.turn = (turn + 1) % len(self.slots)
        return head, self.slots[turn, : head["bytes"]]

    def _settled(self) -> str:
        while self._hear() != TAKEN:
            pass
        return ""

    def _settle(self, problem: str) -> None:
        if not problem:
            return self._say(TAKEN)
        with suppress(TransferError):  # where the sender is gone
            self._say(REFUSED + _message(problem.encode()))
        self.close()

    def _fail(self, problem: str) -> None:
        super()._fail(problem)
        self.close()

    def _hear(self) -> bytes:
        """One word of the receiver."""
        word = self._read(1)
        if word == FREE:
            self.flying -= 1
        if word == REFUSED:
            raise TransferError(f"the receiver refused the update: {self._message().decode()}")
        return word

    def _message(self) -> bytes:
        return self._read(int.from_bytes(self._read(4), "little"))

    def _read(self, n: int) -> bytes:
        out = b""
        while len(out) < n:
            try:
                part = self.line.recv(n - len(out))
            except ConnectionError:  # it left before it had read everything
                part = b""
            except OSError as problem:
                raise TransferError(f"the ring heard nothing from its other end ({problem}); make a new ring") from None
            if not part:
                raise TransferError("the process at the other end of the ring is gone; restart it and send all again")
            out += part
        return out

    def _say(self, data: bytes) -> None:
        try:
            self.line.sendall(data)
        except OSError as problem:
            raise TransferError(f"the ring's other end cannot be reached ({problem}); make a new ring") from None


def _map(fd: int, size: int) -> Tensor:
    memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)


def _message(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text
