"""The headline figure: what one supervised token costs by component, one panel a quantity, one bar a run."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..errors import DataError
from ..measure.headline import COMPONENTS, PARTS, QUANTITIES, headline
from .theme import INK, MUTED, SERIES, SIZE, WIDE, Figure, figure, names_axis, note, tint

# components by hue (a reward's and a transfer's share is small), their parts by tint
COLOUR: dict[str, str] = dict(zip(COMPONENTS, (*SERIES[:3], SERIES[5], SERIES[3], SERIES[4])))
TINT = {"forward": 1.0, "train": 1.0, "recompute": 0.8, "backward": 0.62, "score": 0.36, "prefill": 0.55, "decode": 1.0,
        "parameters": 1.0, "gradients": 0.75, "optimizer": 0.55, "saved": 0.32, "cache": 0.75}  # fmt: skip
GAP = 0.05


def headline_figure(runs: Any, *, title: str = "What one supervised token costs") -> Figure:
    """Routed rows, wire bytes, seconds and memory of a supervised token; bars in the colours of components, a pass or
    kind of memory in a tint of its component's.

    Args: `runs`: a table of `moekit.headline`, or what it takes. A quantity that no run has gets no panel.
    """
    table: Any = runs if hasattr(runs, "columns") and "wire_bytes" in runs else headline(runs)
    names = list(dict.fromkeys(table.index.get_level_values("run")))
    shown = [q for q in QUANTITIES if table[q].sum() > 0]
    if not shown:
        raise DataError("the runs hold no row, byte or second; nothing to draw")
    margin = {"l": min(30 + 7 * max(map(len, names)), 220), "t": 116, "r": 50, "b": 66}
    how = "Dark to light: forward, recompute, backward, score; memory: weights to saved activations"
    fig = figure(title, how, width=WIDE, height=116 + 36 * len(names) + 66, margin=margin, barmode="stack", bargap=0.36,
                 hovermode="closest")  # fmt: skip
    width = (1 - GAP * (len(shown) - 1)) / len(shown)
    totals: Any = table.groupby(level="run", sort=False).sum(min_count=1)
    for at, quantity in enumerate(shown):
        suffix, left = str(at + 1) if at else "", at * (width + GAP)
        heading, factor = QUANTITIES[quantity]
        bars = table[quantity].mul(factor).dropna().unstack("run").reindex(columns=names).fillna(0.0)
        for component, part in sorted(bars.index, key=lambda k: (COMPONENTS.index(k[0]), PARTS.index(k[1]))):
            x = bars.loc[(component, part)]
            if x.any():
                fig.add_bar(x=x.tolist(), y=names, orientation="h", name=f"{component} {part}, {heading}",
                            marker={"color": tint(COLOUR[component], TINT.get(part, 1.0)), "line": {"width": 0.5}},
                            hovertemplate="%{x:.4g}", xaxis=f"x{suffix}", yaxis=f"y{suffix}")  # fmt: skip
        most = float(totals[quantity].max()) * factor
        for name in names:
            total = totals[quantity].get(name, float("nan"))
            text, colour = (f"{float(total) * factor:.3g}", INK) if isfinite(total) else ("none", MUTED)
            note(fig, text, float(total) * factor if isfinite(total) else 0.0, name, axes=(f"x{suffix}", f"y{suffix}"),
                 shift=(5, 0), colour=colour, size=SIZE["tick"])  # fmt: skip
        note(fig, f"<b>{heading}</b>", left, 1, stand="left bottom", shift=(0, 8))
        x = {"domain": [left, left + width], "range": [0, most * 1.36], "showticklabels": False, "showline": False}
        y = {**names_axis(names), "anchor": f"x{suffix}", "showticklabels": at == 0}
        fig.update_layout({f"xaxis{suffix}": {**x, "anchor": f"y{suffix}"}, f"yaxis{suffix}": y})
    place = 0.0
    for component in (c for c in COMPONENTS if c in table.index.get_level_values("component")):
        words = {"policy": "policy learner", "transfer": "weight transfer", "engine": "rollout engine"}.get(
            component, component
        )
        note(fig, f"<b>{words}</b>", 0, 0, stand="left top", shift=(place, -16), colour=COLOUR[component])
        place += 8.4 * len(words) + 14
    return fig
