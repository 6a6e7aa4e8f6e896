"""Metrics over steps: one small panel for each question, lines labelled by name and last value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .series import pick
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, Figure, figure, note, number, tint

Panel = str | Sequence[str]  # one metric, or several that share an axis
DEFAULT: tuple[Panel, ...] = ("loss/sft", "rate/supervised_tokens_s", "load/max_over_mean")
POINTS = 2000  # more steps than this are thinned to the extremes of neighbours
UNITS = {"loss": "nats a token", "eval": "nats a token", "rows": "a step", "tokens": "a step"}
GAP_X, GAP_Y, BELOW = 0.1, 74, 52  # between panels (share of the width, pixels), and below the last


def curves(source: Any, *panels: Panel, title: str = "", smooth: int = 1, columns: int | None = None) -> Figure:
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
    subtitle = f"bold: mean of {smooth} steps; thin: every step" if smooth > 1 else ""
    fig = empty(panels, title=title, subtitle=subtitle, smooth=smooth, columns=columns)
    fill(fig, panels, data, smooth)
    return fig


def names(panel: Panel) -> tuple[str, ...]:
    """The metrics of one panel."""
    return (panel,) if isinstance(panel, str) else tuple(panel)


def empty(
    panels: Sequence[Panel], *, title: str = "", subtitle: str = "", smooth: int = 1, columns: int | None = None
) -> Figure:
    """The figure of `curves` without data; `fill` puts data in, as often as wanted."""
    wide = columns or (2 if len(panels) == 4 else min(3, len(panels)))
    high = math.ceil(len(panels) / wide)
    top = 44 + 48 * bool(title) + 26 * bool(title and subtitle)
    each = {1: 230, 2: 170}.get(wide, 150)
    inner = high * each + (high - 1) * GAP_Y
    margin = {"t": top, "l": 56, "b": BELOW, "r": 24}
    fig = figure(title, subtitle, height=top + inner + BELOW, margin=margin)
    share = (1 - GAP_X * (wide - 1)) / wide
    for i, panel in enumerate(panels):
        row, column = divmod(i, wide)
        suffix = str(i + 1) if i else ""
        left, bottom = column * (share + GAP_X), 1 - (row * (each + GAP_Y) + each) / inner
        x = {"domain": [left, left + share], "anchor": f"y{suffix}", "nticks": 8 if wide == 1 else 5}
        y = {"domain": [max(bottom, 0.0), bottom + each / inner], "anchor": f"x{suffix}", "nticks": 5}
        x["title"] = "step" if i + wide >= len(panels) else None
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
        for k, name in enumerate(names(panel)):
            colour = CLASS.get(name.split("/")[-1], SERIES[k % len(SERIES)])
            look = {"mode": "lines", "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            if smooth > 1:
                thin_line = {"color": tint(colour, 0.3), "width": 1}
                fig.add_scatter(name=f"{name}, every step", hoverinfo="skip", line=thin_line, **look)
            label = name if smooth == 1 else f"{name}, mean of {smooth}"
            fig.add_scatter(name=label, line={"color": colour, "width": 2}, **look)
        head(fig, i, names(panel), {})
    return fig


def head(fig: Figure, index: int, metrics: Sequence[str], last: dict[str, float]) -> None:
    """Write (or rewrite) the heading of a panel: name and unit, then each line's last value in its colour."""
    suffix = str(index + 1) if index else ""
    left, top = fig.layout[f"xaxis{suffix}"].domain[0], fig.layout[f"yaxis{suffix}"].domain[1]
    groups, one = {name.split("/")[0] for name in metrics}, len(metrics) == 1
    group = metrics[0].split("/")[0]
    what = metrics[0] if one else group if len(groups) == 1 else ""
    parts = [(", ".join(filter(None, (what, UNITS.get(group)))), MUTED, SIZE["tick"], (0, 24))]
    at = 0.0
    for k, name in enumerate(metrics):
        words = "" if one else name.split("/", 1)[-1] if len(groups) == 1 else name
        text = f"{words}  {number(last[name])}".strip() if name in last else words
        ink = CLASS_TEXT.get(name.split("/")[-1], INK if one else SERIES[k % len(SERIES)])
        parts.append((f"<b>{text}</b>", ink, 16 if one else SIZE["label"], (at, 5)))
        at += 8.4 * len(text) + 18
    for k, (text, ink, size, shift) in enumerate(parts):
        known = [n for n in fig.layout.annotations if n.name == f"{index}/{k}"]
        if known:
            known[0].update(text=text, xshift=shift[0])
        else:
            note(fig, text, left, top, stand="left bottom", shift=shift, colour=ink, size=size, name=f"{index}/{k}")


def fill(
    fig: Figure, panels: Sequence[Panel], data: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]], smooth: int = 1
) -> None:
    """Put steps and values into a figure of `empty`, thinned to about `POINTS`, with the exact last value written."""
    import pandas as pd

    traces = iter(fig.data)
    for i, (panel, (step, found)) in enumerate(zip(panels, data)):
        last = {}
        for name in names(panel):
            value = found.get(name, np.full(len(step), np.nan))
            known = value[~np.isnan(value)]
            if len(known):
                last[name] = float(known[-1])
            sparse = len(known) < max(2, 0.5 * len(value))  # recorded now and then: points, and no mean over them
            keep = np.flatnonzero(~np.isnan(value)) if sparse else thin(value)
            if smooth > 1:
                _put(next(traces), step, value, keep[: 0 if sparse else None])
                mean = pd.Series(value).rolling(smooth, center=True, min_periods=1).mean()
                value = value if sparse else mean.to_numpy()
            line = next(traces)
            _put(line, step, value, keep)
            line.mode = "lines+markers" if sparse else "lines"
        head(fig, i, names(panel), last)


def thin(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Indices that keep a line's look: the extremes of each of most/2 pieces, the first and the last.

    >>> thin(np.array([0.0, 9.0, 1.0, 2.0, -5.0, 3.0]), most=4).tolist()
    [0, 1, 4, 5]
    """
    if len(values) <= most:
        return np.arange(len(values))
    pieces = np.array_split(np.arange(len(values)), most // 2)
    low = [piece[np.argmin(np.nan_to_num(values[piece], nan=np.inf))] for piece in pieces]
    high = [piece[np.argmax(np.nan_to_num(values[piece], nan=-np.inf))] for piece in pieces]
    return np.unique([0, *low, *high, len(values) - 1])


def _put(trace: Any, step: np.ndarray, value: np.ndarray, keep: np.ndarray) -> None:
    trace.x, trace.y = step[keep].tolist(), [v if math.isfinite(v) else None for v in value[keep].tolist()]
