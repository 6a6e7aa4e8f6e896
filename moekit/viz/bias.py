"""How a denominator's bias arises: which documents it favours, how that moves with the cut, what a filter adds.

A reading is what `moekit.learner.lab.DenominatorLab.measure` returns; weights are what its `weights` returns.

Axis letters: S documents with labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from .theme import DIVERGING, INK, MUTED, SERIES, SIZE, end_labels, figure, need

if TYPE_CHECKING:
    import plotly.graph_objects as go

REACH = 3.0  # the colour scale ends at 2^-3 and 2^3 times the exact weight
FLOOR = 1e-7  # a smaller 1 - cosine is drawn here: rounding


def weight_map(
    weights: Mapping[str, Any],
    labels: Sequence[int],
    *,
    exact: str = "global_tokens",
    title: str = "Who is favoured: weight of a label against the exact one",
    subtitle: str = "One column a document, ordered by its labels; 1 = as the exact token mean",
) -> go.Figure:
    """Weight of each document's labels under each convention, as a multiple of its weight in the exact mean.

    Args:
        weights: mode -> [S] weights; must hold `exact`.
        labels: [S] labelled positions of each document, the columns' names.

    Raises:
        DataError: `exact` is missing, or lengths differ.
    """
    go = need("plotly.graph_objects", "drawing weights")
    table = {mode: np.asarray(w, dtype=float) for mode, w in weights.items()}
    if exact not in table:
        raise DataError(f"weights have no {exact!r} to compare with; they have {', '.join(table) or 'nothing'}")
    wrong = [mode for mode, w in table.items() if w.shape != (len(labels),)]
    if wrong:
        raise DataError(f"{wrong[0]!r} has weights of shape {table[wrong[0]].shape}, there are {len(labels)} documents")
    order = np.argsort(np.asarray(labels), kind="stable")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.array([np.where(table[exact] > 0, w / table[exact], np.nan)[order] for w in table.values()])
        colour = np.clip(np.log2(ratio), -REACH, REACH)
    text = [["" if not math.isfinite(v) else f"{v:.1f}" if v < 9.95 else f"{v:.0f}" for v in row] for row in ratio]
    fig = figure(title, subtitle, height=84 + 32 * len(table) + 62, margin={"l": 150, "r": 84}, hovermode="closest")
    written = len(labels) <= 24
    columns = list(range(len(labels)))
    fig.add_trace(
        go.Heatmap(
            z=[[v if math.isfinite(v) else None for v in row] for row in colour.tolist()],
            customdata=ratio.tolist(), x=columns, y=list(table), zmin=-REACH, zmax=REACH, colorscale=DIVERGING,
            xgap=1, ygap=1, text=text if written else None, texttemplate="%{text}" if written else None,
            textfont={"size": 11}, hovertemplate="%{y}: %{customdata:.3f} times the exact weight<extra></extra>",
            colorbar={"tickvals": [-3, -2, -1, 0, 1, 2, 3], "ticktext": ["≤ ⅛", "¼", "½", "1", "2", "4", "≥ 8"],
                      "thickness": 12, "x": 1.02, "len": 1.0, "outlinewidth": 0},
        )
    )  # fmt: skip
    every = max(1, math.ceil(len(labels) / 24))
    fig.update_xaxes(title="labels of the document", tickvals=columns[::every], showline=False,
                     ticktext=[str(int(np.asarray(labels)[i])) for i in order[::every]])  # fmt: skip
    fig.update_yaxes(type="category", autorange="reversed", showgrid=False, categoryarray=list(table),
                     categoryorder="array", tickfont={"size": SIZE["label"], "color": INK})  # fmt: skip
    return fig


def across_cuts(
    readings: Iterable[Any],
    *,
    title: str = "The same step, cut differently",
    subtitle: str = "A convention whose line is not flat trains another model on another machine",
) -> go.Figure:
    """Gradient norm ratio and 1 - cosine of each convention over cuts into ranks x microbatches.

    Args:
        readings: of several modes and cuts; cuts are drawn in the order of their first reading.

    Raises:
        DataError: no readings.
    """
    go = need("plotly.graph_objects", "drawing cuts")
    table: dict[str, dict[str, Any]] = {}
    for r in readings:
        table.setdefault(r.mode, {})[f"{r.ranks} × {r.microbatches}"] = r
    if not table:
        raise DataError("no readings to draw; give those of several cuts")
    cuts = list(dict.fromkeys(cut for by_cut in table.values() for cut in by_cut))
    fig = figure(title, subtitle, height=560, margin={"r": 176, "t": 108})
    tops = {"": ([0.56, 1.0], "gradient norm over the exact one"), "2": ([0.0, 0.42], "1 − cosine to the exact one")}
    for suffix, (domain, words) in tops.items():
        fig.update_layout({
            f"xaxis{suffix}": {"type": "category", "categoryarray": cuts, "categoryorder": "array",
                               "anchor": f"y{suffix}", "title": "ranks × microbatches of each" if suffix else None},
            f"yaxis{suffix}": {"domain": domain, "anchor": f"x{suffix}"},
        })  # fmt: skip
        fig.add_annotation(x=0, xref="paper", y=domain[1], yref="paper", yanchor="bottom", yshift=6, xanchor="left",
                           text=f"<b>{words}</b>", showarrow=False, font={"size": SIZE["label"]})  # fmt: skip
    ratios, turns = [], []
    for colour, (mode, by_cut) in zip(_palette(len(table)), table.items()):
        ratio = [by_cut[c].norm_ratio if c in by_cut else None for c in cuts]
        turn = [max(1 - by_cut[c].cosine, FLOOR) if c in by_cut else None for c in cuts]
        for suffix, values, kept in (("", ratio, ratios), ("2", turn, turns)):
            fig.add_trace(go.Scatter(x=cuts, y=values, name=mode, mode="lines+markers", xaxis=f"x{suffix}",
                                     yaxis=f"y{suffix}", line={"color": colour, "width": 2},
                                     marker={"size": 7}, cliponaxis=False))  # fmt: skip
            kept.append((values[-1], mode, colour))
    known = [v for t in fig.data[::2] for v in t.y if v is not None]
    low, high = min(0.0, *known), 1.08 * max(known)
    fig.update_layout(yaxis={"range": [low, high]},
                      yaxis2={"type": "log", "range": [math.log10(FLOOR) - 0.3, 0.35],
                              "tickvals": [1e-6, 1e-4, 1e-2, 1], "ticktext": ["10⁻⁶", "10⁻⁴", "10⁻²", "1"]},
                      )  # fmt: skip
    end_labels(fig, [(v, m, c) for v, m, c in ratios], low, high)
    logs = [(math.log10(v) if v else math.log10(FLOOR), m, c) for v, m, c in turns]
    end_labels(fig, logs, math.log10(FLOOR) - 0.3, 0.35, axis="2")
    return fig


def filter_bias(
    readings: Mapping[int, Sequence[Any]],
    *,
    title: str = "What the filter removes, the loss loses",
    subtitle: str = "Points: measured. Lines: U / (U + removed × (T − 1))",
) -> go.Figure:
    """Reported over exact loss against removed instances, for `kept_plus_filtered`; one line for each row length.

    Args:
        readings: T -> readings with more and more removed instances.

    Raises:
        DataError: no readings.
    """
    go = need("plotly.graph_objects", "drawing the filter's bias")
    if not any(readings.values()):
        raise DataError("no readings to draw; give row length T -> readings with 0, 1, 2, ... removed instances")
    fig = figure(title, subtitle, height=380, margin={"r": 120})
    labels = []
    for colour, (length, series) in zip(_palette(len(readings)), readings.items()):
        x = [r.removed for r in series]
        formula = [r.supervised / (r.supervised + r.removed * (length - 1)) for r in series]
        measured = [r.loss / r.exact_loss for r in series]
        line = {"color": colour, "width": 2}
        fig.add_trace(go.Scatter(x=x, y=formula, name=f"T = {length}, formula", mode="lines", line=line))
        fig.add_trace(go.Scatter(x=x, y=measured, name=f"T = {length}, measured", mode="markers", cliponaxis=False,
                                 marker={"size": 8, "color": colour}))  # fmt: skip
        labels.append((measured[-1], f"T = {length}: {measured[-1]:.2f}", colour))
    fig.update_xaxes(title="instances removed", dtick=1)
    fig.update_yaxes(title="reported loss / exact loss", range=[0, 1.06])
    end_labels(fig, labels, 0.0, 1.06)
    return fig


def _palette(count: int) -> list[str]:
    return [(*SERIES, MUTED)[i % (len(SERIES) + 1)] for i in range(count)]
