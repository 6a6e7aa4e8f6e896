"""Which runs can be laid side by side, what differs between them, and their numbers.

Section 22.4 of the source: a comparison states base checkpoint, learner configuration, batch construction and token
accounting, and gives supervised tokens a second beside routed rows a second. Here everything that the run folders say
must be alike or be meant to differ, but for what is known to leave a step as it is (`FREE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..data.batch import CLASSES
from ..errors import ConfigError, DataError, UnlikeRunsError

if TYPE_CHECKING:
    import pandas as pd

    from .run import Run

Differences = dict[str, dict[str, Any]]  # name -> run -> value
# Paths are free, for contents are compared by their hashes. GPUs are interchangeable; threads are said elsewhere.
FREE = ("steps", "out", "save_every", "keep_checkpoints", "export", "overwrite", "resume", "model", "data", "tokenizer",
        "eval_data", "eval_every", "eval_items", "cache", "engine_url", "machine.memory bytes",
        "settings.CUDA_VISIBLE_DEVICES", "settings.OMP_NUM_THREADS", "settings.MKL_NUM_THREADS")  # fmt: skip
REQUIRED = ("base.weights", "batch.data", "layout.world", "layout.device")  # a run that does not say them is unlike
FOLLOWS = {  # what is decided by what
    "batch.rows": ("rows", "batch", "length", "share_prompt", "over_long", "max_prompt", "items", "seed"),
    "batch.verifier": ("verifier",),
    "layout.kernels": ("dtype", "layout.device", "layout.backend"),
}
# What a loss is a mean of: where one of these differs, losses are different quantities.
MEANING = ("objective", "denominator", "constant_length", "rows.filter", "rows.supervise", "batch.data", "kind", "beta",
           "batch.tokenizer", "batch.template", "label_smoothing", "length_normalised", "base.model", "verifier",
           "batch.verifier", "reward_scale")  # fmt: skip
RATES, PER = ("supervised tokens/s", "tokens/s", "positions/s", "routed rows/s"), "routed rows per supervised token"
TAIL = 0.1  # of the supervised tokens: what a loss is averaged over


def facts(run: Run) -> dict[str, Any]:
    """What a run folder says of how its steps were made: dotted name -> value; None = not recorded.

    The names are those of the recipe's configuration ("learner.lr", "rows.length") and, besides: base.weights (a hash,
    or the preset that `seed` draws), base.model (its shape), batch.data, batch.tokenizer, batch.template (hashes),
    batch.verifier (of the file that one of the user's own stands in), batch.rows (of all rows), objective, layout
    (world, threads, device, backend, kernels), accounting, machine, settings, versions and source.
    """
    card, recipe = run.card, run.config.get("recipe", {})
    if card is None:
        return {name: value for name, value in flat(recipe).items() if not under(name, FREE)} | dict.fromkeys(REQUIRED)
    base, batch, layout, env = card.base, card.batch, card.layout, card.environment
    task = str(batch.get("data")) if str(batch.get("data")).isidentifier() else None
    told = (recipe or {"seed": base.get("seed"), "learner": card.learner, "loss": card.objective}) | {
        "base": {"weights": base.get("sha256") or base.get("preset"), "model": card.model.get("config")},
        "batch": {"data": batch.get("sha256") or task or batch.get("fingerprint"), "rows": batch.get("fingerprint"),
                  "verifier": batch.get("verifier_sha256"),
                  **{name: batch.get(name) for name in ("tokenizer", "template")}},
        "objective": card.objective.get("name"),
        "layout": {"threads": layout.get("threads of a rank"),
                   **{name: layout.get(name) for name in ("world", "device", "backend", "kernels")}},
        "accounting": card.definitions, "machine": env.get("hardware"), "source": env.get("source", {}).get("moekit"),
        **{name: env.get(name) for name in ("settings", "versions")},
    }  # fmt: skip
    return {name: value for name, value in flat(told).items() if not under(name, FREE)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names.
    >>> flat({"lr": 0.1, "rows": {"length": 8}})
    {'lr': 0.1, 'rows.length': 8}
    """
    out = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def under(name: str, names: Iterable[str]) -> bool:
    """Whether a name is one of those, or inside one of them."""
    return any(name == n or name.startswith(f"{n}.") for n in names)


def differences(runs: Mapping[str, Run]) -> Differences:
    """All in which runs differ, and what one of them had to say and does not (None).

    What follows from something that is named is not named again (`FOLLOWS`). Kernels that were chosen by measuring
    count where two runs have met the same shape."""
    told, out = {label: facts(run) for label, run in runs.items()}, dict[str, dict[str, Any]]()
    for name in dict.fromkeys(name for found in told.values() for name in found):
        measured = name.startswith("layout.kernels.")
        first, *rest = values = [found.get(name) for found in told.values() if name in found or not measured]
        if any(value != first for value in rest) or (first is None and name in REQUIRED):
            out[name] = dict(zip([label for label in told if name in told[label] or not measured], values))
    for what, by in FOLLOWS.items():
        if any(under(name, by) and not under(name, [what]) for name in out):
            out = {name: values for name, values in out.items() if not under(name, [what])}
    return out


def check(runs: Mapping[str, Run], varying: Iterable[str], allow: Iterable[str], strict: bool) -> Differences:
    """`differences`, if nothing differs that may not.
    Raises:
        UnlikeRunsError: something that is neither in `varying` nor in `allow`, if `strict`.
        ConfigError: a name of `varying` that does not differ."""
    found = differences(runs)
    if alike := [name for name in varying if not any(under(other, [name]) for other in found)]:
        what = f"what does: {', '.join(found)}" if found else "they are alike in everything"
        raise ConfigError(f"varying={alike[0]!r} does not differ between these runs; {what}")
    wrong = [name for name in found if not under(name, [*varying, *allow])]
    if wrong and strict:
        lines = "".join(f"\n  {name}: {words(found[name])}" for name in wrong)
        how = f"name what is meant to differ as varying=({wrong[0]!r}, ...), what may as allow=(...), or see them"
        raise UnlikeRunsError(
            f"these runs are not alike. They differ in{lines}\n{how} with strict=False, which says so"
        )
    return found


def words(values: Mapping[str, Any]) -> str:
    """Each value with the runs that have it; of a hash twelve letters.
    >>> words({"a": 1e-3, "b": 3e-3, "c": 1e-3, "d": None})
    '0.001 (a; c), 0.003 (b), not recorded (d)'
    """
    of: dict[str, list[str]] = {}
    for label, value in values.items():
        text = "not recorded" if value is None else str(value)
        of.setdefault(text[: 12 if len(text) == 64 else 60], []).append(label)
    return ", ".join(f"{value} ({'; '.join(labels)})" for value, labels in of.items())


def side_by_side(runs: Mapping[str, Run], warmup: int = 3, loss: str | None = None) -> tuple[pd.DataFrame, dict]:
    """The numbers of each run, and the curves of their losses.

    A rate of a step is its count over its seconds, both of all ranks; given are the median over steps and the
    quartiles, of all four rates over the same steps. The loss is compared after the same number of supervised tokens,
    the most that all runs were trained on: its mean over the last tenth of them, weighted by them, and its quartiles
    over those steps.

    Args:
        warmup: steps at the start that rates leave out.
        loss: a metric; None = that of the objective, where all runs have the same one, else loss/total.
    Returns:
        A line for each run (`attrs`: loss, budget); and run -> supervised tokens after each step, loss of each step.
    Raises:
        DataError: a run that recorded no counts, or has no step after the warm-up.
    """
    import pandas as pd

    rows, curves, counted = {}, {}, dict[str, Any]()
    for label, run in runs.items():
        needed = [*(f"tokens/{c}" for c in CLASSES), "rows/dispatched", "time/step_s"]
        counted[label] = m = run.metrics.reindex(columns=[*dict.fromkeys([*needed, *run.metrics])]).dropna(
            subset=needed
        )
        if len(m) <= warmup:
            what = f"{len(m)} steps with {', '.join(needed)}"
            raise DataError(f"{label}: {run.folder} has recorded {what}, and warmup={warmup} of them are left out")
    own = {f"loss/{run.card.objective.get('name')}" if run.card else "" for run in runs.values()}
    names = [loss] if loss else [*(own if len(own) == 1 else ()), "loss/total"]
    name = next((n for n in names if all(n in m for m in counted.values())), None)
    budget = min(float(m["tokens/supervised"].sum()) for m in counted.values())
    for (label, m), run in zip(counted.items(), runs.values()):
        supervised, routed, done = m["tokens/supervised"], m["rows/dispatched"], m["tokens/supervised"].cumsum()
        positions = sum(m[f"tokens/{c}"] for c in CLASSES)
        row = dict[str, float]()
        for rate, count in zip(RATES, (supervised, positions - m["tokens/padding"], positions, routed)):
            row |= _quartiles(rate, (count / m["time/step_s"]).iloc[warmup:])
        row |= _quartiles(PER, (routed / supervised).iloc[warmup:])
        row[PER] = float(routed.iloc[warmup:].sum() / supervised.iloc[warmup:].sum())
        if name:
            inside = ((done > (1 - TAIL) * budget) & (done <= budget) & (supervised > 0)).to_numpy()
            last = max(int((done <= budget).sum()) - 1, 0)
            part = m[inside] if inside.any() else m.iloc[[last]]  # steps are larger than the last tenth
            weight = part["tokens/supervised"].to_numpy()
            row |= _quartiles("loss", part[name]) | {"at tokens": float(done[part.index[-1]])}
            row["loss"] = float((part[name].to_numpy() * weight).sum() / weight.sum())  # a NaN stays one
            curves[label] = done.to_numpy(float), m[name].to_numpy(float)
        rows[label] = row | {"supervised tokens": float(done.iloc[-1]), "steps": len(m), "warm-up steps": warmup,
                             "state": run.state}  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
    table.attrs |= {"loss": name, "budget": budget}
    return table, curves


def _quartiles(name: str, values: pd.Series) -> dict[str, float]:
    return dict(zip((name, f"{name} q25", f"{name} q75"), values.quantile([0.5, 0.25, 0.75]).tolist()))
