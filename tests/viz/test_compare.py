"""The comparison as a reader sees it: figure, static twin, text, names."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import moekit
from moekit.errors import ConfigError, UnlikeRunsError
from moekit.measure.card import RunCard
from moekit.measure.record import RunWriter
from moekit.viz import static, theme

BASE = {"base": {"sha256": "a" * 64}, "batch": {"sha256": "b" * 64}, "layout": {"world": 2, "device": "cpu"},
        "objective": {"name": "sft"}}  # fmt: skip


def record(folder: Path, lr: float, scale: float = 1.0, **card: Any) -> Path:
    with RunWriter(folder, rank=0) as writer:
        writer.card(RunCard(folder.name, **{**BASE, **card}, environment={}))
        writer.config({"learner": {"lr": lr}, "steps": 12, "out": str(folder)})
        for i in range(12):
            metrics = {"tokens/supervised": 10, "tokens/context": 20, "tokens/filtered": 0, "tokens/padding": 10,
                       "rows/dispatched": 120, "time/step_s": (1 + i % 4) / 10 / scale}  # fmt: skip
            writer.write(i, {**metrics, "loss/sft": 4 - i / 4 * scale})
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [record(tmp_path / "a", 1e-3), record(tmp_path / "b", 3e-3, 2.0)]


def test_runs_are_named_by_what_varies_and_may_be_paths_runs_jobs_or_a_dictionary(pair: list[Path]) -> None:
    found = moekit.compare([str(pair[0]), moekit.open_run(pair[1])], varying="learner.lr")
    assert list(found.table.index) == ["lr 0.001", "lr 0.003"] and found.varying == ("learner.lr",)
    jobs = {"low": SimpleNamespace(folder=pair[0]), "high": SimpleNamespace(folder=pair[1])}
    named = moekit.compare(jobs, ["learner"])
    assert list(named.table.index) == ["low", "high"]
    assert named.table.to_numpy().tolist() == found.table.to_numpy().tolist()
    repeats = moekit.compare([pair[0], pair[0]])
    assert list(repeats.table.index) == ["a (0)", "a (1)"] and not repeats.differences
    with pytest.raises(ConfigError, match="two runs at least .* got 1"):
        moekit.compare([pair[0]])


def test_the_numbers_on_the_figure_are_those_of_the_table(pair: list[Path]) -> None:
    """Nine steps after the warm-up, of 0.4, 0.1, 0.2, 0.3 s in turn and 0.4 again: the median step takes 0.3 s, and a
    tenth of the 120 tokens is the last two steps."""
    found = moekit.compare(pair, "learner.lr")
    assert found.table.loc["lr 0.001", "supervised tokens/s"] == pytest.approx(10 / 0.3)
    assert found.table["routed rows per supervised token"].tolist() == [12.0, 12.0]
    fig = found.figure
    bars = {(t.name, t.y[0]): t.x[0] for t in fig.data if t.type == "bar"}
    for name in (*moekit.measure.compare.RATES, "routed rows per supervised token"):
        for run in found.table.index:
            assert bars[name, run] == found.table.loc[run, name]
            (line,) = (t for t in fig.data if t.name == f"{name}, quartiles" and t.y[0] == run)
            assert list(line.x) == found.table.loc[run, [f"{name} q25", f"{name} q75"]].tolist()
    curves = {t.name: (list(t.x), list(t.y)) for t in fig.data if t.type == "scatter" and t.mode == "lines"}
    assert curves["lr 0.001"] == ([10.0 * (i + 1) for i in range(12)], [4 - i / 4 for i in range(12)])
    dots = [(t.x[0], t.y[0]) for t in fig.data if t.type == "scatter" and t.mode == "markers"]
    assert dots == [(120.0, 1.375), (120.0, -1.25)] == list(zip(found.table["at tokens"], found.table["loss"]))


def test_the_figure_has_a_static_twin_and_says_what_was_left_out(pair: list[Path]) -> None:
    """BC-126: without JavaScript the picture and the numbers are there."""
    found = moekit.compare(pair, "learner.lr")
    data = found._repr_mimebundle_()
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.size == (found.figure.layout.width, found.figure.layout.height)
    text = data["text/plain"]
    assert text == repr(found) and "12 steps; rates leave the first 3 (warm-up) out" in text
    assert "33.33 (" in text and "after 120 supervised tokens" in text and "meant to differ: learner.lr" in text
    assert found.heads[0] in [n.text for n in found.figure.layout.annotations]
    shown = json.dumps(data["application/vnd.plotly.v1+json"])
    assert "lr 0.003" in shown and "routed rows/s" in shown


def test_what_differs_is_said_on_the_figure_and_in_the_text(pair: list[Path], tmp_path: Path) -> None:
    other = record(tmp_path / "c", 1e-3, layout={"world": 4, "device": "cpu"}, batch={"sha256": "c" * 64})
    with pytest.raises(UnlikeRunsError, match="layout.world: 2 .*, 4 "):
        moekit.compare([*pair, other], "learner.lr")
    with pytest.raises(UnlikeRunsError, match="batch.data"):
        moekit.compare([*pair, other], "learner.lr", allow="layout")
    found = moekit.compare([*pair, other], "learner.lr", strict=False)
    said = [note.text for note in found.figure.layout.annotations]
    for place in (said, repr(found).split("\n")):
        assert any("differs: layout.world: 2 (lr 0.001 a; lr 0.003), 4 (lr 0.001 c)" in line for line in place)
        assert "losses are different quantities here, not to be compared (batch.data)" in place
    allowed = moekit.compare([*pair, other], "learner.lr", allow=("layout", "batch"))
    assert allowed.remarks == found.remarks and allowed.table.equals(found.table)
    alike = moekit.compare(pair, "learner.lr")
    assert alike.remarks == [] and not any("Not alike" in (n.text or "") for n in alike.figure.layout.annotations)


def test_a_run_that_did_not_finish_is_said(pair: list[Path]) -> None:
    for folder, state in zip(pair, ("failed", "finished")):
        (folder / "state.json").write_text(json.dumps({"state": state}))
    found = moekit.compare(pair, "learner.lr")
    assert found.remarks == ["not finished: lr 0.001 (failed); compared is what it recorded"]
    assert found.remarks[0] in repr(found)


def test_a_sweep_is_compared_by_what_it_varies(pair: list[Path]) -> None:
    """`steps` and `out` change no step, so they are no difference; a path is compared by what is there."""
    sweep: Any = SimpleNamespace(finished={"one": pair[0], "two": pair[1]}, varying=("learner.lr", "steps", "data"))
    assert moekit.compare(sweep).varying == ("learner.lr",)


def test_many_runs_and_long_names_stay_on_the_page(tmp_path: Path) -> None:
    runs = {f"a long name of a run, number {i}": record(tmp_path / str(i), i / 10) for i in range(5)}
    fig = moekit.compare(runs, "learner.lr").figure
    drawn = static.to_matplotlib(fig)
    drawn.canvas.draw()
    wide, high = drawn.get_size_inches() * drawn.dpi
    boxes = [t.get_window_extent() for t in drawn.texts if t.get_text()]
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= wide and b.y1 <= high for b in boxes)
    assert fig.layout.width <= theme.WIDE, "a cell of JupyterLab cuts what is wider"
