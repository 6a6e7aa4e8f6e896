"""The static twin: any of the kit's figures drawn by matplotlib from the plotly figure itself, without a browser.

One description, two renderers: the twin reads the figure's traces, axes, shapes and annotations, so the picture in a
saved notebook or a printed report cannot disagree with the interactive one. It draws the trace kinds that the kit
uses: scatter (lines, markers, steps, fills, stacks), bar (grouped, stacked, horizontal) and heatmap. Another kind is
refused by name, not left out.
"""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import BackendError
from . import static_traces
from .static_panel import PX, Panel, clean, rgba
from .static_traces import DASH
from .theme import FONTS, HEIGHT, INK, MARGIN, MUTED, PAPER, SERIES, SIZE, WIDTH, heading, need

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.figure import Figure

SIDE = {"left": "left", "center": "center", "right": "right", "auto": "center", None: "center"}
LEVEL = {"top": "top", "middle": "center", "bottom": "bottom", "auto": "center", None: "center"}
KINDS = ("scatter", "scattergl", "bar", "heatmap")


def render(fig: go.Figure, format: str = "png", *, scale: float = 2.0) -> bytes:
    """Picture of a figure.

    Args:
        fig: a plotly figure made of scatter, bar and heatmap traces.
        format: "png", "svg" or "pdf".
        scale: pixels of the PNG for one pixel of the figure.

    Raises:
        BackendError: matplotlib is missing, or the figure has a trace kind that the twin does not draw.
    """
    mpl = need("matplotlib", "the static twin of a figure")
    out = io.BytesIO()
    metadata = {"Date": None} if format == "svg" else None  # equal figures give equal files
    with mpl.rc_context({"svg.hashsalt": "moekit", "svg.fonttype": "path"}):
        to_matplotlib(fig).savefig(out, format=format, dpi=96 * scale, metadata=metadata)
    if format == "png":  # a third of the size with a palette: flat colours and text need few
        from PIL import Image

        drawn, out = Image.open(out).convert("RGB"), io.BytesIO()
        drawn.quantize(256, dither=Image.Dither.NONE).save(out, "png")
    return out.getvalue()


def to_matplotlib(fig: go.Figure) -> Figure:
    """The figure drawn by matplotlib at the same size, margins and domains. See `render` for what is drawn."""
    need("matplotlib", "the static twin of a figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unknown = sorted({t.type for t in fig.data} - set(KINDS))
    if unknown:
        raise BackendError(
            f"the static twin draws scatter, bar and heatmap traces, not {', '.join(unknown)}; "
            "use one of those kinds, or save this figure with plotly's own image export"
        )
    size = ((fig.layout.width or WIDTH) / 96, (fig.layout.height or HEIGHT) / 96)
    figure = Figure(figsize=size, dpi=96, facecolor=PAPER)
    FigureCanvasAgg(figure)  # not pyplot: no global state, and safe from a background thread
    Canvas(fig, figure).draw()
    return figure


class Canvas:
    """The page: where panels lie, and all that is written around them."""

    def __init__(self, fig: go.Figure, figure: Figure):
        self.fig, self.figure, self.layout = fig, figure, fig.layout
        self.width, self.height = figure.get_size_inches() * 96
        self.margin = {s: MARGIN[s] if self.layout.margin[s] is None else self.layout.margin[s] for s in "lrtb"}
        self.panels: dict[tuple[str, str], Panel] = {}

    def draw(self) -> None:
        """Traces, then axes, then shapes and annotations (which need the final ranges), then title and legend."""
        shown: list[tuple[Any, str]] = []
        for index, trace in enumerate(self.fig.data):
            if trace.visible in (False, "legendonly"):
                continue
            panel = self.panel(trace.xaxis or "x", trace.yaxis or "y")
            colour = SERIES[index % len(SERIES)]
            if trace.type == "heatmap":
                mesh = static_traces.heatmap(panel, trace, self.font)
                if trace.showscale is not False:
                    left = self.paper(1.02 if trace.colorbar.x is None else trace.colorbar.x, 0)[0]
                    static_traces.colour_bar(self, mesh, trace.colorbar, panel, left, self.width, self.height)
                continue
            if trace.type == "bar":
                gap = 0.2 if self.layout.bargap is None else self.layout.bargap
                drawn = static_traces.bar(panel, trace, colour, self.font, self.layout.barmode or "group", gap)
            else:
                drawn = static_traces.scatter(panel, trace, colour, self.font)
            if trace.name and trace.showlegend is not False:
                shown.append((drawn, clean(trace.name)[0]))
        for panel in self.panels.values():
            panel.finish(self.font)
        for shape in self.layout.shapes:
            self.shape(shape)
        for note in self.layout.annotations:
            if note.text and note.visible is not False:
                self.note(note)
        self.title()
        if self.layout.showlegend or (self.layout.showlegend is None and len(shown) > 1):
            self.legend(shown)

    def panel(self, x: str, y: str) -> Panel:
        """The pair of axes named as a trace names them, made on first use."""
        if (x, y) not in self.panels:
            xaxis, yaxis = self.layout[x.replace("x", "xaxis")], self.layout[y.replace("y", "yaxis")]
            (x0, x1), (y0, y1) = xaxis.domain or (0, 1), yaxis.domain or (0, 1)
            (left, bottom), (right, top) = self.paper(x0, y0), self.paper(x1, y1)
            ax = self.figure.add_axes((left, bottom, right - left, top - bottom), facecolor="none")
            traces = [t for t in self.fig.data if (t.xaxis or "x", t.yaxis or "y") == (x, y)]
            self.panels[x, y] = Panel(ax, xaxis, yaxis, traces, self.layout.template.layout)
        return self.panels[x, y]

    def paper(self, x: float, y: float) -> tuple[float, float]:
        """Paper coordinates (0..1 inside the margins) as fractions of the whole figure."""
        m = self.margin
        return (
            (m["l"] + x * (self.width - m["l"] - m["r"])) / self.width,
            (m["b"] + y * (self.height - m["t"] - m["b"])) / self.height,
        )

    def font(self, size: float, bold: bool = False) -> Any:
        """The kit's typeface at a size in pixels."""
        from matplotlib.font_manager import FontProperties

        return FontProperties(family=list(_families()), size=size * PX, weight="bold" if bold else "normal")

    def place(self, ref: str | None, value: Any, name: str, exponent: bool) -> float:
        """A coordinate of a shape or an annotation as a fraction of the figure.

        On a logarithmic axis plotly's annotations give the exponent, its shapes the value.
        """
        ref = ref or name
        if ref == "paper":
            return self.paper(value, value)[0 if name == "x" else 1]
        key = ref.removesuffix(" domain")
        panel = next(p for pair, p in self.panels.items() if key in pair)
        if key != ref:
            box = panel.ax.get_position()
            return box.x0 + value * box.width if name == "x" else box.y0 + value * box.height
        value = panel.values(name, [value])[0]
        if panel.axis(name).type == "log" and exponent:
            value = 10.0**value
        point = (value, panel.ax.get_ylim()[0]) if name == "x" else (panel.ax.get_xlim()[0], value)
        spot = self.figure.transFigure.inverted().transform(panel.ax.transData.transform(point))
        return float(spot[0 if name == "x" else 1])

    def shape(self, shape: Any) -> None:
        """A line or a filled rectangle."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        x0, x1 = (self.place(shape.xref, v, "x", False) for v in (shape.x0, shape.x1))
        y0, y1 = (self.place(shape.yref, v, "y", False) for v in (shape.y0, shape.y1))
        if shape.type == "rect":
            artist = Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=rgba(shape.fillcolor or "none"), lw=0)
        else:
            style = DASH.get(shape.line.dash or "solid", "-")
            width = (shape.line.width or 1) * PX
            artist = Line2D([x0, x1], [y0, y1], color=rgba(shape.line.color or MUTED), linewidth=width, linestyle=style)
        artist.set(transform=self.figure.transFigure, alpha=shape.opacity, zorder=-1 if shape.layer == "below" else 3)
        self.figure.add_artist(artist)

    def note(self, note: Any) -> None:
        """An annotation without its arrow."""
        x = self.place(note.xref, note.x, "x", True) + (note.xshift or 0) / self.width
        y = self.place(note.yref, note.y, "y", True) + (note.yshift or 0) / self.height
        text, bold = clean(note.text)
        self.figure.text(x, y, text, ha=SIDE[note.xanchor], va=LEVEL[note.yanchor], rotation=-(note.textangle or 0),
                         multialignment=note.align or "left", linespacing=1.25, color=rgba(note.font.color or INK),
                         fontproperties=self.font(note.font.size or SIZE["tick"], bold))  # fmt: skip

    def title(self) -> None:
        """Title and subtitle, flush with the left edge of the plot."""
        (title, subtitle), left = heading(self.fig), self.paper(0, 0)[0]
        for part, down, size, colour, bold in (
            (title, 18, self.layout.title.font.size or SIZE["title"], INK, True),
            (subtitle, 43, SIZE["subtitle"], MUTED, False),
        ):
            if part:
                self.figure.text(left, 1 - down / self.height, clean(part)[0], ha="left", va="top", color=colour,
                                 linespacing=1.25, fontproperties=self.font(size, bold))  # fmt: skip

    def legend(self, shown: list[tuple[Any, str]]) -> None:
        """For figures of the user's own; the kit's figures label their lines directly."""
        drawn = self.figure.legend(
            [artist for artist, _ in shown], [name for _, name in shown], loc="lower left", ncols=max(1, len(shown)),
            bbox_to_anchor=self.paper(0, 1), frameon=False, prop=self.font(SIZE["tick"]), borderaxespad=0.2,
            handlelength=1.4, columnspacing=1.4,
        )  # fmt: skip
        for text in drawn.get_texts():
            text.set_color(INK)


@cache
def _families() -> tuple[str, ...]:
    from matplotlib.font_manager import fontManager

    have = set(fontManager.get_font_names())
    return (*[name for name in FONTS[:-1] if name in have][:1], FONTS[-1])
