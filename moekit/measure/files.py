"""Writing files so that a crash or a full disk leaves the old content or the new one, and nothing in between."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError

PARTIAL = ".partial"


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.exists() else next(p for p in path.parents if p.exists())


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a `StorageError` that names `path` and the remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if full else (e.strerror or str(e))
        remedy = "free some space, or choose another folder" if full else "choose a folder that can be written"
        raise StorageError(f"cannot write {path}: {what}; {remedy}. What was there before is unharmed") from e


def write_atomic(path: str | Path, data: bytes | memoryview) -> Path:
    """Write a whole file under a temporary name, push it to the disk, and rename it.
    Raises StorageError: not writable, or the disk is full; the old file stays and no temporary one does."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def append(fd: int, path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing of it.
    Raises StorageError: see `write_atomic`; the file is cut back to its length before."""
    before = os.fstat(fd).st_size
    view = memoryview(data)
    with storage_errors(path):
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            os.ftruncate(fd, before)
            raise
