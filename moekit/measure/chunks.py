"""Per-step arrays of a run in a few safetensors files: written in chunks, read back as series over steps.

A chunk holds up to `CHUNK_STEPS` steps. Under each array's name stand its values of those steps stacked, [n, ...], and
under `steps:<name>` the step numbers, [n]. A chunk is always written whole, under a temporary name, then renamed; the
current one is written again from time to time, so that a crash costs the steps since the last flush and no more.
Integer arrays are stored as int32 where they fit, and come back as int64.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
    """Collects arrays step by step and writes chunks into `folder`.

    Args:
        folder: made with the first chunk.
        resume: cut what is recorded at this step or later; None = `folder` holds no chunk yet.
    """

    def __init__(self, folder: str | Path, resume: int | None = None):
        self.folder = Path(folder)
        self._clear()
        if resume is not None:
            cut(self.folder, resume)
        for left in self.folder.glob(f".*{PARTIAL}"):
            left.unlink()

    def _clear(self) -> None:
        self._open: dict[str, list[tuple[int, Tensor]]] = {}
        self._bytes, self._steps, self._dirty = 0, 0, False
        self._first = self._last = -1
        self._flushed, self._cost = 0.0, 0.0

    def add(self, step: int, arrays: Mapping[str, Tensor]) -> None:
        """Take copies of the arrays of a step; may write the current chunk."""
        if any(_kind(t) != _kind(self._open[n][0][1]) for n, t in arrays.items() if self._open.get(n)):
            self.close()  # a shape changed: its series goes on in the next chunk
        for name, t in arrays.items():
            if name.startswith(_STEPS):
                raise ConfigError(f"an array may not be called {name!r}: names with {_STEPS!r} hold step numbers")
            taken = self._open.setdefault(name, [])
            if taken and taken[-1][0] >= step:
                raise ConfigError(f"array {name!r} of step {step} was recorded already (last: step {taken[-1][0]})")
            taken.append((step, t.detach().to("cpu", copy=True)))
            self._bytes += t.numel() * t.element_size()
        if arrays:
            self._first = step if self._first < 0 else self._first
            self._steps += step != self._last
            self._last, self._dirty = step, True
        if self._steps >= CHUNK_STEPS or self._bytes >= CHUNK_BYTES:
            self.close()
        elif time.monotonic() - self._flushed > max(FLUSH_SECONDS, self._cost / FLUSH_SHARE):
            self.flush()

    def flush(self) -> None:
        """Write the current chunk, whole."""
        if not self._dirty:
            return
        began = time.monotonic()
        out: dict[str, Tensor] = {}
        for name, taken in self._open.items():
            out[name] = _narrow(torch.stack([t for _, t in taken]))
            out[_STEPS + name] = torch.tensor([step for step, _ in taken], dtype=torch.int64)
        write_atomic(self.folder / f"{self._first:09d}.safetensors", save(out))
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
        kept: dict[str, Tensor] = {}
        for name in [n for n in held if not n.startswith(_STEPS)]:
            n = int((held[_STEPS + name] < step).sum())
            if n:
                kept[name], kept[_STEPS + name] = held[name][:n], held[_STEPS + name][:n]
        if any(len(held[n]) != len(kept.get(n, ())) for n in held):
            write_atomic(path, save({n: t.contiguous() for n, t in kept.items()}))


def names(folder: Path) -> list[str]:
    """Names of all arrays that `folder` holds."""
    found: dict[str, None] = {}
    for _, _, held in _chunks(folder):
        found |= dict.fromkeys(n for n in held if not n.startswith(_STEPS))
    return sorted(found)


def series(folder: Path, name: str, wanted: Collection[int] | None = None) -> Series:
    """All values of one array, or those of the wanted steps, in the order of steps. Shapes must agree over the run.

    Raises RunError: no such array, a broken chunk, or a shape that changed on the way.
    """
    steps, values = [], []
    for path, chunk, held in _chunks(folder):
        if name in held:
            at = chunk.get_tensor(_STEPS + name).numpy()
            chosen = np.isin(at, list(wanted)) if wanted is not None else np.ones(len(at), bool)
            if wanted is not None and not chosen.any() and steps:
                continue  # spare the reading; the first chunk gives dtype and shape
            steps.append(at[chosen])
            values.append(_wide(chunk.get_tensor(name))[chosen])
            if values[-1].shape[1:] != values[0].shape[1:]:
                raise RunError(f"{path}: array {name!r} is {values[-1].shape[1:]}, earlier {values[0].shape[1:]}")
    if not steps:
        raise RunError(f"{folder} has no array {name!r}; it has: {', '.join(names(folder)) or 'none'}")
    return Series(np.concatenate(steps), np.concatenate(values))


def _files(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("*.safetensors") if p.stem.isdigit()), key=lambda p: int(p.stem))


def _chunks(folder: Path) -> Iterator[tuple[Path, safe_open, list[str]]]:
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as chunk:
                yield path, chunk, list(chunk.keys())
        except SafetensorError as e:
            raise RunError(f"{path} cannot be read: {e}; delete it to read the rest of the run") from None


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype]:
    return t.shape, t.dtype


def _narrow(t: Tensor) -> Tensor:
    if t.dtype == torch.int64 and t.numel() and int(t.abs().max()) < 2**31:
        return t.to(torch.int32)
    return t.contiguous()


def _wide(t: Tensor) -> np.ndarray:
    if t.dtype in (torch.bfloat16, torch.float16):
        t = t.float()
    return (t.to(torch.int64) if t.dtype == torch.int32 else t).numpy()
