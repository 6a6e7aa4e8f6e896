"""Metrics over steps: one small panel for each question, lines labelled by name and last value."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .series import pick
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, Figure, figure, note, number, tint

Panel = str | Sequence[str]  # one metric, or several that share an axis
DEFAULT: tuple[Panel, ...] = ("loss/sft", "rate/supervised_tokens_s", "load/max_over_mean")
POINTS = 2000  # more steps than this are thinned to the extremes of neighbours
PER = {"sft": "nats a token", "dpo": "nats a pair", "reward": "nats a pair"}  # of losses, by objective
GAP_X, GAP_Y, BELOW = 0.1, 74, 52  # between panels (share of the width, pixels), and below the last


def curves(source: Any, *panels: Panel, title: str = "", smooth: int = 1, columns: int | None = None) -> Figure:
    """Metrics over steps, one panel each; give a tuple of names to draw several in one panel.
    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns.
        panels: metric names; default: loss, supervised tokens a second, load.
        smooth: steps of a centred mean drawn over the raw line; 1 = the raw line only.
        columns: panels side by side; None = up to three.
    Raises DataError: a metric that was not recorded; names those that are close.
    >>> fig = curves({"step/index": [1, 2, 3], "loss/sft": [2.5, 1.25, 0.5]}, "loss/sft")
    >>> [list(t.y) for t in fig.data]
    [[2.5, 1.25, 0.5]]
    """
    panels = panels or DEFAULT
    data = [pick(source, *names(panel)) for panel in panels]
    subtitle = f"Bold: mean of {smooth} steps; thin: every step" if smooth > 1 else ""
    return draw(panels, data, title=title, subtitle=subtitle, smooth=smooth, columns=columns)


def unit(name: str) -> str:
    """The unit of a metric; empty for one that has none, or that its name does not tell.
    >>> [unit(name) for name in ("loss/sft", "eval/dpo", "eval/accuracy", "rows/dispatched")]
    ['nats a token', 'nats a pair', '', 'a step']
    """
    group, _, what = name.partition("/")
    return PER.get(what, "") if group in ("loss", "eval") else "a step" if group in ("rows", "tokens") else ""


def names(panel: Panel) -> tuple[str, ...]:
    """The metrics of one panel."""
    return (panel,) if isinstance(panel, str) else tuple(panel)


def draw(
    panels: Sequence[Panel], data: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]], *, title: str, subtitle: str,
    smooth: int = 1, columns: int | None = None,
) -> Figure:  # fmt: skip
    """The figure of `curves` from steps and values of each panel, thinned to about `POINTS`; metrics may be missing."""
    wide = columns or (2 if len(panels) == 4 else min(3, len(panels)))
    high = math.ceil(len(panels) / wide)
    top = 44 + 48 * bool(title) + 26 * bool(title and subtitle)
    each = {1: 230, 2: 170}.get(wide, 150)
    inner = high * each + (high - 1) * GAP_Y
    fig = figure(title, subtitle, height=top + inner + BELOW, margin={"t": top, "l": 56, "b": BELOW, "r": 24})
    share = (1 - GAP_X * (wide - 1)) / wide
    for i, (panel, (step, found)) in enumerate(zip(panels, data)):
        row, column = divmod(i, wide)
        suffix = str(i + 1) if i else ""
        left, bottom = column * (share + GAP_X), max(1 - (row * (each + GAP_Y) + each) / inner, 0.0)
        x = {"domain": [left, left + share], "anchor": f"y{suffix}", "nticks": 8 if wide == 1 else 5}
        x["title"] = "step" if i + wide >= len(panels) else None
        y = {"domain": [bottom, bottom + each / inner], "anchor": f"x{suffix}", "nticks": 5}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
        for k, name in enumerate(names(panel)):
            colour = CLASS.get(name.split("/")[-1], SERIES[k % len(SERIES)])
            _line(fig, suffix, name, colour, step, found.get(name, np.full(len(step), np.nan)), smooth)
        _head(fig, names(panel), found, left, bottom + each / inner)
    return fig


def _line(fig: Figure, suffix: str, name: str, colour: str, step: np.ndarray, value: np.ndarray, smooth: int) -> None:
    import pandas as pd

    known = np.flatnonzero(~np.isnan(value))
    sparse = len(known) < max(2, 0.5 * len(value))  # recorded now and then: points, and no mean over them
    keep = known if sparse else thin(value)
    axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
    if smooth > 1:
        raw, look = keep[: 0 if sparse else None], {"color": tint(colour, 0.3), "width": 1}
        fig.add_scatter(x=step[raw].tolist(), y=_gaps(value[raw]), name=f"{name}, every step", mode="lines",
                        hoverinfo="skip", line=look, **axes)  # fmt: skip
        if not sparse:
            value = pd.Series(value).rolling(smooth, center=True, min_periods=1).mean().to_numpy()
        name = f"{name}, mean of {smooth}"
    fig.add_scatter(x=step[keep].tolist(), y=_gaps(value[keep]), name=name, mode="lines+markers" if sparse else "lines",
                    line={"color": colour, "width": 2}, **axes)  # fmt: skip


def _head(fig: Figure, metrics: Sequence[str], found: dict[str, np.ndarray], left: float, top: float) -> None:
    """The heading of a panel: name and unit, then each line's last value in its colour."""
    groups, one = {name.split("/")[0] for name in metrics}, len(metrics) == 1
    group = metrics[0].split("/")[0]
    what = metrics[0] if one else group if len(groups) == 1 else ""
    per = {unit(name) for name in metrics}
    words = ", ".join(filter(None, (what, per.pop() if len(per) == 1 else "")))
    note(fig, words, left, top, stand="left bottom", shift=(0, 24), colour=MUTED, size=SIZE["tick"])
    at = 0.0
    for k, name in enumerate(metrics):
        words = "" if one else name.split("/", 1)[-1] if len(groups) == 1 else name
        known = found[name][~np.isnan(found[name])] if name in found else []
        text = f"{words}  {number(float(known[-1]))}".strip() if len(known) else words
        ink = CLASS_TEXT.get(name.split("/")[-1], INK if one else SERIES[k % len(SERIES)])
        size = 16 if one else SIZE["label"]
        note(fig, f"<b>{text}</b>", left, top, stand="left bottom", shift=(at, 5), colour=ink, size=size)
        at += 8.4 * len(text) + 18


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


def _gaps(values: np.ndarray) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]
