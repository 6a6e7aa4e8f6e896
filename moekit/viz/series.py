"""What the plots read: metrics by name, whatever holds them.

A run (`moekit.open_run`), the path of a run folder, a DataFrame, a dictionary of columns, or a list of step
dictionaries: each plot takes any of them, so that a plot needs no run and a run no plot.
Axis letters: L layers that route, E experts, C classes."""

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
    Args: `source`: a Run, a run folder, a DataFrame, a mapping of columns, or a sequence of step dictionaries.
    Raises DataError: nothing in `source` looks like metrics.
    >>> columns([{"loss/sft": 2.0}, {"loss/sft": 1.5, "lr": 0.1}])["lr"].tolist()
    [nan, 0.1]
    """
    import pandas as pd

    table = getattr(_opened(source), "metrics", source)
    if isinstance(table, Mapping):
        table = {name: np.atleast_1d(np.asarray(values, dtype=object)) for name, values in table.items()}
    elif not isinstance(table, (pd.DataFrame, list, tuple)):
        how = "a run, a run folder, a DataFrame, a dictionary of columns or a list of step dictionaries"
        raise DataError(f"cannot read metrics from {type(source).__name__}; give {how}")
    frame = pd.DataFrame(table)
    if frame.index.name in STEP and frame.index.name not in frame:
        frame = frame.reset_index()
    found = {}
    for name, column in frame.items():
        values = np.asarray(pd.to_numeric(column, errors="coerce"), dtype=float)
        if not np.isnan(values).all() or not column.notna().any():  # a column of words is no metric
            found[str(name)] = values
    return found


def pick(source: Any, *names: str, optional: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps, and the named metrics where at least one of them was recorded.
    Args: `source`: as in `columns`. `names`: metric names. `optional`: leave missing metrics out instead of raising.
    Raises DataError: a metric is missing; names those that are close, or all."""
    found = columns(source)
    missing = [name for name in names if name not in found]
    if missing and not optional:
        close = difflib.get_close_matches(missing[0], found, n=3, cutoff=0.5) or sorted(found)
        raise DataError(f"no metric {missing[0]!r} in this run; it has {', '.join(close) or 'no metrics at all'}")
    chosen = {name: found[name] for name in names if name in found}
    count = max((len(v) for v in chosen.values()), default=0)
    step = next((found[name] for name in STEP if name in found), np.arange(count, dtype=float))[:count]
    keep = ~np.isnan(list(chosen.values())).all(axis=0) if chosen else np.zeros(0, bool)
    return step[keep], {name: values[keep] for name, values in chosen.items()}


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
        scope: "all" (every token: all classes but padding), "supervised" or "context".
    Returns: counts [L, E], a name for each layer, and what they are of in words."""
    if scope not in ("all", "supervised", "context"):
        raise DataError(f"scope={scope!r} is not one of 'all', 'supervised', 'context'")
    source, when, layers = _opened(source), "", None
    if hasattr(source, "arrays"):
        source, layers, when = _recorded(source, step)
    elif isinstance(source, Mapping):
        if f"{ARRAY}/decided" not in source:
            raise DataError(f"no array {ARRAY}/decided among {', '.join(map(str, source)) or 'no arrays'}")
        source, layers = source[f"{ARRAY}/decided"], source.get("policy/layers")
    table = np.asarray(source, dtype=float)
    if table.ndim == 3:
        wanted = [scope] if scope in CLASSES else [name for name in CLASSES if name != "padding"]
        table = table[:, [CLASSES.index(name) for name in wanted]].sum(axis=1)
    elif table.ndim != 2:
        raise DataError(f"counts must be [layers, experts] or [layers, classes, experts], got shape {table.shape}")
    elif scope != "all":
        raise DataError(f"counts [layers, experts] hold no classes; scope={scope!r} needs [layers, classes, experts]")
    return table, [str(int(i)) for i in (range(len(table)) if layers is None else layers)], when


def _recorded(run: Any, step: int | None) -> tuple[np.ndarray, Any, str]:
    """The policy's decisions in the forward pass of a run: [L, C, E] of one step, or their mean over all."""
    if f"{ARRAY}/decided" not in run.array_names:
        raise DataError(f"{run.folder.name} has no per-layer arrays ({ARRAY}/decided), so expert load cannot be drawn")
    found = run.arrays(f"{ARRAY}/decided", None if step is None else [step])
    if not len(found.values):
        raise DataError(f"{run.folder.name} has no arrays of step {step}")
    when = f"step {step}" if step is not None else f"mean of {len(found.steps)} steps"
    return np.asarray(found.values, dtype=float).mean(axis=0), run.arrays("policy/layers").values[0], when


def _opened(source: Any) -> Any:
    """The run of a folder; anything else as it is."""
    if not isinstance(source, (str, Path)):
        return source
    from ..measure.record import open_run

    return open_run(source)
