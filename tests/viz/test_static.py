"""The static twin draws what the plotly figure holds: the same numbers at the same places."""

from __future__ import annotations

import io

import numpy as np
import plotly.graph_objects as go
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from PIL import Image

from moekit.errors import BackendError
from moekit.viz import curves, denominators, masking, routing, static, tables, theme

STEPS = np.arange(1, 9)
RUN = {
    "step": STEPS,
    "loss/sft": 3.0 / STEPS,
    "loss/total": 3.1 / STEPS,
    "load/max_over_mean": 1 + 1 / STEPS,
    "load_supervised/max_over_mean": 1 + 2 / STEPS,
    "rows/supervised": 40 + 0 * STEPS,
    "rows/context": 80 + STEPS,
    "rows/filtered": 10 + 0 * STEPS,
    "rows/padding": 30 - STEPS,
    "tokens/supervised": 10 + 0 * STEPS,
    "time/step_s": 0.5 + 0 * STEPS,
    "memory/saved_bytes": 1e6 + 0 * STEPS,
}
READINGS = {
    "global_tokens": {"loss": 2.0, "norm_ratio": 1.0, "cosine": 1.0},
    "rank_mean": {"loss": 2.5, "norm_ratio": 0.8, "cosine": 0.99},
    "constant": {"loss": 0.5, "norm_ratio": 1.3, "cosine": 1 - 1e-6},
}
FIGURES = {
    "curves": lambda: curves.curves(RUN, ("loss/sft", "loss/total"), "time/step_s", title="Loss", smooth=2),
    "load": lambda: routing.load_heatmap(np.array([[0, 3, 1, 4], [2, 2, 2, 2]])),
    "wide load": lambda: routing.load_heatmap(np.arange(8 * 64).reshape(8, 64)),
    "load over time": lambda: routing.load_over_time(RUN),
    "routed work": lambda: masking.routed_work(RUN),
    "costs": lambda: masking.cost_bars({"padded": RUN, "packed": {**RUN, "rows/padding": 0 * STEPS}}),
    "denominators": lambda: denominators.side_by_side(READINGS),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_twin_and_a_table(name: str) -> None:
    fig = FIGURES[name]()
    picture = Image.open(io.BytesIO(static.render(fig, scale=1)))
    assert picture.size == (fig.layout.width, fig.layout.height)
    ink = np.asarray(picture.convert("L"))
    assert (ink < 250).mean() > 0.02, "an empty picture"
    inside = ink[:, 2:-2][:, [0, -1]]
    assert (inside > 250).all(), "something is cut at the left or right edge"
    assert all(part in tables.text(fig) for part in theme.heading(fig))
    assert len(tables.text(fig).splitlines()) >= 3
    assert "<td" in tables.to_html(fig)


def test_equal_figures_give_equal_files_and_svg_is_vector() -> None:
    first, second = (static.render(FIGURES["costs"](), "svg") for _ in range(2))
    assert first == second and b"<svg" in first and b"<image" not in first


def test_lines_bars_and_cells_hold_the_figures_numbers() -> None:
    fig = theme.figure("t", xaxis={"domain": [0, 0.4]}, xaxis2={"domain": [0.6, 1]}, barmode="stack")
    fig.add_scatter(x=[1, 2, 3], y=[2.5, 1.25, 0.5], mode="lines", line={"color": "#123456"})
    for values in ([1, -2], [3, 4], [5, -6]):
        fig.add_bar(x=["a", "b"], y=values, xaxis="x2", yaxis="y2", marker={"color": "#AABBCC"})
    fig.update_layout(yaxis2={"anchor": "x2"})
    left, right = static.to_matplotlib(fig).axes
    (line,) = left.lines
    assert line.get_xydata().tolist() == [[1, 2.5], [2, 1.25], [3, 0.5]]
    assert to_hex(line.get_color()) == "#123456"
    bars = [(p.get_x() + p.get_width() / 2, p.get_y(), p.get_height()) for p in right.patches]
    assert np.allclose(bars, [(0, 0, 1), (1, 0, -2), (0, 1, 3), (1, 0, 4), (0, 4, 5), (1, -2, -6)])  # signs stack apart
    # the panels lie where plotly puts them: margins in pixels, domains as shares of the rest
    width, m = fig.layout.width, fig.layout.margin
    inner = width - m.l - m.r
    assert np.isclose(right.get_position().x0 * width, m.l + 0.6 * inner)
    assert np.isclose(left.get_position().x1 * width, m.l + 0.4 * inner)
    assert [t.get_text() for t in right.get_xticklabels()] == ["a", "b"]


def test_grouped_and_lying_bars() -> None:
    fig = go.Figure([go.Bar(y=["a", "b"], x=[1, 2], orientation="h", base=1), go.Bar(y=["a", "b"], x=[3, 4],
                    orientation="h")])  # fmt: skip
    bars = static.to_matplotlib(fig).axes[0].patches
    assert [(b.get_x(), b.get_width()) for b in bars] == [(1, 1), (1, 2), (0, 3), (0, 4)]
    assert np.allclose(bars[0].get_y() + bars[0].get_height(), bars[2].get_y())  # side by side


def test_heatmap_cells_scale_and_gaps() -> None:
    fig = go.Figure(go.Heatmap(z=[[0, 1, None], [3, 4, 9]], zmin=0, zmax=4, colorscale=theme.DIVERGING, showscale=True))
    fig.update_yaxes(autorange="reversed")
    drawn = static.to_matplotlib(fig)
    mesh = drawn.axes[0].collections[0]
    assert mesh.get_array().filled(-1).tolist() == [[0, 1, -1], [3, 4, 9]]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 4)
    assert drawn.axes[0].get_ylim() == (1.5, -0.5)
    middle = to_rgb(theme.DIVERGING[3][1])
    assert np.allclose(mesh.cmap(mesh.norm(2))[:3], middle, atol=0.02)
    assert len(drawn.axes) == 2, "a colour bar"


def test_numbers_on_a_category_axis_stand_in_order_of_appearance() -> None:
    fig = go.Figure(go.Bar(x=[30, 10, 20], y=[1, 2, 3]))
    fig.update_xaxes(type="category")
    ax = static.to_matplotlib(fig).axes[0]
    assert [b.get_x() + b.get_width() / 2 for b in ax.patches] == [0, 1, 2]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["30", "10", "20"]


def test_log_axes_shapes_and_notes_stand_where_plotly_puts_them() -> None:
    fig = theme.figure("t")
    fig.add_scatter(x=[1, 100], y=[0, 1], mode="markers")
    fig.update_layout(xaxis={"type": "log", "range": [0, 2]}, yaxis={"range": [0, 1]})
    fig.add_shape(type="line", x0=10, x1=10, y0=0, y1=1)  # shapes give the value,
    fig.add_annotation(x=1, y=0.5, text="here", showarrow=False)  # annotations the exponent
    drawn = static.to_matplotlib(fig)
    box = drawn.axes[0].get_window_extent()
    middle = (box.x0 + box.x1) / 2
    (line,) = (artist for artist in drawn.artists if isinstance(artist, Line2D))
    note = next(t for t in drawn.texts if t.get_text() == "here")
    assert np.allclose(line.get_transform().transform(line.get_xydata())[:, 0], middle)
    assert np.isclose(note.get_transform().transform(note.get_position())[0], middle)


def test_a_kind_that_the_twin_cannot_draw_is_refused_by_name_and_shown_as_numbers() -> None:
    fig = go.Figure(go.Pie(values=[1, 2]))
    with pytest.raises(BackendError, match="not pie"):
        static.render(fig)
    with pytest.raises(BackendError, match="not stacked area"):
        static.render(go.Figure(go.Scatter(y=[1, 2], stackgroup="s")))
    assert (
        "no picture: the static twin draws scatter, bar and heatmap traces, not pie" in theme.bundle(fig)["text/plain"]
    )


def test_tables_keep_first_and_last_and_say_what_they_left_out() -> None:
    fig = go.Figure(go.Scatter(x=list(range(100)), y=[i / 4 for i in range(100)], name="loss"))
    lines = tables.text(fig, rows=5).splitlines()
    assert [line.split() for line in lines[:-1]] == [["x", "loss"], ["0", "0"], ["25", "6.25"], ["50", "12.5"],
                                                      ["74", "18.5"], ["99", "24.75"]]  # fmt: skip
    assert lines[-1] == "5 of 100 rows shown"


def test_the_table_of_a_load_map_has_the_loads_and_not_their_logarithms() -> None:
    text = tables.text(routing.load_heatmap(np.array([[1, 3, 0, 0], [1, 1, 1, 1]])))
    assert "smallest 0 at (0, 2), largest 3 at (0, 1)" in text


def test_a_pale_cell_has_the_colour_that_the_scale_gives_it() -> None:
    """A palette for the whole picture would give neighbours of 1 one and the same, or another, colour."""
    values = np.linspace(-0.3, 0.3, 24)
    fig = theme.figure("", width=720, height=200)
    fig.add_heatmap(z=[values], zmin=-1, zmax=1, colorscale=theme.DIVERGING, showscale=True)
    picture = np.asarray(Image.open(io.BytesIO(static.render(fig, scale=1))).convert("RGB")).astype(int)
    left, right = fig.layout.margin.l, 720 - fig.layout.margin.r
    row = picture[100, [round(left + (i + 0.5) * (right - left) / 24) for i in range(24)]]
    stops, colours = zip(*((stop, [int(c[i : i + 2], 16) for i in (1, 3, 5)]) for stop, c in theme.DIVERGING))
    want = [[np.interp((v + 1) / 2, stops, [c[i] for c in colours]) for i in range(3)] for v in values]
    assert np.abs(row - want).max() < 2


def test_an_axis_that_reaches_to_zero_does_so_in_the_twin() -> None:
    fig = theme.figure("t", yaxis={"rangemode": "tozero"})
    fig.add_scatter(x=[0, 1], y=[100.0, 101.0], mode="lines")
    low, high = static.to_matplotlib(fig).axes[0].get_ylim()
    assert low == 0 and 101 <= high < 102
