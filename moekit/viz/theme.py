"""One visual language: what each colour means, how large things are, and how a figure reaches the reader.

* A colour has one meaning. The four position classes and the seven passes own theirs (`CLASS`, `PASS`); they are
  told apart with any common colour blindness, and by lightness in a black and white print.
* A line or layer is labelled where it ends, not in a legend; axes carry their unit.
* A figure leaves the kernel three times in one message: for plotly, as a picture, and as numbers in plain text, so
  that a saved notebook shows its result where no JavaScript runs.

Importing this module imports neither plotly nor matplotlib."""

import base64
import importlib
import json
import math
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batch import CLASSES
from ..errors import BackendError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    Figure = Any  # the name that signatures use; plotly is imported when a figure is drawn

# Lightness 42, 73, 41, 81: neighbours in a stack differ in grey too. Smallest CIELAB distance between two of them,
# with protanopia, deuteranopia or tritanopia simulated: 20 (a test computes it).
CLASS: dict[str, str] = dict(zip(CLASSES, ("#0067A5", "#EDA63A", "#A23B72", "#C5CBD1")))
CLASS_TEXT: dict[str, str] = dict(zip(CLASSES, ("#005A91", "#8F5B00", "#8C2F61", "#5F6C7B")))  # dark: to write with
CLASS_MEANING = dict(zip(CLASSES, (
    "predicts a token that is trained on", "routed, its prediction is not trained on",
    "its instance was removed by the filter; it still routes", "fills the row",
)))  # fmt: skip
PASSES = ("forward", "backward", "recompute", "score", "evaluate", "prefill", "decode")
PASS = dict(zip(PASSES, ("#332288", "#88CCEE", "#44AA99", "#999933", "#DDCC77", "#CC6677", "#882255")))
SERIES = ("#0067A5", "#D55E00", "#00856A", "#7A4FA3", "#4BA3D9", "#3E4C59")

INK, MUTED, RULE, GRID, PAPER = "#1F2933", "#5F6C7B", "#9AA5B1", "#E8EBEE", "#FFFFFF"
# below, at and above the balanced share: teal, near white, brown
DIVERGING = [(0.0, "#00574F"), (0.2, "#35978F"), (0.35, "#95D3C9"), (0.5, "#F7F7F5"), (0.65, "#E8CE94"),
             (0.8, "#BF812D"), (1.0, "#6B3D07")]  # fmt: skip
FONTS = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")
SIZE = {"title": 17, "subtitle": 13, "axis": 13, "tick": 12, "label": 13}  # pixels at 96 to the inch
WIDTH, HEIGHT = 720, 400  # 19 cm wide in print
WIDE = 840  # of several panels: a cell of JupyterLab on a screen of 1280, with the side bar open
MARGIN = {"l": 72, "r": 28, "t": 84, "b": 60}
TEMPLATE = "moekit"


def need(module: str, purpose: str) -> Any:
    """Import an optional dependency, or say what wanted it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = 'install the notebook extra: pip install "moekit[notebooks]"'
        raise BackendError(
            f"{purpose} needs {module.split('.')[0]}, which cannot be imported ({error}); {how}"
        ) from error


def template() -> str:
    """Register the kit's plotly template and return its name. The user's default template stays what it was."""
    pio = need("plotly.io", "drawing a figure")
    if TEMPLATE not in pio.templates:
        words = {"size": SIZE["tick"], "color": MUTED}
        axis = {"title": {"font": words | {"size": SIZE["axis"]}, "standoff": 10}, "tickfont": words, "zeroline": False}
        axis |= {"gridcolor": GRID, "linecolor": RULE, "ticklabelstandoff": 5, "automargin": False}
        title = {"font": {"size": SIZE["title"], "color": INK, "weight": 600}, "pad": {"t": 18}}
        title |= {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
        legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}
        layout = {"paper_bgcolor": PAPER, "plot_bgcolor": PAPER, "colorway": SERIES, "margin": MARGIN, "bargap": 0.3}
        layout |= {"font": {"family": ", ".join(FONTS) + ", sans-serif", "size": SIZE["tick"], "color": INK}}
        layout |= {"xaxis": {**axis, "showgrid": False, "showline": True}, "yaxis": axis, "title": title}
        layout |= {"legend": legend, "hovermode": "x unified", "hoverlabel": {"font": words, "bgcolor": PAPER}}
        pio.templates[TEMPLATE] = {"layout": layout}
    return TEMPLATE


def figure(title: str, subtitle: str = "", *, width: int = WIDTH, height: int = HEIGHT, **layout: Any) -> Figure:
    """An empty figure in the kit's style: title, how to read it, size in pixels, further plotly layout settings."""
    go = need("plotly.graph_objects", "drawing a figure")
    size = {"width": width, "height": height, "margin": {**MARGIN, **layout.pop("margin", {})}}
    head = {"template": template(), "title": {"text": headline(title, subtitle)}, "showlegend": False}
    return go.Figure(layout=head | size | layout)


def headline(title: str, subtitle: str = "") -> str:
    """Title and subtitle as one text. (Plotly's own subtitle lands on the title when a figure is drawn hidden.)"""
    style = f"font-size:{SIZE['subtitle']}px;color:{MUTED};font-weight:400"
    return title + (f"<br><span style='{style}'>{subtitle}</span>" if title and subtitle else "")


def heading(fig: Figure) -> tuple[str, str]:
    """Title and subtitle of a figure, the inverse of `headline`; of a figure of plotly's own making too."""
    title, _, subtitle = (fig.layout.title.text or "").partition("<br>")
    return title, re.sub(r"<[^>]+>", "", subtitle) or fig.layout.title.subtitle.text or ""


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """Settings of a y axis that lists names from the top, in the order given."""
    order = {"type": "category", "autorange": "reversed", "categoryarray": list(names), "categoryorder": "array"}
    return {**order, "showgrid": False, "tickfont": {"size": SIZE["label"], "color": INK}}


def page(name: str, **values: Any) -> str:
    """One of the HTML templates beside this file, filled in; what is not `Markup` is escaped."""
    colours = {"INK": INK, "MUTED": MUTED, "GRID": GRID, "CLASS": CLASS, "CLASS_TEXT": CLASS_TEXT, "tint": tint}
    return _templates().get_template(name).render(colours, **values)


@cache
def _templates() -> Any:
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    where = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=where, autoescape=True, trim_blocks=True, undefined=ChainableUndefined)


def tint(colour: str, share: float) -> str:
    """`colour` mixed with white: share 1 is the colour itself, 0 is white.
    >>> tint("#000000", 0.2)
    '#CCCCCC'
    """
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (p - 255) * share):02X}" for p in parts)


def number(value: float | None) -> str:
    """A number as a reader wants it: at most four significant digits, thousands marked, `–` for none.
    >>> [number(v) for v in (0.5, 1.23456, 12345.6, 1234567, 3.2e-9, float("nan"))]
    ['0.5', '1.235', '12,346', '1.235M', '3.2e-09', '–']
    """
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    limit, unit = next(((10.0**e, u) for e, u in ((12, "T"), (9, "G"), (6, "M")) if size >= 10.0**e), (1.0, ""))
    return f"{value:,.0f}" if 1000 <= size < 1e6 else f"{value / limit:.4g}{unit}"


def spread(at: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart so that neighbours are `gap` apart, inside [low, high], as little as needed.
    >>> spread([10.0, 11.0, 40.0], gap=6, low=0, high=50)
    [7.5, 13.5, 40.0]
    """
    order = np.argsort(at, kind="stable")
    place = gap * np.arange(len(order))
    rest = np.asarray(at, dtype=float)[order] - place  # labels are far enough apart where this does not fall
    even = (np.maximum.accumulate(rest) + np.minimum.accumulate(rest[::-1])[::-1]) / 2
    out = np.empty(len(order))
    out[order] = np.clip(even, low, max(low, high - place[-1])) + place if len(order) else even
    return out.tolist()


def note(
    fig: Figure, text: str, x: Any, y: Any, *, axes: tuple[str, str] = ("paper", "paper"), stand: str = "left middle",
    shift: tuple[float, float] = (0, 0), colour: str = INK, size: float = SIZE["label"],
) -> None:  # fmt: skip
    """Write a text at a place: `stand` says which of its edges is there, `shift` moves it right and up by pixels."""
    side, level = stand.split()
    at = {"x": x, "y": y, "xref": axes[0], "yref": axes[1], "xshift": shift[0], "yshift": shift[1]}
    look = {"xanchor": side, "yanchor": level, "align": "left", "font": {"color": colour, "size": size}}
    fig.add_annotation(text=text, showarrow=False, **at, **look)


def end_labels(
    fig: Figure, labels: list[tuple[float, str, str]], low: float, high: float, *, axis: str = "", x: float = 1.0
) -> None:
    """Write labels (height in data units, text, colour) at the right edge `x` (in paper units) of a panel, moved apart
    where they would touch. `low` and `high`: range of its y axis (not logarithmic), whose suffix is `axis`."""
    bottom, top = getattr(fig.layout, f"yaxis{axis}").domain or (0.0, 1.0)
    pixels = (fig.layout.height - fig.layout.margin.t - fig.layout.margin.b) * (top - bottom)
    height = [min(max((v - low) / ((high - low) or 1.0), 0.0), 1.0) * pixels if math.isfinite(v) else 0.0
              for v, _, _ in labels]  # fmt: skip
    for (_, text, colour), up in zip(labels, spread(height, SIZE["label"] * 1.25, 0.0, pixels)):
        note(fig, text, x, bottom, shift=(8, up), colour=colour)


def plain(fig: Figure) -> dict[str, Any]:
    """The figure as JSON with every number written out (plotly packs arrays in base64, which not all viewers read)."""
    encoder = need("plotly.utils", "drawing a figure").PlotlyJSONEncoder
    parts = {"data": [t.to_plotly_json() for t in fig.data], "layout": fig.layout.to_plotly_json()}
    return json.loads(json.dumps(parts, cls=encoder))


def bundle(fig: Figure, *, interactive: bool = True) -> dict[str, Any]:
    """The MIME bundle of a figure: plotly's JSON, a PNG made without a browser, and its numbers as text.

    JupyterLab shows the PNG, in the figure's own size, until the mouse enters it, then draws the plot. It does not look
    at later updates of an output that it has drawn: what is updated must be a widget, or ``interactive=False``."""
    from . import static, tables

    data: dict[str, Any] = {"text/plain": tables.text(fig)}
    if interactive:
        data["application/vnd.plotly.v1+json"] = plain(fig)
    try:
        data["image/png"] = base64.b64encode(static.render(fig, "png", scale=1)).decode()
    except BackendError as error:  # said, not hidden: the numbers stay
        data["text/plain"] += f"\n(no picture: {error})"
    return data


def display(fig: Figure) -> None:
    """Show a figure so that it survives saving: see `bundle`. Outside IPython the numbers are printed."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        ipython.display.display(bundle(fig), raw=True)
    else:
        from .tables import text

        print(text(fig))
