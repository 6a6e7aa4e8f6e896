"""The static twin, the traces: scatter, bar and heatmap as matplotlib draws them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .static_panel import PX, Panel, clean, readable, rgba
from .theme import DIVERGING, GRID, INK, MUTED, PAPER, SIZE, number

DASH = {"solid": "-", "dash": (0, (5, 3)), "dot": (0, (1, 2)), "dashdot": (0, (5, 2, 1, 2)), "longdash": (0, (9, 4))}
MARKER = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "x", "x-thin": "x", "triangle-up": "^"}
STEP = {"hv": "steps-post", "vh": "steps-pre", "hvh": "steps-mid"}


def scatter(panel: Panel, trace: Any, colour: str, font: Any) -> Any:
    """Lines, markers, steps, fills to zero and stacked areas, with text. Returns the artist for a legend."""
    y = panel.values("y", () if trace.y is None else trace.y)
    x = np.arange(len(y), dtype=float) if trace.x is None else panel.values("x", trace.x)
    mode = trace.mode or ("lines" if trace.stackgroup else "lines+markers")
    colour = trace.line.color or first(trace.marker.color) or colour
    step = STEP.get(trace.line.shape or "", "default")
    if trace.stackgroup:
        base = panel.stack.get(trace.stackgroup, np.zeros(len(y)))
        y = base + np.nan_to_num(y)
        panel.stack[trace.stackgroup] = y
        fill_step = None if step == "default" else step.removeprefix("steps-")
        panel.ax.fill_between(x, base, y, color=rgba(trace.fillcolor or colour), step=fill_step, lw=0)
    elif trace.fill == "tozeroy":
        panel.ax.fill_between(x, 0, y, color=rgba(trace.fillcolor or colour), lw=0)
    width = 2.0 if trace.line.width is None else trace.line.width
    marks = "markers" in mode
    if marks and not isinstance(trace.marker.color, (str, type(None))):  # one colour for each point
        marks, points = False, [rgba(c) for c in trace.marker.color]
        size = (float(first(trace.marker.size) or 6) * PX) ** 2
        panel.ax.scatter(x, y, s=size, c=points, zorder=3, clip_on=False)
    edge = trace.marker.line.color
    (drawn,) = panel.ax.plot(
        x,
        y,
        color=rgba(colour),
        alpha=trace.opacity,
        linestyle=DASH.get(trace.line.dash or "solid", "-") if "lines" in mode and width else "none",
        linewidth=width * PX,
        marker=MARKER.get(trace.marker.symbol or "circle", "o") if marks else "none",
        markersize=(first(trace.marker.size) or 6) * PX,
        markeredgecolor=rgba(edge) if edge else rgba(colour),
        drawstyle=step,
        solid_joinstyle="round",
        clip_on=not marks,
    )
    if "text" in mode and trace.text is not None:
        up, side = (trace.textposition or "middle center").split()
        for xi, yi, text in zip(x, y, per_item(trace.text, len(x))):
            write(panel.ax, xi, yi, text, side, up, font, trace.textfont, pad=6)
    return drawn


def bar(panel: Panel, trace: Any, colour: str, font: Any, mode: str, gap: float) -> Any:
    """Bars: grouped, stacked or over each other, standing or lying, with text. Returns the artist for a legend."""
    flat = trace.orientation == "h"
    along, across = ("y", "x") if flat else ("x", "y")
    place, size = panel.values(along, getattr(trace, along)), panel.values(across, getattr(trace, across))
    places = np.unique(place)
    width = np.full(len(place), (1 - gap) * (np.diff(places).min() if len(places) > 1 else 1.0))
    same = [t for t in panel.traces if t.type == "bar"]
    if mode == "group" and len(same) > 1:
        width = width / len(same)
        place = place + (next(i for i, t in enumerate(same) if t is trace) - (len(same) - 1) / 2) * width
    if trace.width is not None:
        width = np.broadcast_to(np.asarray(trace.width, float), place.shape)
    if trace.base is not None:
        base = np.broadcast_to(np.asarray(trace.base, float), size.shape)
    elif mode in ("stack", "relative"):
        keys = [("bar", float(p), bool(s < 0)) for p, s in zip(place, size)]
        base = np.array([panel.stack.get(key, 0.0) for key in keys])
        panel.stack.update({key: b + np.nan_to_num(s) for key, b, s in zip(keys, base, size)})
    else:
        base = np.zeros(len(place))
    colours = colour if trace.marker.color is None else trace.marker.color
    thick = trace.marker.line.width
    style = {
        "color": rgba(colours) if isinstance(colours, str) else [rgba(c) for c in colours],
        "edgecolor": rgba(trace.marker.line.color or PAPER) if thick != 0 else None,
        "linewidth": (1 if thick is None else thick) * PX if thick != 0 else 0.7,  # bars that touch: no seam between
        "alpha": trace.opacity,
    }
    style["edgecolor"] = style["edgecolor"] or style["color"]
    if flat:
        drawn = panel.ax.barh(place, size, height=width, left=base, **style)
    else:
        drawn = panel.ax.bar(place, size, width=width, bottom=base, **style)
    inside = trace.textposition == "inside"
    ink = None if not inside or not isinstance(colours, str) else readable(_rgb(colours))
    for p, s, b, text in zip(place, size, base, per_item(trace.text, len(place))):
        if text and math.isfinite(s):
            end = b + (s / 2 if inside else s)
            spot = (end, p, "center" if inside else "right", "middle") if flat else (
                p, end, "center", "middle" if inside else "top")  # fmt: skip
            write(panel.ax, spot[0], spot[1], text, spot[2], spot[3], font, trace.textfont, pad=5, colour=ink)
    return drawn[0] if len(drawn) else drawn


def heatmap(panel: Panel, trace: Any, font: Any) -> Any:
    """Cells, with text in them where asked. Returns the matplotlib mesh, for its colour bar."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    z = np.array([[np.nan if v is None else v for v in row] for row in trace.z], dtype=float)
    x = np.arange(z.shape[1], dtype=float) if trace.x is None else panel.values("x", trace.x)
    y = np.arange(z.shape[0], dtype=float) if trace.y is None else panel.values("y", trace.y)
    low = float(np.nanmin(z, initial=math.inf)) if trace.zmin is None else trace.zmin
    high = float(np.nanmax(z, initial=-math.inf)) if trace.zmax is None else trace.zmax
    if trace.zmid is not None and trace.zmin is None:
        reach = max(high - trace.zmid, trace.zmid - low)
        low, high = trace.zmid - reach, trace.zmid + reach
    stops = [(stop, rgba(c)) for stop, c in trace.colorscale or DIVERGING]
    colours = LinearSegmentedColormap.from_list("moekit", stops).with_extremes(bad=GRID)
    gap = float(trace.xgap or 0) * PX
    mesh = panel.ax.pcolormesh(
        edges(x), edges(y), z, cmap=colours, norm=Normalize(low, high), edgecolors=PAPER if gap else "none",
        linewidth=gap, rasterized=z.size > 4096,
    )  # fmt: skip
    if trace.text is not None and trace.texttemplate:
        for i, row in enumerate(trace.text):
            for j, text in enumerate(row):
                ink = readable(colours(mesh.norm(z[i, j]))) if math.isfinite(z[i, j]) else INK
                write(panel.ax, x[j], y[i], text or "", "center", "middle", font, trace.textfont, colour=ink)
    return mesh


def colour_bar(canvas: Any, mesh: Any, bar: Any, panel: Panel, left: float, width: float, height: float) -> None:
    """A colour bar right of a panel. `left` is a fraction of the figure; `width` and `height` its size in pixels."""
    box = panel.ax.get_position()
    tall = box.height * (1.0 if bar.len is None else bar.len)
    ax = canvas.figure.add_axes(
        (left + 6 / width, box.y0 + (box.height - tall) / 2, (bar.thickness or 14) / width, tall)
    )
    drawn = canvas.figure.colorbar(mesh, cax=ax)
    drawn.outline.set_visible(False)
    if bar.tickvals is not None:
        words = [number(v) for v in bar.tickvals] if bar.ticktext is None else bar.ticktext
        drawn.set_ticks(list(bar.tickvals), labels=[clean(w)[0] for w in words])
    ax.minorticks_off()
    ax.tick_params(length=0, pad=4)
    for label in ax.get_yticklabels():
        label.set_fontproperties(canvas.font(SIZE["tick"]))
        label.set_color(MUTED)
    if bar.title.text:
        above = 1 + 8 / (tall * height)
        ax.text(0, above, clean(bar.title.text)[0], transform=ax.transAxes, va="bottom", ha="left", color=MUTED,
                fontproperties=canvas.font(SIZE["tick"]))  # fmt: skip


def write(ax: Any, x: float, y: float, text: str, side: str, up: str, font: Any, style: Any, *, pad: float = 0,
          colour: str | None = None) -> None:  # fmt: skip
    """A label on a data point, standing on the named side of it."""
    if not text:
        return
    sign = {"right": 1, "left": -1, "top": 1, "bottom": -1}
    words, bold = clean(str(text))
    own = first(style.color)
    ax.annotate(words, (x, y), xytext=(sign.get(side, 0) * pad * PX, sign.get(up, 0) * pad * PX),
                textcoords="offset points", annotation_clip=False, zorder=4,
                ha={"right": "left", "left": "right"}.get(side, "center"),
                va={"top": "bottom", "bottom": "top"}.get(up, "center_baseline"),
                color=rgba(own) if own else colour or INK, fontproperties=font(first(style.size) or SIZE["tick"], bold),
                )  # fmt: skip


def first(value: Any) -> Any:
    """A setting that may be one value or one for each point."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value[0] if len(value) else None


def per_item(text: Any, count: int) -> list[str]:
    """One text for each point."""
    if text is None:
        return [""] * count
    return [text] * count if isinstance(text, str) else ["" if t is None else str(t) for t in text]


def edges(centre: np.ndarray) -> np.ndarray:
    """Cell borders half-way between centres.

    >>> edges(np.array([0.0, 1.0, 2.0])).tolist()
    [-0.5, 0.5, 1.5, 2.5]
    """
    if len(centre) < 2:
        return np.array([centre[0] - 0.5, centre[0] + 0.5]) if len(centre) else np.zeros(1)
    middle = (centre[1:] + centre[:-1]) / 2
    return np.concatenate([[2 * centre[0] - middle[0]], middle, [2 * centre[-1] - middle[-1]]])


def _rgb(colour: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return to_rgb(rgba(colour))
