"""The folder of a checkpoint: how it appears at once or not at all, its manifest, and which of several is the newest.

A checkpoint is written into a temporary sibling folder, synced to disk and renamed, so a crash leaves either the old
state of affairs or the new one. Its tensors are safetensors files (`files`), everything else is one JSON manifest; no
pickle. `write` saves, `load` reads.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, MoekitError, StorageError

FORMAT = 2
MANIFEST = "manifest.json"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def sync(path: Path) -> None:
    """Push a file's, or a folder's, content to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a complete, synced folder its name; a folder that has the name is exchanged for it, and then deleted."""
    if path.exists():
        # one system call, so that no crash falls between the old one's going and the new one's coming
        swap = getattr(ctypes.CDLL(None), "renameat2", None)
        names = os.fsencode(temporary), os.fsencode(path)
        if swap is None or swap(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE):
            aside = temporary.with_suffix(".old.partial")  # a file system that cannot exchange
            path.rename(aside)
            temporary.rename(path)
            temporary = aside
        sync(path.parent)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.rename(path)
        sync(path.parent)


def storage_error(path: Path, error: Exception) -> MoekitError:
    """An error of the file system in moekit's words; moekit's own stay as they are."""
    if isinstance(error, MoekitError):
        return error
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error)
    what = "the disk is full" if full else str(error)
    return StorageError(f"cannot write {path}: {what}; nothing was left there. Free space or choose another folder")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """An existing folder is an error unless it may be replaced."""
    if os.path.exists(path) and not overwrite:  # an unreadable parent shows later, as StorageError
        raise CheckpointError(f"{path} exists already; choose another folder or pass overwrite=True")


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder that appears under its name only when the block ends well: write into what is yielded.

    Raises:
        CheckpointError: `path` exists and `overwrite` is False. Nothing is touched.
        StorageError: the place cannot be written or the disk is full. Nothing half-written stays.
    """
    path = Path(path)
    refuse_existing(path, overwrite)
    temporary = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            sync(entry)
        sync(temporary)
        put_in_place(temporary, path)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise storage_error(path, e)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# ------------------------------------------------------------------ the manifest


def _check(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, entry: dict[str, Any]) -> None:
    """Write and sync a manifest, with a checksum over itself."""
    entry = json.loads(json.dumps({"format": FORMAT, **entry}))
    with open(folder / MANIFEST, "w") as f:
        f.write(json.dumps({**entry, "check": _check(entry)}, indent=1))
        f.flush()
        os.fsync(f.fileno())


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is broken or altered, or of another format.
    """
    path = Path(path)
    try:
        manifest = dict(json.loads((path / MANIFEST).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except (ValueError, TypeError, OSError) as e:
        raise CheckpointError(f"{path / MANIFEST} is broken: {e}") from None
    if manifest.get("format") == 1 and STATE in manifest.get("sha256", ()):
        return manifest
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}; this moekit reads format {FORMAT}")
    if manifest.pop("check", None) != _check(manifest):
        raise CheckpointError(f"{path / MANIFEST} is broken: it does not match its own checksum")
    return manifest


# ------------------------------------------------------------------ several checkpoints


def _steps(folder: str | Path) -> list[tuple[int, Path]]:
    """Complete ``step_N`` checkpoints, oldest first. The manifest is written last, so it tells."""
    found = ((p.name[5:], p) for p in Path(folder).glob("step_*") if (p / MANIFEST).is_file())
    return sorted((int(n), p) for n, p in found if n.isdigit())


def latest(folder: str | Path) -> Path | None:
    """The newest complete ``step_N`` checkpoint under `folder`, or None."""
    found = _steps(folder)
    return found[-1][1] if found else None


def retain(folder: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` (at least one) ``step_N`` checkpoints, and what older saves left unfinished.

    Call it on one rank. Other ranks may have begun the next save, so only folders of steps before the newest complete
    one are taken for leftovers; those of a later step go when that step is saved.
    """
    found = _steps(folder)
    for _, path in found[: -max(keep, 1)]:
        doomed = path.parent / f".{path.name}.old.partial"  # first out of sight: a crash here leaves no half of it
        path.rename(doomed)
    for path in Path(folder).glob(".step_*.partial"):
        step = path.name.split(".")[1][5:]
        if found and step.isdigit() and int(step) < found[-1][0]:
            shutil.rmtree(path, ignore_errors=True)


def find(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run folder or of a folder of checkpoints."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    return latest(path / "checkpoints") or latest(path) or path


# ------------------------------------------------------------------ format 1, until the learner has moved
STATE = "state.safetensors"


def checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_state(path: str | Path, tensors: dict[str, Tensor], manifest: dict[str, Any], *, overwrite=False) -> Path:
    """Write one checkpoint folder.

    Args:
        path: the folder to make.
        tensors: by name; contiguous, may be views as long as they do not overlap.
        manifest: JSON values that go with them.
        overwrite: replace an existing folder, atomically.
    """
    path = Path(path)
    with new_folder(path, overwrite=overwrite) as folder:
        save_file(tensors, folder / STATE)
        entry = {
            "format": 1,
            **manifest,
            "tensors": {n: {"shape": list(t.shape), "dtype": str(t.dtype)} for n, t in tensors.items()},
            "sha256": {STATE: checksum(folder / STATE)},
        }
        (folder / MANIFEST).write_text(json.dumps(entry, indent=1))
    return path


@contextmanager
def open_state(path: str | Path, *, verify: bool = True) -> Iterator[tuple[dict[str, Any], Callable[[str], Tensor]]]:
    """Yield (manifest, read), with ``read(name)`` giving one tensor. `verify` compares checksums first.

    Raises:
        CheckpointError: a missing, truncated or altered file, named.
    """
    path = Path(path)
    manifest = read_manifest(path)
    file = path / STATE
    if not file.exists():
        raise CheckpointError(f"{path} lacks {STATE}")
    if verify and checksum(file) != manifest["sha256"][STATE]:
        raise CheckpointError(f"{file} does not match the checksum in its manifest: truncated or altered")
    try:
        with safe_open(file, framework="pt") as f:
            names = set(f.keys())

            def read(name: str) -> Tensor:
                if name not in names:
                    raise CheckpointError(f"{file} has no tensor {name!r}")
                return f.get_tensor(name)

            yield manifest, read
    except SafetensorError as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from None
