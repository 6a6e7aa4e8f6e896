"""Supervised tokens a second against routed rows a second: two rates of one step that measure different work.

A step can look fast by either. What joins them is the number of routed rows that one supervised token took, the slope
of the lines through the origin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError
from .series import columns
from .theme import GRID, MUTED, SERIES, SIZE, Figure, figure, note, number, spread, tint

USEFUL, ROUTED = "rate/supervised_tokens_s", "rate/routed_rows_s"
SHADE = (0.35, 1.0)  # tints of a line's first and last point


def two_rates(
    points: Mapping[tuple[str, str], Any], *, title: str = "Routed rows are not supervised tokens", subtitle: str = ""
) -> Figure:
    """Supervised tokens/s over routed rows/s, one point for each configuration, joined into lines.

    Args:
        points: (line, point) -> a Run, run folder, table or dictionary of metrics; the median over steps is drawn.
            Points of a line go from light to dark in the order given.

    Raises:
        DataError: no point, or one without the two rates (or with a rate of 0).
    """
    rates = {key: _rates(key, source) for key, source in points.items()}
    if not rates:
        raise DataError("no configuration to compare; give at least one (line, point)")
    names = list(dict.fromkeys(line for line, _ in rates))
    shown = list(dict.fromkeys(point for _, point in rates))
    high_x, high_y = (1.12 * max(r[i] for r in rates.values()) for i in (0, 1))
    how = subtitle or f"Light to dark: {', '.join(shown)}. Grey: routed rows for one supervised token"
    fig = figure(title, how, height=440, margin={"r": 176, "l": 84, "t": 96}, hovermode="closest")
    for slope in _slopes([x / y for x, y in rates.values()]):
        x = min(high_x, slope * high_y)
        fig.add_shape(type="line", x0=0, y0=0, x1=x, y1=x / slope, line={"color": GRID, "width": 1}, layer="below")
        stand, shift = ("center bottom", (0, 0)) if x < high_x else ("left middle", (6, 0))
        note(fig, f"{slope:g} rows each", x, x / slope, axes=("x", "y"), stand=stand, shift=shift, colour=MUTED,
             size=SIZE["tick"])  # fmt: skip
    ends = []
    for colour, name in zip(SERIES, names):
        line = {point: rates[name, point] for point in shown if (name, point) in rates}
        shades = [tint(colour, share) for share in np.linspace(*SHADE, max(len(line), 2))[-len(line) :]]
        x, y = zip(*line.values())
        fig.add_scatter(x=x, y=y, name=name, mode="lines+markers", text=list(line), cliponaxis=False,
                        line={"color": tint(colour, 0.5), "width": 1.5}, marker={"size": 12, "color": shades},
                        hovertemplate="%{text}: %{y:,.0f} of %{x:,.0f} rows/s")  # fmt: skip
        ends.append((x[-1], y[-1], f"<b>{name}</b> {number(y[-1])}"))
    pixels = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
    at = [y / high_y * pixels for _, y, _ in ends]
    for (x, y, words), before, after in zip(ends, at, spread(at, 1.3 * SIZE["label"], 0.0, pixels)):
        note(fig, words, x, y, axes=("x", "y"), stand="right middle", shift=(-11, after - before))
    fig.update_xaxes(title="routed rows a second", range=[0, high_x])
    fig.update_yaxes(title="supervised tokens a second", range=[0, high_y])
    return fig


def _rates(key: tuple[str, str], source: Any) -> tuple[float, float]:
    found = columns(source)
    missing = [name for name in (ROUTED, USEFUL) if name not in found]
    if missing:
        raise DataError(f"{' · '.join(key)} has no metric {' and no '.join(missing)}")
    routed, useful = float(np.nanmedian(found[ROUTED])), float(np.nanmedian(found[USEFUL]))
    if not (routed > 0 and useful > 0):
        raise DataError(f"{' · '.join(key)}: {useful} supervised tokens/s and {routed} rows/s; both must be positive")
    return routed, useful


def _slopes(ratios: list[float]) -> list[float]:
    """Round numbers around the rows per supervised token that occur, at most six.

    >>> _slopes([16.2, 83.0])
    [10.0, 20.0, 50.0, 100.0]
    """
    low, high = math.floor(math.log10(min(ratios))), math.ceil(math.log10(max(ratios)))
    round_ones = [float(f"{m}e{e}") for e in range(low, high + 1) for m in (1, 2, 5)]
    below = max(v for v in round_ones if v <= min(ratios))
    above = min(v for v in round_ones if v >= max(ratios))
    inside = [v for v in round_ones if below <= v <= above]
    return inside[:: math.ceil(len(inside) / 6)]
