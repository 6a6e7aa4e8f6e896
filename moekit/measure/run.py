"""A recorded run, read back as tables."""

import html
import json
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..data.batch import CLASSES
from ..errors import ConfigError, RunError
from . import chunks, record
from .card import RunCard
from .chunks import Series
from .follow import joined, read_table

AXES = ("step", "component", "pass", "layer", "class", "expert")
STATE = "state.json"


class Run:
    """The run in `folder`; make it with `moekit.open_run`. Reads when asked, and again when the run has moved on."""

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        if not self.folder.is_dir():
            raise RunError(f"there is no run folder {self.folder}; runs are usually under runs/")
        marks = (record.METRICS, record.ARRAYS, record.CARD, STATE)
        if not any((self.folder / m).exists() for m in marks):
            raise RunError(f"{self.folder} is not a run folder: it has none of {', '.join(marks)}")
        self._metrics: tuple[tuple[int, int], pd.DataFrame] | None = None

    @property
    def metrics(self) -> pd.DataFrame:
        """All records, indexed by `step`; several records of one step are joined, the later value wins."""
        path = self.folder / record.METRICS
        mark = (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else (0, 0)
        if self._metrics is None or self._metrics[0] != mark:
            self._metrics = (mark, read_metrics(path))
        return self._metrics[1]

    @property
    def array_names(self) -> list[str]:
        """Names of the recorded arrays."""
        return chunks.names(self.folder / record.ARRAYS)

    def arrays(self, name: str, steps: Collection[int] | None = None) -> Series:
        """One array over all steps, or some: `steps` [n] and `values` [n, ...]; name "policy/forward/decided", say.
        Raises RunError: no such array; the message lists those that there are."""
        return chunks.series(self.folder / record.ARRAYS, name, steps)

    def rows(
        self, by: Sequence[str] = AXES, *, component: str | None = None, pass_name: str | None = None,
        steps: Collection[int] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """Dispatched rows as a table: one line for each combination of `by`, summed over the other axes.
        Args:
            by: any of step, component, pass, layer, class, expert.
            component, pass_name, steps: only these; without "pass" in `by`, say, passes are summed.
        Raises ConfigError: an unknown axis.
        >>> run.rows(by=("step", "class"), pass_name="forward")          # doctest: +SKIP
        """
        unknown = [axis for axis in by if axis not in AXES]
        if unknown or not by:
            raise ConfigError(f"rows(by={tuple(by)}): choose from {', '.join(AXES)}")
        parts = []
        for name in self.array_names:
            c, p, quantity = name.split("/") if name.count("/") == 2 else ("", "", "")
            if quantity != "dispatched" or (component or c) != c or (pass_name or p) != p:
                continue
            found = self.arrays(name, steps)
            layers = self.arrays(f"{c}/layers").values[0]
            experts = np.arange(found.values.shape[-1])
            labels = dict(zip(AXES, (found.steps, [c], [p], layers, CLASSES, experts)))
            summed = found.values[:, None, None].sum(tuple(i for i, axis in enumerate(AXES) if axis not in by))
            kept = {axis: values for axis, values in labels.items() if axis in by}
            index = pd.MultiIndex.from_product(list(kept.values()), names=list(kept))
            parts.append(pd.Series(summed.reshape(-1), index=index, name="rows"))
        if not parts:
            return pd.DataFrame(columns=[*by, "rows"])
        table: pd.DataFrame = pd.concat(parts).to_frame()
        if len(parts) > 1 and not {"component", "pass"} <= set(by):
            table = pd.DataFrame(table.groupby(level=list(table.index.names)).sum())
        return table.reset_index().reindex(columns=[*by, "rows"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says; empty without one. The recipe's own configuration is `config["recipe"]`."""
        return _read_json(self.folder / record.CONFIG)

    @property
    def card(self) -> RunCard | None:
        """The run card, or None."""
        values = _read_json(self.folder / record.CARD)
        return RunCard.from_dict(values) if values else None

    @property
    def state(self) -> str:
        """As the launcher wrote it: starting, running, finished, failed or stopped; "unknown" if it did not."""
        return str(_read_json(self.folder / STATE).get("state", "unknown"))

    def _facts(self) -> dict[str, str]:
        m = self.metrics
        facts = {"folder": str(self.folder), "state": self.state, "steps": f"{len(m):,}"}
        for name, label in {"loss/total": "loss", "eval/sft": "evaluation loss"}.items():
            if name in m and len(seen := m[name].dropna().to_numpy()):
                facts[label] = f"{seen[0]:.4g} -> {seen[-1]:.4g}"
        for name, label in {"tokens/supervised": "supervised tokens", "rows/dispatched": "routed rows"}.items():
            if name in m:
                facts[label] = f"{m[name].sum():,.0f}"
        if "rate/supervised_tokens_s" in m:
            facts["supervised tokens/s"] = f"{m['rate/supervised_tokens_s'].median():,.0f} (median)"
        return facts

    def __repr__(self) -> str:
        return "\n".join(f"{'Run' if not i else '   '} {k:<20} {v}" for i, (k, v) in enumerate(self._facts().items()))

    def _repr_html_(self) -> str:
        row = "<tr><th style='text-align:left'>{}</th><td style='text-align:left'>{}</td></tr>".format
        return f"<table>{''.join(row(html.escape(k), html.escape(v)) for k, v in self._facts().items())}</table>"


def read_metrics(path: str | Path) -> pd.DataFrame:
    """A metrics.jsonl as a table indexed by step. A last line that is still being written is left out.
    Raises RunError: a broken line, with its number."""
    return joined(read_table(path)[0]) if Path(path).exists() else pd.DataFrame(index=pd.Index([], name=record.STEP))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as e:
        raise RunError(f"{path} is broken: {e}") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} holds a {type(values).__name__}, not an object")
    return values
