"""What masking costs: routed work split by the class of the position it was done for.

Supervised rows are the work that was asked for; context, filtered and padding rows are what it took. Everything is
given per supervised token, so that rows of different kinds and elisions can be laid side by side."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import DataError
from . import theme
from .series import by_class, columns
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, Figure, end_labels, figure, names_axis, note, number

BARS = 240  # more steps than this are drawn as means of neighbours
PANELS = (("rows", "routed rows", 1.0), ("bytes", "saved activations, kB", 1e-3), ("seconds", "time, ms", 1e3))
GAP = 0.09  # between panels, as a share of the width
USEFUL, ROUTED = "rate/supervised_tokens_s", "rate/routed_rows_s"
SHADE = (0.35, 1.0)  # tints of a line's first and last point


def routed_work(source: Any) -> Figure:
    """Expert rows of every step, stacked by the class of their position.
    Args: `source`: a Run, a run folder, a DataFrame or a dictionary of columns with `rows/<class>`.
    Raises DataError: no row counts in `source`."""
    step, rows = by_class(source)
    if not len(step):
        raise DataError("no step has row counts yet: nothing to draw")
    total = {name: float(v.sum()) for name, v in rows.items() if v.any()}
    layers = {}
    for name, share in ((name, rows_of_class / sum(total.values())) for name, rows_of_class in total.items()):
        words = f"{name} {100 * share:.0f} %" if share >= 0.01 else f"{name} < 1 %"
        layers[name] = (CLASS[name], CLASS_TEXT[name], rows[name], words)
    size = math.ceil(len(step) / BARS)
    how = f"; each bar is the mean of {size} steps" if size > 1 else ""
    fig = figure("Routed work by class", f"Expert rows of the forward pass, all layers{how}", barmode="stack",
                 margin={"r": 158})  # fmt: skip
    stack(fig, step, layers)
    return fig.update_layout(yaxis_title="routed rows a step", xaxis_title="step")


def stack(
    fig: Figure, step: np.ndarray, layers: Mapping[str, tuple[str, str, np.ndarray, str]], *, bars: int = BARS,
    axis: str = "", right: float = 1.0,
) -> None:  # fmt: skip
    """Stacked bars in a panel, means of neighbours where there are more than `bars` steps, labelled at the last one.
    Args:
        layers: name -> colour, colour to write with, values [S], label; from below.
        axis, right: suffix of the panel's axes, and its right edge in paper units.
    """
    size = math.ceil(len(step) / bars)
    cut = np.arange(0, len(step), size or 1)
    labels, level, total, many = [], 0.0, np.zeros(len(cut)), len(cut) > 60
    for name, (colour, ink, values, words) in layers.items():
        mean = np.add.reduceat(values, cut) / np.diff(np.append(cut, len(step))) if len(cut) else np.zeros(0)
        edge = {"width": 0 if many else 0.5, "color": theme.PAPER}
        look, at = {"color": colour, "line": edge}, {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        fig.add_bar(x=step[cut].tolist(), y=mean.tolist(), name=name, marker=look, hovertemplate="%{y:,.0f}", **at)
        total += mean
        last = float(mean[-1]) if len(cut) else 0.0
        labels.append((level + last / 2, words, ink))
        level += last
    top = 1.04 * (float(total.max(initial=0.0)) or 1.0)
    ends = [float(step[0]) - size / 2, float(step[-1]) + size / 2] if len(cut) else [-0.5, 0.5]
    fig.update_layout({"bargap": 0.0 if many else 0.12, f"yaxis{axis}.range": [0, top], f"xaxis{axis}.range": ends})
    end_labels(fig, labels, 0.0, top, axis=axis, x=right)


def per_supervised(source: Any) -> dict[str, float]:
    """Totals over the steps of a run, divided by its supervised tokens.
    Args: `source`: a Run, a run folder, a DataFrame or a dictionary of columns (one number each will do).
    Returns: rows/<class>, rows, and where recorded seconds (of steps) and bytes (of saved activations).
    Raises DataError: no row counts, or no supervised token.
    >>> per_supervised({"rows/supervised": [8, 8], "rows/context": [24, 8], "tokens/supervised": [4, 4]})["rows"]
    6.0
    """
    found = {name: float(np.nansum(values)) for name, values in columns(source).items()}
    tokens = found.get("tokens/supervised", 0.0)
    if tokens <= 0:
        raise DataError("no supervised tokens were counted (tokens/supervised), so nothing can be given per such token")
    out = {f"rows/{name}": float(values.sum()) / tokens for name, values in by_class(source)[1].items()}
    also = {"seconds": "time/step_s", "bytes": "memory/saved_bytes"}
    return {**out, "rows": sum(out.values()), **{n: found[m] / tokens for n, m in also.items() if m in found}}


def cost_bars(configurations: Mapping[str, Any]) -> Figure:
    """Rows, saved bytes and seconds per supervised token, one line for each configuration.
    Args: `configurations`: name -> a Run, run folder, table of metrics, or a result of `per_supervised`. Bytes and
        seconds have a panel when at least one recorded them."""
    given = lambda c: dict(c) if isinstance(c, Mapping) and "rows" in c else per_supervised(c)
    costs = {name: given(c) for name, c in configurations.items()}
    if not costs:
        raise DataError("no configuration to compare; give at least one name and run")
    panels = [p for p in PANELS if any(p[0] in c for c in costs.values())]
    names = list(costs)
    margin = {"l": min(40 + 7 * max(map(len, names)), 260), "t": 112, "r": 40}
    look = {"height": 84 + 34 * len(names) + 92, "barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    fig = figure("What one supervised token costs", "Per supervised token; shorter is better", margin=margin, **look)
    unit_width = (1 - GAP * (len(panels) - 1)) / (len(panels) + 0.5)  # the first panel is half as wide again
    left = 0.0
    for index, (key, words, factor) in enumerate(panels):
        suffix = str(index + 1) if index else ""
        axes, right = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}, left + unit_width * (1 if index else 1.5)
        classes = {f"rows/{name}": (name, CLASS[name]) for name in CLASSES}
        layers = classes if key == "rows" else {key: (words, SERIES[5])}
        for layer, (label, colour) in layers.items():
            x = [c[layer] * factor if layer in c else None for c in costs.values()]
            if any(x):
                fig.add_bar(y=names, x=x, orientation="h", name=label, marker={"color": colour},
                            hovertemplate="%{x:.4g}", **axes)  # fmt: skip
        for name, c in costs.items():
            text, colour = (number(c[key] * factor), INK) if key in c else ("not recorded", MUTED)
            note(fig, text, c.get(key, 0.0) * factor, name, axes=(f"x{suffix}", f"y{suffix}"), shift=(5, 0),
                 colour=colour, size=SIZE["tick"])  # fmt: skip
        room = (right - left + GAP) * (fig.layout.width - margin["l"] - margin["r"])
        if 7.8 * len(words) > room:  # the names on the left took the width: the heading in two lines
            words = words.replace(" ", "<br>", 1)
        note(fig, f"<b>{words}</b>", left, 1, stand="left bottom", shift=(0, 8))
        most = max(c.get(key, 0.0) for c in costs.values()) * factor or 1.0
        x = {"domain": [left, right], "range": [0, most * 1.22], "showticklabels": False, "showline": False}
        y = {**names_axis(names), "anchor": f"x{suffix}", "showticklabels": index == 0}
        fig.update_layout({f"xaxis{suffix}": {**x, "anchor": f"y{suffix}"}, f"yaxis{suffix}": y})
        left = right + GAP
    at = 0.0
    for name in (n for n in CLASSES if any(c.get(f"rows/{n}") for c in costs.values())):  # the key, in one line below
        note(fig, f"<b>{name}</b>", 0, 0, stand="left top", shift=(at, -14), colour=CLASS_TEXT[name])
        at += 8.2 * len(name) + 18
    return fig


def two_rates(points: Mapping[tuple[str, str], Any]) -> Figure:
    """Supervised tokens/s over routed rows/s, one point for each configuration, joined into lines.
    Args:
        points: (line, point) -> a Run, run folder, table or dictionary of metrics; the median over steps is drawn.
            Points of a line go from light to dark in the order given.
    Raises DataError: no point, or one without the two rates (or with a rate of 0)."""
    rates = {key: _rates(key, source) for key, source in points.items()}
    if not rates:
        raise DataError("no configuration to compare; give at least one (line, point)")
    names = list(dict.fromkeys(line for line, _ in rates))
    shown = list(dict.fromkeys(point for _, point in rates))
    high_x, high_y = (1.12 * max(r[i] for r in rates.values()) for i in (0, 1))
    how = f"Light to dark: {', '.join(shown)}. Grey: routed rows for one supervised token"
    fig = figure("Routed rows are not supervised tokens", how, height=440, margin={"r": 176, "l": 84, "t": 96},
                 hovermode="closest")  # fmt: skip
    for slope in _slopes([x / y for x, y in rates.values()]):
        x = min(high_x, slope * high_y)
        line = {"color": theme.GRID, "width": 1}
        fig.add_shape(type="line", x0=0, y0=0, x1=x, y1=x / slope, line=line, layer="below")
        stand, shift = ("center bottom", (0, 0)) if x < high_x else ("left middle", (6, 0))
        note(fig, f"{slope:g} rows each", x, x / slope, axes=("x", "y"), stand=stand, shift=shift, colour=MUTED,
             size=SIZE["tick"])  # fmt: skip
    ends = []
    for colour, name in zip(SERIES, names):
        line = {point: rates[name, point] for point in shown if (name, point) in rates}
        shades = [theme.tint(colour, share) for share in np.linspace(*SHADE, max(len(line), 2))[-len(line) :]]
        x, y = zip(*line.values())
        fig.add_scatter(x=x, y=y, name=name, mode="lines+markers", text=list(line), cliponaxis=False,
                        line={"color": theme.tint(colour, 0.5), "width": 1.5}, marker={"size": 12, "color": shades},
                        hovertemplate="%{text}: %{y:,.0f} of %{x:,.0f} rows/s")  # fmt: skip
        ends.append((x[-1], y[-1], f"<b>{name}</b> {number(y[-1])}"))
    pixels = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
    at = [y / high_y * pixels for _, y, _ in ends]
    for (x, y, words), before, after in zip(ends, at, theme.spread(at, 1.3 * SIZE["label"], 0.0, pixels)):
        room = x / high_x * (fig.layout.width - fig.layout.margin.l - fig.layout.margin.r)
        stand, right = ("right middle", -11) if room > 8 * len(words) - 45 else ("left middle", 11)  # 7 are marks
        note(fig, words, x, y, axes=("x", "y"), stand=stand, shift=(right, after - before))
    fig.update_xaxes(title="routed rows a second", range=[0, high_x])
    fig.update_yaxes(title="supervised tokens a second", range=[0, high_y])
    return fig


def _rates(key: tuple[str, str], source: Any) -> tuple[float, float]:
    found = columns(source)
    if missing := [name for name in (ROUTED, USEFUL) if name not in found]:
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
    known = np.array([float(f"{m}e{e}") for e in range(low, high + 1) for m in (1, 2, 5)])
    inside = known[known.searchsorted(min(ratios), "right") - 1 : known.searchsorted(max(ratios)) + 1]
    return inside[:: math.ceil(len(inside) / 6)].tolist()
