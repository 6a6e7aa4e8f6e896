"""Where the router sent the tokens: expert load by layer and class, how it moved, and what imbalance costs.

Axis letters: S steps, L layers that route, E experts, C classes.

Load is a share of the balanced load: rows of an expert times E over the rows of its layer. 1 = even, E/K at most,
0 = a dead expert.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .series import ARRAY, counts, pick
from .theme import CLASS, DIVERGING, GRID, MUTED, SERIES, SIZE, Figure, end_labels, figure, names_axis, note, number

INNER = 500  # pixels across the experts
SCOPE = {"all": "all tokens", "supervised": "supervised tokens", "context": "context tokens"}
BINS = 24  # more steps than this are drawn as sums of neighbours


def balanced_share(count_LE: np.ndarray) -> np.ndarray:
    """Load of each expert as a multiple of its layer's balanced load, [L, E]; NaN for a layer without rows.

    >>> balanced_share(np.array([[3, 1], [0, 0]])).tolist()
    [[1.5, 0.5], [nan, nan]]
    """
    count_LE = np.asarray(count_LE, dtype=float)
    total_L = count_LE.sum(axis=1, keepdims=True)
    return np.divide(count_LE * count_LE.shape[1], total_L, out=np.full(count_LE.shape, np.nan), where=total_L > 0)


def load_heatmap(source: Any, step: int | None = None, scope: str = "all", *, title: str | None = None) -> Figure:
    """Expert load, layer by expert, on a diverging scale centred at the balanced load.

    The scale is logarithmic: half the balanced load is as far from even as twice. Dead experts are crossed out.

    Args:
        source: a Run, a run folder, its arrays of one step, or counts [L, E] or [L, C, E].
        step: the step to draw; None = the mean over the recorded steps.
        scope: "all" (every token, padding left out) or "supervised".

    Raises:
        DataError: no counts in `source`, or an unknown scope.
    """
    count_LE, layers, when = counts(source, step, scope)
    load_LE = balanced_share(count_LE)
    rows, experts = load_LE.shape
    names = [str(e) for e in range(experts)]
    height = min(max(30 * rows, 64), 560)
    how = "Rows of an expert over the balanced share of its layer: 1 = even, × = dead" + (f" · {when}" if when else "")
    size = {"height": height + 84 + 60, "margin": {"r": 148}, "hovermode": "closest"}
    fig = figure(title or f"Expert load, {SCOPE[scope]}", how, **size)
    words = np.where(load_LE == 0, "×", np.char.mod("%.1f", load_LE)) if experts <= INNER / 24 else None
    hover = "layer %{y}, expert %{x}<br>%{customdata:.3f} of the balanced load<extra></extra>"
    ratio_map(fig, load_LE, names, layers, words, 2, hover=hover, bar=1.105)
    if words is None:
        layer, expert = np.nonzero(load_LE == 0)
        cross = {"symbol": "x", "size": min(max(0.35 * INNER / experts, 3), 7), "color": "#FFFFFF"}
        fig.add_scatter(x=[names[e] for e in expert], y=[layers[i] for i in layer], mode="markers", marker=cross,
                        name="dead", hoverinfo="skip")  # fmt: skip
    every, many = math.ceil(24 * experts / INNER), math.ceil(18 * rows / height)  # labels that do not touch
    fig.update_xaxes(title="expert", type="category", showline=False, tickvals=names[::every])
    fig.update_yaxes(title="layer", tickvals=layers[::many], tickfont={"size": SIZE["tick"], "color": MUTED})
    for i in range(0, rows, many):
        most = np.nanmax(load_LE[i], initial=-np.inf)
        text = f"{most:.1f}×" if np.isfinite(most) else "–"
        note(fig, text, 1, 1 - (i + 0.5) / rows, shift=(8, 0), size=SIZE["tick"])
    note(fig, "max", 1, 1, stand="left bottom", shift=(8, 5), colour=MUTED, size=SIZE["tick"])
    return fig


def ratio_map(
    fig: Figure, ratio: np.ndarray, x: Sequence[Any], y: list[str], words: Any, reach: int, *, hover: str,
    bar: float | None, axes: str = "",
) -> None:  # fmt: skip
    """Cells coloured by the logarithm of a ratio: 1 is the middle of the scale, which ends at 2^-reach and 2^reach.

    Args:
        ratio: one row for each of `y`, from the top; NaN = a blank cell.
        words: the text of each cell; None = none.
        bar: where the colour bar stands, in paper units; None = no bar.
        axes: suffix of the panel's axes.
    """
    with np.errstate(divide="ignore"):
        z = np.clip(np.log2(ratio), -reach, reach)
    ticks = list(range(-reach, reach + 1))
    scale = ["⅛", "¼", "½", "1", "2", "4", "8"][3 - reach : 4 + reach]
    scale[0], scale[-1] = f"≤ {scale[0]}", f"≥ {scale[-1]}"
    fig.add_heatmap(
        z=[[None if np.isnan(v) else v for v in row] for row in z.tolist()], customdata=ratio.tolist(), x=x, y=y,
        zmin=-reach, zmax=reach, colorscale=DIVERGING, xgap=int(len(x) <= 64), ygap=int(len(y) <= 32),
        colorbar={"tickvals": ticks, "ticktext": scale, "thickness": 12, "x": bar, "len": 1, "outlinewidth": 0},
        showscale=bar is not None, hovertemplate=hover, xaxis=f"x{axes}", yaxis=f"y{axes}",
    )  # fmt: skip
    if words is not None:
        text = np.where(np.isnan(ratio), "", words).tolist()
        fig.update_traces(text=text, texttemplate="%{text}", textfont={"size": 11})
    fig.update_layout({f"yaxis{axes}": names_axis(y)})


def load_history(source: Any, scope: str = "all") -> Figure:
    """Expert load over training: expert by step, one panel for each layer; at its right the busiest expert's load.

    Args:
        source: a Run, a run folder, or router decisions [S, L, C, E] of consecutive steps.
        scope: "all", "supervised" or "context".
    """
    names = None
    if not isinstance(source, np.ndarray):
        from ..measure.record import open_run

        run = source if hasattr(source, "arrays") else open_run(source)
        source, names = run.arrays(f"{ARRAY}/decided").values, run.arrays("policy/layers").values[0]
    cut = np.unique(np.linspace(0, len(source), min(BINS, len(source)) + 1).astype(int))
    bins = np.add.reduceat(source, cut[:-1], axis=0)
    load_LEB = np.stack([balanced_share(counts(c, None, scope)[0]) for c in bins], axis=-1)
    layers, experts, _ = load_LEB.shape
    each, gap = max(9 * experts, 72), 34
    inner = layers * (each + gap) - gap
    how = "Rows of an expert over the balanced share: 1 = even. Right: the busiest, first → last steps"
    fig = figure(f"Expert load over training, {SCOPE[scope]}", how,
                 height=104 + inner + 60, margin={"r": 184, "t": 104}, hovermode="closest")  # fmt: skip
    hover = "step %{x}, expert %{y}<br>%{customdata:.3f} of the balanced load<extra></extra>"
    lines, steps = [str(e) for e in range(experts)], [str(step) for step in cut[:-1]]
    for i, load_EB in enumerate(load_LEB):
        axes, top, last = str(i + 1) if i else "", 1 - i * (each + gap) / inner, i + 1 == layers
        ratio_map(fig, load_EB, steps, lines, None, 2, hover=hover, bar=None if i else 1.19, axes=axes)
        x = {"type": "category", "tickvals": steps[::4], "showline": False, "showticklabels": last}
        y = {"domain": [max(top - each / inner, 0), top], "anchor": f"x{axes}", "tickvals": lines[::4]}
        y |= {"title": "expert", "tickfont": {"size": SIZE["tick"], "color": MUTED}}
        fig.update_layout({f"xaxis{axes}": x | {"anchor": f"y{axes}", "title": "step" if last else None}})
        fig.update_layout({f"yaxis{axes}": y})
        note(fig, f"<b>layer {i if names is None else names[i]}</b>", 0, top, stand="left bottom", shift=(0, 5))
        words = " → ".join(f"{number(round(load, 1))}×" for load in load_EB.max(axis=0)[[0, -1]])
        note(fig, words, 1, top - each / inner / 2, shift=(8, 0), size=SIZE["tick"])
    return fig


def load_over_time(source: Any) -> Figure:
    """The busiest expert's load over the mean at every step, over all tokens and over supervised tokens; 1 = even.

    Args:
        source: a Run, a run folder, a DataFrame or a dictionary of columns.

    Raises:
        DataError: the run has no such metric.
    """
    lines = {
        "load/max_over_mean": ("all tokens", SERIES[5]),
        "load_supervised/max_over_mean": ("supervised", SERIES[0]),
    }
    step, found = pick(source, *lines, optional=True)
    found = {name: series for name, series in found.items() if np.isfinite(series).any()}
    if not found:
        raise DataError("no metric load/max_over_mean in this run")
    fig = figure("Busiest expert over the mean", "Mean over layers, one point a step", height=340, margin={"r": 150})
    high = max(1.05, *(float(np.nanmax(series)) for series in found.values()))
    low, high = 1 - 0.05 * (high - 1), high + 0.05 * (high - 1)
    labels = [(1.0, "even", MUTED)]
    for name, series in found.items():
        label, colour = lines[name]
        fig.add_scatter(x=step, y=series, name=label, mode="lines", line={"color": colour, "width": 2})
        last = float(series[~np.isnan(series)][-1])
        labels.append((last, f"{label} {last:.2f}", colour))
    fig.add_shape(type="line", xref="x domain", x0=0, x1=1, yref="y", y0=1, y1=1,
                  line={"color": MUTED, "width": 1, "dash": "dot"})  # fmt: skip
    fig.update_yaxes(title="load, max / mean", range=[low, high])
    fig.update_xaxes(title="step")
    end_labels(fig, labels, low, high)
    return fig


def compare(
    names: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, subtitle: str = "",
    limits: Mapping[str, tuple[float, float]] | None = None, colours: Mapping[str, str] | None = None,
) -> Figure:  # fmt: skip
    """Settings side by side: one line each, one panel for each quantity, one dot for each series of it.

    Args:
        names: of the settings, from the top.
        panels: quantity and unit -> series -> one value for each name.
        limits: quantity -> ends of its axis; without, those of its values.
        colours: series -> its colour, if it has one elsewhere.
    """
    if not (names and panels):
        raise DataError("nothing to compare: give at least one name and one panel of series")
    margin = {"l": min(44 + 7 * max(map(len, names)), 300), "t": 112, "b": 76, "r": 32}
    look = {"height": 112 + 29 * len(names) + 76, "margin": margin, "hovermode": "closest"}
    fig = figure(title, subtitle, **look)
    series = dict.fromkeys(name for panel in panels.values() for name in panel)
    colour = {name: CLASS.get(name, SERIES[5 - k] if name else MUTED) for k, name in enumerate(series)}
    colour |= colours or {}
    share, gap = 1 / len(panels), 0.06
    for i, (heading, panel) in enumerate(panels.items()):
        axes, left = str(i + 1) if i else "", i * (share + gap / len(panels))
        refs = {"xaxis": f"x{axes}", "yaxis": f"y{axes}"}
        table = np.array(list(panel.values()), dtype=float)
        low, high = (limits or {}).get(heading, (float(table.min()), float(table.max())))
        room = (high - low) or 1.0
        pad = 40 * room / max((share - gap) * (fig.layout.width - margin["l"] - margin["r"]) - 80, 40)  # for labels
        for name, least, most in zip(names, table.min(axis=0), table.max(axis=0)):
            fig.add_scatter(x=[least, most], y=[name, name], mode="lines", hoverinfo="skip",
                            line={"color": GRID, "width": 3}, **refs)  # fmt: skip
            for value, stand, shift in ((most, "left", 9), (least, "right", -9))[: 1 + (least < most)]:
                at = {"axes": tuple(refs.values()), "stand": f"{stand} middle", "shift": (shift, 0)}
                note(fig, f"{value:,.{1 + (room < 20)}f}" if room < 1000 else number(value), value, name,
                     size=SIZE["tick"], **at)  # fmt: skip
        for name, values in panel.items():
            look = {"size": 11, "color": colour[name]}
            fig.add_scatter(x=list(values), y=list(names), mode="markers", name=name, marker=look, **refs)
        note(fig, f"<b>{heading}</b>", left, 1, stand="left bottom", shift=(0, 8))
        ticks = np.linspace(low, high, 4 if high > low else 1).round(3).tolist()
        x = {"domain": [left, left + share - gap], "range": [low - pad, high + pad], "tickvals": ticks}
        x["ticktext"] = list(map(number, ticks))
        y = {**names_axis(names), "anchor": refs["xaxis"], "showticklabels": not i}
        fig.update_layout({f"xaxis{axes}": x | {"anchor": refs["yaxis"]}, f"yaxis{axes}": y})
    at = 0.0
    for name in filter(None, series):  # the key, in one line below
        note(fig, f"<b>{name}</b>", 0, 0, stand="left top", shift=(at, -38), colour=colour[name])
        at += 8.2 * len(name) + 18
    return fig


def tile_cost(count_SLE: Any, tiles: Sequence[int] = (16, 64, 128)) -> Figure:
    """Share of a grouped GEMM's rows that only fill up tiles, over rows per expert; dotted: half a tile an expert.

    Args:
        count_SLE: rows by expert of consecutive steps. Counts of 1, 2, 4, ... steps are added up, as if that much more
            came in one forward.
        tiles: heights of a tile, in rows.
    """
    import torch

    from ..measure.routing import tile_waste

    count_SLE = torch.as_tensor(np.asarray(count_SLE))
    steps, *rest = count_SLE.shape
    many = [2**i for i in range(steps.bit_length())]
    pooled = [count_SLE[: steps // n * n].view(-1, n, *rest).sum(1) for n in many]
    rows = [float(c.double().mean()) for c in pooled]
    fig = figure("Rows that only fill up tiles", "Points: recorded counts. Dotted: half a tile for each expert",
                 height=360, margin={"r": 190})  # fmt: skip
    ends, most = [], 0.0
    for colour, tile in zip(SERIES, tiles):
        waste = [float(tile_waste(c, tile).sum()) for c in pooled]
        share = [100 * w / (w + float(c.sum())) for w, c in zip(waste, pooled)]
        half = [100 * tile / (tile + 2 * r) for r in rows]
        fig.add_scatter(x=rows, y=half, name=f"tile of {tile}, half", mode="lines",
                        line={"color": colour, "width": 1.5, "dash": "dot"})  # fmt: skip
        fig.add_scatter(x=rows, y=share, name=f"tile of {tile}", line={"color": colour, "width": 2}, marker={"size": 7})
        ends.append((share[-1], f"tile of {tile}: {share[0]:.0f} → {share[-1]:.1f} %", colour))
        most = max(most, 1.1 * max(share + half))
    fig.update_xaxes(title="rows per expert in one forward", type="log", tickvals=[round(r) for r in rows])
    fig.update_yaxes(title="rows for nothing, %", range=[0, most])
    end_labels(fig, ends, 0.0, most)
    return fig
