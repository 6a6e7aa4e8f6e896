"""Save a checkpoint from any number of ranks, at once or in the background, whole or not at all.

Every rank writes the pieces that it owns into one file of a temporary folder whose name all ranks know (the target's
name and the attempt's token), and then a small JSON entry. Rank 0 waits for all entries, checks that every element of
every tensor is there exactly once, writes the manifest and gives the folder its name. Ranks meet in the file system
only: no collective runs in a background thread, where it would race with the training step's.
"""

import atexit
import datetime
import importlib.metadata
import json
import os
import secrets
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, StorageError
from .files import CODES, write_file
from .intervals import Piece, check_cover
from .save import MANIFEST, put_in_place, refuse_existing, storage_error, write_manifest

PATIENCE = 600.0  # seconds without any progress of any rank after which a save is given up
Flat = list[tuple[str, Piece, Tensor]]


class Saving:
    """A save that was begun. One that nobody waits for is finished, and its failure told, before Python exits."""

    def __init__(self, path: Path, run: Callable[[], None], asynchronous: bool) -> None:
        self.path, self._work, self._error, self._told = path, run, None, False
        self._thread = threading.Thread(target=self._run, name="moekit-save") if asynchronous else None
        self._thread.start() if self._thread else self._run()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001 (wait raises it)
            self._error = e
        del self._work

    @property
    def done(self) -> bool:
        """Whether the checkpoint is there, or the save has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint, all ranks' parts, is on the disk; returns its folder.

        Raises:
            StorageError, CheckpointError: it failed on this rank or another, which is named; what was there before
                is untouched.
        """
        if self._thread is not None:
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        return self.path


_saves: dict[int, Saving] = {}  # the newest of each rank (a process is one rank, except in tests)
_staging: dict[int, Tensor] = {}  # kept, so that only the first save pays for new pages


@atexit.register
def _tell() -> None:
    for saving in _saves.values():
        if saving._error is not None and not saving._told:
            print(f"moekit: the checkpoint {saving.path} was not saved: {saving._error}", file=sys.stderr)


def save_state(
    path: str | Path, entries: Mapping[str, Sequence[tuple[Piece, Tensor]]], manifest: Mapping[str, Any], *, world: Any,
    token: str = "", overwrite: bool = False, asynchronous: bool = False, patience: float = PATIENCE,
) -> Saving:  # fmt: skip
    """Save this rank's pieces; every rank calls it, also one that owns nothing.

    Args:
        path: the checkpoint's folder, the same on all ranks, on a disk that all of them see.
        entries: by kind ("master", "exp_avg", "buffer", ...) this rank's pieces and their flat contiguous values.
            Over all ranks the pieces of a kind hold every element of its tensors exactly once.
        manifest: JSON values that go with them; rank 0's are kept.
        world: has `rank` and `size`; no collective is called.
        token: names this attempt: the same on all ranks, never used before. One process needs none.
        overwrite: replace an existing folder, in one step.
        asynchronous: copy the values, return, and write from a thread: what is saved are the values at the time of the
            call. One save is in flight at most; the next call waits for it, with a warning.
        patience: seconds to wait for other ranks while none of them makes progress.
    Returns:
        The save, which has ended well unless it is `asynchronous`: `Saving.wait` tells.
    Raises:
        CheckpointError: the folder exists, pieces that are not the whole, values that do not fit their piece, no token,
            another rank failed; or the previous save did and nobody had asked.
        StorageError: this rank or another cannot write.
    Cost: one copy of this rank's values with `asynchronous` (its buffer is kept) or on a GPU; else none.
    """
    path = Path(os.path.abspath(path))
    refuse_existing(path, overwrite)
    if not token and world.size > 1:
        raise CheckpointError(f"saving {path} from {world.size} ranks needs a token that all ranks agree on")
    attempt = _Attempt(path, world.rank, world.size, token or secrets.token_hex(8), patience)
    flat = [(kind, piece, t.detach()) for kind, group in entries.items() for piece, t in group]
    try:
        if (previous := _saves.get(world.rank)) is not None:
            if not previous.done:
                warnings.warn(f"the save of {previous.path} is still being written; waiting for it", stacklevel=2)
            if not (previous._told and previous.done):
                previous.wait()  # here, because others may have been told already and go on
        text = json.dumps(dict(manifest))
        for kind, p, t in flat:
            if t.shape != (len(p),) or not t.is_contiguous() or t.dtype not in CODES:
                raise CheckpointError(
                    f"{kind} of {p.name}: a contiguous flat tensor of {len(p)} elements is needed, got shape "
                    f"{list(t.shape)}, strides {t.stride()}, {t.dtype}"
                )
        if asynchronous or any(t.device.type != "cpu" for *_, t in flat):
            flat = _staged(world.rank, flat)
    except Exception as e:  # noqa: BLE001 (the others must learn of any)
        raise attempt.failed(e) from None
    saving = _saves[world.rank] = Saving(path, lambda: attempt.run(flat, text), asynchronous)
    if not asynchronous:
        saving.wait()
    return saving


def _staged(rank: int, flat: Flat) -> Flat:
    """The same with copies in this rank's staging buffer, which no save in flight is using."""
    size = sum(t.nbytes + 16 for *_, t in flat)
    if rank not in _staging or _staging[rank].numel() < size:
        pinned = any(t.device.type == "cuda" for *_, t in flat)
        _staging[rank] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    out, at = [], 0
    for kind, piece, t in flat:
        out.append((kind, piece, _staging[rank][at : at + t.nbytes].view(t.dtype).copy_(t)))
        at += -(-t.nbytes // 16) * 16
    return out


class _Attempt:
    """One rank's part of one save."""

    def __init__(self, path: Path, rank: int, size: int, token: str, patience: float) -> None:
        self.path, self.rank, self.size, self.token = path, rank, size, token
        self.folder = path.parent / f".{path.name}.{token}.partial"
        # others give up after rank 0, so that its reason is the one that is told
        self.patience = patience if rank == 0 else 1.2 * patience + 2

    def _file(self, rank: int, ending: str) -> Path:
        return self.folder / f"rank_{rank:05d}.{ending}"

    def _publish(self, ending: str, value: dict[str, Any]) -> None:
        """A file that others see whole or not at all."""
        half = self._file(self.rank, f"{ending}.half")
        half.write_text(json.dumps(value))
        half.rename(half.with_suffix(""))

    def run(self, flat: Flat, manifest: str) -> None:
        """Write, and wait until the checkpoint is in place."""
        try:
            for old in self.path.parent.glob(f".{self.path.name}.*.partial") if self.rank == 0 else ():
                if old != self.folder:  # an attempt that was killed
                    shutil.rmtree(old, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            tensors: dict[str, dict[str, Any]] = {kind: {} for kind, *_ in flat}
            for kind, p, t in flat:
                tensors[kind][p.name] = {"shape": p.shape, "dtype": CODES[t.dtype]}
            entry = write_file(self._file(self.rank, "safetensors"), [e for e in flat if len(e[1])])
            self._publish("json", {"file": entry, "tensors": tensors})
            self._wait()
            if self.rank == 0:
                self._finish(json.loads(manifest))
        except BaseException as e:  # noqa: BLE001 (the others must learn of any)
            raise self.failed(e) from None

    def failed(self, error: BaseException) -> BaseException:
        """Say why to the others, take the data away (rank 0: everybody's); returns the error with the rank's name."""
        if isinstance(error, Exception):
            error = storage_error(self.path, error)
            if self.size > 1 and not str(error).startswith("rank "):
                error = type(error)(f"rank {self.rank}: {error}")
        try:
            if self.size == 1:
                shutil.rmtree(self.folder, ignore_errors=True)
                return error
            for file in self.folder.glob("*.safetensors" if self.rank == 0 else self._file(self.rank, "s*").name):
                file.unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            text = str(error) or f"rank {self.rank}: {type(error).__name__}"
            self._publish("error", {"text": text, "storage": isinstance(error, StorageError)})
        except OSError:  # the disk that cannot be written is often the reason; the others will run out of patience
            pass
        return error

    def _wait(self) -> None:
        """Until all entries are there (rank 0), or the checkpoint is in place (the others)."""
        seen, since, pause = None, time.monotonic(), 0.002
        while True:
            try:
                state = {f.name: f.stat().st_size for f in os.scandir(self.folder)}
            except OSError:  # it, or a file of it, has just been moved: the next look will tell
                state = {}
            for name in sorted(n for n in state if n.endswith(".error")):
                told = json.loads((self.folder / name).read_text())
                raise (StorageError if told["storage"] else CheckpointError)(told["text"])
            late = [rank for rank in range(self.size) if not self._file(rank, "json").exists()]
            if self.rank == 0 and not late or self.rank and not self.folder.exists():
                break
            if state != seen:
                seen, since = state, time.monotonic()
            elif time.monotonic() - since > self.patience:
                names = ", ".join(map(str, late or [0]))
                raise CheckpointError(f"saving {self.path}: no sign of rank {names} for {self.patience:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        if self.rank and f'"token": "{self.token}"' not in (self.path / MANIFEST).read_text():
            raise CheckpointError(f"the temporary folder of {self.path} has gone, but the checkpoint is not there")

    def _finish(self, manifest: dict[str, Any]) -> None:
        files, tensors, pieces = {}, {}, {}
        for rank in range(self.size):
            told, file = json.loads(self._file(rank, "json").read_text()), self._file(rank, "safetensors")
            files[file.name] = told["file"]
            if not file.exists() or file.stat().st_size != told["file"]["bytes"]:
                raise CheckpointError(f"{file} was taken away or altered while others were written")
            for kind, group in told["tensors"].items():
                for name, what in group.items():
                    first = tensors.setdefault(kind, {}).setdefault(name, what)
                    if first != what:
                        raise CheckpointError(f"{kind} of {name} is {what} on rank {rank}, {first} on one before")
            for kind, name, start, stop, *_ in told["file"]["pieces"]:
                piece = Piece(name, tuple(tensors[kind][name]["shape"]), start, stop)
                pieces.setdefault(kind, []).append(piece)
        for kind, group in tensors.items():
            try:
                check_cover(pieces.get(kind, ()), {name: what["shape"] for name, what in group.items()})
            except CheckpointError as e:
                raise CheckpointError(f"the pieces of kind {kind!r} are not the whole: {e}") from None
        for rank in range(self.size):
            self._file(rank, "json").unlink()
        about = {
            "token": self.token,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"moekit": importlib.metadata.version("moekit"), "torch": torch.__version__},
        }
        write_manifest(self.folder, {**about, **manifest, "tensors": tensors, "files": files})
        put_in_place(self.folder, self.path)
