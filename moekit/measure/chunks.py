"""Per-step arrays of a run in a few safetensors files: written in chunks, read back as series over steps.

A chunk holds up to `CHUNK_STEPS` steps. Under each array's name stand its values of those steps stacked, [n, ...], and
under `steps:<name>` the step numbers, [n]. A chunk is always written whole, under a temporary name, then renamed; the
current one is written again from time to time, so that a crash costs the steps since the last flush and no more.
Integer arrays are stored as int32 where they fit, and come back as int64."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ..errors import ConfigError, RunError
from .files import PARTIAL, write_atomic

CHUNK_STEPS = 1024
CHUNK_BYTES = 32 << 20
FLUSH_SECONDS = 2.0
FLUSH_SHARE = 0.05  # at most this share of the run's time goes into writing the current chunk again
_STEPS = "steps:"


@dataclass(frozen=True)
class Series:
    """One array over the steps at which it was recorded."""

    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # [n, ...]

    def __len__(self) -> int:
        return len(self.steps)


class ArrayWriter:
    """Collects arrays step by step and writes chunks into `folder`, which is made with the first chunk.
    Args: `resume`: cut what is recorded at this step or later; None = `folder` holds no chunk yet."""

    def __init__(self, folder: str | Path, resume: int | None = None):
        self.folder = Path(folder)
        self._clear()
        if resume is not None:
            cut(self.folder, resume)
        for left in self.folder.glob(f".*{PARTIAL}"):
            left.unlink()

    def _clear(self) -> None:
        self._open: dict[str, dict[int, Tensor]] = {}  # name -> step -> array
        self._steps: list[int] = []
        self._bytes, self._dirty, self._flushed, self._cost = 0, False, 0.0, 0.0

    def add(self, step: int, arrays: Mapping[str, Tensor]) -> None:
        """Take copies of the arrays of a step; may write the current chunk."""
        kind = lambda t: (t.shape, t.dtype)
        if any(kind(t) != kind(next(iter(self._open[n].values()))) for n, t in arrays.items() if n in self._open):
            self.close()  # a shape changed: its series goes on in the next chunk
        for name, t in arrays.items():
            if name.startswith(_STEPS):
                raise ConfigError(f"an array may not be called {name!r}: names with {_STEPS!r} hold step numbers")
            taken = self._open.setdefault(name, {})
            if taken and max(taken) >= step:
                raise ConfigError(f"array {name!r} of step {step} was recorded already (last: step {max(taken)})")
            taken[step] = t.detach().to("cpu", copy=True)
            self._bytes += t.numel() * t.element_size()
            self._dirty = True
        if arrays and self._steps[-1:] != [step]:
            self._steps.append(step)
        if len(self._steps) >= CHUNK_STEPS or self._bytes >= CHUNK_BYTES:
            self.close()
        elif time.monotonic() - self._flushed > max(FLUSH_SECONDS, self._cost / FLUSH_SHARE):
            self.flush()

    def flush(self) -> None:
        """Write the current chunk, whole."""
        if not self._dirty:
            return
        began = time.monotonic()
        out = {name: _narrow(torch.stack(list(taken.values()))) for name, taken in self._open.items()}
        out |= {_STEPS + name: torch.tensor(list(taken)) for name, taken in self._open.items()}
        write_atomic(self.folder / f"{self._steps[0]:09d}.safetensors", save(out))
        self._flushed, self._dirty = time.monotonic(), False
        self._cost = self._flushed - began

    def close(self) -> None:
        """Write the current chunk and begin the next one with the next step."""
        self.flush()
        self._clear()


def cut(folder: Path, step: int) -> None:
    """Remove what is recorded at `step` or later."""
    for path in _files(folder):
        if int(path.stem) >= step:
            path.unlink()
            continue
        held = load_file(path)
        before = {name: held[_STEPS + name] < step for name in held if not name.startswith(_STEPS)}
        if not all(b.all() for b in before.values()):
            kept = {part: held[part][b] for name, b in before.items() for part in (name, _STEPS + name) if b.any()}
            write_atomic(path, save(kept))


def names(folder: Path) -> list[str]:
    """Names of all arrays that `folder` holds."""
    return sorted({name for _, _, held in _chunks(_files(folder)) for name in held})


def steps(folder: Path, name: str) -> np.ndarray:
    """The steps at which an array was recorded, [n]; none if it was not. Files that were read before are not again."""
    marks = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in _files(folder)]
    return np.concatenate([np.zeros(0, np.int64), *(_steps_in(name, *mark) for mark in marks)])


@lru_cache(1 << 14)
def _steps_in(name: str, path: Path, *mark: int) -> np.ndarray:
    found = (chunk.get_tensor(_STEPS + name).numpy() for _, chunk, held in _chunks([path]) if name in held)
    return next(found, np.zeros(0, np.int64))


def series(folder: Path, name: str, wanted: Collection[int] | None = None) -> Series:
    """All values of one array, or those of the wanted steps, in the order of steps. Shapes must agree over the run.
    Raises RunError: no such array, a broken chunk, or a shape that changed on the way."""
    steps, values, files = [], [], _files(folder)
    if wanted is not None:  # a file begins with the step that it is named after
        until = [int(path.stem) for path in files[1:]] + [max(wanted, default=0)]
        of = [any(int(path.stem) <= step <= end for step in wanted) for path, end in zip(files, until)]
        files = [path for path, needed in zip(files, of) if needed] or files[:1]
    for path, chunk, held in _chunks(files):
        if name in held:
            at = chunk.get_tensor(_STEPS + name).numpy()
            chosen = np.isin(at, list(wanted)) if wanted is not None else np.ones(len(at), bool)
            if wanted is not None and not chosen.any() and steps:
                continue  # spare the reading; the first chunk gives dtype and shape
            steps.append(at[chosen])
            values.append(_wide(chunk.get_tensor(name))[chosen])
            if values[-1].shape[1:] != values[0].shape[1:]:
                raise RunError(f"{path}: array {name!r} is {values[-1].shape[1:]}, earlier {values[0].shape[1:]}")
    if not steps and wanted is not None:  # where it is recorded, those steps are not
        whole = series(folder, name)
        return Series(whole.steps[:0], whole.values[:0])
    if not steps:
        raise RunError(f"{folder} has no array {name!r}; it has: {', '.join(names(folder)) or 'none'}")
    return Series(np.concatenate(steps), np.concatenate(values))


def _files(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("*.safetensors") if p.stem.isdigit()), key=lambda p: int(p.stem))


def _chunks(files: list[Path]) -> Iterator[tuple[Path, safe_open, list[str]]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as chunk:
                yield path, chunk, [name for name in chunk.keys() if not name.startswith(_STEPS)]  # noqa: SIM118
        except SafetensorError as e:
            raise RunError(f"{path} cannot be read: {e}; delete it to read the rest of the run") from None


def _narrow(t: Tensor) -> Tensor:
    small = t.dtype == torch.int64 and t.numel() and int(t.abs().max()) < 2**31
    return t.to(torch.int32) if small else t.contiguous()


def _wide(t: Tensor) -> np.ndarray:
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int32: torch.int64}
    return t.to(wide.get(t.dtype, t.dtype)).numpy()
