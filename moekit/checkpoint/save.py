"""The folder of a checkpoint: how it appears at once or not at all, its manifest, and which of several is the newest.

A checkpoint is written into a temporary sibling folder, synced to disk and renamed, so a crash leaves either the old
state of affairs or the new one. Its tensors are safetensors files (`files`), everything else is one JSON manifest; no
pickle. `write` saves, `load` reads.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

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
    """Sync a complete folder and give it its name; a folder that has the name is exchanged for it, then deleted."""
    sync(temporary)
    if path.exists():
        # one system call, so that no crash falls between the old one's going and the new one's coming
        swap = getattr(ctypes.CDLL(None), "renameat2", None)
        if not swap or swap(AT_FDCWD, os.fsencode(temporary), AT_FDCWD, os.fsencode(path), RENAME_EXCHANGE):
            aside = temporary.with_suffix(".old.partial")  # a file system that cannot exchange
            path.rename(aside)
            temporary.rename(path)
            temporary = aside
    else:
        temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(temporary, ignore_errors=True)


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
        put_in_place(temporary, path)
    except (OSError, SafetensorError) as e:
        raise storage_error(path, e) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ------------------------------------------------------------------ the manifest


def _check(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, entry: dict[str, Any]) -> None:
    """Write and sync a manifest, with a checksum over itself."""
    entry = json.loads(json.dumps({"format": FORMAT, **entry}))
    (folder / MANIFEST).write_text(json.dumps({**entry, "check": _check(entry)}, indent=1))
    sync(folder / MANIFEST)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it is broken or altered, or of another format.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = dict(json.loads(file.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except (ValueError, TypeError, OSError) as e:
        raise CheckpointError(f"{file} is broken: {e}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}; this moekit reads format {FORMAT}")
    if manifest.pop("check", None) != _check(manifest):
        raise CheckpointError(f"{file} is broken: it does not match its own checksum")
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


def find(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run folder or of a folder of checkpoints."""
    path = Path(path)
    return path if (path / MANIFEST).exists() else latest(path / "checkpoints") or latest(path) or path


def retain(folder: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` (at least one) ``step_N`` checkpoints, and what older saves left unfinished.

    Call it on one rank. Other ranks may have begun the next save, so only folders of steps before the newest complete
    one are taken for leftovers; those of a later step go when that step is saved.
    """
    found = _steps(folder)
    for _, path in found[: -max(keep, 1)]:  # first out of sight: a crash here leaves no half of one
        path.rename(path.parent / f".{path.name}.old.partial")
    for path in Path(folder).glob(".step_*.partial"):
        step = path.name.split(".")[1][5:]
        if found and step.isdigit() and int(step) < found[-1][0]:
            shutil.rmtree(path, ignore_errors=True)
