"""The visual language: colours that are told apart, text that can be read, nothing global changed, nothing imported."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from moekit.errors import BackendError
from moekit.viz import curves, denominators, masking, routing, static, theme

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize(("colours", "least"), [(theme.CLASS, 20.0), (theme.PASS, 15.0)], ids=["classes", "passes"])
def test_colours_are_told_apart(colours: dict[str, str], least: float, kind: str) -> None:
    seen = {name: lab(np.array(BLINDNESS[kind]) @ linear(c)) for name, c in colours.items()}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > least, (a, b)


def test_neighbours_in_a_stack_differ_in_a_grey_print() -> None:
    light = [lab(linear(c))[0] for c in theme.CLASS.values()]
    assert all(abs(a - b) > 25 for a, b in itertools.pairwise(light)), light


@pytest.mark.parametrize("colour", [*theme.CLASS_TEXT.values(), theme.INK, theme.MUTED])
def test_text_on_white_has_enough_contrast(colour: str) -> None:
    luminance = float(XYZ[1] @ linear(colour))
    assert 1.05 / (luminance + 0.05) >= 4.5  # WCAG 2 AA


def test_the_template_is_registered_and_the_default_stays() -> None:
    before = pio.templates.default
    fig = theme.figure("title", "subtitle")
    assert theme.TEMPLATE in pio.templates and pio.templates.default == before
    assert fig.layout.template.layout.colorway == theme.SERIES
    assert go.Figure().layout.template.layout.colorway != theme.SERIES


def test_plain_writes_packed_numbers_out() -> None:
    fig = go.Figure(go.Scatter(x=np.arange(3), y=np.array([1.5, np.nan, 2.5])))
    assert "bdata" in fig.to_json()
    data = theme.plain(fig)["data"][0]
    assert data["x"] == [0, 1, 2] and data["y"] == [1.5, None, 2.5]
    assert theme.plain(go.Figure(go.Heatmap(z=np.arange(4).reshape(2, 2))))["data"][0]["z"] == [[0, 1], [2, 3]]


def test_labels_are_moved_apart_as_little_as_needed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        at = rng.uniform(0, 100, rng.integers(1, 7)).tolist()
        out = theme.spread(at, 12.0, 0.0, 100.0)
        ordered = sorted(out)
        assert all(b - a >= 12 - 1e-6 for a, b in itertools.pairwise(ordered))
        assert min(out) >= -1e-9 and max(out) <= 100 + 1e-9
        assert np.argsort(out, kind="stable").tolist() == np.argsort(at, kind="stable").tolist()
    assert theme.spread([10, 50, 90], 12, 0, 100) == [10, 50, 90]


def test_importing_the_plots_loads_neither_plotly_nor_widgets_nor_matplotlib() -> None:
    names = ["curves", "denominators", "live", "masking", "panels", "progress", "report", "routing", "series", "show",
             "static", "static_panel", "tables", "theme"]  # fmt: skip
    code = (
        "import sys, moekit\n"
        "assert not {'torch', 'plotly'} & set(sys.modules), 'moekit alone'\n"
        f"for name in {names}: __import__('moekit.viz.' + name)\n"
        "moekit.live, moekit.show\n"
        "heavy = {'plotly', 'ipywidgets', 'anywidget', 'matplotlib', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: routing.load_heatmap(np.ones((2, 4))),
        lambda: masking.routed_work({"rows/supervised": [1]}),
        lambda: curves.curves({"loss/sft": [1.0]}, "loss/sft"),
        lambda: denominators.side_by_side({"global_tokens": {"loss": 1.0, "norm_ratio": 1.0, "cosine": 1.0}}),
    ],
    ids=["routing", "masking", "curves", "denominators"],
)
def test_without_plotly_the_error_names_the_extra(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(BackendError, match=r"needs plotly.*pip install \"moekit\[notebooks\]\""):
        draw()


def test_without_matplotlib_the_numbers_stay_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fig = curves.curves({"loss/sft": [2.5, 1.25]}, "loss/sft")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"matplotlib.*moekit\[notebooks\]"):
        static.render(fig)
    data = theme.bundle(fig)
    assert "image/png" not in data and "no picture: " in data["text/plain"] and "1.25" in data["text/plain"]


def test_numbers_as_words() -> None:
    assert theme.number(math.inf) == "∞" and theme.number(0) == "0" and theme.number(2_000_000_000) == "2G"
