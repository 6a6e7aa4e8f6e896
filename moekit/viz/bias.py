"""How a denominator's bias arises: which documents it favours, how that moves with the cut, what a filter adds.

A reading is what `moekit.learner.lab.DenominatorLab.measure` returns; weights are what its `weights` returns.

Axis letters: S documents with labels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from ..errors import DataError
from .routing import ratio_map
from .theme import MUTED, SERIES, Figure, end_labels, figure, note

EXACT = "global_tokens"
REACH = 3  # the colour scale ends at 2^-3 and 2^3 times the exact weight
PALETTE = (*SERIES, MUTED)
FLOOR = 1e-7  # a smaller 1 - cosine is drawn here: rounding


def weight_map(weights: Mapping[str, Any], labels: Sequence[int]) -> Figure:
    """Weight of each document's labels under each convention, as a multiple of its weight in the exact mean.
    Args:
        weights: mode -> [S] weights; must hold `EXACT`.
        labels: [S] labelled positions of each document, the columns' names.
    Raises DataError: `EXACT` is missing, or lengths differ."""
    table = {mode: np.asarray(w, dtype=float) for mode, w in weights.items()}
    if EXACT not in table:
        raise DataError(f"weights have no {EXACT!r} to compare with; they have {', '.join(table) or 'nothing'}")
    for mode, w in table.items():
        if w.shape != (len(labels),):
            raise DataError(f"{mode!r} has weights of shape {w.shape}, there are {len(labels)} documents")
    order = np.argsort(labels, kind="stable")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.array([np.where(table[EXACT] > 0, w / table[EXACT], np.nan)[order] for w in table.values()])
    words = np.where(ratio < 9.95, np.char.mod("%.1f", ratio), np.char.mod("%.0f", ratio))
    fig = figure("Who is favoured: weight of a label against the exact one",
                 "One column a document, ordered by its labels; 1 = as the exact token mean",
                 height=84 + 32 * len(table) + 62, margin={"l": 150, "r": 84}, hovermode="closest")  # fmt: skip
    places = list(range(len(labels)))
    ratio_map(fig, ratio, places, list(table), words if len(labels) <= 24 else None, REACH, bar=1.02,
              hover="%{y}: %{customdata:.3f} times the exact weight<extra></extra>")  # fmt: skip
    every = max(1, math.ceil(len(labels) / 24))
    fig.update_xaxes(title="labels of the document", tickvals=places[::every], showline=False,
                     ticktext=[str(int(labels[i])) for i in order[::every]])  # fmt: skip
    return fig


def across_cuts(readings: Iterable[Any]) -> Figure:
    """Gradient norm ratio and 1 - cosine of each convention over cuts into ranks x microbatches.
    Args: `readings`: of several modes and cuts; cuts are drawn in the order of their first reading.
    Raises DataError: no readings."""
    table: dict[str, dict[str, Any]] = {}
    for r in readings:
        table.setdefault(r.mode, {})[f"{r.ranks} × {r.microbatches}"] = r
    if not table:
        raise DataError("no readings to draw; give those of several cuts")
    cuts = list(dict.fromkeys(cut for by_cut in table.values() for cut in by_cut))
    how = "A convention whose line is not flat trains another model on another machine"
    fig = figure("The same step, cut differently", how, height=560, margin={"r": 176, "t": 108})
    panels = (
        ("", (0.56, 1.0), "gradient norm over the exact one", lambda r: r.norm_ratio),
        ("2", (0.0, 0.42), "1 − cosine to the exact one", lambda r: max(1 - r.cosine, FLOOR)),
    )
    ends: dict[str, list[tuple[float, str, str]]] = {"": [], "2": []}
    for colour, (mode, by_cut) in zip(cycle(PALETTE), table.items()):
        for suffix, _, _, value in panels:
            values = [value(by_cut[cut]) if cut in by_cut else None for cut in cuts]
            fig.add_scatter(x=cuts, y=values, name=mode, mode="lines+markers", line={"color": colour, "width": 2},
                            marker={"size": 7}, cliponaxis=False, xaxis=f"x{suffix}", yaxis=f"y{suffix}")  # fmt: skip
            ends[suffix].append((math.nan if values[-1] is None else values[-1], mode, colour))
    for suffix, domain, words, _ in panels:
        x = {"type": "category", "categoryarray": cuts, "categoryorder": "array", "anchor": f"y{suffix}"}
        fig.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": {"domain": domain, "anchor": f"x{suffix}"}})
        note(fig, f"<b>{words}</b>", 0, domain[1], stand="left bottom", shift=(0, 6))
    known = [v for t in fig.data[::2] for v in t.y if v is not None]
    low, high, low_log, high_log = min(0.0, *known), 1.08 * max(known), math.log10(FLOOR) - 0.3, 0.35
    log = {"type": "log", "range": [low_log, high_log], "tickvals": [FLOOR, 1e-4, 1e-2, 1],
           "ticktext": ["≤ 10⁻⁷", "10⁻⁴", "10⁻²", "1"]}  # fmt: skip
    fig.update_layout(xaxis2={"title": "ranks × microbatches of each"}, yaxis={"range": [low, high]}, yaxis2=log)
    end_labels(fig, ends[""], low, high)
    end_labels(fig, [(math.log10(v), mode, c) for v, mode, c in ends["2"]], low_log, high_log, axis="2")
    return fig


def filter_bias(readings: Mapping[int, Sequence[Any]]) -> Figure:
    """Reported over exact loss against removed instances, for `kept_plus_filtered`; one line for each row length.
    Args: `readings`: T -> readings with more and more removed instances.
    Raises DataError: no readings."""
    if not any(readings.values()):
        raise DataError("no readings to draw; give row length T -> readings with 0, 1, 2, ... removed instances")
    how = "Points: measured. Lines: U / (U + removed × (T − 1))"
    fig = figure("What the filter removes, the loss loses", how, height=380, margin={"r": 120})
    labels = []
    for colour, (length, series) in zip(cycle(PALETTE), readings.items()):
        x, name = [r.removed for r in series], f"T = {length}"
        formula = [r.supervised / (r.supervised + r.removed * (length - 1)) for r in series]
        measured = [r.loss / r.exact_loss for r in series]
        fig.add_scatter(x=x, y=formula, name=f"{name}, formula", mode="lines", line={"color": colour, "width": 2})
        fig.add_scatter(x=x, y=measured, name=f"{name}, measured", mode="markers", cliponaxis=False,
                        marker={"size": 8, "color": colour})  # fmt: skip
        labels.append((measured[-1], f"T = {length}: {measured[-1]:.2f}", colour))
    fig.update_xaxes(title="instances removed", dtick=1)
    fig.update_yaxes(title="reported loss / exact loss", range=[0, 1.06])
    end_labels(fig, labels, 0.0, 1.06)
    return fig
