"""One weight transfer: who sends how much to whom, and where its seconds go, against the floor.

Axis letters: S sources, T targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError
from .theme import MUTED, SERIES, SIZE, WIDE, Figure, figure, names_axis, note, number

PHASES = {"plan": SERIES[5], "cast": SERIES[3], "wire": SERIES[0], "load": SERIES[2], "verify": SERIES[1]}
PALE, DEEP = "#F2F6F9", SERIES[0]


def transfer_figure(
    plan: Any, seconds: Mapping[str, Mapping[str, float]], *, floor: float | None = None, title: str = "",
    subtitle: str = "",
) -> Figure:  # fmt: skip
    """Left: bytes of every pair, if there is more than one, with sums. Right: seconds by phase, one bar a side or run.

    Args:
        plan: a `WeightPlan` (anything with `bytes_ST`).
        seconds: name of a bar -> seconds of "plan", "cast", "wire", "load", "verify", those that it has.
        floor: seconds below which no transfer can be (`WeightPlan.floor`), a dotted line.

    Raises DataError: nothing is sent, no bars, or a phase with another name.
    """
    bytes_ST = np.array(plan.bytes_ST.tolist(), dtype=float).reshape(len(plan.bytes_ST), -1)
    if not bytes_ST.any() or not seconds:
        raise DataError("transfer_figure: the plan sends nothing, or there are no seconds to draw")
    if unknown := {p for bar in seconds.values() for p in bar} - PHASES.keys():
        raise DataError(f"transfer_figure: phases {sorted(unknown)} are not among {', '.join(PHASES)}")
    S, T = bytes_ST.shape
    unit, word = next(u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")) if bytes_ST.max() >= u[0])
    title = title or f"{number(bytes_ST.sum() / unit)} {word} from {S} process{'es' * (S > 1)} to {T}"
    bars = list(seconds)
    fig = figure(title, subtitle, width=WIDE, height=190 + max(34 * S, 44 * len(bars), 90), barmode="stack", bargap=0.5,
                 margin={"t": 128, "b": 62, "l": 84, "r": 60}, hovermode="closest")  # fmt: skip
    sources, targets = [str(s) for s in range(S)], [str(t) for t in range(T)]
    cells = [[number(float(f"{v / unit:.3g}")) if v else "" for v in row] for row in bytes_ST]
    shown = np.where(bytes_ST > 0, bytes_ST / unit, np.nan)
    if many := S * T > 1:  # else the title has said all
        fig.add_heatmap(z=shown, x=targets, y=sources, text=cells, texttemplate="%{text}", name=f"{word} sent",
                        xgap=2, ygap=2, zmin=0, zmax=bytes_ST.max() / unit, colorscale=[[0, PALE], [1, DEEP]],
                        hovertemplate=f"%{{y}} → %{{x}}: %{{z:.4g}} {word}<extra></extra>",
                        showscale=False)  # fmt: skip
        note(fig, f"<b>{word} sent</b>", 0, 1, stand="left bottom", shift=(0, 8))
    for source, row in zip(sources, bytes_ST if many else ()):
        note(fig, f"Σ {row.sum() / unit:.3g}", 0.36, source, axes=("paper", "y"), shift=(8, 0), colour=MUTED,
             size=SIZE["tick"])  # fmt: skip
    for phase, colour in PHASES.items():
        found = [bar.get(phase, 0.0) for bar in seconds.values()]
        if any(found):
            fig.add_bar(x=[1e3 * f for f in found], y=bars, orientation="h", name=phase, xaxis="x2", yaxis="y2",
                        marker={"color": colour}, hovertemplate="%{x:.4g} ms")  # fmt: skip
    totals = {name: 1e3 * sum(bar.values()) for name, bar in seconds.items()}
    most = max(*totals.values(), 1e3 * (floor or 0.0))
    for name, total in totals.items():
        note(fig, f"{total:.3g}", total, name, axes=("x2", "y2"), shift=(5, 0), size=SIZE["tick"])
    if floor is not None:
        fig.add_shape(type="line", x0=1e3 * floor, x1=1e3 * floor, y0=0, y1=1, xref="x2", yref="paper",
                      line={"color": MUTED, "width": 1.5, "dash": "dot"})  # fmt: skip
    left = 0.48 * many + 7.4 * max(map(len, bars)) / (WIDE - fig.layout.margin.l - fig.layout.margin.r)
    fig.update_layout(
        xaxis={"domain": [0, 0.36], "title": "to serving process", "type": "category", "showline": False,
               "visible": many},
        yaxis=names_axis(sources) | {"title": "from learner rank", "visible": many},
        yaxis2=names_axis(bars) | {"anchor": "x2"},
        xaxis2={"domain": [left, 1], "anchor": "y2", "title": "milliseconds", "range": [0, 1.12 * most],
                "showgrid": True},
    )  # fmt: skip
    place = 0.0
    for phase, colour in PHASES.items():
        if any(bar.get(phase) for bar in seconds.values()):
            note(fig, f"<b>{phase}</b>", left, 1, stand="left bottom", shift=(place, 8), colour=colour)
            place += 8.4 * len(phase) + 14
    if floor is not None:
        note(fig, f"┊ floor {1e3 * floor:.3g} ms", left, 1, stand="left bottom", shift=(place, 8), colour=MUTED)
    return fig
