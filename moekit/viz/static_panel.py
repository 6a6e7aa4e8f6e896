"""The static twin, one pair of axes: categories, ranges and ticks by plotly's habits; small conversions."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from .theme import GRID, INK, MUTED, PAPER, RULE, SIZE, number

PX = 0.75  # points in a pixel at 96 pixels to the inch


class Panel:
    """One pair of axes: its matplotlib axes, its plotly axes and traces, and the order of its categories."""

    def __init__(self, ax: Any, x: Any, y: Any, traces: list[Any], defaults: Any):
        self.ax, self.x, self.y, self.traces, self.defaults = ax, x, y, traces, defaults
        self.stack: dict[Any, Any] = {}  # how high the stacked bars and areas are so far
        self.categories: dict[str, dict[str, int]] = {"x": {}, "y": {}}
        for name in "xy":
            order = self.axis(name).categoryarray
            for value in () if order is None else order:
                self.categories[name].setdefault(str(value), len(self.categories[name]))
        if x.type == "log":
            ax.set_xscale("log", nonpositive="mask")
        if y.type == "log":
            ax.set_yscale("log", nonpositive="clip")

    def axis(self, name: str) -> Any:
        """The plotly axis "x" or "y"."""
        return self.x if name == "x" else self.y

    def setting(self, name: str, key: str) -> Any:
        """A setting of an axis, or of the template's axis where the figure leaves it open."""
        own = getattr(self.axis(name), key)
        return own if own is not None else getattr(self.defaults[f"{name}axis"], key)

    def values(self, name: str, data: Any) -> np.ndarray:
        """Numbers of an axis: numeric data as they are, words as their place in order of appearance."""
        data = list(data)
        if self.axis(name).type == "category" or any(isinstance(v, str) for v in data):
            known = self.categories[name]
            return np.array([known.setdefault(str(v), len(known)) for v in data], dtype=float)
        return np.array([np.nan if v is None else v for v in data], dtype=float)

    def finish(self, font: Any) -> None:
        """Ranges, ticks, axis titles, grid and the base line, once all traces are drawn."""
        ax = self.ax
        for name, mpl in (("x", ax.xaxis), ("y", ax.yaxis)):
            axis = self.axis(name)
            self._ticks(name, mpl, font)
            (ax.set_xlim if name == "x" else ax.set_ylim)(*self._limits(name))
            if axis.title.text:
                label = ax.set_xlabel if name == "x" else ax.set_ylabel
                label(clean(axis.title.text)[0], fontproperties=font(SIZE["axis"]), color=MUTED, labelpad=6)
                if name == "y":  # as far left as there is room, whatever the width of the tick labels
                    ax.yaxis.set_label_coords(-54 / (ax.get_position().width * 96 * ax.figure.get_figwidth()), 0.5)
            shown = self.setting(name, "showgrid") is not False
            mpl.grid(shown, **({"color": GRID, "linewidth": PX} if shown else {}))
            mpl.set_visible(axis.visible is not False)
        ax.set_axisbelow(True)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_visible(self.setting("x", "showline") is True and self.x.visible is not False)
        ax.spines["bottom"].set_color(RULE)
        ax.spines["bottom"].set_linewidth(PX)

    def _limits(self, name: str) -> list[float]:
        axis, box = self.axis(name), self.ax.dataLim
        if axis.range is not None and None not in axis.range:
            return [10.0**v for v in axis.range] if axis.type == "log" else list(axis.range)
        low, high = sorted(self.ax.get_xlim() if name == "x" else self.ax.get_ylim())
        least, most = (box.x0, box.x1) if name == "x" else (box.y0, box.y1)
        kinds = {t.type for t in self.traces}
        if self.categories[name]:
            low, high = -0.5, len(self.categories[name]) - 0.5
        elif "heatmap" in kinds:
            low, high = least, most
        elif axis.rangemode == "tozero" and axis.type != "log":
            low, high = (0.0 if least >= 0 else low), (0.0 if most <= 0 else high)
        elif name == "x" and "bar" not in kinds and axis.type != "log" and math.isfinite(least) and most > least:
            marks = any("markers" in (t.mode or "") for t in self.traces)
            slack = 0.03 * (most - least) if marks else 0.0
            low, high = least - slack, most + slack
        return [high, low] if axis.autorange == "reversed" else [low, high]

    def _ticks(self, name: str, mpl: Any, font: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

        axis, known = self.axis(name), self.categories[name]
        if axis.tickvals is not None:
            words = (
                axis.ticktext
                if axis.ticktext is not None
                else [v if isinstance(v, str) else number(v) for v in axis.tickvals]
            )
            mpl.set_ticks(self.values(name, axis.tickvals), labels=[clean(str(w))[0] for w in words])
        elif known:
            mpl.set_ticks(list(known.values()), labels=[clean(w)[0] for w in known])
        else:
            if axis.type != "log":
                most = axis.nticks or (5 if name == "y" else 7)
                mpl.set_major_locator(MaxNLocator(most, integer=self._whole(name), steps=[1, 2, 5, 10]))
            mpl.set_major_formatter(
                FuncFormatter(lambda value, _: _tick(value, axis, max(map(abs, self._limits(name)))))
            )
        mpl.set_minor_locator(NullLocator())
        if axis.showticklabels is False:
            mpl.set_major_formatter(NullFormatter())
        mpl.set_tick_params(length=0, pad=5)
        for label in mpl.get_ticklabels():
            label.set_fontproperties(font(axis.tickfont.size or SIZE["tick"]))
            label.set_color(axis.tickfont.color or MUTED)

    def _whole(self, name: str) -> bool:
        """Whether all numbers on an axis are whole, so that a tick at 2.5 would make no sense."""
        for trace in self.traces:
            if getattr(trace, name) is not None:
                values = self.values(name, getattr(trace, name))
                if not np.all(values[np.isfinite(values)] % 1 == 0):
                    return False
        return True


def _tick(value: float, axis: Any, most: float) -> str:
    form = (axis.tickformat or "").lstrip("~")
    if form.endswith("d"):
        text = format(round(value), form)
    elif form and form[-1] in "%feg":
        text = format(value, form)
    elif 1e4 <= most < 1e6 and value:
        text = f"{value / 1000:g}k"
    else:
        text = number(value)
    return f"{axis.tickprefix or ''}{text.replace('-', '−')}{axis.ticksuffix or ''}"


def rgba(colour: Any) -> Any:
    """matplotlib's form of a CSS colour."""
    found = re.fullmatch(r"rgba?\(([^)]*)\)", colour) if isinstance(colour, str) else None
    if not found:
        return colour
    parts = [float(p) for p in found[1].split(",")]
    return (*(p / 255 for p in parts[:3]), parts[3] if len(parts) > 3 else 1.0)


def readable(colour: tuple[float, ...]) -> str:
    """Dark or white ink, whichever reads better on a colour."""
    return INK if 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2] > 0.5 else PAPER


def clean(text: str) -> tuple[str, bool]:
    """Plotly's small HTML as plain text, and whether all of it was bold. Dollar signs are no mathematics here."""
    bold = bool(re.fullmatch(r"(<span[^>]*>)?<b>.*</b>(</span>)?", text, re.DOTALL))
    text = re.sub(r"<br\s*/?>", "\n", text)
    text = re.sub(r"<[^>]+>", "", text)
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", " "), ("&amp;", "&"), ("$", r"\$")):
        text = text.replace(entity, sign)
    return text, bold
