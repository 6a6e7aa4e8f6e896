"""What the plots read: metrics by name, whatever holds them.

Axis letters: L layers that route, E experts, C classes.

A run (`moekit.open_run`), the path of a run folder, a DataFrame, a dictionary of columns, or a list of step
dictionaries: each plot takes any of them, so that a plot needs no run and a run no plot.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import DataError

ARRAY = "policy/forward"  # component and pass that the plots of expert load show
STEP = ("step", "step/index")  # the loop's round; the learner's count, which stands still when a step is skipped


def columns(source: Any) -> dict[str, np.ndarray]:
    """Every metric of a run as a float array over steps; missing values are NaN.

    Args:
        source: a Run, a run folder, a DataFrame, a mapping of columns, or a sequence of step dictionaries.

    Raises:
        DataError: nothing in `source` looks like metrics.

    >>> columns([{"loss/sft": 2.0}, {"loss/sft": 1.5, "lr": 0.1}])["lr"].tolist()
    [nan, 0.1]
    """
    if isinstance(source, (str, Path)):
        from ..measure.record import open_run

        source = open_run(source)
    table: Any = getattr(source, "metrics", source)
    if callable(table):
        table = table()
    if hasattr(table, "columns") and hasattr(table, "iloc"):
        found = {str(name): _floats(table[name]) for name in table.columns}
        if table.index.name in STEP:
            found.setdefault(table.index.name, _floats(table.index))
    elif isinstance(table, Mapping):
        found = {str(name): _floats(np.atleast_1d(np.asarray(values, object))) for name, values in table.items()}
    elif isinstance(table, (list, tuple)) and all(isinstance(row, Mapping) for row in table):
        names = dict.fromkeys(name for row in table for name in row)
        found = {str(name): _floats([row.get(name) for row in table]) for name in names}
    else:
        raise DataError(
            f"cannot read metrics from {type(source).__name__}; give a run, a run folder, a DataFrame, "
            "a dictionary of columns or a list of step dictionaries"
        )
    return {name: values for name, values in found.items() if values is not None}


def pick(source: Any, *names: str, optional: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps, and the named metrics where at least one of them was recorded.

    Args:
        source: as in `columns`.
        names: metric names.
        optional: leave missing metrics out instead of raising.

    Raises:
        DataError: a metric is missing; names those that are close, or all.
    """
    found = columns(source)
    missing = [name for name in names if name not in found]
    if missing and not optional:
        close = difflib.get_close_matches(missing[0], found, n=3, cutoff=0.5) or sorted(found)
        raise DataError(f"no metric {missing[0]!r} in this run; it has {', '.join(close) or 'no metrics at all'}")
    chosen = {name: found[name] for name in names if name in found}
    count = max((len(v) for v in (chosen or found).values()), default=0)
    step = next((found[name] for name in STEP if name in found), np.arange(count, dtype=float))
    keep = np.zeros(count, bool)
    for values in chosen.values():
        keep |= np.isfinite(values) | np.isinf(values)
    return step[:count][keep], {name: values[keep] for name, values in chosen.items()}


def by_class(source: Any, group: str = "rows") -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps and `group`/class for the four position classes, zero where a class was not recorded."""
    step, found = pick(source, *(f"{group}/{name}" for name in CLASSES), optional=True)
    if not found:
        raise DataError(f"no metric {group}/{'|'.join(CLASSES)} in this run: nothing to split by class")
    return step, {name: np.nan_to_num(found.get(f"{group}/{name}", np.zeros(len(step)))) for name in CLASSES}


def counts(source: Any, step: int | None = None, scope: str = "all") -> tuple[np.ndarray, list[str], str]:
    """Router decisions by layer and expert.

    Args:
        source: counts [L, E] or [L, C, E], a Run, a run folder, or one step's arrays (`RowCounter.arrays`).
        step: the step to read; None = the mean over all recorded steps.
        scope: "all" (every token: all classes but padding) or "supervised".

    Returns:
        counts [L, E], a name for each layer, and what they are of in words.
    """
    if scope not in ("all", "supervised"):
        raise DataError(f"scope={scope!r} is not one of 'all', 'supervised'")
    if isinstance(source, (str, Path)):
        from ..measure.record import open_run

        source = open_run(source)
    when, layers = "", None
    if hasattr(source, "arrays"):
        source, layers, when = _recorded(source, step)
    elif isinstance(source, Mapping):
        source, layers = _decided(source)
    table = np.asarray(source, dtype=float)
    if table.ndim == 3:
        chosen = [CLASSES.index("supervised")] if scope == "supervised" else [
            i for i, name in enumerate(CLASSES) if name != "padding"]  # fmt: skip
        table = table[:, chosen].sum(axis=1)
    elif table.ndim != 2:
        raise DataError(f"counts must be [layers, experts] or [layers, classes, experts], got shape {table.shape}")
    elif scope != "all":
        raise DataError("counts [layers, experts] hold no classes; scope='supervised' needs [layers, classes, experts]")
    return table, layers or [str(i) for i in range(len(table))], when


def _recorded(run: Any, step: int | None) -> tuple[np.ndarray, list[str], str]:
    """The policy's decisions in the forward pass of a run: [L, C, E] of one step, or their mean over all."""
    if f"{ARRAY}/decided" not in run.array_names:
        raise DataError(f"{run.folder.name} has no per-layer arrays ({ARRAY}/decided), so expert load cannot be drawn")
    found = run.arrays(f"{ARRAY}/decided", None if step is None else [step])
    if not len(found.values):
        raise DataError(f"{run.folder.name} has no arrays of step {step}")
    when = f"step {step}" if step is not None else f"mean of {len(found.steps)} steps"
    layers = run.arrays("policy/layers").values[0]
    return np.asarray(found.values, dtype=float).mean(axis=0), [str(int(i)) for i in layers], when


def _decided(arrays: Mapping[str, Any]) -> tuple[Any, list[str] | None]:
    """The policy's decisions in the forward pass, from arrays named component/pass/quantity."""
    names = [name for name in arrays if name.split("/")[-1] == "decided"]
    if not names:
        raise DataError(f"no array named 'decided' among {', '.join(map(str, arrays)) or 'no arrays'}")
    best = next((name for name in names if name == f"{ARRAY}/decided"), names[0])
    layers = arrays.get(f"{best.split('/')[0]}/layers", arrays.get("layers"))
    return arrays[best], None if layers is None else [str(int(i)) for i in layers]


def _floats(values: Any) -> np.ndarray | None:
    try:
        return np.array([np.nan if v is None else v for v in values], dtype=float)
    except (TypeError, ValueError):
        return None
