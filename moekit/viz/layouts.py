"""Layouts side by side: how far each is from one process, and what it sends."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError
from .theme import MUTED, SERIES, SIZE, WIDE, Figure, figure, names_axis, note

FLOOR = 1e-17  # smaller differences, and none, are drawn here
WORST = 10.0  # larger ones here
MARGINS = {"t": 104, "b": 56, "r": 24}


def layouts_figure(
    rows: Sequence[Mapping[str, Any]],
    tolerance: float = 1e-9,
    *,
    title: str | None = None,
    subtitle: str = "Left of the line: equal to one process but for the order of sums. In brackets: ranks",
) -> Figure:
    """Gradient difference of each layout on a log axis, with the tolerance as a line; beside it the bytes it sends.

    Args: `rows`: of a `LayoutReport`: layout, world, gradient, wire_bytes and problems.
    Raises DataError: no rows.
    """
    if not rows:
        raise DataError("no layouts to draw; give the rows of moekit.check_layouts()")
    bad = sum(bool(r["problems"]) for r in rows)
    title = title or (f"{bad} of {len(rows)} layouts differ" if bad else "One gradient in every layout")
    names = [f"{r['layout']} ({r['world']})" for r in rows]
    height = MARGINS["t"] + 22 * len(rows) + MARGINS["b"]
    fig = figure(title, subtitle, height=height, margin=MARGINS | {"l": 24 + 6.8 * max(map(len, names))}, width=WIDE,
                 hovermode="closest", bargap=0.35)  # fmt: skip
    at = [min(max(r["gradient"], FLOOR), WORST) for r in rows]
    colour = [SERIES[1] if r["problems"] else SERIES[0] for r in rows]
    told = [f"{r['gradient']:.1e}" + "".join(f"<br>{p}" for p in r["problems"]) for r in rows]
    fig.add_scatter(x=at, y=names, mode="markers", marker={"color": colour, "size": 9}, text=told, cliponaxis=False,
                    hovertemplate="%{y}: %{text}<extra></extra>", name="gradient difference")  # fmt: skip
    sent = [r["wire_bytes"] for r in rows]
    unit, word = next(u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(sent) >= u[0] or u[1] == "kB")
    fig.add_bar(x=[s / unit for s in sent], y=names, orientation="h", marker={"color": SERIES[4]}, xaxis="x2",
                yaxis="y2", name="bytes sent", hovertemplate=f"%{{y}}: %{{x:.4g}} {word}<extra></extra>")  # fmt: skip
    for s, name in zip(sent, names):
        note(fig, f"{s / unit:.3g}", s / unit, name, axes=("x2", "y2"), shift=(5, 0), colour=MUTED, size=SIZE["tick"])
    ticks = [1e-16, 1e-13, 1e-10, 1e-7, 1e-4, 0.1]
    words = ["10⁻¹⁶", "10⁻¹³", "10⁻¹⁰", "10⁻⁷", "10⁻⁴", "0.1"]
    axis = names_axis(names) | {"autorange": False, "range": [len(names) - 0.5, -0.5]}  # marks and bars at one height
    fig.update_layout(
        yaxis=axis, yaxis2=axis | {"anchor": "x2", "showticklabels": False},
        xaxis={"type": "log", "range": [-17.4, 1.2], "domain": [0, 0.56], "tickvals": ticks, "ticktext": words,
               "showgrid": True, "title": "largest difference of a gradient, relative"},
        xaxis2={"domain": [0.62, 1], "anchor": "y2", "title": f"sent by all ranks in a step, {word}",
                "range": [0, 1.18 * max(max(sent) / unit, 1e-9)]},
    )  # fmt: skip
    fig.add_shape(type="line", x0=tolerance, x1=tolerance, y0=0, y1=1, xref="x", yref="paper",
                  line={"color": MUTED, "width": 1.5, "dash": "dash"})  # fmt: skip
    share = 0.56 * (17.4 + math.log10(tolerance)) / 18.6
    note(fig, f"allowed: {tolerance:g}", share, 1, stand="center bottom", shift=(0, 4), colour=MUTED)
    return fig
