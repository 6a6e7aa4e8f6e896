"""What masking costs: routed work split by the class of the position it was done for.

Axis letters: C classes.

Supervised rows are the work that was asked for; context, filtered and padding rows are what it took. Everything is
given per supervised token, so that rows of different kinds and elisions can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import DataError
from .series import by_class, columns
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, end_labels, figure, need, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

BARS = 240  # more steps than this are drawn as means of neighbours


def routed_work(source: Any, *, title: str = "Routed work by class") -> go.Figure:
    """Expert rows of every step, stacked by the class of their position.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns with `rows/<class>`.

    Raises:
        DataError: no row counts in `source`.
    """
    go = need("plotly.graph_objects", "drawing routed work")
    step, rows = by_class(source)
    if not len(step):
        raise DataError("no step has row counts yet: nothing to draw")
    size = int(np.ceil(len(step) / BARS))
    cut = np.arange(0, len(step), size)
    mean = {name: np.add.reduceat(v, cut) / np.diff(np.append(cut, len(step))) for name, v in rows.items()}
    total = {name: float(v.sum()) for name, v in rows.items()}
    whole = sum(total.values()) or 1.0
    subtitle = "Expert rows that entered the matrix multiplication, forward pass, all layers"
    fig = figure(
        title,
        subtitle if size == 1 else f"{subtitle}; each bar is the mean of {size} steps",
        barmode="stack",
        bargap=0.0 if len(cut) > 60 else 0.12,
        margin={"r": 158},
    )
    top = float(sum(mean.values()).max()) or 1.0
    labels, level = [], 0.0
    for name in CLASSES:
        if not total[name]:
            continue
        fig.add_trace(
            go.Bar(x=step[cut].tolist(), y=mean[name].tolist(), name=name, marker={"color": CLASS[name],
                   "line": {"width": 0.5 if len(cut) <= 60 else 0}}, hovertemplate="%{y:,.0f}")
        )  # fmt: skip
        last = float(mean[name][-1])
        labels.append((level + last / 2, f"{name} {_percent(total[name] / whole)}", CLASS_TEXT[name]))
        level += last
    fig.update_yaxes(title="routed rows a step", range=[0, top * 1.04])
    fig.update_xaxes(title="step", range=[float(step[0]) - size / 2, float(step[-1]) + size / 2])
    end_labels(fig, labels, 0.0, top * 1.04)
    return fig


def per_supervised(source: Any, seconds: str = "time/step_s", bytes: str = "memory/saved_bytes") -> dict[str, float]:
    """Totals over the steps of a run, divided by its supervised tokens.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns (one number each will do).
        seconds, bytes: the metrics to divide; left out of the result where they were not recorded.

    Returns:
        rows/<class>, rows, and where recorded seconds and bytes, each per supervised token.

    Raises:
        DataError: no row counts, or no supervised token.

    >>> per_supervised({"rows/supervised": [8, 8], "rows/context": [24, 8], "tokens/supervised": [4, 4]})["rows"]
    6.0
    """
    found = columns(source)
    tokens = float(np.nansum(found.get("tokens/supervised", np.zeros(1))))
    if tokens <= 0:
        raise DataError("no supervised tokens were counted (tokens/supervised), so nothing can be given per such token")
    _, rows = by_class(found)
    out = {f"rows/{name}": float(values.sum()) / tokens for name, values in rows.items()}
    out["rows"] = sum(out.values())
    for name, metric in (("seconds", seconds), ("bytes", bytes)):
        if metric in found:
            out[name] = float(np.nansum(found[metric])) / tokens
    return out


def cost_bars(configurations: Mapping[str, Any], *, title: str = "What one supervised token costs") -> go.Figure:
    """Rows, saved bytes and seconds per supervised token, one line for each configuration.

    Args:
        configurations: name -> a Run, run folder, table of metrics, or a result of `per_supervised`.

    A panel is drawn for bytes and for seconds when at least one configuration recorded them.
    """
    go = need("plotly.graph_objects", "drawing costs")
    costs = {
        name: dict(c) if isinstance(c, Mapping) and "rows" in c else per_supervised(c)
        for name, c in configurations.items()
    }
    if not costs:
        raise DataError("no configuration to compare; give at least one name and run")
    panels = [("rows", "routed rows", 1.0, "")]
    for key, words, unit, factor in (("bytes", "saved activations", "kB", 1e-3), ("seconds", "time", "ms", 1e3)):
        if any(key in c for c in costs.values()):
            panels.append((key, words, factor, unit))
    names = list(costs)
    widest = max(len(n) for n in names)
    fig = figure(
        title,
        "Per supervised token; shorter is better",
        height=84 + 34 * len(names) + 92,
        barmode="stack",
        bargap=0.35,
        hovermode="closest",
        margin={"l": min(40 + 7 * widest, 260), "t": 112, "r": 40},
    )
    shares = [1.5] + [1.0] * (len(panels) - 1)
    gap = 0.09
    unit_width = (1 - gap * (len(panels) - 1)) / sum(shares)
    left = 0.0
    for index, (key, words, factor, unit) in enumerate(panels):
        suffix = "" if index == 0 else str(index + 1)
        right = left + shares[index] * unit_width
        most = max((c.get(key, 0.0) for c in costs.values()), default=1.0) * factor or 1.0
        layers = CLASSES if key == "rows" else (key,)
        for layer in layers:
            values = [c.get(f"rows/{layer}" if key == "rows" else key) for c in costs.values()]
            if key == "rows" and not any(values):
                continue
            colour = CLASS[layer] if key == "rows" else SERIES[5]
            fig.add_trace(go.Bar(y=names, x=[None if v is None else v * factor for v in values], orientation="h",
                                 name=layer if key == "rows" else f"{words}, {unit}", marker={"color": colour},
                                 xaxis=f"x{suffix}", yaxis=f"y{suffix}", hovertemplate="%{x:.4g}"))  # fmt: skip
        for name, c in costs.items():
            value = c.get(key)
            fig.add_annotation(
                x=(value or 0.0) * factor, xref=f"x{suffix}", y=name, yref=f"y{suffix}", xanchor="left", xshift=5,
                text="not recorded" if value is None else number(value * factor), showarrow=False,
                font={"size": SIZE["tick"], "color": MUTED if value is None else INK},
            )  # fmt: skip
        room = (right - left + gap) * (fig.layout.width - fig.layout.margin.l - fig.layout.margin.r)
        head = words + (f", {unit}" if unit else "")
        if 7.8 * len(head) > room:  # the names on the left took the width: the heading in two lines
            head = head.replace(" ", "<br>", 1)
        fig.add_annotation(x=left, xref="paper", y=1, yref="paper", yanchor="bottom", yshift=8, xanchor="left",
                           text=f"<b>{head}</b>", showarrow=False, align="left",
                           font={"size": SIZE["label"], "color": INK})  # fmt: skip
        fig.update_layout({
            f"xaxis{suffix}": {"domain": [left, right], "range": [0, most * 1.22], "showticklabels": False,
                               "anchor": f"y{suffix}", "showline": False},
            f"yaxis{suffix}": {"type": "category", "autorange": "reversed", "showgrid": False, "categoryarray": names,
                               "categoryorder": "array", "anchor": f"x{suffix}", "showticklabels": index == 0,
                               "tickfont": {"size": SIZE["label"], "color": INK}},
        })  # fmt: skip
        left = right + gap
    _class_key(fig, [n for n in CLASSES if any(c.get(f"rows/{n}") for c in costs.values())])
    return fig


def _class_key(fig: go.Figure, names: list[str]) -> None:
    """The classes' names in their colours, in one line below the panels."""
    at = 0.0
    for name in names:
        fig.add_annotation(x=0, xref="paper", xshift=at, y=0, yref="paper", yshift=-14, yanchor="top", xanchor="left",
                           text=f"<b>{name}</b>", showarrow=False, font={"size": SIZE["label"],
                           "color": CLASS_TEXT[name]})  # fmt: skip
        at += 8.2 * len(name) + 18


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"
