"""What masking costs: routed work split by the class of the position it was done for.

Axis letters: C classes.

Supervised rows are the work that was asked for; context, filtered and padding rows are what it took. Everything is
given per supervised token, so that rows of different kinds and elisions can be laid side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import DataError
from .series import by_class, columns
from .theme import CLASS, CLASS_TEXT, INK, MUTED, SERIES, SIZE, Figure, end_labels, figure, names_axis, note, number

BARS = 240  # more steps than this are drawn as means of neighbours
PANELS = (("rows", "routed rows", 1.0), ("bytes", "saved activations, kB", 1e-3), ("seconds", "time, ms", 1e3))
GAP = 0.09  # between panels, as a share of the width


def routed_work(source: Any, *, title: str = "Routed work by class") -> Figure:
    """Expert rows of every step, stacked by the class of their position.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns with `rows/<class>`.

    Raises:
        DataError: no row counts in `source`.
    """
    step, rows = by_class(source)
    if not len(step):
        raise DataError("no step has row counts yet: nothing to draw")
    size = math.ceil(len(step) / BARS)
    cut = np.arange(0, len(step), size)
    mean = {name: np.add.reduceat(v, cut) / np.diff(np.append(cut, len(step))) for name, v in rows.items()}
    total = {name: float(v.sum()) for name, v in rows.items() if v.any()}
    subtitle = "Expert rows of the forward pass, all layers"
    subtitle += f"; each bar is the mean of {size} steps" if size > 1 else ""
    many = len(cut) > 60
    fig = figure(title, subtitle, barmode="stack", bargap=0.0 if many else 0.12, margin={"r": 158})
    top = 1.04 * (float(sum(mean.values()).max()) or 1.0)
    labels, level = [], 0.0
    for name, rows_of_class in total.items():
        look = {"color": CLASS[name], "line": {"width": 0 if many else 0.5}}
        fig.add_bar(x=step[cut].tolist(), y=mean[name].tolist(), name=name, marker=look, hovertemplate="%{y:,.0f}")
        last, share = float(mean[name][-1]), rows_of_class / sum(total.values())
        words = f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"
        labels.append((level + last / 2, f"{name} {words}", CLASS_TEXT[name]))
        level += last
    fig.update_yaxes(title="routed rows a step", range=[0, top])
    fig.update_xaxes(title="step", range=[float(step[0]) - size / 2, float(step[-1]) + size / 2])
    end_labels(fig, labels, 0.0, top)
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


def cost_bars(configurations: Mapping[str, Any], *, title: str = "What one supervised token costs") -> Figure:
    """Rows, saved bytes and seconds per supervised token, one line for each configuration.

    Args:
        configurations: name -> a Run, run folder, table of metrics, or a result of `per_supervised`.

    A panel is drawn for bytes and for seconds when at least one configuration recorded them.
    """
    given = lambda c: isinstance(c, Mapping) and "rows" in c
    costs = {name: dict(c) if given(c) else per_supervised(c) for name, c in configurations.items()}
    if not costs:
        raise DataError("no configuration to compare; give at least one name and run")
    panels = [p for p in PANELS if any(p[0] in c for c in costs.values())]
    names = list(costs)
    margin = {"l": min(40 + 7 * max(map(len, names)), 260), "t": 112, "r": 40}
    look = {"height": 84 + 34 * len(names) + 92, "barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    fig = figure(title, "Per supervised token; shorter is better", margin=margin, **look)
    unit_width = (1 - GAP * (len(panels) - 1)) / (len(panels) + 0.5)  # the first panel is half as wide again
    left = 0.0
    for index, (key, words, factor) in enumerate(panels):
        suffix = str(index + 1) if index else ""
        axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        right = left + unit_width * (1 if index else 1.5)
        layers = (
            {f"rows/{name}": (name, CLASS[name]) for name in CLASSES} if key == "rows" else {key: (words, SERIES[5])}
        )
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
