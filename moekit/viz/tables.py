"""A figure's numbers as a small text table, and as HTML: what remains when neither JavaScript nor pictures do."""

import html
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .theme import Figure, heading, number

if TYPE_CHECKING:
    import pandas as pd


def text(fig: Figure, rows: int = 12) -> str:
    """Title and tables of a figure, at most `rows` lines a table, evenly chosen with the first and the last kept.
    >>> import plotly.graph_objects as go
    >>> print(text(go.Figure(go.Scatter(x=[1, 2, 3], y=[2.5, 1.25, 0.5], name="loss"))))
    x  loss
    1   2.5
    2  1.25
    3   0.5
    >>> print(text(go.Figure([go.Scatter(x=[1, 2], y=[0, 9]), go.Scatter(x=[2], y=[1.25], name="loss")])))
    x  loss
    2  1.25
    """
    blocks = []
    for table, note in tables(fig, rows):
        first = table.columns[0]
        if not all(re.fullmatch(r"[\d.,]+", cell) for cell in table[first]):  # words stand left, numbers right
            wide = max(map(len, [first, *table[first]]))
            table = table.assign(**{first: table[first].str.ljust(wide)}).rename(columns={first: first.ljust(wide)})
        wider = table.rename(columns=" {}".format).map(" {}".format)  # two spaces between columns
        blocks.append(textwrap.dedent(wider.to_string(index=False)) + (f"\n{note}" if note else ""))
    head = [_words(part) for part in heading(fig) if part.strip()]
    return "\n".join([*head, "\n\n".join(blocks)]).strip() or "a figure without numbers to list"


def to_html(fig: Figure, rows: int = 12) -> str:
    """The same tables as HTML."""
    out = ""
    for table, note in tables(fig, rows):
        out += table.to_html(index=False, border=0, classes="numbers")
        out += f"<p class=note>{html.escape(note)}</p>" if note else ""
    return out


def tables(fig: Figure, rows: int = 12) -> "Iterator[tuple[pd.DataFrame, str]]":
    """Table and note of each heatmap, and one for all traces of a panel, which share their first axis."""
    panels: dict[Any, list[Any]] = {}
    for trace in fig.data:
        if trace.type == "heatmap":
            yield _heatmap(fig, trace, rows)
        elif trace.type in ("scatter", "bar"):
            panels.setdefault((trace.xaxis or "x", trace.yaxis or "y"), []).append(trace)
    for axes, traces in panels.items():
        yield _series(fig, axes, traces, rows)


def _series(fig: Figure, axes: tuple[str, str], traces: list[Any], rows: int) -> "tuple[pd.DataFrame, str]":
    import pandas as pd

    traces = [t for t in traces if t.name] or traces  # beside named ones, others lead the eye and say nothing
    words = lambda values: values is not None and any(isinstance(v, str) for v in values)
    flat = traces[0].orientation == "h" or (words(traces[0].y) and not words(traces[0].x))
    along, across = ("y", "x") if flat else ("x", "y")
    title = lambda name: _words(fig.layout[axes["xy".index(name)].replace(name, f"{name}axis")].title.text or "")
    columns = []
    for t in traces:
        values = pd.Series([] if t[across] is None else list(t[across]), index=t[along], dtype=object)
        columns.append(values[~values.index.duplicated()])
    table = pd.concat(columns, axis=1, sort=not words(columns[0].index))
    table.columns = [_words(t.name or (title(across) if len(traces) == 1 else "") or across) for t in traces]
    head = title(along) or ("" if words(table.index) else along)
    shown = table.iloc[_pick(len(table), rows)].rename_axis(head).reset_index().map(_cell)
    return shown, f"{len(shown)} of {len(table)} rows shown" if len(shown) < len(table) else ""


def _heatmap(fig: Figure, trace: Any, rows: int) -> "tuple[pd.DataFrame, str]":
    import pandas as pd

    # A figure that colours by a transformed value carries the value itself as customdata.
    z = np.array(trace.z if trace.customdata is None else trace.customdata, dtype=float)
    y, x = (range(n) if given is None else given for n, given in zip(z.shape, (trace.y, trace.x)))
    table = pd.DataFrame(z, index=list(y), columns=list(x))
    shown = table.iloc[_pick(len(y), rows), _pick(len(x), 10)].rename(columns=_cell)
    note = ""
    if np.isfinite(z).any():
        (i, j), (k, l) = (np.unravel_index(find(z), z.shape) for find in (np.nanargmin, np.nanargmax))
        note = f"smallest {number(z[i, j])} at ({y[i]}, {x[j]}), largest {number(z[k, l])} at ({y[k]}, {x[l]})"
    if shown.size < z.size:
        note += f"; {shown.size} of {z.size} cells shown"
    corner = " \\ ".join(_words(fig.layout[f"{a}axis"].title.text or a) for a in "yx")
    return shown.rename_axis(corner).reset_index().map(_cell), note


def _pick(count: int, most: int) -> list[int]:
    """Places of at most `most` of `count` things, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist() if count else []


def _cell(value: Any) -> str:
    value = None if value is None else getattr(value, "item", lambda: value)()
    return _words(value) if isinstance(value, str) else str(value) if isinstance(value, int) else number(value)


def _words(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup.replace("<br>", " ")))
