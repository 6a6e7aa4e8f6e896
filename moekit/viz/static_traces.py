"""The static twin, the traces: scatter, bar and heatmap as matplotlib draws them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .static_panel import DASH, PX, Panel, font, readable, rgba
from .theme import DIVERGING, GRID, INK, PAPER, SIZE

MARKER = {"square": "s", "diamond": "D", "cross": "P", "x": "x", "triangle-up": "^"}


def scatter(panel: Panel, trace: Any, colour: str, layout: Any) -> None:
    """Lines and markers."""
    y = panel.values("y", () if trace.y is None else trace.y)
    x = np.arange(len(y), dtype=float) if trace.x is None else panel.values("x", trace.x)
    mode, size = trace.mode or "lines+markers", (trace.marker.size or 6) * PX
    line = trace.line.color or (trace.marker.color if isinstance(trace.marker.color, str) else None) or colour
    width = 2.0 if trace.line.width is None else trace.line.width
    if "lines" in mode:
        panel.ax.plot(
            x, y, color=rgba(line), linewidth=width * PX, linestyle=DASH.get(trace.line.dash, "-"),
            alpha=trace.opacity, label=trace.name, solid_joinstyle="round", clip_on="markers" not in mode,
        )  # fmt: skip
    if "markers" in mode:
        points = rgba(line if trace.marker.color is None else trace.marker.color)
        panel.ax.scatter(
            x, y, s=size**2, c=points, marker=MARKER.get(trace.marker.symbol, "o"), alpha=trace.opacity,
            label=None if "lines" in mode else trace.name, zorder=3, clip_on=False,
        )  # fmt: skip


def bar(panel: Panel, trace: Any, colour: str, layout: Any) -> None:
    """Bars: grouped, stacked or over each other, standing or lying."""
    flat, mode = trace.orientation == "h", layout.barmode or "group"
    along, across = ("y", "x") if flat else ("x", "y")
    place, size = panel.values(along, getattr(trace, along)), panel.values(across, getattr(trace, across))
    places = np.unique(place)
    step = np.diff(places).min() if len(places) > 1 else 1.0
    width = (1 - (0.2 if layout.bargap is None else layout.bargap)) * step
    same = [t for t in panel.traces if t.type == "bar"]
    if mode == "group" and len(same) > 1:
        width /= len(same)
        place = place + (next(i for i, t in enumerate(same) if t is trace) - (len(same) - 1) / 2) * width
    base = np.broadcast_to(np.asarray(0.0 if trace.base is None else trace.base, dtype=float), size.shape)
    if trace.base is None and mode in ("stack", "relative"):
        keys = [(float(p), bool(s < 0)) for p, s in zip(place, size)]
        base = np.array([panel.stack.get(key, 0.0) for key in keys])
        panel.stack.update({key: b + np.nan_to_num(s) for key, b, s in zip(keys, base, size)})
    fill = rgba(colour if trace.marker.color is None else trace.marker.color)
    edge = 1 if trace.marker.line.width is None else trace.marker.line.width
    look = {"color": fill, "alpha": trace.opacity, "label": trace.name, "linewidth": edge * PX or 0.7}
    look["edgecolor"] = PAPER if edge else fill  # bars that touch: no seam between
    thick = width if trace.width is None else trace.width
    if flat:
        panel.ax.barh(place, size, height=thick, left=base, **look)
    else:
        panel.ax.bar(place, size, width=thick, bottom=base, **look)


def heatmap(panel: Panel, trace: Any) -> Any:
    """Cells, with text in them where asked. Returns the matplotlib mesh, for its colour bar."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    z = np.array([[np.nan if v is None else v for v in row] for row in trace.z], dtype=float)
    x = np.arange(z.shape[1], dtype=float) if trace.x is None else panel.values("x", trace.x)
    y = np.arange(z.shape[0], dtype=float) if trace.y is None else panel.values("y", trace.y)
    low = float(np.nanmin(z, initial=math.inf)) if trace.zmin is None else trace.zmin
    high = float(np.nanmax(z, initial=-math.inf)) if trace.zmax is None else trace.zmax
    stops = [(stop, rgba(c)) for stop, c in trace.colorscale or DIVERGING]
    colours = LinearSegmentedColormap.from_list("moekit", stops).with_extremes(bad=GRID)
    gap = float(trace.xgap or 0) * PX
    mesh = panel.ax.pcolormesh(
        _edges(x), _edges(y), z, cmap=colours, norm=Normalize(low, high), edgecolors=PAPER if gap else "none",
        linewidth=gap, rasterized=z.size > 4096,
    )  # fmt: skip
    for i, row in enumerate(trace.text if trace.text is not None and trace.texttemplate else ()):
        for j, text in enumerate(row):
            ink = readable(colours(mesh.norm(z[i, j]))) if math.isfinite(z[i, j]) else INK
            panel.ax.text(x[j], y[i], text, ha="center", va="center_baseline", color=ink,
                          fontproperties=font(trace.textfont.size or SIZE["tick"]))  # fmt: skip
    return mesh


def _edges(centre: np.ndarray) -> np.ndarray:
    """Cell borders half-way between evenly spaced centres."""
    half = (centre[1] - centre[0]) / 2 if len(centre) > 1 else 0.5
    return np.append(centre - half, centre[-1:] + half)
