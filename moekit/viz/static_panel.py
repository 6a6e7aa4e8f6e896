"""The static twin, one pair of axes: categories, ranges and ticks by plotly's habits; small conversions."""

from __future__ import annotations

import html
import re
from functools import cache
from typing import Any

import numpy as np

from .theme import FONTS, GRID, INK, MUTED, PAPER, RULE, SIZE, number

PX = 0.75  # points in a pixel at 96 pixels to the inch
DASH = {"dash": (0, (5, 3)), "dot": (0, (1, 2)), "dashdot": (0, (5, 2, 1, 2))}


class Panel:
    """One pair of axes: its matplotlib axes, its plotly axes and traces, and the order of its categories."""

    def __init__(self, ax: Any, x: Any, y: Any, traces: list[Any], defaults: Any):
        self.ax, self.x, self.y, self.traces, self.defaults = ax, x, y, traces, defaults
        self.stack: dict[Any, float] = {}  # how high the stacked bars are so far
        self.whole = {"x": True, "y": True}  # whether all numbers of an axis are whole: then no tick at 2.5
        self.categories: dict[str, dict[str, int]] = {
            name: {str(v): i for i, v in enumerate(() if axis.categoryarray is None else axis.categoryarray)}
            for name, axis in (("x", x), ("y", y))
        }
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
        found = np.array([np.nan if v is None else v for v in data], dtype=float)
        self.whole[name] &= not (found[np.isfinite(found)] % 1).any()
        return found

    def finish(self) -> None:
        """Ranges, ticks, axis titles, grid and the base line, once all traces are drawn."""
        ax = self.ax
        for name, mpl in (("x", ax.xaxis), ("y", ax.yaxis)):
            axis = self.axis(name)
            self._ticks(name, mpl)
            (ax.set_xlim if name == "x" else ax.set_ylim)(*self._limits(name))
            if axis.title.text:
                mpl.set_label_text(clean(axis.title.text)[0], fontproperties=font(SIZE["axis"]), color=MUTED)
                mpl.labelpad = 6
                if name == "y":  # as far left as there is room, whatever the width of the tick labels
                    ax.yaxis.set_label_coords(-54 / (ax.get_position().width * 96 * ax.figure.get_figwidth()), 0.5)
            shown = self.setting(name, "showgrid") is not False
            mpl.grid(shown, **({"color": GRID, "linewidth": PX} if shown else {}))
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set(visible=self.setting("x", "showline") is True, color=RULE, linewidth=PX)

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
        elif name == "x" and kinds == {"scatter"} and axis.type != "log" and np.isfinite(least) and most > least:
            marks = any("markers" in (t.mode or "") for t in self.traces)
            slack = 0.03 * (most - least) if marks else 0.0
            low, high = least - slack, most + slack
        return [high, low] if axis.autorange == "reversed" else [low, high]

    def _ticks(self, name: str, mpl: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

        axis, known = self.axis(name), self.categories[name]
        if axis.tickvals is not None:
            words = axis.tickvals if axis.ticktext is None else axis.ticktext
            mpl.set_ticks(self.values(name, axis.tickvals), labels=[clean(str(w))[0] for w in words])
        elif known:
            mpl.set_ticks(list(known.values()), labels=[clean(w)[0] for w in known])
        else:
            if axis.type != "log":
                most = axis.nticks or (5 if name == "y" else 7)
                mpl.set_major_locator(MaxNLocator(most, integer=self.whole[name], steps=[1, 2, 5, 10]))
            mpl.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, max(map(abs, self._limits(name))))))
        mpl.set_minor_locator(NullLocator())
        mpl.set_tick_params(length=0, pad=5, **{f"label{'bottom' if name == 'x' else 'left'}": axis.showticklabels
                                                is not False})  # fmt: skip
        for label in mpl.get_ticklabels():
            label.set(fontproperties=font(axis.tickfont.size or SIZE["tick"]), color=axis.tickfont.color or MUTED)


def _tick(value: float, most: float) -> str:
    text = f"{value / 1000:g}k" if 1e4 <= most < 1e6 and value else number(value)
    return text.replace("-", "−")


def font(size: float, bold: bool = False) -> Any:
    """The kit's typeface at a size in pixels."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=list(_families()), size=size * PX, weight="bold" if bold else "normal")


@cache
def _families() -> tuple[str, ...]:
    from matplotlib.font_manager import fontManager

    have = set(fontManager.get_font_names())
    return (*[name for name in FONTS[:-1] if name in have][:1], FONTS[-1])


def rgba(colour: Any) -> Any:
    """matplotlib's form of a CSS colour, or of several."""
    if not isinstance(colour, str):
        return [rgba(c) for c in colour]
    found = re.fullmatch(r"rgba?\(([^)]*)\)", colour)
    if not found:
        return colour
    parts = [float(p) for p in found[1].split(",")]
    return (*(p / 255 for p in parts[:3]), *parts[3:])


def readable(colour: tuple[float, ...]) -> str:
    """Dark or white ink, whichever reads better on a colour."""
    return INK if 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2] > 0.5 else PAPER


def clean(text: str) -> tuple[str, bool]:
    """Plotly's small HTML as plain text, and whether it began bold. Dollar signs are no mathematics here."""
    words = re.sub(r"<[^>]+>", "", re.sub(r"<br\s*/?>", "\n", text))
    return html.unescape(words).replace("$", r"\$"), text.startswith("<b>")
