"""Where the router sent the tokens: expert load by layer, and how it moved.

Axis letters: L layers that route, E experts, C classes.

Load is a share of the balanced load: rows of an expert times E over the rows of its layer. 1 = even, E/K at most,
0 = a dead expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from .series import counts, pick
from .theme import DIVERGING, INK, MUTED, SERIES, SIZE, end_labels, figure, need, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

INNER = 500  # pixels across the experts
REACH = 2.0  # the colour scale ends at 2^-2 and 2^2 times the balanced load
SCOPE = {"all": "all tokens", "supervised": "supervised tokens"}


def balanced_share(count_LE: np.ndarray) -> np.ndarray:
    """Load of each expert as a multiple of its layer's balanced load, [L, E]; NaN for a layer without rows.

    >>> balanced_share(np.array([[3, 1], [0, 0]])).tolist()
    [[1.5, 0.5], [nan, nan]]
    """
    count_LE = np.asarray(count_LE, dtype=float)
    total_L = count_LE.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total_L > 0, count_LE * count_LE.shape[1] / total_L, np.nan)


def load_heatmap(source: Any, step: int | None = None, scope: str = "all", *, title: str | None = None) -> go.Figure:
    """Expert load, layer by expert, on a diverging scale centred at the balanced load.

    The scale is logarithmic: half the balanced load is as far from even as twice. Dead experts are crossed out.

    Args:
        source: a Run, a run folder, its arrays of one step, or counts [L, E] or [L, C, E].
        step: the step to draw; None = the mean over the recorded steps.
        scope: "all" (every token, padding left out) or "supervised".

    Raises:
        DataError: no counts in `source`, or an unknown scope.
    """
    go = need("plotly.graph_objects", "drawing expert load")
    count_LE, layers, when = counts(source, step, scope)
    load_LE = balanced_share(count_LE)
    rows, experts = load_LE.shape
    with np.errstate(divide="ignore"):
        colour_LE = np.clip(np.log2(load_LE), -REACH, REACH)
    cell = INNER / max(experts, 1)
    written = cell >= 24
    text = [[("×" if v == 0 else f"{v:.1f}") if np.isfinite(v) else "" for v in row] for row in load_LE]
    height = int(min(max(30 * rows, 64), 560))
    fig = figure(
        title or f"Expert load, {SCOPE[scope]}",
        "Rows of an expert over the balanced share of its layer: 1 = even, × = dead" + (f" · {when}" if when else ""),
        height=height + 84 + 60,
        margin={"r": 148},
        hovermode="closest",
    )
    ticks = [-2, -1, 0, 1, 2]
    fig.add_trace(
        go.Heatmap(
            z=[[None if np.isnan(v) else v for v in row] for row in colour_LE.tolist()],
            customdata=load_LE.tolist(),
            x=[str(e) for e in range(experts)],
            y=layers,
            text=text if written else None,
            texttemplate="%{text}" if written else None,
            textfont={"size": 11},
            zmin=-REACH,
            zmax=REACH,
            colorscale=DIVERGING,
            xgap=1 if experts <= 64 else 0,
            ygap=1 if rows <= 32 else 0,
            colorbar={
                "tickvals": ticks,
                "ticktext": ["≤ ¼", "½", "1", "2", "≥ 4"],
                "thickness": 12,
                "x": 1.105,
                "len": 1.0,
                "outlinewidth": 0,
            },
            hovertemplate="layer %{y}, expert %{x}<br>%{customdata:.3f} of the balanced load<extra></extra>",
        )
    )
    dead = np.argwhere(load_LE == 0)
    if len(dead) and not written:
        fig.add_trace(
            go.Scatter(
                x=[str(e) for _, e in dead],
                y=[layers[i] for i, _ in dead],
                mode="markers",
                marker={"symbol": "x", "size": min(max(cell * 0.35, 3), 7), "color": "#FFFFFF"},
                name="dead",
                hoverinfo="skip",
            )
        )
    every = max(1, int(np.ceil(experts / max(1, int(INNER / 24)))))
    fig.update_xaxes(
        title="expert", type="category", showline=False, tickvals=[str(e) for e in range(0, experts, every)]
    )
    many = max(1, int(np.ceil(rows / max(1, height // 18))))
    fig.update_yaxes(
        title="layer", type="category", autorange="reversed", showgrid=False, tickvals=layers[::many],
        categoryarray=layers, categoryorder="array",
    )  # fmt: skip
    for i in range(0, rows, many):
        most = np.nanmax(load_LE[i], initial=-np.inf)
        fig.add_annotation(
            x=1, xref="paper", xshift=8, xanchor="left", y=1 - (i + 0.5) / rows, yref="paper", yanchor="middle",
            showarrow=False, text=f"{most:.1f}×" if np.isfinite(most) else "–",
            font={"size": SIZE["tick"], "color": INK},
        )  # fmt: skip
    fig.add_annotation(x=1, xref="paper", xshift=8, xanchor="left", y=1, yref="paper", yanchor="bottom", yshift=5,
                       showarrow=False, text="max", font={"size": SIZE["tick"], "color": MUTED})  # fmt: skip
    return fig


def load_over_time(source: Any, quantity: str = "max_over_mean") -> go.Figure:
    """How even the expert load was at every step, over all tokens and over supervised tokens.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns.
        quantity: "max_over_mean" (1 = even), "entropy" or "dead_experts".

    Raises:
        DataError: the run has no such metric.
    """
    go = need("plotly.graph_objects", "drawing expert load")
    words = {
        "max_over_mean": ("Busiest expert over the mean", "load, max / mean"),
        "entropy": ("Entropy of the expert load", "entropy"),
        "dead_experts": ("Experts that received no row", "experts"),
    }
    if quantity not in words:
        raise DataError(f"quantity={quantity!r} is not one of {', '.join(words)}")
    names = {f"load/{quantity}": ("all tokens", SERIES[5]), f"load_supervised/{quantity}": ("supervised", SERIES[0])}
    step, found = pick(source, *names, optional=True)
    if not found:
        raise DataError(f"no metric load/{quantity} in this run")
    even = 1.0 if quantity == "max_over_mean" else None
    fig = figure(words[quantity][0], "Mean over layers, one point a step", height=340, margin={"r": 150})
    values = np.concatenate(list(found.values()))
    values = values[np.isfinite(values)]
    low = min(float(values.min(initial=np.inf)), even if even is not None else np.inf)
    high = max(float(values.max(initial=-np.inf)), low + 1e-9)
    low, high = (1.0 if even else max(0.0, low)) - 0.04 * (high - low), high + 0.06 * (high - low)
    labels = []
    for name, series in found.items():
        label, colour = names[name]
        fig.add_trace(go.Scatter(x=step.tolist(), y=series.tolist(), name=label, mode="lines",
                                 line={"color": colour, "width": 2}))  # fmt: skip
        last = series[np.isfinite(series)]
        if len(last):
            labels.append(
                (
                    float(last[-1]),
                    f"{label} {float(last[-1]):.2f}" if even else f"{label} {number(float(last[-1]))}",
                    colour,
                )
            )
    if even is not None:
        fig.add_shape(type="line", xref="x domain", x0=0, x1=1, yref="y", y0=even, y1=even,
                      line={"color": MUTED, "width": 1, "dash": "dot"})  # fmt: skip
        labels.append((even, "even", MUTED))
    fig.update_yaxes(title=words[quantity][1], range=[low, high])
    fig.update_xaxes(title="step")
    end_labels(fig, labels, low, high)
    return fig
