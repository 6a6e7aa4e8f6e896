"""What serving a sparse model costs by request batch size: how few rows an expert gets, and what stands idle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import DataError
from .theme import MUTED, SERIES, Figure, end_labels, figure, note, number

if TYPE_CHECKING:
    import pandas as pd

ROWS = {"decode": "rows_per_expert_decode", "prefill": "rows_per_expert_prefill"}
SHARES = {"decode": "below_crossover_decode", "prefill": "below_crossover_prefill", "empty slots": "idle_slots"}


def costs_by_batch(costs: pd.DataFrame, *, crossover: float = 16, subtitle: str = "") -> Figure:
    """Left: mean rows of an expert that has any; dotted: the crossover. Right: of each pass the share of layers that
    stay below it, and of slots those that stood empty.
    Args: `costs`: as `moekit.rollout.serving_costs.serving_costs` gives them. Raises DataError: a column is missing."""
    if lost := [c for c in (*ROWS.values(), *SHARES.values()) if c not in costs]:
        raise DataError(f"costs_by_batch: no column {', '.join(lost)}; give what serving_costs returned")
    fig = figure("What serving costs", subtitle, height=380, margin={"r": 178, "t": 112})
    batch, rows = costs.index.tolist(), costs[list(ROWS.values())].to_numpy()
    low, high = math.log10(min(1.0, rows.min())) - 0.05, math.log10(max(crossover, rows.max())) + 0.1
    ticks = [10**e for e in range(math.ceil(low), math.floor(high) + 1)]
    log = {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": list(map(number, ticks))}
    left = ("rows per busy expert", costs[list(ROWS.values())], ROWS, log, low, high)
    right = ("share, %", 100 * costs[list(SHARES.values())], SHARES, {"range": [0, 105]}, 0.0, 105.0)
    for suffix, at, (words, values, lines, y, bottom, top) in (("", (0.0, 0.34), left), ("2", (0.62, 1.0), right)):
        x = {"title": "requests at one time", "type": "log", "domain": at, "anchor": f"y{suffix}", "tickvals": batch}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y | {"anchor": f"x{suffix}"}})
        ends = [] if suffix else [(math.log10(crossover), f"crossover {number(crossover)}", MUTED)]
        for (name, column), colour in zip(lines.items(), (*SERIES[:2], SERIES[3])):
            fig.add_scatter(x=batch, y=values[column].tolist(), name=f"{name}, {words}", xaxis=f"x{suffix}",
                            yaxis=f"y{suffix}", line={"color": colour, "width": 2}, marker={"size": 7})  # fmt: skip
            last = values[column].iloc[-1]
            what = name if not suffix or column == "idle_slots" else f"{name} below {number(crossover)}"
            height, text = (last, f"{what}: {last:.0f} %") if suffix else (math.log10(last), f"{name} {last:.3g}")
            ends.append((height, text, colour))
        note(fig, f"<b>{words}</b>", at[0], 1, stand="left bottom", shift=(0, 8))
        end_labels(fig, ends, bottom, top, axis=suffix, x=at[1])
    fig.add_hline(crossover, line={"color": MUTED, "width": 1, "dash": "dot"})
    return fig
