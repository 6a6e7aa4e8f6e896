"""A run's metrics as a table of numbers, read at once however long they are, and piece by piece while they grow.

Long pieces are parsed by Arrow; what Arrow cannot read as records of ours is read line by line, which finds the line
that is broken."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import RunError
from . import record

LONG = 1 << 18  # bytes; Arrow's start costs as much as parsing so many line by line


def read_table(path: str | Path, offset: int = 0) -> tuple[pd.DataFrame, int, bytes]:
    """Records from a byte offset on, one row each, indexed by step, which may repeat.
    Returns: the table, the offset to go on from, and the last line. A last line that is still being written is left.
    Raises RunError: a broken line, with its number.
    Cost: 100,000 records of 40 metrics (117 MB): 1.9 s on two cores; line by line 4.5 s."""
    with open(path, "rb") as f:
        f.seek(offset)
        data = f.read()
    data = data[: data.rfind(b"\n") + 1]
    table = _arrow(data) if len(data) > LONG else None
    if table is None:
        empty = pd.DataFrame({record.STEP: pd.Series(dtype="int64")})
        table = pd.DataFrame(record.parse(data, path, offset)) if data else empty
    last = data[data.rfind(b"\n", 0, -1) + 1 :]
    return table.set_index(record.STEP), offset + len(data), last


def _arrow(data: bytes) -> pd.DataFrame | None:
    """The records of whole lines; None if they are not plain: text, numbers and null under a whole step."""
    import pyarrow as pa
    from pyarrow import json

    try:
        found = json.read_json(io.BytesIO(data), json.ReadOptions(block_size=4 << 20))
    except pa.ArrowInvalid:
        return None
    kinds = {field.name: field.type for field in found.schema if field.name != record.NONFINITE}
    plain = {pa.int64(), pa.float64(), pa.string(), pa.null()}  # words that look like dates become another type
    whole = kinds.get(record.STEP) == pa.int64() and not found[record.STEP].null_count
    if not whole or set(kinds.values()) - plain or len(found) != data.count(b"\n"):
        return None
    table = found.select(list(kinds)).to_pandas()
    if record.NONFINITE in found.column_names:
        spelled = found[record.NONFINITE].to_pandas()
        for at, values in spelled[spelled.notna()].items():
            for name, value in values.items():
                if value is not None:
                    table.loc[at, name] = float(value)
    return table


def joined(table: pd.DataFrame) -> pd.DataFrame:
    """One row a step: where a step has several records, the later value wins."""
    return table if table.index.is_unique else table.groupby(level=0).last()


class Columns:
    """Some metrics of a growing run: `table`, numbers by step, is brought up to date by `read`.
    Args: `path`: of metrics.jsonl, which need not exist yet. `keep`: says of a name whether it is wanted."""

    def __init__(self, path: Path, keep: Callable[[str], object]):
        self.path, self._keep = path, keep
        self._forget()

    def _forget(self) -> None:
        self.table = pd.DataFrame(index=pd.Index([], dtype="int64", name=record.STEP))
        self._offset, self._line = 0, b""

    def read(self) -> bool:
        """Take in what was added, or everything if the file is no longer the one that was read (a run that goes on
        from an earlier step cuts it). Returns whether there was anything."""
        try:
            if again := not self._goes_on():
                self._forget()
            try:
                found, end, line = read_table(self.path, self._offset)
            except RunError:
                if self._goes_on():
                    raise
                return self.read()  # it was cut after the first look
            if not self._goes_on():
                return self.read()
        except FileNotFoundError:
            return False
        if end == self._offset:
            return again
        self._offset, self._line = end, line
        kept: Any = found[[name for name in found if self._keep(str(name))]].apply(pd.to_numeric, errors="coerce")
        self.table = joined(pd.concat([self.table, kept.astype(float)]) if len(self.table) else kept.astype(float))
        return True

    def _goes_on(self) -> bool:
        """Whether the last line that was read still stands where it stood."""
        with open(self.path, "rb") as f:
            f.seek(self._offset - len(self._line))
            return f.read(len(self._line)) == self._line
