"""The record of a run: `RunWriter` writes it while the run goes on, `open_run` reads it as tables, also meanwhile.

A run folder holds, among what the launcher puts there:

    metrics.jsonl   one JSON object for each record: {"step": 7, "loss/total": 1.5, ...}
    arrays/         per-layer arrays of each step, in chunks (`moekit.measure.chunks`)
    config.json     what was launched, and the recipe's configuration under "recipe"
    card.json, card.html   the run card (`moekit.measure.card`)

`step` counts the rounds of the run's loop from its start, skipped ones included; `step/index` is the learner's count.
JSON has no NaN and no infinity: such a value is `null` in its place and spelled out beside,
{"step": 7, "grad/norm": null, "nonfinite": {"grad/norm": "inf"}}, so that any strict parser reads the file."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, RunError, RunExistsError
from . import chunks
from .card import RunCard
from .files import append, storage_errors, write_atomic

if TYPE_CHECKING:
    from .run import Run

METRICS = "metrics.jsonl"
ARRAYS = "arrays"
CONFIG = "config.json"
CARD = "card.json"
CARD_PAGE = "card.html"
STEP, NONFINITE = "step", "nonfinite"
_LEADING_STEP = re.compile(rb'\{"step":(\d+)[,}]')


def open_run(path: str | Path) -> "Run":
    """Read a run folder, finished or still being written: metrics, arrays, config, card and state.
    Raises RunError: no such folder, or one that is not a run."""
    from .run import Run

    return Run(path)


def encode(step: int, metrics: Mapping[str, Any]) -> bytes:
    """One record as a line of JSON.
    >>> encode(3, {"loss/total": 0.5, "grad/norm": float("inf")})
    b'{"step":3,"loss/total":0.5,"grad/norm":null,"nonfinite":{"grad/norm":"inf"}}\\n'
    """
    record: dict[str, Any] = {STEP: step}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if name in (STEP, NONFINITE):
            raise ConfigError(f"a metric may not be called {name!r}: the record uses that name; use 'group/name'")
        if hasattr(value, "item"):  # tensors and numpy scalars
            if math.prod(value.shape) != 1:
                raise ConfigError(f"metric {name!r} has shape {tuple(value.shape)}; pass tensors through `arrays`")
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name], value = repr(value), None
        elif value is not None and not isinstance(value, (int, float, str)):
            raise ConfigError(f"metric {name!r} is a {type(value).__name__}; metrics are numbers, text or None")
        record[name] = value
    if nonfinite:
        record[NONFINITE] = nonfinite
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes | str) -> dict[str, Any]:
    """The record of one line, non-finite values restored. Raises ValueError for a broken line.
    >>> decode(encode(3, {"grad/norm": float("nan")}))
    {'step': 3, 'grad/norm': nan}
    """
    record = json.loads(line)
    ours = isinstance(record, dict) and isinstance(record.get(STEP), int)
    if not ours:
        raise ValueError("not a record of a run: it has no integer 'step'")
    for name, value in (record.pop(NONFINITE, None) or {}).items():
        record[name] = float(value)
    return record


def parse(whole: bytes, path: str | Path, offset: int = 0) -> list[dict[str, Any]]:
    """The records of whole lines, which begin at byte `offset` of `path`. Raises RunError: a broken line."""
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            records.append(decode(line))
        except ValueError as e:
            after = f" after byte {offset}" if offset else ""
            raise RunError(f"{path}, line {number}{after} is broken: {e}") from None
    return records


class RunWriter:
    """Writes a run's record: append-only, a line for each record, safe against crashes. Only rank 0 writes.
    Args:
        folder: the run folder; made if it does not exist.
        resume: the first step that will be written. What is recorded at that step or later, which the checkpoint does
            not know, is cut; so is a half-written last line. None = a new run.
        rank: this process's rank; None = torch.distributed's, or 0. On other ranks every method does nothing.
    Raises:
        RunExistsError: a new run, in a folder that holds records already. Nothing is touched.
        StorageError: the folder cannot be written, or the disk is full. A record is written whole or not at all.
    Cost: one write call for each record; rewriting the current chunk of arrays takes at most 5 % of the run's time.
    >>> with RunWriter(folder) as writer:                                # doctest: +SKIP
    ...     for step in range(100):
    ...         metrics = learner.step(batches)
    ...         writer.write(step, metrics, learner.counter.arrays())
    """

    def __init__(self, folder: str | Path, *, resume: int | None = None, rank: int | None = None):
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.folder, self.active = Path(folder), rank == 0
        self._fd = self._last = -1
        if not self.active:
            return
        path = self.folder / METRICS
        held = path.exists() and path.stat().st_size > 0
        if resume is None and (held or any((self.folder / ARRAYS).glob("*.safetensors"))):
            raise RunExistsError(f"{self.folder} already holds a run; choose another, or resume it with resume=<step>")
        with storage_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if held and resume is not None:
                self._last = _cut_lines(path, resume)
            self._arrays = chunks.ArrayWriter(self.folder / ARRAYS, resume)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, step: int, metrics: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> None:
        """Append one record, and the arrays of the same step.
        Args:
            step: 0, 1, ...; never less than the last one. A second record of a step adds to it (evaluation, say).
            metrics: name -> number (also a 0-dimensional tensor), text or None.
            arrays: name -> tensor; see `RowCounter.arrays`. A name's shape should stay the same over the run."""
        if not self.active:
            return
        if self._fd < 0:
            raise ConfigError(f"the writer of {self.folder} is closed")
        if step < max(self._last, 0):
            raise ConfigError(f"step {step} comes after step {self._last} in {self.folder}; steps may not go back")
        append(self._fd, self.folder / METRICS, encode(step, metrics))
        self._last = step
        if arrays:
            self._arrays.add(step, arrays)

    def config(self, values: Mapping[str, Any]) -> None:
        """Put the recipe's configuration into config.json, as "recipe", beside what the launcher wrote there."""
        if self.active:
            path = self.folder / CONFIG
            there = json.loads(path.read_text()) if path.exists() else {}
            write_atomic(path, json.dumps({**there, "recipe": dict(values)}, indent=1, default=str).encode())

    def card(self, card: RunCard) -> None:
        """Write the run card: card.json and card.html. Write it when the run starts and again when it ends."""
        if self.active:
            write_atomic(self.folder / CARD, card.to_json().encode())
            write_atomic(self.folder / CARD_PAGE, card.to_html().encode())

    def flush(self) -> None:
        """Write arrays that are still in memory. Records are in the file already."""
        if self.active and self._fd >= 0:
            self._arrays.flush()

    def close(self) -> None:
        """Write what is left and push the record to the disk. Can be called twice."""
        if self._fd >= 0:
            try:
                self._arrays.close()
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_lines(path: Path, resume: int) -> int:
    """Cut the file before the first record at `resume` or later, or a broken last line; returns the last step left."""
    last, at = -1, 0
    with open(path, "r+b") as f:
        for number, line in enumerate(f, 1):
            found = _LEADING_STEP.match(line)
            if found is None or not line.endswith(b"}\n"):
                if f.read(1):
                    raise RunError(f"{path}, line {number} is broken and not the last; repair the file by hand")
                break
            if int(found[1]) >= resume:
                break
            last, at = int(found[1]), at + len(line)
        f.truncate(at)
    return last
