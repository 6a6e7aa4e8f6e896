"""The figure of a weight transfer: bytes of the plan in the cells, milliseconds in the bars, the floor as a line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moekit.errors import DataError
from moekit.viz.static import render
from moekit.viz.transfer import transfer_figure

PLAN = SimpleNamespace(bytes_ST=torch.tensor([[2_000_000, 0], [500_000, 1_500_000]]))
BARS = {"learner": {"cast": 0.001, "wire": 0.003}, "engine": {"wire": 0.001, "load": 0.002, "verify": 0.0005}}


def test_cells_bars_and_floor():
    fig = transfer_figure(PLAN, BARS, floor=0.0025)
    heat, *bars = fig.data
    assert [[v if v > 0 else None for v in row] for row in heat.z.tolist()] == [[2.0, None], [0.5, 1.5]]
    assert [list(row) for row in heat.text] == [
        ["2", ""],
        ["0.5", "1.5"],
    ] and "4 MB from 2 processes to 2" in fig.layout.title.text
    assert {b.name: list(b.x) for b in bars} == {
        "cast": [1.0, 0.0], "wire": [3.0, 1.0], "load": [0.0, 2.0], "verify": [0.0, 0.5],
    }  # fmt: skip
    (line,) = fig.layout.shapes
    assert line.x0 == line.x1 == 2.5
    words = [a.text for a in fig.layout.annotations]
    assert {"Σ 2", "4", "3.5", "┊ floor 2.5 ms", "<b>wire</b>"} <= set(words) and "<b>plan</b>" not in words
    assert render(fig, "svg").startswith(b"<?xml") and len(render(fig)) > 5000


def test_one_pair_is_said_by_the_title_and_leaves_its_room_to_the_bars():
    fig = transfer_figure(SimpleNamespace(bytes_ST=torch.tensor([[4_000_000]])), BARS)
    assert {t.type for t in fig.data} == {"bar"} and "4 MB from 1 process to 1" in fig.layout.title.text
    assert fig.layout.xaxis2.domain[0] < 0.1 and not any(
        "Σ" in a.text or "sent" in a.text for a in fig.layout.annotations
    )


@pytest.mark.parametrize("plan, bars, words", [
    (SimpleNamespace(bytes_ST=torch.zeros(1, 1)), BARS, "sends nothing"),
    (PLAN, {}, "no seconds"),
    (PLAN, {"x": {"lunch": 1.0}}, r"phases \['lunch'\] are not among plan, cast"),
])  # fmt: skip
def test_what_cannot_be_drawn(plan, bars, words):
    with pytest.raises(DataError, match=words):
        transfer_figure(plan, bars)
