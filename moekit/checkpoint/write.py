"""Save a checkpoint from any number of ranks, at once or in the background, whole or not at all.

Every rank writes the pieces that it owns into one file of a temporary folder whose name all ranks know (the target's
name and the attempt's token), and then a small JSON entry. Rank 0 waits for all entries, checks that every element of
every tensor is there exactly once, writes the manifest and gives the folder its name. Ranks meet in the file system
only: no collective runs in a background thread, where it would race with the training step's.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError, StorageError
from .files import CODES, write_file
from .intervals import Piece, check_cover
from .save import MANIFEST, put_in_place, refuse_existing, storage_error, sync, write_manifest

PATIENCE = 600.0  # seconds without any progress of any rank after which a save is given up
Entries = Mapping[str, Sequence[tuple[Piece, Tensor]]]


class Ranks(Protocol):
    """What saving needs to know of the world."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Processes that save together."""
        ...


class Saving:
    """A save that was begun. A save that nobody waits for is finished, and its error told, before Python exits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether the checkpoint is there, or the save has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the whole checkpoint, all ranks' parts, is on the disk; returns its folder.

        Raises:
            StorageError, CheckpointError: the save failed on this rank or another one, which is named. Nothing of
                the attempt stays, and what was there before is untouched.
        """
        if self._thread is not None:
            self._thread.join()
        self.told = True
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 (it is raised by wait)
            self._error = e


_saves: dict[int, Saving] = {}  # the newest of each rank (a process is one rank, except in tests)
_staging: dict[int, Tensor] = {}  # kept, so that only the first save pays for new pages


@atexit.register
def _tell() -> None:
    for saving in _saves.values():
        if saving._error is not None and not saving.told:
            print(f"moekit: the checkpoint {saving.path} was not saved: {saving._error}", file=sys.stderr)


def save_state(
    path: str | Path,
    entries: Entries,
    manifest: Mapping[str, Any],
    *,
    world: Ranks,
    token: str = "",
    overwrite: bool = False,
    asynchronous: bool = False,
    patience: float = PATIENCE,
) -> Saving:
    """Save this rank's pieces; every rank calls it, also one that owns nothing.

    Args:
        path: the checkpoint's folder, the same on all ranks, on a disk that all of them see.
        entries: by kind ("master", "exp_avg", "exp_avg_sq", "buffer", ...) this rank's pieces with their flat
            contiguous values. Over all ranks each kind's pieces hold every element of its tensors exactly once.
        manifest: JSON values that go with them; rank 0's count.
        world: rank and size.
        token: names this attempt: the same on all ranks, never used before. One process needs none.
        overwrite: replace an existing folder, in one step.
        asynchronous: copy the values, return, and write from a thread. Values at the time of the call are saved,
            whatever happens to the tensors afterwards. One save is in flight at most: the next call waits for it.
        patience: seconds to wait for other ranks while none of them makes progress.

    Returns:
        The save; `Saving.wait` tells how it ended. Without `asynchronous` it has ended well.

    Raises:
        CheckpointError: the folder exists, pieces that do not cover, a value that does not fit its piece, no token,
            another rank failed; or the previous save failed and nobody had asked.
        StorageError: this rank cannot write.

    Cost: one copy of this rank's values with `asynchronous` (the buffer is kept) or on a GPU; else none.
    """
    path = Path(os.path.abspath(path))
    previous = _saves.get(world.rank)
    if previous is not None and not previous.done:
        warnings.warn(f"the save of {previous.path} is still being written; waiting for it", stacklevel=2)
    if previous is not None and not (previous.told and previous.done):
        previous.wait()
    refuse_existing(path, overwrite)
    if not token and world.size > 1:
        raise CheckpointError(f"saving {path} from {world.size} ranks needs a token that all ranks agree on")
    flat = [(kind, piece, t.detach()) for kind, group in entries.items() for piece, t in group]
    for kind, piece, t in flat:
        if t.shape != (len(piece),) or not t.is_contiguous() or t.dtype not in CODES:
            raise CheckpointError(
                f"{kind} of {piece.name}: a contiguous flat tensor of {len(piece)} elements is needed, got shape "
                f"{list(t.shape)}, {t.dtype}{'' if t.is_contiguous() else ', not contiguous'}"
            )
    attempt = _Attempt(path, world.rank, world.size, token or secrets.token_hex(8), dict(manifest), patience)
    saving = _saves[world.rank] = Saving(path)
    if asynchronous or any(t.device.type != "cpu" for *_, t in flat):
        flat = _staged(world.rank, flat)
    if asynchronous:
        # not a daemon: Python waits for it at exit
        work = lambda: attempt.run(flat)
        saving._thread = threading.Thread(target=saving._run, args=(work,), name="moekit-save", daemon=False)
        saving._thread.start()
    else:
        saving.told = True
        attempt.run(flat)
    return saving


def _staged(rank: int, flat: list[tuple[str, Piece, Tensor]]) -> list[tuple[str, Piece, Tensor]]:
    """The same with copies in this rank's staging buffer, which no save in flight is using."""
    ends = [0]
    for *_, t in flat:
        ends.append(ends[-1] + -(-t.nbytes // 16) * 16)
    stage = _staging.get(rank)
    if stage is None or stage.numel() < ends[-1]:
        pinned = any(t.device.type == "cuda" for *_, t in flat)
        stage = _staging[rank] = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
    out = []
    for at, (kind, piece, t) in zip(ends, flat):
        out.append((kind, piece, stage[at : at + t.nbytes].view(t.dtype).copy_(t)))
    return out


def _stem(rank: int) -> str:
    return f"rank_{rank:05d}"


class _Attempt:
    """One rank's part of one save."""

    def __init__(self, path: Path, rank: int, size: int, token: str, manifest: dict[str, Any], patience: float):
        self.path, self.rank, self.size, self.token, self.manifest = path, rank, size, token, manifest
        self.folder = path.parent / f".{path.name}.{token}.partial"
        # others give up after rank 0, so that its reason is the one that is told
        self.patience = patience if rank == 0 else 1.2 * patience + 2

    def run(self, flat: list[tuple[str, Piece, Tensor]]) -> None:
        try:
            if self.rank == 0:
                for old in self.path.parent.glob(f".{self.path.name}.*.partial"):
                    if old != self.folder:  # an attempt that was killed
                        shutil.rmtree(old, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            entry = write_file(self.folder / f"{_stem(self.rank)}.safetensors", [e for e in flat if len(e[1])])
            shapes: dict[str, dict[str, Any]] = {}
            for kind, piece, t in flat:
                shapes.setdefault(kind, {})[piece.name] = {"shape": list(piece.shape), "dtype": CODES[t.dtype]}
            self._publish(f"{_stem(self.rank)}.json", {"file": entry, "tensors": shapes})
            self._wait(self._all_there if self.rank == 0 else self._in_place)
            if self.rank == 0:
                self._finish()
        except _Elsewhere as e:
            self._leave()
            raise e.error from None
        except BaseException as e:
            e = storage_error(self.path, e) if isinstance(e, Exception) else e
            self._leave(e)
            if self.size > 1 and isinstance(e, (CheckpointError, StorageError)):
                raise type(e)(f"rank {self.rank}: {e}") from None
            raise e from None

    # ------------------------------------------------------------------ rank 0
    def _finish(self) -> None:
        files, tensors, pieces = {}, {}, {}
        for rank in range(self.size):
            told = json.loads((self.folder / f"{_stem(rank)}.json").read_text())
            file = self.folder / f"{_stem(rank)}.safetensors"
            files[file.name] = told["file"]
            if not file.exists() or file.stat().st_size != told["file"]["bytes"]:
                raise CheckpointError(f"{file} was taken away or altered while the others were written")
            for kind, group in told["tensors"].items():
                for name, what in group.items():
                    if tensors.setdefault(kind, {}).setdefault(name, what) != what:
                        raise CheckpointError(
                            f"{kind} of {name} is {what} on rank {rank}, {tensors[kind][name]} before"
                        )
            for kind, name, start, stop, *_ in told["file"]["pieces"]:
                shape = tuple(tensors[kind][name]["shape"])
                pieces.setdefault(kind, []).append(Piece(name, shape, start, stop))
        for kind, group in pieces.items():
            try:
                check_cover(group, {name: what["shape"] for name, what in tensors[kind].items()})
            except CheckpointError as e:
                raise CheckpointError(f"the pieces of kind {kind!r} are not the whole: {e}") from None
        for rank in range(self.size):
            (self.folder / f"{_stem(rank)}.json").unlink()
        about = {
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"moekit": importlib.metadata.version("moekit"), "torch": torch.__version__},
            "token": self.token,
        }
        write_manifest(self.folder, {**about, **self.manifest, "tensors": tensors, "files": files})
        sync(self.folder)
        put_in_place(self.folder, self.path)

    def _all_there(self) -> bool:
        self._errors()
        return all((self.folder / f"{_stem(rank)}.json").exists() for rank in range(self.size))

    # ------------------------------------------------------------------ the others
    def _in_place(self) -> bool:
        self._errors()
        if self.folder.exists():
            return False
        try:
            if json.loads((self.path / MANIFEST).read_text()).get("token") == self.token:
                return True
        except (OSError, ValueError):
            pass
        raise CheckpointError(f"the temporary folder of {self.path} has gone, but the checkpoint is not there")

    # ------------------------------------------------------------------ all
    def _publish(self, name: str, value: dict[str, Any]) -> None:
        """A file that others see whole or not at all."""
        half = self.folder / f"{name}.half"
        half.write_text(json.dumps(value))
        half.rename(self.folder / name)

    def _errors(self) -> None:
        for file in sorted(self.folder.glob("*.error")):
            told = json.loads(file.read_text())
            kind = StorageError if told["storage"] else CheckpointError
            raise _Elsewhere(kind(f"rank {told['rank']}: {told['text']}"))

    def _wait(self, ready: Callable[[], bool]) -> None:
        seen, since, pause = None, time.monotonic(), 0.002
        while not ready():
            state = _sizes(self.folder)
            if state != seen:
                seen, since = state, time.monotonic()
            if time.monotonic() - since > self.patience:
                late = [r for r in range(self.size) if f"{_stem(r)}.json" not in dict(state)] or [0]
                raise CheckpointError(
                    f"saving {self.path}: no sign of rank {', '.join(map(str, late))} for {self.patience:g} s"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _leave(self, error: BaseException | None = None) -> None:
        """After a failure: say why to the others, and take the data away (rank 0: everybody's)."""
        try:
            if self.size == 1:
                shutil.rmtree(self.folder, ignore_errors=True)
                return
            for file in self.folder.glob("*.safetensors" if self.rank == 0 else f"{_stem(self.rank)}.safetensors"):
                file.unlink(missing_ok=True)
            if error is not None and self.folder.exists():
                text = str(error) or type(error).__name__
                told = {"rank": self.rank, "text": text, "storage": isinstance(error, StorageError)}
                self._publish(f"{_stem(self.rank)}.error", told)
        except OSError:  # the disk that cannot be written is often the reason; the others will run out of patience
            pass


class _Elsewhere(Exception):
    """Another rank's error, which needs no report of ours."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _sizes(folder: Path) -> Iterable[tuple[str, int]]:
    try:
        return sorted((f.name, f.stat().st_size) for f in os.scandir(folder))
    except OSError:  # it has just been renamed
        return []
