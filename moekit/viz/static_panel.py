"""The static twin, one pair of axes: its traces, and categories, ranges and ticks by plotly's habits."""

import html
import re
from typing import Any

import numpy as np

from .theme import DIVERGING, FONTS, GRID, INK, MUTED, PAPER, RULE, SIZE, number

PX = 0.75  # points in a pixel at 96 pixels to the inch
DASH = {"dash": (0, (5, 3)), "dot": (0, (1, 2)), "dashdot": (0, (5, 2, 1, 2))}


def style() -> dict[str, Any]:
    """matplotlib's settings for the kit's look; they must hold while a figure is made and while it is drawn."""
    from matplotlib.font_manager import fontManager

    have = set(fontManager.get_font_names())
    ticks = {"major.size": 0, "major.pad": 5, "labelcolor": MUTED, "labelsize": SIZE["tick"] * PX}
    return {
        "font.family": [*[name for name in FONTS[:-1] if name in have][:1], FONTS[-1]], "font.size": SIZE["tick"] * PX,
        "svg.hashsalt": "moekit", "svg.fonttype": "path", "figure.facecolor": PAPER, "axes.facecolor": "none",
        "axes.edgecolor": RULE, "axes.linewidth": PX, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": PX,
        "axes.labelcolor": MUTED, "axes.labelsize": SIZE["axis"] * PX, "axes.labelpad": 6, "legend.frameon": False,
        **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
        **{f"{axis}tick.{name}": value for axis in "xy" for name, value in ticks.items()},
    }  # fmt: skip


class Panel:
    """One pair of axes: its matplotlib axes, its plotly axes and traces, and the order of its categories."""

    def __init__(self, ax: Any, axis: dict[str, Any], traces: list[Any], defaults: Any):
        self.ax, self.axis, self.traces, self.defaults = ax, axis, traces, defaults
        self.stack: dict[Any, float] = {}  # how high the stacked bars are so far
        self.whole = {"x": True, "y": True}  # whether all numbers of an axis are whole: then no tick at 2.5
        order = {name: () if a.categoryarray is None else a.categoryarray for name, a in axis.items()}
        self.categories = {name: {str(v): i for i, v in enumerate(values)} for name, values in order.items()}
        ax.set(**{f"{name}scale": "log" for name, a in axis.items() if a.type == "log"})

    def values(self, name: str, data: Any) -> np.ndarray:
        """Numbers of an axis: numeric data as they are, words as their place in order of appearance."""
        data = list(data)
        if self.axis[name].type == "category" or any(isinstance(v, str) for v in data):
            known = self.categories[name]
            return np.array([known.setdefault(str(v), len(known)) for v in data], dtype=float)
        found = np.array(data, dtype=float)
        self.whole[name] &= not (found[np.isfinite(found)] % 1).any()
        return found

    def points(self, trace: Any) -> tuple[np.ndarray, np.ndarray]:
        """x and y of a trace; where one is missing, 0, 1, 2, ..."""
        known = {name: self.values(name, trace[name]) for name in "xy" if trace[name] is not None}
        rest = np.arange(max(map(len, known.values()), default=0), dtype=float)
        return known.get("x", rest), known.get("y", rest)

    def scatter(self, trace: Any, colour: str) -> None:
        """Lines and markers."""
        (x, y), mode, marker = self.points(trace), trace.mode or "lines+markers", trace.marker
        line = trace.line.color or (marker.color if isinstance(marker.color, str) else None) or colour
        if "lines" in mode:
            width = 2.0 if trace.line.width is None else trace.line.width
            self.ax.plot(x, y, color=rgba(line), label=trace.name, alpha=trace.opacity, linewidth=width * PX,
                         clip_on="markers" not in mode, linestyle=DASH.get(trace.line.dash, "-"),
                         solid_joinstyle="round")  # fmt: skip
        if "markers" in mode:
            fill, shape = rgba(line if marker.color is None else marker.color), "x" if marker.symbol == "x" else "o"
            self.ax.scatter(x, y, c=fill, s=((marker.size or 6) * PX) ** 2, marker=shape, zorder=3, clip_on=False,
                            label=None if "lines" in mode else trace.name, alpha=trace.opacity)  # fmt: skip

    def bar(self, trace: Any, colour: str, layout: Any) -> None:
        """Bars: grouped, stacked or over each other, standing or lying."""
        (x, y), mode, lying = self.points(trace), layout.barmode or "group", trace.orientation == "h"
        place, size = (y, x) if lying else (x, y)
        step = np.diff(np.unique(place)).min(initial=np.inf)
        width = (1 - (0.2 if layout.bargap is None else layout.bargap)) * (step if np.isfinite(step) else 1.0)
        if mode == "group":
            same = [id(t) for t in self.traces if t.type == "bar"]
            width /= len(same)
            place = place + (same.index(id(trace)) - (len(same) - 1) / 2) * width
        base = 0.0 if trace.base is None else trace.base
        if trace.base is None and mode in ("stack", "relative"):
            keys = [(float(p), bool(s < 0)) for p, s in zip(place, size)]
            base = np.array([self.stack.get(key, 0.0) for key in keys])
            self.stack.update({key: b + np.nan_to_num(s) for key, b, s in zip(keys, base, size)})
        fill, edge = rgba(trace.marker.color or colour), trace.marker.line.width
        look = {"color": fill, "alpha": trace.opacity, "label": trace.name, "linewidth": (edge or 1) * PX}
        look |= {"edgecolor": fill, "linewidth": 0.7} if edge == 0 else {"edgecolor": PAPER}  # 0: no seam between
        thick = width if trace.width is None else trace.width
        draw, names = (self.ax.barh, ("height", "left")) if lying else (self.ax.bar, ("width", "bottom"))
        draw(place, size, **dict(zip(names, (thick, base))), **look)

    def heatmap(self, trace: Any) -> Any:
        """Cells, with text in them where asked. Returns the matplotlib mesh, for its colour bar."""
        from matplotlib.colors import LinearSegmentedColormap, Normalize

        z = np.array([list(row) for row in trace.z], dtype=float)
        x, y = (np.arange(n) if trace[a] is None else self.values(a, trace[a]) for a, n in zip("xy", z.shape[::-1]))
        low = np.nanmin(z) if trace.zmin is None else trace.zmin
        high = np.nanmax(z) if trace.zmax is None else trace.zmax
        stops = [(stop, rgba(c)) for stop, c in trace.colorscale or DIVERGING]
        colours = LinearSegmentedColormap.from_list("moekit", stops).with_extremes(bad=GRID)
        edges = [np.append(c - _half(c), c[-1:] + _half(c)) for c in (x, y)]
        line = {"edgecolors": PAPER if trace.xgap else "none", "linewidth": (trace.xgap or 0) * PX}
        mesh = self.ax.pcolormesh(*edges, z, cmap=colours, norm=Normalize(low, high), rasterized=z.size > 4096, **line)
        size = (trace.textfont.size or SIZE["tick"]) * PX
        for i, row in enumerate(trace.text if trace.text is not None and trace.texttemplate else ()):
            for j, text in enumerate(row):
                r, g, b, _ = colours(mesh.norm(z[i, j]))
                ink = INK if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.5 else PAPER  # whichever reads better
                self.ax.text(x[j], y[i], text, ha="center", va="center_baseline", color=ink, size=size)
        return mesh

    def finish(self) -> None:
        """Ranges, ticks, axis titles, grid and the base line, once all traces are drawn."""
        ax = self.ax
        for name, mpl in (("x", ax.xaxis), ("y", ax.yaxis)):
            axis, default = self.axis[name], self.defaults[f"{name}axis"].showgrid is not False
            self._ticks(name, mpl)
            self._limit(name)
            if axis.title.text:
                mpl.set_label_text(clean(axis.title.text)[0])
                if name == "y":  # as far left as there is room, whatever the width of the tick labels
                    mpl.set_label_coords(-54 / (ax.get_position().width * 96 * ax.figure.get_figwidth()), 0.5)
            if default if axis.showgrid is None else axis.showgrid:
                mpl.grid(True)
        ax.spines["bottom"].set_visible(self.axis["x"].showline is not False and bool(self.defaults.xaxis.showline))

    def _limit(self, name: str) -> None:
        axis, kinds = self.axis[name], {t.type for t in self.traces}
        get, put = (self.ax.get_xlim, self.ax.set_xlim) if name == "x" else (self.ax.get_ylim, self.ax.set_ylim)
        if name == "x" and kinds == {"scatter"} and axis.type != "log":  # lines reach both ends, marks stay inside
            self.ax.margins(x=0.03 if any("markers" in (t.mode or "") for t in self.traces) else 0)
        low, high = sorted(get())
        if axis.rangemode == "tozero":
            low, high = min(getattr(self.ax.dataLim, f"interval{name}")[0], 0.0), max(high, 0.0)
        if axis.range is not None and None not in axis.range:
            put([10.0**v for v in axis.range] if axis.type == "log" else axis.range)
            return
        if self.categories[name]:
            low, high = -0.5, len(self.categories[name]) - 0.5
        put((high, low) if axis.autorange == "reversed" else (low, high))

    def _ticks(self, name: str, mpl: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

        axis, known = self.axis[name], self.categories[name]
        if axis.tickvals is not None:
            words = axis.tickvals if axis.ticktext is None else axis.ticktext
            mpl.set_ticks(self.values(name, axis.tickvals), labels=[clean(str(w))[0] for w in words])
        elif known:
            mpl.set_ticks(list(known.values()), labels=[clean(w)[0] for w in known])
        else:
            if axis.type != "log":
                most = axis.nticks or (5 if name == "y" else 7)
                mpl.set_major_locator(MaxNLocator(most, integer=self.whole[name], steps=[1, 2, 5, 10]))
            mpl.set_major_formatter(
                FuncFormatter(lambda value, _: _tick(value, max(map(abs, mpl.get_view_interval()))))
            )
        mpl.set_minor_locator(NullLocator())
        side, (size, colour) = "bottom" if name == "x" else "left", (axis.tickfont.size, axis.tickfont.color)
        mpl.set_tick_params(labelsize=(size or SIZE["tick"]) * PX, labelcolor=colour or MUTED,
                            **{f"label{side}": axis.showticklabels is not False})  # fmt: skip


def _tick(value: float, most: float) -> str:
    text = f"{value / 1000:g}k" if 1e4 <= most < 1e6 and value else number(value)
    return text.replace("-", "−")


def rgba(colour: Any) -> Any:
    """matplotlib's form of a CSS colour, or of several."""
    if not isinstance(colour, str):
        return [rgba(c) for c in colour]
    found = re.fullmatch(r"rgba?\(([^)]*)\)", colour)
    parts = [float(p) for p in found[1].split(",")] if found else []
    return (*(p / 255 for p in parts[:3]), *parts[3:]) if found else colour


def _half(centre: np.ndarray) -> float:
    """Half of the distance between evenly spaced cells."""
    return (centre[1] - centre[0]) / 2 if len(centre) > 1 else 0.5


def clean(text: str) -> tuple[str, bool]:
    """Plotly's small HTML as plain text, and whether it began bold. Dollar signs are no mathematics here."""
    words = re.sub(r"<[^>]+>", "", re.sub(r"<br\s*/?>", "\n", text))
    return html.unescape(words).replace("$", r"\$"), text.startswith("<b>")
