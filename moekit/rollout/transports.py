"""Chunks between processes without shared memory of our own: by torch.distributed, or as files that come and go."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, StorageError, TransferError
from .weight_transfer import Transport


class PointToPoint(Transport):
    """torch.distributed's send and receive, with one other rank of a group.

    After a refused update the pair can be used again; a rank that died ends it.

    Args:
        peer: the other's rank in the group.
        group: None = the world.
        device: where chunks arrive: "cpu" for gloo, a CUDA device for NCCL.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"):
        self.peer, self.group, self.device = peer, group, torch.device(device)
        self.room = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.last = ""  # how the stream under way has ended: "end", "failed", or not yet

    def _put(self, head: dict[str, Any], data: Tensor | None) -> None:
        self._say(json.dumps(head).encode())
        if data is not None:
            self._do(dist.send, data.to(self.device), group_dst=self.peer)

    def _get(self) -> tuple[dict[str, Any], Tensor | None]:
        head = json.loads(self._hear())
        self.last = next((word for word in ("end", "failed") if word in head), "")
        if self.last:
            return head, None
        if len(self.room) < head["bytes"]:
            self.room = torch.empty(head["bytes"], dtype=torch.uint8, device=self.device)
        self._do(dist.recv, self.room[: head["bytes"]], group_src=self.peer)
        return head, self.room[: head["bytes"]]

    def _settle(self, problem: str) -> None:
        with suppress(TransferError) if problem else nullcontext():
            while not self.last:  # what is under way is taken, so that the next update begins with its first chunk
                self._get()
            if self.last == "end":
                self._say(problem.encode())
        self.last = ""

    def _settled(self) -> str:
        return self._hear().decode()

    def _say(self, data: bytes) -> None:
        self._do(dist.send, torch.tensor([len(data)], device=self.device), group_dst=self.peer)
        if data:
            self._do(dist.send, torch.tensor(list(data), dtype=torch.uint8, device=self.device), group_dst=self.peer)

    def _hear(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._do(dist.recv, size, group_src=self.peer)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if len(data):
            self._do(dist.recv, data, group_src=self.peer)
        return data.cpu().numpy().tobytes()

    def _do(self, call: Any, *args: Any, **where: int) -> None:
        try:
            call(*args, group=self.group, **where)
        except RuntimeError as problem:
            raise TransferError(f"rank {self.peer} of the transfer cannot be reached: {problem}") from None


def put_file(path: Path, tensors: Mapping[str, Tensor], head: str = "") -> None:
    """A safetensors file, which is there under its name when it is whole. Raises StorageError: no room for it."""
    new = path.with_name("new")
    try:
        save_file(dict(tensors), new, {"head": head} if head else None)
        new.rename(path)
    except (OSError, SafetensorError) as problem:
        new.unlink(missing_ok=True)
        need = f"{sum(t.nbytes for t in tensors.values()):,} more bytes ({problem})"
        how = "make room, or have less wait there (ahead=, chunk_bytes=)"
        raise StorageError(f"{path.parent} did not take {need}; {how}") from None


class FileDrop(Transport):
    """Files in one folder, for an engine that shares a (memory) file system and nothing else.

    A chunk is a safetensors file, its head in the metadata. It appears under its name when it is whole, and goes when
    it was read. Nothing tells the sender that the last chunk was read.

    Args:
        root: the folder of all updates.
        update: a name of this update that was not used before.
        ahead: chunks that may lie there unread; None = all of them.
        timeout: seconds without a new file, or without one being read, after which the other side is taken for dead.
    """

    def __init__(self, root: str | Path, update: str, *, ahead: int | None = None, timeout: float = 60.0):
        if not update or Path(update).name != update or update.startswith("."):
            raise ConfigError(f"update={update!r} must be a plain name, the folder of one update under {root}")
        self.folder, self.ahead, self.timeout, self.count = Path(root) / update, ahead, timeout, 0

    def _put(self, head: dict[str, Any], data: Tensor | None) -> None:
        if self.ahead is not None and self.count >= self.ahead:
            due = self._file(self.count - self.ahead)
            self._wait(lambda: not due.exists(), "read")
        try:
            self.folder.mkdir(parents=True, exist_ok=self.count > 0)
        except FileExistsError:
            raise ConfigError(f"{self.folder} is there already; give every update a name of its own") from None
        put_file(self._file(self.count), {} if data is None else {"data": data}, json.dumps(head))
        self.count += 1

    def _get(self) -> tuple[dict[str, Any], Tensor | None]:
        file, failed = self._file(self.count), self.folder / "failed"
        self._wait(lambda: file.exists() or failed.exists(), "written")
        if failed.exists():
            return {"failed": failed.read_text()}, None
        try:
            with safe_open(file, "pt") as f:
                head, data = json.loads(f.metadata()["head"]), f.get_tensor("data") if f.keys() else None
        except SafetensorError as problem:
            raise TransferError(f"{file} is cut or damaged ({problem}); send all again") from None
        file.unlink()  # the mapping keeps the numbers until they were taken
        self.count += 1
        return head, data

    def _settle(self, problem: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _fail(self, problem: str) -> None:
        for file in self.folder.glob("*") if self.count else ():  # there may be no room otherwise
            file.unlink(missing_ok=True)
        if self.count:
            (self.folder / "failed").write_text(problem)

    def _file(self, n: int) -> Path:
        return self.folder / f"{n:06d}"

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end, pause = time.monotonic() + self.timeout, 1e-4
        while not done():
            if time.monotonic() > end:
                raise TransferError(
                    f"nothing was {what} in {self.folder} for {self.timeout:g} s; is the other side up?"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
