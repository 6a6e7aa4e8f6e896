"""One notebook, executed without a browser: what is left of progress, panels, figures and the lab in the saved file."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

CELLS = {
    "curve": """
        from moekit.viz.curves import curves
        from moekit.viz.theme import display
        display(curves({"step": [1, 2, 3], "loss/sft": [2.5, 1.25, 0.5]}, "loss/sft", title="Loss"))
        """,
    "progress": """
        from moekit.viz.progress import Progress
        with Progress(10_000, "steps") as progress:
            for i in range(10_000):
                progress.update(loss=1 / (i + 1))
        """,
    "panels": """
        import threading
        from moekit.viz.panels import LogPanel
        a, b = LogPanel("panel a"), LogPanel("panel b")
        a._ipython_display_(); b._ipython_display_()
        def work(panel, name):
            for i in range(5):
                print(f"{name}{i}", file=panel)
        threads = [threading.Thread(target=work, args=pair) for pair in ((a, "a"), (b, "b"))]
        for t in threads: t.start()
        for t in threads: t.join()
        a.close(); b.close()
        """,
    "live": """
        import pathlib, tempfile
        from moekit.measure.record import RunWriter
        from moekit.viz.live import live
        folder = pathlib.Path(tempfile.mkdtemp()) / "run"
        writer = RunWriter(folder)
        writer.write(0, {"loss/sft": 2.5})
        watch = live(folder, "loss/sft", interval=0.1)
        watch
        """,
    "live ends": """
        writer.write(1, {"loss/sft": 1.25})
        writer.close()
        watch.close()
        print(type(watch.figure).__name__)
        """,
    "lab": """
        from moekit.viz.denominators import lab
        def measure(mode, ranks, microbatches):
            return {"loss": 2.0, "norm_ratio": 1 + 0.5 * (ranks - 1) * (mode == "rank_mean"), "cosine": 1.0}
        bench = lab(measure, modes=("global_tokens", "rank_mean"))
        bench
        """,
    "lab moves": """
        bench.sliders["ranks"].value = 4
        assert bench.value["ranks"] == 4
        print([float(x) for x in bench._widget.data[0].x])
        """,
    "show": """
        import torch
        from moekit.data.batch import Batch
        from moekit.viz.show import show
        show(Batch.make(torch.tensor([[5, 6, 7, 2]])))
        """,
    "static live": """
        import plotly.graph_objects
        from plotly.missing_anywidget import FigureWidget  # what plotly has in its place without the package
        plotly.graph_objects.FigureWidget = FigureWidget
        still = live(folder, "loss/sft", interval=0.1)
        still
        """,
    "static live ends": "still.close()",
}


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    """Cell name -> cell, after execution."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell("\n".join(x.removeprefix(" " * 8) for x in source.split("\n")).strip())
                  for source in CELLS.values()]  # fmt: skip
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    return dict(zip(CELLS, book.cells))


def bundle(cell: Any, which: int = 0) -> dict[str, Any]:
    """The MIME bundle of a cell's output."""
    return [o for o in cell.outputs if o.output_type in ("display_data", "execute_result")][which]["data"]


def test_bc_126_a_saved_figure_has_its_numbers_and_a_picture(notebook: dict[str, Any]) -> None:
    (output,) = notebook["curve"].outputs
    data = output["data"]
    assert {"application/vnd.plotly.v1+json", "image/png", "text/plain"} <= set(data)
    (trace,) = data["application/vnd.plotly.v1+json"]["data"]
    assert trace["x"] == [1, 2, 3] and trace["y"] == [2.5, 1.25, 0.5]
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    layout = data["application/vnd.plotly.v1+json"]["layout"]
    assert picture.size == (layout["width"], layout["height"])
    assert (np.asarray(picture.convert("L")) < 200).any()
    assert [line.split() for line in data["text/plain"].splitlines()[1:]] == [
        ["step", "loss/sft"], ["1", "2.5"], ["2", "1.25"], ["3", "0.5"]]  # fmt: skip


def test_bc_122_progress_leaves_one_small_output_in_the_file(notebook: dict[str, Any]) -> None:
    (output,) = notebook["progress"].outputs
    assert "10000/10000" in output["data"]["text/plain"] and "10000/10000 · " in output["data"]["text/html"]
    assert len(json.dumps(notebook["progress"])) < 100_000


def test_bc_124_panels_own_their_lines_and_the_cell_prints_nothing(notebook: dict[str, Any]) -> None:
    cell = notebook["panels"]
    assert not [o for o in cell.outputs if o.output_type == "stream"]
    texts = [bundle(cell, i)["text/plain"].splitlines() for i in (0, 1)]
    assert texts == [["panel a", *(f"a{i}" for i in range(5))], ["panel b", *(f"b{i}" for i in range(5))]]


def test_a_live_figure_turns_into_an_ordinary_one_when_it_ends(notebook: dict[str, Any]) -> None:
    data = bundle(notebook["live"])
    assert "application/vnd.jupyter.widget-view+json" not in data
    assert data["application/vnd.plotly.v1+json"]["data"][0]["y"] == [2.5, 1.25]
    assert "image/png" in data and "closed · step 1" in data["text/plain"]
    assert notebook["live ends"].outputs[0]["text"].strip() == "FigureWidget"


def test_without_widgets_a_live_figure_is_static_and_says_so(notebook: dict[str, Any]) -> None:
    said = next(o for o in notebook["static live"].outputs if o.output_type == "stream")["text"]
    assert "static picture" in said and "anywidget" in said and 'pip install "moekit[notebooks]"' in said
    data = bundle(notebook["static live"])
    assert data["application/vnd.plotly.v1+json"]["data"][0]["y"] == [2.5, 1.25] and "image/png" in data


def test_the_lab_has_sliders_and_a_saved_figure_that_follows_them(notebook: dict[str, Any]) -> None:
    assert "application/vnd.jupyter.widget-view+json" in bundle(notebook["lab"], 0)
    twin = bundle(notebook["lab"], 1)
    assert "image/png" in twin and "ranks 4" in twin["text/plain"]
    assert re.search(r"rank_mean +1\.5\n", twin["text/plain"])  # 1 + 0.5 * (4 - 1), less one
    assert "<details><summary>" in twin["text/html"]
    assert re.search(r"<td>rank_mean</td>\s*<td>1\.5</td>", twin["text/html"])
    assert notebook["lab moves"].outputs[0]["text"].split() == ["[0.0,", "1.5]"]  # the widget's bars


def test_a_batch_is_html_with_a_text_fallback(notebook: dict[str, Any]) -> None:
    data = bundle(notebook["show"])
    assert "moekit-show" in data["text/html"] and "supervised" in data["text/plain"]
