"""Write and read a checkpoint folder: safetensors for the tensors, one JSON manifest, no pickle.

A checkpoint is written into a temporary sibling folder, synced to disk and renamed, so a crash leaves either the old
state of affairs or the new one. The manifest holds the names, shapes, dtypes and a checksum of every file.
"""

from __future__ import annotations

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

from ..errors import CheckpointError, StorageError

FORMAT = 1
STATE = "state.safetensors"
MANIFEST = "manifest.json"


def sync(path: Path) -> None:
    """Push a file's, or a folder's, content to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder that appears under its name only when the block ends well: write into what is yielded.

    Raises:
        CheckpointError: `path` exists and `overwrite` is False. Nothing is touched.
        StorageError: the place cannot be written or the disk is full. Nothing half-written stays.
    """
    path = Path(path)
    if os.path.exists(path) and not overwrite:  # an unreadable parent shows below, as StorageError
        raise CheckpointError(f"{path} exists already; choose another folder or pass overwrite=True")
    temporary = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            sync(entry)
        sync(temporary)
        if path.exists():
            old = path.parent / f".{path.name}.{os.getpid()}.old"
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, StorageError):
            raise
        full = getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(e)
        what = "the disk is full" if full else str(e)
        raise StorageError(f"cannot write {path}: {what}; nothing was left there. Free space or choose another folder")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
            "format": FORMAT,
            **manifest,
            "tensors": {n: {"shape": list(t.shape), "dtype": str(t.dtype)} for n, t in tensors.items()},
            "sha256": {STATE: checksum(folder / STATE)},
        }
        (folder / MANIFEST).write_text(json.dumps(entry, indent=1))
    return path


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except ValueError as e:
        raise CheckpointError(f"{path / MANIFEST} is broken: {e}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}; this moekit reads format {FORMAT}")
    return manifest


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


def latest(folder: str | Path) -> Path | None:
    """The newest ``step_N`` checkpoint under `folder`, or None."""
    found = [(int(p.name[5:]), p) for p in Path(folder).glob("step_*") if p.name[5:].isdigit()]
    return max(found)[1] if found else None


def retain(folder: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` ``step_N`` checkpoints under `folder`."""
    found = sorted((int(p.name[5:]), p) for p in Path(folder).glob("step_*") if p.name[5:].isdigit())
    for _, path in found[: max(0, len(found) - keep)]:
        shutil.rmtree(path)
