"""Runs side by side: what they may differ in, their four rates, and their losses after equal supervised tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from ..measure import compare as measured
from ..measure.compare import MEANING, PER, RATES, TAIL, Differences, short, under, words
from ..measure.record import open_run
from .curves import thin
from .theme import MUTED, SERIES, SIZE, Figure, bundle, end_labels, figure, names_axis, note, number, tint

if TYPE_CHECKING:
    import pandas as pd

GAP, LINES = 0.03, 150
HEIGHTS = {"bar": 34, "between": 78, "loss": 230, "top": 122, "below": 62, "line": 18}  # pixels


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; shows itself as a figure in a notebook and as text elsewhere."""

    table: pd.DataFrame  # a line for each run: see `compare`
    differences: Differences  # all that differs, also what is meant to: name -> run -> value
    varying: tuple[str, ...]  # what is meant to differ
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # run -> supervised tokens after each step, loss

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before comparing."""
        beyond = {name: values for name, values in self.differences.items() if not under(name, self.varying)}
        told = [f"{'also ' * bool(self.varying)}differs: {name}: {words(values)}" for name, values in beyond.items()]
        if self.curves and (unlike := [name for name in self.differences if under(name, MEANING)]):
            told = [f"losses are different quantities here, not to be compared ({', '.join(unlike)})", *told]
        return told

    @property
    def figure(self) -> Figure:
        """The comparison as a plotly figure."""
        return comparison_figure(self)

    def _head(self) -> str:
        warm, steps = int(self.table["warm-up steps"].iloc[0]), self.table["steps"]
        many = f"{steps.min():,}" + (f" to {steps.max():,}" if steps.max() > steps.min() else "")
        return f"{many} steps; rates leave the first {warm} (warm-up) out: median and quartiles of the others"

    def __repr__(self) -> str:
        shown: Any = {}
        for name in (*RATES, PER, *(["loss"] if "loss" in self.table else [])):
            cells = self.table[[name, f"{name} q25", f"{name} q75"]].to_numpy()
            shown[name] = [f"{number(m)} ({number(low)} to {number(high)})" for m, low, high in cells]
        lines = [f"{len(self.table)} runs; meant to differ: {', '.join(self.varying) or 'nothing'}", self._head(), ""]
        lines += [self.table.assign(**shown)[list(shown)].T.to_string()]
        if self.curves:
            lines += ["", self._loss_words()]
        return "\n".join([*lines, *self.remarks])

    def _loss_words(self) -> str:
        name, budget = self.table.attrs["loss"], self.table.attrs["budget"]
        unit = ", nats a token," if name.endswith("/sft") else ""
        return f"{name}{unit} after {number(budget)} supervised tokens: mean and quartiles over the last {TAIL:.0%}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return bundle(self.figure) | {"text/plain": repr(self)}


def compare(
    runs: Any, varying: str | Sequence[str] = (), *, allow: str | Sequence[str] = (), strict: bool = True,
    warmup: int = 3, loss: str | None = None,
) -> Comparison:  # fmt: skip
    """Lay runs side by side, if they are alike but for what is meant to differ.

    All that the run folders say is compared (`moekit.measure.compare.facts`): base checkpoint by the hash of its
    weights, layout, data by their hash, batch construction, token accounting, learner, machine, versions, kernels.

    Args:
        runs: run folders, `Run`s or `Job`s; as a list (named by what varies, or by their folders), or name -> run. Or
            a `Sweep`: its finished jobs, and what it varies.
        varying: names of what is meant to differ, as "learner.lr" or all of "rows"; it labels the runs.
        allow: what else may differ; it is said on the figure.
        strict: False = whatever differs is said on the figure and in the text, and nothing is refused.
        warmup: steps at the start that the rates leave out.
        loss: the metric that is compared after equal supervised tokens; None = the objective's loss.
    Returns:
        A `Comparison`. Its `table` has a line for each run: supervised tokens/s, tokens/s, positions/s and routed
        rows/s, of the optimizer steps (median, and "... q25", "... q75"); routed rows per supervised token; loss at
        equal supervised tokens; steps. What lies between optimizer steps (rollouts, data) is in `moekit.headline`.
    Raises:
        UnlikeRunsError: they differ in something else; names all of it, with the values.
        ConfigError: fewer than two runs, or `varying` names what does not differ.
        DataError: a run without enough recorded steps.

    >>> moekit.compare(["runs/a", "runs/b"], varying="learner.lr").table                     # doctest: +SKIP
    """
    names, rest = ([n] if isinstance(n, str) else list(n) for n in (varying, allow))
    if hasattr(runs, "finished"):  # a sweep
        runs, names = runs.finished, names or list(runs.varying)
    some = dict(runs) if isinstance(runs, Mapping) else dict(enumerate(runs))
    opened = {label: open_run(r if isinstance(r, (str, Path)) else r.folder) for label, r in some.items()}
    if len(opened) < 2:
        raise ConfigError(f"compare needs two runs at least, got {len(opened)}: {', '.join(map(str, opened))}")
    if not isinstance(runs, Mapping):
        opened = {_label(run, names, i, opened): run for i, run in opened.items()}
    found = measured.check(opened, names, rest, strict)
    table, curves = measured.side_by_side(opened, warmup, loss)
    return Comparison(table, found, tuple(names), curves)


def _label(run: Any, varying: Sequence[str], at: int, runs: Mapping[int, Any]) -> str:
    """What varies, of this run; or its folder's name. Never that of another run."""
    told = [{k: v for k, v in measured.facts(r).items() if under(k, varying)} for r in runs.values()]
    each = [", ".join(f"{k.rpartition('.')[2]} {short(t[k])}" for k in t if len({str(o.get(k)) for o in told}) > 1)
            for t in told]  # fmt: skip
    folders = [r.folder.resolve().name for r in runs.values()]
    own, folder = each[at], folders[at]
    if own and each.count(own) == 1:
        return own
    return f"{own} {folder}".strip() if folders.count(folder) == 1 else f"{own} {folder} {at}".strip()


def comparison_figure(found: Comparison) -> Figure:
    """Bars of the four rates and of the rows that a supervised token takes, and losses over supervised tokens."""
    table, size, names = found.table, HEIGHTS, list(found.table.index)
    remarks = [line for remark in found.remarks for line in textwrap.wrap(remark, LINES)]
    remarks = remarks if len(remarks) <= 8 else [*remarks[:7], f"... {len(remarks) - 7} more lines in its text"]
    remarks = ["<b>Not alike</b>", *remarks] if remarks else []
    bars = size["bar"] * len(names)
    inner = bars + (size["between"] + size["loss"] if found.curves else 0)
    below = size["below"] + size["line"] * len(remarks)
    margin = {"l": min(24 + 7 * max(map(len, names)), 200), "r": 24, "t": size["top"], "b": below}
    meant = f"Meant to differ: {', '.join(found.varying)}. " if found.varying else ""
    fig = figure("Four rates of the same steps, and the loss after equal supervised tokens",
                 f"{meant}{found._head()} (bar, dark line)", width=980, height=size["top"] + inner + below,
                 margin=margin, bargap=0.34, barmode="overlay", hovermode="closest")  # fmt: skip
    colours = [SERIES[i % len(SERIES)] for i in range(len(names))]
    shown = [*RATES, PER]
    width = (1 - GAP * (len(shown) - 1)) / len(shown)
    for at, name in enumerate(shown):
        suffix, left, most = str(at + 1) if at else "", at * (width + GAP), float(table[f"{name} q75"].max())
        axes: dict[str, Any] = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        for run, colour in zip(names, colours):
            value, low, high = (float(table.loc[run, f"{name}{q}"]) for q in ("", " q25", " q75"))
            fig.add_bar(x=[value], y=[run], orientation="h", name=name, marker={"color": tint(colour, 0.45)},
                        hovertemplate="%{x:,.4g}", **axes)  # fmt: skip
            fig.add_scatter(x=[low, high], y=[run, run], mode="lines", line={"color": colour, "width": 4},
                            name=f"{name}, quartiles", hoverinfo="skip", **axes)  # fmt: skip
            note(fig, number(value), max(value, high), run, axes=(f"x{suffix}", f"y{suffix}"), shift=(6, 0),
                 size=SIZE["tick"])  # fmt: skip
        note(fig, f"<b>{'<br>per '.join(name.split(' per '))}</b>", left, 1, stand="left bottom", shift=(0, 6))
        x = {"domain": [left, left + width], "range": [0, most * 1.5], "showticklabels": False, "showline": False}
        y = {**names_axis(names), "anchor": f"x{suffix}", "domain": [1 - bars / inner, 1], "showticklabels": at == 0}
        fig.update_layout({f"xaxis{suffix}": {**x, "anchor": f"y{suffix}"}, f"yaxis{suffix}": y})
    if found.curves:
        _losses(fig, found, colours, size["loss"] / inner)
    for i, line in enumerate(remarks):
        note(fig, line, 0, 0, stand="left top", shift=(0, 8 - size["below"] - size["line"] * i), size=SIZE["tick"])
    return fig


def _losses(fig: Figure, found: Comparison, colours: list[str], high: float) -> None:
    import pandas as pd

    table, at = found.table, len(RATES) + 2
    budget, span, values = table.attrs["budget"], [], table[["loss", "loss q25", "loss q75"]].to_numpy()
    labels = [f"<b>{run}</b>  {number(v)} ({number(a)} to {number(b)})" for run, (v, a, b) in zip(table.index, values)]
    room = fig.layout.width - fig.layout.margin.l - fig.layout.margin.r
    right = 1 - (7.6 * max(map(len, labels)) - 30) / room
    for (run, (done, value)), colour in zip(found.curves.items(), colours):
        keep, steps = thin(value), max(len(value) // 20, 1)
        mean = pd.Series(value).rolling(steps, center=True, min_periods=1).mean().to_numpy()
        for line, look, what in ((value, {"color": tint(colour, 0.3), "width": 1}, "every step"),
                                 (mean, {"color": colour, "width": 2}, f"mean of {steps}")):  # fmt: skip
            fig.add_scatter(x=done[keep], y=line[keep], mode="lines", line=look, name=f"{run}, {what}",
                            xaxis=f"x{at}", yaxis=f"y{at}")  # fmt: skip
        span += [float(v) for v in value[np.isfinite(value)]]
        fig.add_scatter(x=[table.loc[run, "at tokens"]], y=[table.loc[run, "loss"]], mode="markers", name=run,
                        marker={"color": colour, "size": 9}, xaxis=f"x{at}", yaxis=f"y{at}")  # fmt: skip
    low, top = np.quantile(span or [0.0, 1.0], (0.0, 1.0))
    low, top = low - 0.05 * (top - low or 1), top + 0.05 * (top - low or 1)
    x = {
        "domain": [0, right],
        "anchor": f"y{at}",
        "title": "supervised tokens trained on",
        "range": [0, max(done[-1] for done, _ in found.curves.values())],
    }
    y = {"domain": [0, high], "anchor": f"x{at}", "range": [low, top], "nticks": 5}
    fig.update_layout({f"xaxis{at}": x, f"yaxis{at}": y})
    line = {"color": MUTED, "width": 1, "dash": "dot"}
    fig.add_shape(type="line", x0=budget, x1=budget, y0=low, y1=top, xref=f"x{at}", yref=f"y{at}", line=line)
    note(fig, f"<b>{found._loss_words()}</b>", 0, high, stand="left bottom", shift=(0, 12))
    end_labels(fig, list(zip(values[:, 0], labels, colours)), low, top, axis=str(at), x=right)
