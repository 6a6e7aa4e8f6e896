"""Learner against engine: how large log-prob errors are, how much of them routing flips make, where choices flip."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DataError
from .denominators import POWER
from .theme import INK, SERIES, WIDE, Figure, figure, note

FLOOR = 1e-8  # smaller values are drawn here: rounding
POINTS = 200


def mismatch_figure(report: Any) -> Figure:
    """Distribution of |log-prob error| freely routed and with the engine's routes replayed; of router margins where the
    choice changed and where it did not; share of changed choices by layer.

    Args: `report`: a `moekit.rollout.mismatch.Mismatch` (anything with its tables `tokens`, `choices` and `layers`).
    Raises DataError: it holds no token.
    """
    t, c, by = report.tokens, report.choices, report.layers
    if not len(t):
        raise DataError("the report holds no token to draw")
    told, changed = report.summary(), c.changed.to_numpy(bool)
    gone = told["mismatch/vanishes_with_replay"]
    how = (f"{len(t):,} sampled tokens, mean error {told['mismatch/difference_abs']:.2g}; "
           f"{100 * told['mismatch/changed']:.2g} % of {len(c):,} choices differ")  # fmt: skip
    fig = figure(f"{100 * gone:.0f} % of the log-prob error vanishes with the engine's routes", how, width=WIDE,
                 height=400, margin={"t": 112, "b": 62}, hovermode="closest")  # fmt: skip
    panels = (
        ("", "% of tokens with a smaller error", "|log-prob learner − engine|", (0.0, 0.3),
         (("own routes", t.difference, SERIES[0]), ("engine's routes", t.arithmetic, SERIES[1]))),
        ("2", "% of choices with a smaller margin", "k-th above (k+1)-th router score", (0.38, 0.68),
         (("same choice", c.margin[~changed], SERIES[0]), ("changed", c.margin[changed], SERIES[1]))),
    )  # fmt: skip
    for suffix, head, title, domain, lines in panels:
        values = [np.sort(np.clip(np.abs(v.dropna()), FLOOR, None)) for _, v, _ in lines]
        ends = [np.log10(v[at]) for v in values if len(v) for at in (0, -1)] or [-1.0, 0.0]
        low, high = np.floor(min(ends)) - 0.1, np.ceil(max(ends)) + 0.1
        for row, ((name, _, colour), v) in enumerate(zip(lines, values)):
            share = np.linspace(0, 1, min(POINTS, len(v)))
            x, look = np.quantile(v, share) if len(v) else v, {"color": colour, "width": 2}
            fig.add_scatter(x=x, y=100 * share, name=name, mode="lines", line=look, xaxis=f"x{suffix}",
                            yaxis=f"y{suffix}")  # fmt: skip
            note(fig, name if len(v) else f"{name}: none", domain[0], 1, shift=(8 + 110 * row, 0), colour=colour,
                 stand="left bottom")  # fmt: skip
        powers = range(int(np.ceil(low)), int(high) + 1, 2)
        x = {"type": "log", "range": [low, high], "title": title, "domain": domain, "anchor": f"y{suffix}"}
        x |= {"tickvals": [10.0**e for e in powers], "ticktext": ["10" + str(e).translate(POWER) for e in powers]}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": {"range": [0, 101], "anchor": f"x{suffix}"}})
        note(fig, f"<b>{head}</b>", domain[0], 1, stand="left bottom", shift=(-40, 20), colour=INK)
    fig.add_bar(x=by.index.astype(str), y=100 * by.changed, name="changed", marker={"color": SERIES[1]}, xaxis="x3",
                yaxis="y3", hovertemplate="layer %{x}: %{y:.3g} %<extra></extra>")  # fmt: skip
    fig.update_layout(xaxis3={"title": "layer", "domain": [0.77, 1], "anchor": "y3", "type": "category"},
                      yaxis3={"anchor": "x3", "rangemode": "tozero"})  # fmt: skip
    note(fig, "<b>% of choices that differ</b>", 0.77, 1, stand="left bottom", shift=(-40, 20), colour=INK)
    return fig
