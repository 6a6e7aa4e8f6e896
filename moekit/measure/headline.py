"""The headline of the kit: what one supervised token costs, by component, whatever the workload.

Routed rows, bytes on the wire, seconds and bytes held, from run folders alone: rows from the counters' arrays, the rest
from metrics that the recipes took where the work happened.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from .record import open_run

if TYPE_CHECKING:
    import pandas as pd

    from .run import Run

COMPONENTS = ("policy", "reference", "critic", "reward", "engine", "transfer")
PARTS = ("forward", "recompute", "backward", "train", "score", "prefill", "decode", "verify", "weights",
         "parameters", "gradients", "optimizer", "saved", "cache")  # fmt: skip
QUANTITIES = {  # column -> its name with a unit that reads well, and what one of these is
    "rows": ("routed rows", 1.0),
    "wire_bytes": ("wire, kB", 1e-3),
    "seconds": ("time, ms", 1e3),
    "memory_bytes": ("memory, kB", 1e-3),
}
SECONDS = {  # metric time/<name>_s -> component and part
    "train": ("policy", "train"), "score": ("policy", "score"), "reference": ("reference", "score"),
    "critic_train": ("critic", "train"), "critic_score": ("critic", "score"), "reward": ("reward", "verify"),
    "prefill": ("engine", "prefill"), "transfer": ("transfer", "weights"),
}  # fmt: skip
Key = tuple[str, str, str]  # component, part, quantity


def headline(runs: Mapping[str, Run | str | Path] | Run | str | Path) -> pd.DataFrame:
    """What one supervised token costs in each run: a line for each component and part of it.

    A supervised token is a label that the policy was trained on, each time it was. Every quantity is what all ranks
    did or hold, over all recorded steps:

        rows          dispatched expert rows of a pass
        wire_bytes    sent to other ranks: of training (part "train": rows, gradients, parameters, all), of a scoring
                      pass, of the engines' weights
        seconds       wall time, the slowest rank's: of whole optimizer steps (part "train"), of each other part.
                      Decoding is what is left of the rollout without the prefill: waiting for other ranks too
        memory_bytes  bytes of storages held between steps, and "saved": the most kept for backwards at one time; over
                      the supervised tokens of one step

    Held-out passes, data loading and checkpoints are in none of them.

    Args:
        runs: name -> run folder (or `Run`); a single one is named by its folder.
    Returns:
        Columns rows, wire_bytes, seconds, memory_bytes, NaN where a part has none; index run, component, part.
        `attrs["supervised"]`: supervised tokens of each run.
    Raises:
        DataError: no run, or one without supervised tokens.
        RunError: no run folder.

    >>> moekit.headline({"padded": "runs/a", "packed": "runs/b"}).groupby("run").sum()       # doctest: +SKIP
    """
    import pandas as pd

    one = not isinstance(runs, Mapping)
    opened = {name: open_run(r) if isinstance(r, (str, Path)) else r
              for name, r in ({"": runs} if one else runs).items()}  # fmt: skip
    if not opened:
        raise DataError("headline needs at least one run")
    parts: dict[Any, dict[str, float]] = {}
    supervised: dict[str, float] = {}
    for name, run in opened.items():
        name = name or run.folder.resolve().name
        column: Any = run.metrics.get("tokens/supervised", [0.0])
        supervised[name] = tokens = float(np.nansum(column))
        if not tokens:
            raise DataError(f"{run.folder}: no supervised token was counted, so nothing can be given per such token")
        for (component, part, quantity), total in _totals(run).items():
            parts.setdefault((name, component, part), {})[quantity] = total / tokens
    table: Any = pd.DataFrame.from_dict(parts, orient="index", columns=list(QUANTITIES), dtype=float)
    table.index = pd.MultiIndex.from_tuples(list(parts), names=["run", "component", "part"])
    place = {"run": list(supervised), "component": COMPONENTS, "part": PARTS}
    order = lambda level: level.map({v: i for i, v in enumerate(place[level.name])})
    table = table.sort_index(key=order)
    table.attrs["supervised"] = supervised
    return table


def in_units(table: pd.DataFrame, by: Iterable[str] = ("run",)) -> pd.DataFrame:
    """The sums of `headline` by run (and component, part), in units that read well: rows, kB, ms."""
    some: Any = table.groupby(level=list(by), sort=False).sum(min_count=1)
    return some.mul([factor for _, factor in QUANTITIES.values()]).rename(columns=lambda q: QUANTITIES[q][0])


def _totals(run: Run) -> dict[Key, float]:
    """Sums over the run; memory as the most of any step, times the number of steps with supervised tokens."""
    out: dict[Key, float] = defaultdict(float)
    for name in run.array_names:
        component, _, rest = name.partition("/")
        part, _, quantity = rest.partition("/")
        if quantity == "dispatched" and part != "evaluate":
            out[component, part, "rows"] += float(run.arrays(name).values.sum())
    metrics: Any = run.metrics
    total = {name: float(np.nansum(metrics[name])) for name in metrics if metrics[name].dtype.kind in "if"}
    for name, sent in total.items():
        if found := re.fullmatch(r"(critic_)?wire/(?:([a-z]+)_)??([a-z]+)_bytes", name):
            critic, component, what = found.groups()
            where = ("transfer", "weights") if what == "transfer" else ("critic" if critic else "policy", "train")
            out[*((component, what) if component in COMPONENTS else where), "wire_bytes"] += sent
    told = {name[5:-2]: seconds for name, seconds in total.items() if re.fullmatch(r"time/\w+_s", name)}
    told.setdefault("train", told.get("step", 0.0))
    for name, where in SECONDS.items():
        if name in told:
            out[*where, "seconds"] += told[name]
    if "rollout" in told:
        out["engine", "decode", "seconds"] += told["rollout"] - told.get("prefill", 0.0)
    steps = int((np.asarray(metrics["tokens/supervised"], dtype=float) > 0).sum())
    for name in total:
        if found := re.fullmatch(r"memory/([a-z]+)_([a-z]+)_bytes", name):
            component, kind = found.groups()
            if component in COMPONENTS:
                out[component, kind.replace("caches", "cache"), "memory_bytes"] = float(metrics[name].max()) * steps
    return {key: value for key, value in out.items() if value or key[2] == "rows"}
