"""Runs side by side: what differs, their four rates, and their losses after equal supervised tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..measure.compare import MEANING, PER, RATES, TAIL, Differences, check, facts, side_by_side, under, words
from ..measure.record import open_run
from .curves import thin
from .theme import MUTED, SERIES, SIZE, WIDE, Figure, bundle, end_labels, figure, names_axis, note, number, tint

if TYPE_CHECKING:
    import pandas as pd

CONTENT = {"model": "base", "data": "batch.data", "tokenizer": "batch"}  # a path is compared by what is there
GAP, BAR, BETWEEN, LOSS, TOP, BELOW, LINE = 0.03, 34, 78, 230, 122, 62, 18  # share of the width, pixels


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; shows itself as a figure in a notebook and as text elsewhere."""

    table: pd.DataFrame  # a line for each run: see `compare`
    differences: Differences  # all that differs, also what is meant to: name -> run -> value
    varying: tuple[str, ...]  # what is meant to differ
    curves: dict[str, Any]  # run -> supervised tokens after each step, loss of each step

    @property
    def remarks(self) -> list[str]:
        """What a reader must know: differences that are not meant, runs that did not finish, and whether losses can be
        compared."""
        told = [f"differs: {n}: {words(v)}" for n, v in self.differences.items() if not under(n, self.varying)]
        unlike = ", ".join(n for n in self.differences if under(n, MEANING)) if self.curves else ""
        ended = {run: state for run, state in self.table["state"].items() if state not in ("finished", "unknown")}
        told = [f"not finished: {run} ({state}); compared is what it recorded" for run, state in ended.items()] + told
        return [f"losses are different quantities here, not to be compared ({unlike})"] * bool(unlike) + told

    @property
    def figure(self) -> Figure:
        """The comparison as a plotly figure."""
        return _figure(self)

    @property
    def heads(self) -> tuple[str, str]:
        """What the rates are of, and what the losses."""
        steps: Any = self.table["steps"]
        name = str(self.table.attrs["loss"])
        many = f"{steps.min():,}" + (f" to {steps.max():,}" if steps.max() > steps.min() else "")
        rates = f"{many} steps; rates leave the first {self.table['warm-up steps'].iloc[0]} (warm-up) out"
        unit, budget = ", nats a token," * name.endswith("/sft"), number(self.table.attrs["budget"])
        return rates, f"{name}{unit} after {budget} supervised tokens: mean and quartiles over the last {TAIL:.0%}"

    def cells(self, name: str) -> list[str]:
        """A number of each run with its quartiles."""
        values = self.table[[name, f"{name} q25", f"{name} q75"]].to_numpy()
        return [f"{number(v)} ({number(low)} to {number(high)})" for v, low, high in values]

    def __repr__(self) -> str:
        shown = [*RATES, PER, *(["loss"] if self.curves else [])]
        table = self.table.assign(**{n: self.cells(n) for n in shown})[shown].T.rename_axis(columns=None).to_string()
        what = f"{len(self.table)} runs; meant to differ: {', '.join(self.varying) or 'nothing'}"
        text = (what, f"{self.heads[0]}; median and quartiles", "", table, "", self.heads[1] if self.curves else "")
        return "\n".join([*text, *self.remarks])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return bundle(self.figure) | {"text/plain": repr(self)}


def compare(
    runs: Any, varying: str | Iterable[str] = (), *, allow: str | Iterable[str] = (), strict: bool = True,
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
    swept = list(getattr(runs, "varying", ())) if not names else []
    some = getattr(runs, "finished", runs)
    folders = list(some.values() if isinstance(some, Mapping) else some)
    opened = [open_run(r if isinstance(r, str | Path) else r.folder) for r in folders]
    if len(opened) < 2:
        raise ConfigError(f"compare needs two runs at least (of a sweep: finished ones), got {len(opened)}")
    names = [CONTENT.get(n, n) for n in names or swept]
    labels = list(some) if isinstance(some, Mapping) else _labels(opened, names)
    named = dict(zip(labels, opened))
    if swept:  # not all that a sweep varies makes steps unlike
        found = check(named, (), (), strict=False)
        names = [n for n in names if any(under(other, [n]) for other in found)]
    found = check(named, names, rest, strict)
    table, curves = side_by_side(named, warmup, loss)
    return Comparison(table, found, tuple(names), curves)


def _labels(runs: list[Any], varying: list[str]) -> list[str]:
    """What varies, of each run, and its folder's name where that does not tell it from the others."""
    told = [{n: v for n, v in facts(run).items() if under(n, varying)} for run in runs]
    shown = [n for n in told[0] if any(each.get(n) != told[0][n] for each in told)]
    words = [", ".join(f"{n.rpartition('.')[2]} {each.get(n)}"[:40] for n in shown) for each in told]
    folders = [run.folder.resolve().name for run in runs]
    full = [w if w and words.count(w) == 1 else f"{w} {folder}".strip() for w, folder in zip(words, folders)]
    return [f"{name} ({i})" if full.count(name) > 1 else name for i, name in enumerate(full)]


def _figure(found: Comparison) -> Figure:
    """Bars of the four rates and of the rows that a supervised token takes, and losses over supervised tokens."""
    table, names, colours = found.table, list(found.table.index), SERIES * len(found.table)
    remarks = [line for remark in found.remarks for line in textwrap.wrap(remark, 125)]
    remarks = ["<b>Not alike</b>"] * bool(remarks) + remarks[:9] + ["... and more, in the text"] * (len(remarks) > 9)
    bars, below = BAR * len(names), BELOW + LINE * len(remarks)
    inner = bars + (BETWEEN + LOSS) * bool(found.curves)
    meant = f"Meant to differ: {', '.join(found.varying)}. " if found.varying else ""
    fig = figure("Four rates, and the loss after equal supervised tokens",
                 f"{meant}Bar: median, dark line: quartiles", width=WIDE, height=TOP + inner + below,
                 margin={"l": min(24 + 7 * max(map(len, names)), 240), "r": 24, "t": TOP, "b": below}, bargap=0.34,
                 barmode="overlay", hovermode="closest")  # fmt: skip
    width = (1 - GAP * len(RATES)) / (len(RATES) + 1)
    for at, name in enumerate((*RATES, PER)):
        suffix, left = str(at + 1) if at else "", at * (width + GAP)
        axes: dict[str, Any] = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        values = table[[name, f"{name} q25", f"{name} q75"]].to_numpy()
        for run, colour, (value, low, high) in zip(names, colours, values):
            fig.add_bar(x=[value], y=[run], orientation="h", name=name, marker={"color": tint(colour, 0.45)}, **axes)
            fig.add_scatter(x=[low, high], y=[run, run], mode="lines", line={"color": colour, "width": 4},
                            name=f"{name}, quartiles", **axes)  # fmt: skip
            note(fig, number(value), max(value, high), run, axes=(f"x{suffix}", f"y{suffix}"), shift=(6, 0),
                 size=SIZE["tick"])  # fmt: skip
        note(
            fig,
            f"<b>{name.replace(' per ', '<br>a ').replace('d token', 'd<br>token')}</b>",
            left,
            1,
            stand="left bottom",
            shift=(0, 6),
        )
        x = {"domain": [left, left + width], "range": [0, 1.6 * values.max()], "showticklabels": False}
        y = {**names_axis(names), "anchor": f"x{suffix}", "domain": [1 - bars / inner, 1], "showticklabels": at == 0}
        fig.update_layout({f"xaxis{suffix}": {**x, "anchor": f"y{suffix}", "showline": False}, f"yaxis{suffix}": y})
    note(fig, found.heads[0], 0, 1 - bars / inner, stand="left top", shift=(0, -4), size=SIZE["tick"], colour=MUTED)
    if found.curves:
        _losses(fig, found, colours, LOSS / inner)
    for i, line in enumerate(remarks):
        note(fig, line, 0, 0, stand="left top", shift=(0, 8 - BELOW - LINE * i), size=SIZE["tick"])
    return fig


def _losses(fig: Figure, found: Comparison, colours: tuple[str, ...], height: float) -> None:
    table, at = found.table, len(RATES) + 2
    labels = [f"<b>{run}</b>  {cell}" for run, cell in zip(table.index, found.cells("loss"))]
    right = 1 - (7.6 * max(map(len, labels)) - 30) / (fig.layout.width - fig.layout.margin.l - fig.layout.margin.r)
    axes: dict[str, Any] = {"xaxis": f"x{at}", "yaxis": f"y{at}"}
    seen = [v for _, value in found.curves.values() for v in value if isfinite(v)] or [0.0]
    low, high = min(seen) - 0.05 * (max(seen) - min(seen)), max(seen) + 0.05 * (max(seen) - min(seen) or 1.0)
    for (run, (done, value)), colour in zip(found.curves.items(), colours):
        keep = thin(value)
        fig.add_scatter(
            x=done[keep], y=value[keep], mode="lines", name=run, line={"color": colour, "width": 1.5}, **axes
        )
        fig.add_scatter(x=table.loc[[run], "at tokens"], y=table.loc[[run], "loss"], mode="markers", name=run,
                        marker={"color": colour, "size": 9}, **axes)  # fmt: skip
    x = {"domain": [0, right], "anchor": f"y{at}", "title": "supervised tokens trained on"}
    x["range"] = [0, max(done[-1] for done, _ in found.curves.values())]
    y = {"domain": [0, height], "anchor": f"x{at}", "range": [low, high], "nticks": 5}
    fig.update_layout({f"xaxis{at}": x, f"yaxis{at}": y})
    line = {"color": MUTED, "width": 1, "dash": "dot"}
    fig.add_shape(type="line", x0=table.attrs["budget"], x1=table.attrs["budget"], y0=low, y1=high, xref=f"x{at}",
                  yref=f"y{at}", line=line)  # fmt: skip
    note(fig, f"<b>{found.heads[1]}</b>", 0, height, stand="left bottom", shift=(24 - fig.layout.margin.l, 12))
    end_labels(fig, list(zip(table["loss"], labels, colours)), low, high, axis=str(at), x=right)
