"""Which runs can be laid side by side, what differs between them, and their numbers.

Section 22.4 of the source: a comparison states base checkpoint, learner configuration, batch construction and token
accounting, and gives supervised tokens a second beside routed rows a second. Here it states whatever the run folders
say that is not known to leave a step as it is: `FREE` lists what that is, everything else must be alike or be meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import ConfigError, DataError, UnlikeRunsError

if TYPE_CHECKING:
    import pandas as pd

    from .run import Run

Differences = dict[str, dict[str, Any]]  # name -> run -> value
# of the recipe's configuration: what changes no step. Paths are in it, for contents are compared by their hashes.
FREE = ("steps", "out", "save_every", "keep_checkpoints", "export", "overwrite", "resume", "model", "data", "tokenizer",
        "eval_data", "eval_every", "eval_items", "cache", "engine_url")  # fmt: skip
REQUIRED = ("base.weights", "batch.data", "layout.world", "layout.device")  # a run that does not say them is unlike
OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # devices are interchangeable; threads are told
FOLLOWS = ("rows.", "batch.", "length", "share_prompt", "over_long", "max_prompt", "items", "seed")  # decide the rows
# What a loss is a mean of: where one of these differs, losses are different quantities.
MEANING = ("objective", "denominator", "constant_length", "rows.filter", "rows.supervise", "batch.data", "kind", "beta",
           "batch.tokenizer", "batch.template", "label_smoothing", "length_normalised", "base.model")  # fmt: skip
RATES = ("supervised tokens/s", "tokens/s", "positions/s", "routed rows/s")
PER = "routed rows per supervised token"
QUARTILES = (0.5, 0.25, 0.75)
TAIL = 0.1  # of the supervised tokens: what a loss is averaged over


def facts(run: Run) -> dict[str, Any]:
    """What a run folder says of how its steps were made: dotted name -> value; None = not recorded.

    Names are those of the recipe's configuration ("learner.lr", "rows.length"), and besides: base.weights, base.model.*
    (its shape), batch.data, batch.tokenizer, batch.template (hashes), batch.rows (a hash of all rows in their order),
    layout.* (world, threads, device, backend, kernels), machine.*, versions.*, settings.* and source.*.
    """
    card, recipe = run.card, run.config.get("recipe", {})
    if card is None:
        return flat({k: v for k, v in recipe.items() if k not in FREE}) | dict.fromkeys(REQUIRED)
    base, batch, layout, env = card.base, card.batch, card.layout, card.environment
    hardware = {k: v for k, v in env.get("hardware", {}).items() if k != "memory bytes"}
    settings = {k: v for k, v in env.get("settings", {}).items() if k not in OWN}
    task = str(batch.get("data")) if str(batch.get("data")).isidentifier() else None
    told: dict[str, Any] = {
        "base": {"weights": base.get("sha256") or base.get("preset"), "model": card.model.get("config", {})},
        "batch": {"data": batch.get("sha256") or task or batch.get("fingerprint"),
                  "tokenizer": batch.get("tokenizer"), "template": batch.get("template"),
                  "rows": batch.get("fingerprint")},
        "layout": {"world": layout.get("world"), "threads": layout.get("threads of a rank"),
                   **{k: layout.get(k) for k in ("device", "backend", "kernels")}},
        "objective": card.objective.get("name"),
    }  # fmt: skip
    if not recipe:  # a loop of the user's own
        own = {k: v for k, v in batch.items() if k not in ("data", "sha256", "report", "fingerprint")}
        told |= {"seed": base.get("seed"), "learner": card.learner, "rows": own}
        told |= {k: v for k, v in card.objective.items() if k != "name"}
    told |= {k: v for k, v in recipe.items() if k not in FREE}
    told |= {"accounting": card.definitions, "machine": hardware, "versions": env.get("versions", {})}
    told |= {"settings": settings, "source": env.get("source", {}).get("moekit")}
    return flat(told)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names.
    >>> flat({"lr": 0.1, "rows": {"length": 8}})
    {'lr': 0.1, 'rows.length': 8}
    """
    out = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return out


def differences(runs: Mapping[str, Run]) -> Differences:
    """Everything in which runs differ, and what one of them needs to say and does not (None).

    What follows from a difference that is named is not named again: the rows, where their making differs. Kernels that
    were chosen by measuring count where two runs have met the same shape."""
    told = {label: facts(run) for label, run in runs.items()}
    names = dict.fromkeys(name for found in told.values() for name in found)
    out = {}
    for name in names:
        values = {label: found.get(name) for label, found in told.items()}
        if name.startswith("layout.kernels."):
            values = {label: found[name] for label, found in told.items() if name in found}
        first = next(iter(values.values()))
        if any(value != first for value in values.values()) or (first is None and name in REQUIRED):
            out[name] = values
    if any(under(name, FOLLOWS) and name != "batch.rows" for name in out):
        out.pop("batch.rows", None)
    return out


def under(name: str, allowed: Sequence[str]) -> bool:
    """Whether a name is one of those, or inside one of them."""
    return any(name == a or name.startswith(a.rstrip(".") + ".") for a in allowed)


def check(runs: Mapping[str, Run], varying: Sequence[str], allow: Sequence[str], strict: bool) -> Differences:
    """`differences`, if nothing differs that may not.
    Raises:
        UnlikeRunsError: something that is neither in `varying` nor in `allow`, if `strict`.
        ConfigError: a name of `varying` that is alike in all runs, or that none of them knows."""
    found = differences(runs)
    for name in varying:
        if not any(under(other, [name]) for other in found):
            known = facts(next(iter(runs.values())))
            close = ", ".join(difflib.get_close_matches(name, known, 3, 0.5)) or "none that is close"
            alike = f"is {known[name]!r} in all runs" if name in known else f"is not recorded; there is {close}"
            which = f"they differ in {', '.join(found)}" if found else "they differ in nothing"
            raise ConfigError(f"varying={name!r} {alike}: name what differs between these runs; {which}")
    wrong = {name: values for name, values in found.items() if not under(name, [*varying, *allow])}
    if wrong and strict:
        lines = "".join(f"\n  {name}: {words(values)}" for name, values in wrong.items())
        how = f'name what is meant to differ, as varying=("{next(iter(wrong))}", ...), what may, as allow=(...), or see'
        raise UnlikeRunsError(
            f"these runs differ in {len(wrong)} thing{'s' * (len(wrong) > 1)} that a comparison must have alike:"
            f"{lines}\n{how} them with strict=False, which says so on the figure", wrong
        )  # fmt: skip
    return found


def words(values: Mapping[str, Any]) -> str:
    """Each value with the runs that have it.
    >>> words({"a": 1e-3, "b": 3e-3, "c": 1e-3, "d": None})
    '0.001 (a; c), 0.003 (b), not recorded (d)'
    """
    of: dict[str, list[str]] = {}
    for label, value in values.items():
        of.setdefault("not recorded" if value is None else short(value), []).append(label)
    return ", ".join(f"{value} ({'; '.join(labels)})" for value, labels in of.items())


def short(value: Any) -> str:
    """A value in a few characters: of a hash its first twelve."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    hashed = len(text) >= 32 and all(c in "0123456789abcdef" for c in text)
    return text[:12] if hashed else text if len(text) <= 60 else text[:57] + "..."


def side_by_side(runs: Mapping[str, Run], warmup: int = 3, loss: str | None = None) -> tuple[pd.DataFrame, dict]:
    """The numbers of each run, and the curves of their losses.

    A rate of a step is its count over its seconds, both summed over what the step did on all ranks; given are the
    median over steps and the quartiles, of all four rates over the same steps. The loss is compared after the same
    number of supervised tokens, the most that all runs have trained on: its mean, weighted by them, over the last
    tenth before.

    Args:
        warmup: steps at the start that rates leave out.
        loss: a metric; None = that of the objective, where all runs have the same one.
    Returns:
        A table with a line for each run; and run -> supervised tokens after each step, and the loss of the step.
    Raises:
        DataError: a run that recorded no counts, or has no step after the warm-up.
    """
    import pandas as pd

    rows, curves, counted = {}, {}, {}
    for label, run in runs.items():
        m: Any = run.metrics
        needed = [*(f"tokens/{c}" for c in CLASSES), "rows/dispatched", "time/step_s"]
        if missing := [name for name in needed if name not in m]:
            raise DataError(f"{label}: {run.folder} recorded no {', '.join(missing)}; was it written by a recipe?")
        m = m.dropna(subset=needed)
        if len(m) <= warmup:
            how = "wait for more, or give warmup=0"
            raise DataError(f"{label}: {len(m)} steps and warmup={warmup} leave none to compare; {how}")
        counted[label] = m
    chosen = loss or _loss(runs, counted)
    budget = min(float(m["tokens/supervised"].sum()) for m in counted.values())
    for label, m in counted.items():
        late, positions = m.iloc[warmup:], sum(m[f"tokens/{c}"] for c in CLASSES)
        work = (m["tokens/supervised"], positions - m["tokens/padding"], positions, m["rows/dispatched"])
        row: dict[str, Any] = {}
        for name, count in zip(RATES, work):
            row |= _quartiles(name, (count / m["time/step_s"]).iloc[warmup:])
        useful = late[late["tokens/supervised"] > 0]
        each = useful["rows/dispatched"] / useful["tokens/supervised"]
        sums: Any = useful.sum(numeric_only=True)
        whole = {PER: sums["rows/dispatched"] / sums["tokens/supervised"] if len(useful) else float("nan")}
        row |= _quartiles(PER, each) | whole  # of the sums, whatever the steps' sizes
        done = m["tokens/supervised"].cumsum().to_numpy(float)
        if chosen and chosen in m and budget:
            value, weight = m[chosen].to_numpy(float), m["tokens/supervised"].to_numpy(float)
            curves[label] = done, value
            trained = np.flatnonzero(weight > 0)
            before = trained[: max(int((done[trained] <= budget).sum()), 1)]
            inside = before[done[before] > min((1 - TAIL) * budget, done[before[-1]] - 1)]
            row |= _quartiles("loss", m[chosen].iloc[inside])
            row |= {
                "loss": float(np.average(value[inside], weights=weight[inside])),
                "at tokens": float(done[inside[-1]]),
            }
        row |= {"supervised tokens": float(done[-1]), "steps": len(m), "warm-up steps": warmup}
        rows[label] = row
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.attrs |= {"loss": chosen, "budget": budget}
    return table.rename_axis("run"), curves


def _loss(runs: Mapping[str, Run], counted: Mapping[str, Any]) -> str | None:
    """The loss metric that all runs have."""
    names = {f"loss/{card.objective.get('name')}" if (card := run.card) else "loss/total" for run in runs.values()}
    wanted = [*(names if len(names) == 1 else ()), "loss/total"]
    return next((name for name in wanted if all(name in m for m in counted.values())), None)


def _quartiles(name: str, values: pd.Series) -> dict[str, float]:
    middle, low, high = values.quantile(list(QUARTILES)) if len(values) else [float("nan")] * 3
    return {name: middle, f"{name} q25": low, f"{name} q75": high}
