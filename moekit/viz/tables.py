"""A figure's numbers as a small text table, and as HTML: what remains when neither JavaScript nor pictures do."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .theme import heading, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

Table = tuple[list[str], list[list[str]], str]  # header, rows, note on what was left out


def text(fig: go.Figure, rows: int = 12) -> str:
    """Title and tables of a figure, at most `rows` lines a table, evenly chosen with the first and the last kept.

    >>> import plotly.graph_objects as go
    >>> print(text(go.Figure(go.Scatter(x=[1, 2, 3], y=[2.5, 1.25, 0.5], name="loss"))))
    x  loss
    1   2.5
    2  1.25
    3   0.5
    """
    lines = [_words(part) for part in heading(fig) if part.strip()]
    for header, body, note in tables(fig, rows):
        width = [max(len(r[i]) for r in [header, *body]) for i in range(len(header))]
        left = [not _numeric([r[i] for r in body]) for i in range(len(header))]
        for row in [header, *body]:
            cells = [c.ljust(w) if side else c.rjust(w) for c, w, side in zip(row, width, left)]
            lines.append("  ".join(cells).rstrip())
        if note:
            lines.append(note)
        lines.append("")
    return "\n".join(lines).rstrip() or "empty figure"


def to_html(fig: go.Figure, rows: int = 12) -> str:
    """The same tables as HTML."""
    parts = []
    for header, body, note in tables(fig, rows):
        number_column = [_numeric([r[i] for r in body]) for i in range(len(header))]
        cell = lambda tag, c, right: f"<{tag}{' class=n' if right else ''}>{html.escape(c)}</{tag}>"
        head = "".join(cell("th", c, r) for c, r in zip(header, number_column))
        lines = "".join(
            "<tr>" + "".join(cell("td", c, r) for c, r in zip(row, number_column)) + "</tr>" for row in body
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")
        if note:
            parts.append(f"<p class=note>{html.escape(note)}</p>")
    return "".join(parts)


def tables(fig: go.Figure, rows: int = 12) -> list[Table]:
    """One table for all traces of a panel that share their first axis, one for each heatmap."""
    out: list[Table] = []
    panels: dict[Any, list[Any]] = {}
    for trace in fig.data:
        if trace.type == "heatmap":
            out.append(_heatmap(fig, trace, rows))
        elif getattr(trace, "y", None) is not None or getattr(trace, "x", None) is not None:
            panels.setdefault((getattr(trace, "xaxis", None), getattr(trace, "yaxis", None)), []).append(trace)
        else:
            out.append((["trace"], [[f"{trace.name or trace.type}: no numbers to list"]], ""))
    for traces in panels.values():
        out.append(_series(fig, traces, rows))
    return out


def _series(fig: go.Figure, traces: list[Any], rows: int) -> Table:
    words = lambda values: any(isinstance(v, str) for v in _list(values))
    flat = getattr(traces[0], "orientation", None) == "h" or (words(traces[0].y) and not words(traces[0].x))
    along, across = ("y", "x") if flat else ("x", "y")
    axis = fig.layout[(getattr(traces[0], f"{along}axis", None) or along).replace(along, f"{along}axis")]
    other = fig.layout[(getattr(traces[0], f"{across}axis", None) or across).replace(across, f"{across}axis")]
    at: dict[Any, dict[int, Any]] = {}
    for index, trace in enumerate(traces):
        values = _list(getattr(trace, across))
        places = _list(getattr(trace, along)) or list(range(len(values)))
        for place, value in zip(places, values):
            at.setdefault(place, {})[index] = value
    keys = sorted(at) if all(isinstance(k, (int, float)) for k in at) else list(at)
    keep = _pick(len(keys), rows)
    only = _words(other.title.text or "") if len(traces) == 1 else ""
    names = [_words(t.name) if t.name else (only or f"{across}{i + 1 if len(traces) > 1 else ''}")
             for i, t in enumerate(traces)]  # fmt: skip
    body = [[_cell(keys[i])] + [_cell(at[keys[i]].get(t)) for t in range(len(traces))] for i in keep]
    return (
        [_words(axis.title.text or ("" if words(keys) else along)), *names],
        body,
        _left_out(len(keys), len(keep), "rows"),
    )


def _heatmap(fig: go.Figure, trace: Any, rows: int) -> Table:
    z = np.array([[np.nan if v is None else v for v in row] for row in trace.z], dtype=float)
    # A figure that colours by a transformed value carries the value itself as customdata.
    if trace.customdata is not None and np.asarray(trace.customdata).shape == z.shape:
        z = np.asarray(trace.customdata, dtype=float)
    x = _list(trace.x) if trace.x is not None else list(range(z.shape[1]))
    y = _list(trace.y) if trace.y is not None else list(range(z.shape[0]))
    down, right = _pick(len(y), rows), _pick(len(x), 10)
    words = [_words(fig.layout[f"{a}axis"].title.text or a) for a in "yx"]
    header = [f"{words[0]} \\ {words[1]}", *(_cell(x[j]) for j in right)]
    body = [[_cell(y[i]), *(_cell(z[i, j]) for j in right)] for i in down]
    note = ""
    if np.isfinite(z).any():
        low, high = (np.unravel_index(f(z), z.shape) for f in (np.nanargmin, np.nanargmax))
        spot = [f"{number(z[i])} at ({_cell(y[i[0]])}, {_cell(x[i[1]])})" for i in (low, high)]
        note = f"smallest {spot[0]}, largest {spot[1]}"
    hidden = _left_out(z.size, len(down) * len(right), "cells")
    return header, body, "; ".join(part for part in (note, hidden) if part)


def _pick(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _left_out(count: int, shown: int, what: str) -> str:
    return f"{shown} of {count} {what} shown" if shown < count else ""


def _list(values: Any) -> list[Any]:
    if values is None:
        return []
    return values.tolist() if isinstance(values, np.ndarray) else [getattr(v, "item", lambda v=v: v)() for v in values]


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) and value is not None:
        return _words(str(value))
    if isinstance(value, int):
        return str(value)
    return number(value)


def _words(markup: str) -> str:
    markup = re.sub(r"<br\s*/?>", " ", markup)
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def _numeric(column: list[str]) -> bool:
    return all(re.fullmatch(r"[-−]?[\d.,]+(e[-+]?\d+)?[MGT%×]?|–|-?∞|nan", c.strip()) for c in column)
