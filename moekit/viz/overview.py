"""The figures of a dashboard: how runs go, what work one of them routes, and where its router sends it.

Axis letters: S steps, L layers that route, E experts."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from . import masking, routing
from .curves import thin, unit
from .series import CLASSES
from .theme import (
    CLASS,
    CLASS_TEXT,
    INK,
    MUTED,
    PASS,
    SERIES,
    SIZE,
    WIDE,
    Figure,
    figure,
    names_axis,
    note,
    number,
    spread,
    tint,
)

POINTS = 1000  # of a line; longer ones are thinned to the extremes of neighbours
BINS = 60  # steps that the map of experts over steps shows
RATES = {
    "supervised tokens": "rate/supervised_tokens_s",
    "tokens": "rate/tokens_s",
    "routed rows": "rate/routed_rows_s",
}
PARTS = ("loss/total", "loss/balance", "loss/z")  # an objective's own loss comes before these
NAMED_PASS = re.compile(r"(?:(\w+)_)?rows/(?:(dispatched|backward|recompute)|(\w+)_([a-z]+))")
DASHES = ("solid", "dash", "dot")
Runs = Mapping[str, pd.DataFrame]  # name -> metrics by step


def keep(name: str) -> bool:
    """Whether these figures may want a metric."""
    return name.partition("/")[0] in ("loss", "rate", "rows", "critic_rows", "reward", "eval", "tokens")


def main_loss(table: pd.DataFrame) -> str:
    """The objective's own loss, as far as one was recorded.
    >>> main_loss(pd.DataFrame(columns=["loss/total", "loss/dpo", "loss/balance"]))
    'loss/dpo'
    """
    found = [name for name in table if str(name).startswith("loss/")]
    return next((name for name in found if name not in PARTS), "loss/total")


def known(table: pd.DataFrame, name: str) -> pd.Series:
    """Values of a metric by step, where it has one; of a loss also NaN, at the steps that routed anything.
    >>> known(pd.DataFrame({"loss/a": [1.0, math.nan, math.nan], "rows/dispatched": [8, 8, None]}), "loss/a").tolist()
    [1.0, nan]
    """
    if name not in table:
        return pd.Series(dtype=float)
    values: Any = table[name]
    worked = table["rows/dispatched"].notna() if name.startswith("loss/") and "rows/dispatched" in table else False
    return values[values.notna() | worked]


def looks(count: int) -> list[dict[str, str]]:
    """Colour and dash of the lines of so many runs."""
    return [{"color": SERIES[i % 6], "dash": DASHES[i // 6 % 3]} for i in range(count)]


def progress(runs: Runs, metric: str | None = None) -> Figure:
    """Loss (or `metric`) and rates of each run, one line each, labelled by name and last value."""
    fig = figure("", width=WIDE, height=40 + 240 + 46, margin={"t": 40, "b": 46, "r": 84})
    main = metric or (main_loss(next(iter(runs.values()))) if runs else "loss/total")
    names = {run: metric or main_loss(table) for run, table in runs.items()}
    many = len(runs) > 1  # names stand beside the lines
    loss, rates = ((0.0, 0.42), (0.74, 1.0)) if many else ((0.0, 0.43), (0.61, 1.0))
    panels = [(", ".join(filter(None, (main, unit(main)))), names, loss, (0.0, 1.0))]
    for i, (what, name) in enumerate(RATES.items()):
        panels.append((f"{what} a second", dict.fromkeys(runs, name), rates, (0.74 - 0.37 * i, 1.0 - 0.37 * i)))
    for i, (words, chosen, (left, right), (low, high)) in enumerate(panels):
        suffix, ends = str(i + 1) if i else "", []
        for look, (run, table) in zip(looks(len(runs)), runs.items()):
            line = known(table, chosen[run])
            at = thin(line.to_numpy(), POINTS)
            name = f"{run} {chosen[run]}" if many else chosen[run]
            how = {"mode": "lines+markers" if len(line) < 3 else "lines", "hoverinfo": "x+y+name"}
            fig.add_scatter(x=line.index.to_numpy()[at], y=line.to_numpy()[at], name=name, line=look | {"width": 2},
                            xaxis=f"x{suffix}", yaxis=f"y{suffix}", **how)  # fmt: skip
            if len(line):
                last = "NaN" if math.isnan(line.iloc[-1]) else number(float(line.iloc[-1]))
                ends.append((line, f"<b>{last}</b>" if i or not many else f"{short(run)} <b>{last}</b>", look["color"]))
        bottom = i in (0, len(panels) - 1)
        x = {"domain": [left, right], "anchor": f"y{suffix}", "nticks": 6 if not i else 4, "showticklabels": bottom}
        y = {
            "domain": [low, high],
            "anchor": f"x{suffix}",
            "nticks": 3 if i else 6,
            "rangemode": "tozero" if i else "normal",
        }
        fig.update_layout({f"xaxis{suffix}": x | {"title": "step" if bottom else None}, f"yaxis{suffix}": y})
        note(fig, words, left, high, stand="left bottom", shift=(0, 5), colour=MUTED, size=SIZE["tick"])
        _ends(fig, ends, suffix, 240 * (high - low), zero=bool(i))
    return fig


def short(name: str, most: int = 12) -> str:
    """A name that fits beside a line: its end says more than its middle.
    >>> short("20261130-080000-train"), short("first")
    ('2026…0-train', 'first')
    """
    return name if len(name) <= most else f"{name[: most // 2 - 2]}…{name[most // 2 - 1 - most :]}"


def _ends(fig: Figure, ends: list[tuple[pd.Series, str, str]], suffix: str, pixels: float, zero: bool) -> None:
    """Each line's label at the right edge, at its last value, moved apart where labels would touch."""
    if not ends:
        return
    values = np.concatenate([line.to_numpy() for line, *_ in ends] + [[0.0]] * zero)
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    last = [float(line.iloc[-1]) for line, *_ in ends]
    up = [(min(max(v, low), high) - low) / ((high - low) or 1.0) * pixels if math.isfinite(v) else 0.0 for v in last]
    for value, (_, text, colour), before, after in zip(last, ends, up, spread(up, SIZE["label"] * 1.25, 0.0, pixels)):
        at = value if math.isfinite(value) else low
        note(fig, text, 1, at, axes=(f"x{suffix} domain", f"y{suffix}"), shift=(8, after - before), colour=colour)


def passes(table: pd.DataFrame) -> dict[Any, pd.Series]:
    """Dispatched rows a step of each (component, pass) that was recorded.
    >>> list(passes(pd.DataFrame({"rows/dispatched": [8], "rows/backward": [8], "rows/reference_score": [8]})))
    [('policy', 'forward'), ('policy', 'backward'), ('reference', 'score')]
    """
    found: dict[Any, Any] = {}
    for name, rows in table.items():
        if (m := NAMED_PASS.fullmatch(str(name))) and (m[2] or str(m[4]) in PASS):
            component, pass_name = m[3] or m[1] or "policy", {"dispatched": "forward"}.get(m[2] or "", m[2] or m[4])
            found[component, pass_name] = rows.fillna(0.0)
    order: list[Any] = list(PASS)
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "policy", item[0][0], order.index(item[0][1]))))


def work(table: pd.DataFrame) -> Figure:
    """Routed rows of every step, stacked by the class of their position, and by component and pass."""
    fig = figure("", width=WIDE, height=40 + 170 + 46, margin={"t": 40, "b": 46, "r": 8}, barmode="stack")
    layer = lambda name, colour, ink, rows: (colour, ink, rows.to_numpy(), f"{name} {number(rows.iloc[-1])}")
    classes = {name: layer(name, CLASS[name], CLASS_TEXT[name], table[f"rows/{name}"].fillna(0.0))
               for name in CLASSES if f"rows/{name}" in table and bool(table[f"rows/{name}"].any())}  # fmt: skip
    parts = {}
    for (component, pass_name), rows in passes(table).items():
        if not rows.any():  # a recompute that never was
            continue
        colour, name = tint(PASS[pass_name], 1.0 if component == "policy" else 0.6), f"{component} {pass_name}"
        parts[name] = layer(name, colour, INK, rows)
    halves = (("routed rows a step by class of position, forward", classes, (0.0, 0.3)),
              ("routed rows a step by pass", parts, (0.53, 0.79)))  # fmt: skip
    for i, (words, layers, (left, right)) in enumerate(halves):
        suffix = str(i + 1) if i else ""
        x = {"domain": [left, right], "anchor": f"y{suffix}", "title": "step", "nticks": 5}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": {"anchor": f"x{suffix}", "nticks": 4}})
        note(fig, words, left, 1, stand="left bottom", shift=(0, 5), colour=MUTED, size=SIZE["tick"])
        masking.stack(fig, table.index.to_numpy(dtype=float), layers, axis=suffix, right=right, bars=96)
    return fig


def stride(count: int, most: int) -> int:
    """Every so manieth of `count` things leaves at most `most`: 1, 2, 5, 10, ...
    >>> [stride(count, 60) for count in (0, 60, 61, 250, 10_000)]
    [1, 1, 2, 5, 200]
    """
    return next(m * 10**e for e in range(20) for m in (1, 2, 5) if m * 10**e * most >= count)


def load(
    count_LE: np.ndarray, layers: Sequence[str], step: int, count_SE: np.ndarray, steps: Sequence[int], layer: str
) -> Figure:
    """Expert load: all layers at one step, and one layer at many; 1 = the balanced share of the layer.
    Args:
        count_LE: router decisions at `step`, of `layers`.
        count_SE: of `layer`, at `steps`; none = nothing was recorded.
    """
    margin, known = {"t": 40, "b": 46, "r": 84}, bool(len(steps))
    fig = figure("", width=WIDE, height=40 + 190 + 46, margin=margin, hovermode="closest")
    experts, when = [str(e) for e in range(count_LE.shape[1])], [str(s) for s in steps]
    every = lambda names, most: names[:: stride(len(names), most)]
    x, y = {"type": "category", "showline": False, "ticks": "", "visible": known}, {"ticks": "", "visible": known}
    y["tickfont"] = {"size": SIZE["tick"], "color": MUTED}
    fig.update_layout(
        xaxis=x | {"domain": [0, 0.44], "title": "expert", "tickvals": every(experts, 16)},
        yaxis=names_axis(layers) | y | {"title": "layer", "tickvals": every(list(layers), 12)},
        xaxis2=x | {"domain": [0.56, 1], "anchor": "y2", "title": "step", "tickvals": every(when, 6)},
        yaxis2=names_axis(experts) | y | {"anchor": "x2", "title": "expert", "tickvals": every(experts, 12)},
    )
    heads = ["no expert load recorded yet", ""]
    if known:
        load_LE, load_SE = routing.balanced_share(count_LE), routing.balanced_share(count_SE)
        few = len(experts) <= 16 and len(layers) <= 12
        words = np.where(load_LE == 0, "×", np.char.mod("%.1f", load_LE)) if few else None
        tell = "%{customdata:.3f} of the balanced load<extra></extra>"
        hover = (f"layer %{{y}}, expert %{{x}}<br>{tell}", f"step %{{x}}, expert %{{y}}<br>{tell}")
        routing.ratio_map(fig, load_LE, experts, list(layers), words, 2, hover=hover[0], bar=1.01)
        routing.ratio_map(fig, load_SE.T, when, experts, None, 2, hover=hover[1], bar=None, axes="2")
        heads = [f"expert load over the balanced share at step {step:,}", f"of layer {layer} over the steps"]
        note(fig, "◂", 0.44, 1 - (layers.index(layer) + 0.5) / len(layers), shift=(1, 0))
        near = min(range(len(steps)), key=lambda i: abs(steps[i] - step))  # by place: plotly takes "119" for a number
        note(fig, "▾", 0.56 + 0.44 * (near + 0.5) / len(steps), 1, stand="center bottom", shift=(0, -6))
    for left, text in zip((0.0, 0.56), heads):
        note(fig, text, left, 1, stand="left bottom", shift=(0, 5), colour=MUTED, size=SIZE["tick"])
    return fig
