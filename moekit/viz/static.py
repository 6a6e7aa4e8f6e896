"""The static twin: any of the kit's figures drawn by matplotlib from the plotly figure itself, without a browser.

One description, two renderers: the twin reads the figure's traces, axes, lines and annotations, so the picture in a
saved notebook or a printed report cannot disagree with the interactive one. It draws the trace kinds that the kit
uses: scatter (lines, markers), bar (grouped, stacked, horizontal) and heatmap. Another kind is refused by name, not
left out."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BackendError
from .static_panel import DASH, PX, Panel, clean, rgba, style
from .theme import HEIGHT, INK, MARGIN, MUTED, SERIES, SIZE, WIDTH, heading, need

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.figure import Figure

LEVEL = {"top": "top", "middle": "center", "bottom": "bottom"}
KINDS = ("scatter", "bar", "heatmap")


def render(fig: "go.Figure", format: str = "png", *, scale: float = 2.0) -> bytes:
    """Picture of a figure.
    Args:
        fig: a plotly figure made of scatter, bar and heatmap traces.
        format: "png", "svg" or "pdf".
        scale: pixels of the PNG for one pixel of the figure.
    Raises BackendError: matplotlib is missing, or the figure has a trace kind that the twin does not draw."""
    mpl, out = need("matplotlib", "the static twin of a figure"), io.BytesIO()
    metadata = {"Date": None} if format == "svg" else None  # equal figures give equal files
    with mpl.rc_context(style()):
        to_matplotlib(fig).savefig(out, format=format, dpi=96 * scale, metadata=metadata)
    return out.getvalue()


def stacked(figures: Sequence["go.Figure"]) -> bytes:
    """Figures below each other in one PNG. (No palette: one of 256 colours miscolours the scales of pale maps.)"""
    from PIL import Image

    parts, out = [Image.open(io.BytesIO(render(fig, scale=1))) for fig in figures], io.BytesIO()
    whole = Image.new("RGB", (max(p.width for p in parts), sum(p.height for p in parts)), "white")
    for i, part in enumerate(parts):
        whole.paste(part, (0, sum(p.height for p in parts[:i])))
    whole.save(out, "png")
    return out.getvalue()


def to_matplotlib(fig: "go.Figure") -> "Figure":
    """The figure drawn by matplotlib at the same size, margins and domains. See `render` for what is drawn."""
    mpl = need("matplotlib", "the static twin of a figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = {"stacked area" if t.type == "scatter" and t.stackgroup else t.type for t in fig.data} - set(KINDS)
    if kinds:
        how = "use one of those kinds, or save this figure with plotly's own image export"
        other = ", ".join(sorted(kinds))
        raise BackendError(f"the static twin draws scatter, bar and heatmap traces, not {other}; {how}")
    with mpl.rc_context(style()):
        figure = Figure(figsize=((fig.layout.width or WIDTH) / 96, (fig.layout.height or HEIGHT) / 96), dpi=96)
        FigureCanvasAgg(figure)  # not pyplot: no global state, and safe from a background thread
        _Page(fig, figure).draw()
    return figure


class _Page:
    """Where panels lie, and all that is written around them."""

    def __init__(self, fig: "go.Figure", figure: "Figure"):
        from matplotlib.transforms import Affine2D

        self.fig, self.figure, self.layout = fig, figure, fig.layout
        self.width, self.height = figure.get_size_inches() * 96
        m = {s: MARGIN[s] if self.layout.margin[s] is None else self.layout.margin[s] for s in "lrtb"}
        inner = (self.width - m["l"] - m["r"]) / self.width, (self.height - m["t"] - m["b"]) / self.height
        # paper coordinates (0..1 inside the margins) as fractions of the whole figure
        self.paper = Affine2D().scale(*inner).translate(m["l"] / self.width, m["b"] / self.height)
        self.panels: dict[tuple[str, str], Panel] = {}

    def draw(self) -> None:
        """Traces, then axes, then lines and annotations (whose axes need their final ranges), then the title."""
        for index, trace in enumerate(t for t in self.fig.data if t.visible in (None, True)):
            panel = self.panel(trace.xaxis or "x", trace.yaxis or "y")
            if trace.type == "heatmap":
                mesh = panel.heatmap(trace)
                if trace.showscale is not False:
                    self.colour_bar(mesh, trace.colorbar, panel)
            elif trace.type == "bar":
                panel.bar(trace, SERIES[index % len(SERIES)], self.layout)
            else:
                panel.scatter(trace, SERIES[index % len(SERIES)])
        for panel in self.panels.values():
            panel.finish()
        for shape in (s for s in self.layout.shapes if s.type == "line"):
            self.line(shape)
        for note in (n for n in self.layout.annotations if n.text):
            self.note(note)
        self.title()
        named = [t for t in self.fig.data if t.name and t.type != "heatmap"]
        if named and (self.layout.showlegend or (self.layout.showlegend is None and len(named) > 1)):
            x, y = self.paper.transform((0, 1))  # a figure of the user's own; the kit's label their lines directly
            self.figure.legend(loc="lower left", bbox_to_anchor=(x, y), ncols=4)

    def panel(self, x: str, y: str) -> Panel:
        """The pair of axes named as a trace names them, made on first use."""
        if (x, y) not in self.panels:
            xaxis, yaxis = self.layout[x.replace("x", "xaxis")], self.layout[y.replace("y", "yaxis")]
            (x0, x1), (y0, y1) = xaxis.domain or (0, 1), yaxis.domain or (0, 1)
            (left, bottom), (right, top) = self.paper.transform([(x0, y0), (x1, y1)])
            ax = self.figure.add_axes((left, bottom, right - left, top - bottom))
            traces = [t for t in self.fig.data if (t.xaxis or "x", t.yaxis or "y") == (x, y)]
            self.panels[x, y] = Panel(ax, {"x": xaxis, "y": yaxis}, traces, self.layout.template.layout)
        return self.panels[x, y]

    def place(self, refs: tuple[str, str], values: list[Any], exponent: bool) -> tuple[list[Any], Any]:
        """Coordinates as numbers, x and y in turn, and the way from them to the picture: paper, an axis, or its domain.

        On a logarithmic axis plotly's annotations give the exponent, its shapes the value."""
        from matplotlib.transforms import blended_transform_factory

        ways, values = [], list(values)
        for side, ref in enumerate(refs):
            name, _, domain = ref.partition(" ")
            panel = next((p for pair, p in self.panels.items() if name in pair), None)
            if panel is None or domain:
                ways.append(panel.ax.transAxes if panel else self.paper + self.figure.transFigure)
                continue
            found = panel.values(name[0], values[side::2])
            values[side::2] = 10.0**found if exponent and panel.axis[name[0]].type == "log" else found
            ways.append(panel.ax.transData)
        return values, blended_transform_factory(*ways)

    def line(self, shape: Any) -> None:
        """A shape that is a line."""
        from matplotlib.lines import Line2D

        ends = [shape.x0, shape.y0, shape.x1, shape.y1]
        ends, way = self.place((shape.xref or "x", shape.yref or "y"), ends, exponent=False)
        look = {"color": rgba(shape.line.color or MUTED), "linestyle": DASH.get(shape.line.dash, "-")}
        look |= {"linewidth": (shape.line.width or 1) * PX, "zorder": -1 if shape.layer == "below" else 3}
        self.figure.add_artist(Line2D(ends[::2], ends[1::2], transform=way, **look))

    def note(self, note: Any) -> None:
        """An annotation without its arrow."""
        from matplotlib.transforms import ScaledTranslation

        (x, y), way = self.place((note.xref or "x", note.yref or "y"), [note.x, note.y], exponent=True)
        shift = ScaledTranslation((note.xshift or 0) / 96, (note.yshift or 0) / 96, self.figure.dpi_scale_trans)
        text, bold = clean(note.text)
        look = {"color": note.font.color or INK, "size": (note.font.size or SIZE["tick"]) * PX}
        look |= {
            "weight": "bold" if bold else "normal",
            "ha": note.xanchor or "center",
            "va": LEVEL.get(note.yanchor, "center"),
            "linespacing": 1.25,
        }
        self.figure.text(x, y, text, transform=way + shift, multialignment=note.align or "left", **look)

    def title(self) -> None:
        """Title and subtitle, flush with the left edge of the plot."""
        left = self.paper.transform((0, 0))[0]
        looks = ((18, "title", INK, "bold"), (43, "subtitle", MUTED, "normal"))
        for part, (down, size, colour, weight) in zip(heading(self.fig), looks):
            self.figure.text(left, 1 - down / self.height, clean(part)[0], va="top", color=colour, weight=weight,
                             size=SIZE[size] * PX)  # fmt: skip

    def colour_bar(self, mesh: Any, bar: Any, panel: Panel) -> None:
        """A colour bar right of a panel, as high as it."""
        box, left = panel.ax.get_position(), self.paper.transform((1.02 if bar.x is None else bar.x, 0))[0]
        place = (left + 6 / self.width, box.y0, (bar.thickness or 14) / self.width, box.height)
        drawn = self.figure.colorbar(mesh, cax=self.figure.add_axes(place))
        drawn.outline.set_visible(False)
        if bar.tickvals is not None:
            drawn.set_ticks(list(bar.tickvals), labels=bar.ticktext)
        drawn.ax.minorticks_off()
        drawn.ax.tick_params(pad=4)
