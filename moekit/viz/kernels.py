"""What decides the speed of a sparse layer, and what 8-bit operands cost: rows, tiles, blocks, bits.

Axis letters: E experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .theme import MUTED, SERIES, SIZE, Figure, end_labels, figure, names_axis, note, number

EDGE = 1.75  # 448 / 2^8, the mantissa of the largest E4M3 number
RULER = {"color": MUTED, "width": 1, "dash": "dot"}
MODES = {"floor": ("floor", SERIES[1]), "ceil": ("round up", SERIES[0])}


def crossover(rows: Sequence[float], rate: Sequence[float], share: float = 0.5, of: float | None = None) -> float:
    """Rows an expert at which a rate first reaches `share` of `of` (None = its largest), between points on a log axis.

    >>> round(crossover([1, 4, 16], [10, 30, 60]), 3), crossover([1, 4], [1, 2], of=100)
    (4.0, nan)
    """
    goal = share * (max(rate) if of is None else of)
    for i, value in enumerate(rate):
        if value >= goal:
            before = rate[i - 1] if i else value
            step = (goal - before) / (value - before) if value > before else 1.0
            low, high = math.log(rows[max(i - 1, 0)]), math.log(rows[i])
            return math.exp(low + step * (high - low))
    return math.nan


def rate_by_rows(rows: Sequence[int], rates: Mapping[str, Sequence[float]], *, subtitle: str = "") -> Figure:
    """GFLOP/s over rows per expert, one line a form; dotted: where the first reaches half of the last, the bound.
    Args: `rates`: form -> one rate for each of `rows`; the first is the layer in question, the last its bound.
    Raises DataError: no rates, or lengths differ."""
    if not rates or any(len(r) != len(rows) for r in rates.values()):
        raise DataError(f"rate_by_rows: every form needs a rate for each of {len(rows)} row counts")
    fig = figure("Speed by rows per expert", subtitle, height=400, margin={"r": 190})
    *forms, bound = rates.items()
    values = [v for rate in rates.values() for v in rate]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.12
    lines = [(name, rate, c, "solid") for c, (name, rate) in zip(SERIES, forms)] + [(*bound, MUTED, "dash")]
    for name, rate, colour, dash in lines:
        fig.add_scatter(x=list(rows), y=list(rate), name=name, marker={"size": 7, "color": colour},
                        line={"color": colour, "width": 2, "dash": dash})  # fmt: skip
    ends = [(math.log10(rate[-1]), f"{name} {rate[-1]:.3g}", colour) for name, rate, colour, _ in lines]
    at = crossover(rows, lines[0][1], of=max(bound[1]))
    if math.isfinite(at):
        fig.add_shape(type="line", x0=at, x1=at, y0=0, y1=1, yref="paper", line=RULER)
        note(fig, f"half of the bound: {at:.2g} rows", math.log10(at), 0, axes=("x", "paper"), stand="left bottom",
             shift=(6, 6), colour=MUTED)  # fmt: skip
    ticks = [m * 10**e for e in range(math.floor(low), math.ceil(high)) for m in (1, 3)]
    fig.update_xaxes(title="rows per expert", type="log", tickvals=list(rows), ticktext=list(map(number, rows)))
    fig.update_yaxes(title="GFLOP/s", type="log", range=[low, high], tickvals=ticks, ticktext=list(map(number, ticks)))
    end_labels(fig, ends, low, high)
    return fig


def skew_cost(
    skew: Sequence[float], waste: Mapping[str, Sequence[float]], time: Mapping[str, Sequence[float]]
) -> Figure:
    """Left: share of rows that only fill up tiles (exact). Right: time over that of even counts (measured).
    Args: `skew`: busiest expert over the mean, from even (1) up; `waste` (percent), `time`: name -> values for each.
    Raises DataError: lengths differ."""
    if any(len(v) != len(skew) for v in (*waste.values(), *time.values())):
        raise DataError(f"skew_cost: every series needs a value for each of {len(skew)} skews")
    fig = figure("What a skewed load costs", "The same rows in all, spread unevenly", height=380,
                 margin={"r": 130, "t": 112})  # fmt: skip
    panels = (("", (0.0, 0.37), waste, "rows for nothing, %", " %"), ("2", (0.65, 1.0), time, "time / even", ""))
    colours = dict(zip(dict.fromkeys((*waste, *time)), SERIES))
    for suffix, domain, table, words, unit in panels:
        low, high = (0.0, 1.1 * max(1.0, *map(max, table.values()))) if table else (0.0, 1.0)
        ends = []
        for name, values in table.items():
            look = {"line": {"color": colours[name], "width": 2}, "marker": {"size": 7}}
            fig.add_scatter(x=list(skew), y=list(values), name=f"{name}, {words}", **look, xaxis=f"x{suffix}",
                            yaxis=f"y{suffix}")  # fmt: skip
            ends.append((values[-1], f"{name}: {values[-1]:.{0 if unit else 2}f}{unit}", colours[name]))
        x = {"title": "busiest expert / mean", "domain": domain, "anchor": f"y{suffix}", "type": "log"}
        x |= {"tickvals": list(skew), "ticktext": [f"{s:.1f}" for s in skew]}
        y = {"range": [low, high], "anchor": f"x{suffix}"}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
        note(fig, f"<b>{words}</b>", domain[0], 1, stand="left bottom", shift=(0, 8))
        end_labels(fig, ends, low, high, axis=suffix, x=domain[1])
    return fig


def block_error(mantissa: Any, errors: Mapping[str, Any], *, bins: int = 16, subtitle: str = "") -> Figure:
    """Relative error of MXFP8 blocks over the mantissa of their largest entry, by how the scale was rounded.

    Below 1.75 both modes have one scale; above, "floor" saturates the largest entry and "ceil" takes twice the step.

    Args:
        mantissa: in [1, 2), one for each block.
        errors: "ceil" and "floor" -> norm of the error over that of the block, for each block.
    """
    m, fig = np.asarray(mantissa), figure("Error of a block of 32", subtitle, height=380, margin={"r": 150})
    at, ends, most = np.clip(((m - 1) * bins).astype(int), 0, bins - 1), [], 0.0
    few = np.linspace(0, len(m) - 1, min(len(m), 1500)).astype(int)
    for mode, (name, colour) in MODES.items():
        e = 100 * np.asarray(errors[mode])
        fig.add_scatter(x=m[few].tolist(), y=e[few].tolist(), mode="markers", opacity=0.25,
                        marker={"size": 3, "color": colour}, hoverinfo="skip")  # fmt: skip
        found = [b for b in range(bins) if (at == b).any()]
        middle = [float(np.median(e[at == b])) for b in found]
        fig.add_scatter(x=[1 + (b + 0.5) / bins for b in found], y=middle, name=name, mode="lines",
                        line={"color": colour, "width": 2.5})  # fmt: skip
        ends.append((middle[-1], f"{name} {middle[-1]:.1f} %", colour))
        most = max(most, 1.1 * float(e[few].max()))
    fig.add_shape(type="line", x0=EDGE, x1=EDGE, y0=0, y1=1, yref="paper", line=RULER)
    note(fig, "1.75 = 448 / 2⁸", EDGE, 0, axes=("x", "paper"), stand="right bottom", shift=(-6, 6), colour=MUTED)
    fig.update_xaxes(title="largest entry of the block / its power of two", range=[1, 2])
    fig.update_yaxes(title="error of the block, %", range=[0, most])
    end_labels(fig, ends, 0.0, most)
    return fig


def spread_by_kind(values: Mapping[str, Sequence[float]], *, title: str, unit: str, subtitle: str = "") -> Figure:
    """Repeated measurements of a few kinds: a dot each, the median as a large one with its number; one line a kind."""
    names, most = list(values), max(map(max, values.values()))
    fig = figure(title, subtitle, height=132 + 44 * len(names), margin={"l": 44 + 7 * max(map(len, names)), "r": 150},
                 hovermode="closest")  # fmt: skip
    middle = [float(np.median(found)) for found in values.values()]
    told = {"mode": "markers", "hovertemplate": f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>"}
    each = [(name, v) for name, found in values.items() for v in found]
    fig.add_scatter(x=[v for _, v in each], y=[name for name, _ in each], opacity=0.4, **told,
                    marker={"size": 7, "color": SERIES[4]})  # fmt: skip
    fig.add_scatter(x=middle, y=names, name=f"median, {unit}", marker={"size": 12, "color": SERIES[0]}, **told)
    for name, m in zip(names, middle):
        note(fig, f"{number(m)} {unit}, {m / middle[0]:.2f}×", 1, name, axes=("paper", "y"), shift=(12, 0))
    fig.update_xaxes(title=unit, range=[0, 1.05 * most])
    fig.update_yaxes(**names_axis(names), automargin=False)
    note(fig, "median, × the first", 1, 1, stand="left bottom", shift=(12, 4), colour=MUTED, size=SIZE["tick"])
    return fig
