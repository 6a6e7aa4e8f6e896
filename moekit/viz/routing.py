"""Where the router sent the tokens: expert load by layer, and how it moved.

Axis letters: L layers that route, E experts, C classes.

Load is a share of the balanced load: rows of an expert times E over the rows of its layer. 1 = even, E/K at most,
0 = a dead expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .series import counts, pick
from .theme import DIVERGING, MUTED, SERIES, SIZE, Figure, end_labels, figure, names_axis, note

INNER = 500  # pixels across the experts
SCOPE = {"all": "all tokens", "supervised": "supervised tokens"}


def balanced_share(count_LE: np.ndarray) -> np.ndarray:
    """Load of each expert as a multiple of its layer's balanced load, [L, E]; NaN for a layer without rows.

    >>> balanced_share(np.array([[3, 1], [0, 0]])).tolist()
    [[1.5, 0.5], [nan, nan]]
    """
    count_LE = np.asarray(count_LE, dtype=float)
    total_L = count_LE.sum(axis=1, keepdims=True)
    return np.divide(count_LE * count_LE.shape[1], total_L, out=np.full(count_LE.shape, np.nan), where=total_L > 0)


def load_heatmap(source: Any, step: int | None = None, scope: str = "all", *, title: str | None = None) -> Figure:
    """Expert load, layer by expert, on a diverging scale centred at the balanced load.

    The scale is logarithmic: half the balanced load is as far from even as twice. Dead experts are crossed out.

    Args:
        source: a Run, a run folder, its arrays of one step, or counts [L, E] or [L, C, E].
        step: the step to draw; None = the mean over the recorded steps.
        scope: "all" (every token, padding left out) or "supervised".

    Raises:
        DataError: no counts in `source`, or an unknown scope.
    """
    count_LE, layers, when = counts(source, step, scope)
    load_LE = balanced_share(count_LE)
    rows, experts = load_LE.shape
    names = [str(e) for e in range(experts)]
    height = min(max(30 * rows, 64), 560)
    how = "Rows of an expert over the balanced share of its layer: 1 = even, × = dead" + (f" · {when}" if when else "")
    size = {"height": height + 84 + 60, "margin": {"r": 148}, "hovermode": "closest"}
    fig = figure(title or f"Expert load, {SCOPE[scope]}", how, **size)
    words = np.where(load_LE == 0, "×", np.char.mod("%.1f", load_LE)) if experts <= INNER / 24 else None
    hover = "layer %{y}, expert %{x}<br>%{customdata:.3f} of the balanced load<extra></extra>"
    ratio_map(fig, load_LE, names, layers, words, 2, hover=hover, bar=1.105)
    if words is None:
        layer, expert = np.nonzero(load_LE == 0)
        cross = {"symbol": "x", "size": min(max(0.35 * INNER / experts, 3), 7), "color": "#FFFFFF"}
        fig.add_scatter(x=[names[e] for e in expert], y=[layers[i] for i in layer], mode="markers", marker=cross,
                        name="dead", hoverinfo="skip")  # fmt: skip
    every, many = math.ceil(24 * experts / INNER), math.ceil(18 * rows / height)  # labels that do not touch
    fig.update_xaxes(title="expert", type="category", showline=False, tickvals=names[::every])
    fig.update_yaxes(title="layer", tickvals=layers[::many], tickfont={"size": SIZE["tick"], "color": MUTED})
    for i in range(0, rows, many):
        most = np.nanmax(load_LE[i], initial=-np.inf)
        text = f"{most:.1f}×" if np.isfinite(most) else "–"
        note(fig, text, 1, 1 - (i + 0.5) / rows, shift=(8, 0), size=SIZE["tick"])
    note(fig, "max", 1, 1, stand="left bottom", shift=(8, 5), colour=MUTED, size=SIZE["tick"])
    return fig


def ratio_map(
    fig: Figure, ratio: np.ndarray, x: Sequence[Any], y: list[str], words: Any, reach: int, *, hover: str, bar: float
) -> None:
    """Cells coloured by the logarithm of a ratio: 1 is the middle of the scale, which ends at 2^-reach and 2^reach.

    Args:
        ratio: one row for each of `y`, from the top; NaN = a blank cell.
        words: the text of each cell; None = none.
        bar: where the colour bar stands, in paper units.
    """
    with np.errstate(divide="ignore"):
        z = np.clip(np.log2(ratio), -reach, reach)
    ticks = list(range(-reach, reach + 1))
    scale = ["⅛", "¼", "½", "1", "2", "4", "8"][3 - reach : 4 + reach]
    scale[0], scale[-1] = f"≤ {scale[0]}", f"≥ {scale[-1]}"
    fig.add_heatmap(
        z=[[None if np.isnan(v) else v for v in row] for row in z.tolist()], customdata=ratio.tolist(), x=x, y=y,
        zmin=-reach, zmax=reach, colorscale=DIVERGING, xgap=len(x) <= 64, ygap=len(y) <= 32, hovertemplate=hover,
        colorbar={"tickvals": ticks, "ticktext": scale, "thickness": 12, "x": bar, "len": 1, "outlinewidth": 0},
    )  # fmt: skip
    if words is not None:
        text = np.where(np.isnan(ratio), "", words).tolist()
        fig.update_traces(text=text, texttemplate="%{text}", textfont={"size": 11})
    fig.update_yaxes(names_axis(y))


def load_over_time(source: Any) -> Figure:
    """The busiest expert's load over the mean at every step, over all tokens and over supervised tokens; 1 = even.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns.

    Raises:
        DataError: the run has no such metric.
    """
    lines = {
        "load/max_over_mean": ("all tokens", SERIES[5]),
        "load_supervised/max_over_mean": ("supervised", SERIES[0]),
    }
    step, found = pick(source, *lines, optional=True)
    found = {name: series for name, series in found.items() if np.isfinite(series).any()}
    if not found:
        raise DataError("no metric load/max_over_mean in this run")
    fig = figure("Busiest expert over the mean", "Mean over layers, one point a step", height=340, margin={"r": 150})
    high = max(1.05, *(float(np.nanmax(series)) for series in found.values()))
    low, high = 1 - 0.05 * (high - 1), high + 0.05 * (high - 1)
    labels = [(1.0, "even", MUTED)]
    for name, series in found.items():
        label, colour = lines[name]
        fig.add_scatter(x=step, y=series, name=label, mode="lines", line={"color": colour, "width": 2})
        last = float(series[~np.isnan(series)][-1])
        labels.append((last, f"{label} {last:.2f}", colour))
    fig.add_shape(type="line", xref="x domain", x0=0, x1=1, yref="y", y0=1, y1=1,
                  line={"color": MUTED, "width": 1, "dash": "dot"})  # fmt: skip
    fig.update_yaxes(title="load, max / mean", range=[low, high])
    fig.update_xaxes(title="step")
    end_labels(fig, labels, low, high)
    return fig
