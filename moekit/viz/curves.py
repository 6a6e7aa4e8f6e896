"""Metrics over steps: one small panel for each question, lines labelled by name and last value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from .series import pick
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, WIDTH, figure, need, number, tint

if TYPE_CHECKING:
    import plotly.graph_objects as go

Panel = str | Sequence[str]  # one metric, or several that share an axis
DEFAULT: tuple[Panel, ...] = ("loss/sft", "rate/supervised_tokens_s", "load/max_over_mean")
POINTS = 2000  # more steps than this are thinned to the extremes of neighbours
UNITS = {"loss": "nats a token", "eval": "nats a token", "rows": "a step", "tokens": "a step"}


def curves(source: Any, *panels: Panel, title: str = "", smooth: int = 1, columns: int | None = None) -> go.Figure:
    """Metrics over steps, one panel each; give a tuple of names to draw several in one panel.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns.
        panels: metric names; default: loss, supervised tokens a second, load.
        smooth: steps of a centred mean drawn over the raw line; 1 = the raw line only.
        columns: panels side by side; None = up to three.

    Raises:
        DataError: a metric that was not recorded; names those that are close.

    >>> fig = curves({"step/index": [1, 2, 3], "loss/sft": [2.5, 1.25, 0.5]}, "loss/sft")
    >>> [list(t.y) for t in fig.data]
    [[2.5, 1.25, 0.5]]
    """
    panels = panels or DEFAULT
    data = [pick(source, *names(panel)) for panel in panels]
    fig = empty(panels, title=title, smooth=smooth, columns=columns)
    fill(fig, panels, data, smooth)
    return fig


def names(panel: Panel) -> tuple[str, ...]:
    """The metrics of one panel."""
    return (panel,) if isinstance(panel, str) else tuple(panel)


def empty(
    panels: Sequence[Panel], *, title: str = "", subtitle: str = "", smooth: int = 1, columns: int | None = None
) -> go.Figure:
    """The figure of `curves` without data; `fill` puts data in, as often as wanted."""
    go = need("plotly.graph_objects", "drawing metrics")
    wide = columns or (2 if len(panels) == 4 else min(3, len(panels)))
    high = math.ceil(len(panels) / wide)
    if smooth > 1:
        subtitle = subtitle or f"bold: mean of {smooth} steps; thin: every step"
    top = 44 + (48 if title else 0) + (26 if title and subtitle else 0)
    each = 230 if wide == 1 else 170 if wide == 2 else 150
    gap_y = 74
    height = top + high * each + (high - 1) * gap_y + 52
    width = WIDTH
    inner = height - top - 52
    fig = figure(title, subtitle if title else "",
                 height=height, width=width, margin={"t": top, "l": 56, "b": 52, "r": 24})  # fmt: skip
    gap_x = 0.0 if wide == 1 else 0.1
    share = (1 - gap_x * (wide - 1)) / wide
    for i, panel in enumerate(panels):
        row, column = divmod(i, wide)
        suffix = "" if i == 0 else str(i + 1)
        left = column * (share + gap_x)
        bottom = (inner - (row + 1) * each - row * gap_y) / inner
        fig.update_layout({
            f"xaxis{suffix}": {"domain": [left, left + share], "anchor": f"y{suffix}", "nticks": 8 if wide == 1 else 5,
                               "title": "step" if i + wide >= len(panels) else None},
            f"yaxis{suffix}": {"domain": [max(bottom, 0.0), bottom + each / inner], "anchor": f"x{suffix}",
                               "nticks": 5},
        })  # fmt: skip
        for k, name in enumerate(names(panel)):
            colour = _colour(name, k)
            axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            if smooth > 1:
                fig.add_trace(go.Scatter(x=[], y=[], name=f"{name}, every step", mode="lines", hoverinfo="skip",
                                         line={"color": tint(colour, 0.3), "width": 1}, **axes))  # fmt: skip
            label = name if smooth == 1 else f"{name}, mean of {smooth}"
            fig.add_trace(go.Scatter(x=[], y=[], name=label, mode="lines", line={"color": colour, "width": 2}, **axes))
        head(fig, i, names(panel), {}, left)
    return fig


def head(fig: go.Figure, index: int, metrics: Sequence[str], last: dict[str, float], left: float) -> None:
    """Write (or rewrite) the heading of a panel: name and unit, then each line's last value in its colour."""
    suffix = "" if index == 0 else str(index + 1)
    top = fig.layout[f"yaxis{suffix}"].domain[1]
    group, one = metrics[0].split("/")[0], len(metrics) == 1
    same = len({name.split("/")[0] for name in metrics}) == 1
    unit = ", ".join(part for part in (metrics[0] if one else group if same else "", UNITS.get(group, "")) if part)
    at = 0.0
    parts = [("unit", unit, MUTED, SIZE["tick"], 24)]
    for k, name in enumerate(metrics):
        value = f"  {number(last[name])}" if name in last else ""
        text = value.strip() if one else (name.split("/", 1)[-1] if same else name) + value
        parts.append((name, f"<b>{text}</b>", _ink(name, k), 16 if one else SIZE["label"], 5))
    for key, text, colour, size, shift in parts:
        note = {
            "name": f"{index}/{key}", "text": text, "x": left, "xref": "paper", "xanchor": "left", "y": top,
            "yref": "paper", "yanchor": "bottom", "yshift": shift, "xshift": 0 if key == "unit" else at,
            "showarrow": False, "font": {"color": colour, "size": size},
        }  # fmt: skip
        if key != "unit":
            at += 7.6 * len(text.removeprefix("<b>").removesuffix("</b>")) + 18
        known = [n for n in fig.layout.annotations if n.name == note["name"]]
        if known:
            known[0].update(text=note["text"], xshift=note["xshift"])
        else:
            fig.add_annotation(note)


def fill(fig: go.Figure, panels: Sequence[Panel], data: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]],
         smooth: int = 1) -> None:  # fmt: skip
    """Put steps and values into a figure of `empty`, thinned to about `POINTS`, with the exact last value written."""
    traces = iter(fig.data)
    for i, (panel, (step, found)) in enumerate(zip(panels, data)):
        last = {}
        for name in names(panel):
            value = found.get(name, np.zeros(0))
            keep = thin(value)
            known = value[~np.isnan(value)]
            if len(known):
                last[name] = float(known[-1])
            sparse = len(known) < max(2, 0.5 * len(value))  # recorded now and then: points, and no mean over them
            if sparse:
                keep = keep[~np.isnan(value[keep])]
            if smooth > 1:
                raw = next(traces)
                raw.x, raw.y = ([], []) if sparse else (step[keep].tolist(), _gaps(value[keep]))
                value = value if sparse else centred_mean(value, smooth)
            line = next(traces)
            line.x, line.y = step[keep].tolist() if len(value) else [], _gaps(value[keep])
            line.mode = "lines+markers" if sparse else "lines"
        suffix = "" if i == 0 else str(i + 1)
        head(fig, i, names(panel), last, fig.layout[f"xaxis{suffix}"].domain[0])


def thin(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Indices that keep a line's look: the extremes of each of most/2 pieces, the first and the last.

    >>> thin(np.array([0.0, 9.0, 1.0, 2.0, -5.0, 3.0]), most=4).tolist()
    [0, 1, 4, 5]
    """
    if len(values) <= most:
        return np.arange(len(values))
    cut = np.linspace(0, len(values), most // 2 + 1).astype(int)
    keep = {0, len(values) - 1}
    for a, b in pairwise(cut.tolist()):
        piece = values[a:b]
        if b > a and not np.isnan(piece).all():
            keep |= {a + int(np.nanargmin(piece)), a + int(np.nanargmax(piece))}
    return np.array(sorted(keep))


def centred_mean(values: np.ndarray, steps: int) -> np.ndarray:
    """Mean of the `steps` recorded values around every step; fewer at both ends.

    >>> centred_mean(np.array([1.0, 3.0, 5.0, 7.0]), 3).tolist()
    [2.0, 3.0, 5.0, 6.0]
    """
    known = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    count = np.concatenate([[0], np.cumsum(~np.isnan(values))])
    at = np.arange(len(values))
    start = np.maximum(at - (steps - 1) // 2, 0)
    end = np.minimum(at + steps // 2 + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (known[end] - known[start]) / (count[end] - count[start])


def _gaps(values: np.ndarray) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


def _colour(name: str, place: int) -> str:
    last = name.split("/")[-1]
    return CLASS[last] if last in CLASSES else SERIES[place % len(SERIES)]


def _ink(name: str, place: int) -> str:
    last = name.split("/")[-1]
    return CLASS_TEXT[last] if last in CLASSES else (SERIES[place % len(SERIES)] if place else INK)
