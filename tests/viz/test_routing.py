"""Figures of routing over time and of what imbalance costs: the numbers in them, and both renderers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moekit.errors import DataError
from moekit.measure.record import RunWriter
from moekit.viz import routing, series, static, theme

# steps, layers, classes, experts: layer 0 moves from expert 0 to expert 1, layer 1 is even; padding is all on expert 3
DECIDED = np.zeros((4, 2, 4, 4), dtype=np.int64)
DECIDED[:2, 0, 0] = [6, 2, 0, 0]
DECIDED[2:, 0, 0] = [0, 8, 0, 0]
DECIDED[:, 0, 1] = [2, 2, 2, 2]
DECIDED[:, 1, :2] = 3
DECIDED[:, :, 3, 3] = 50


def texts(fig: theme.Figure) -> list[str]:
    return [note.text for note in fig.layout.annotations]


def test_load_history_has_a_panel_for_each_layer_and_its_busiest_expert() -> None:
    fig = routing.load_history(DECIDED)
    first, second = fig.data
    assert np.allclose(np.array(first.customdata)[:, 0], [2, 1, 0.5, 0.5])  # [8, 4, 2, 2] of 16 rows on 4 experts
    assert np.allclose(np.array(first.customdata)[:, 3], [0.5, 2.5, 0.5, 0.5]) and np.allclose(second.customdata, 1)
    assert list(first.x) == ["0", "1", "2", "3"] and first.showscale and not second.showscale
    assert texts(fig) == ["<b>layer 0</b>", "2× → 2.5×", "<b>layer 1</b>", "1× → 1×"]
    low, high = fig.layout.yaxis.domain, fig.layout.yaxis2.domain
    assert low[0] > high[1] and low[1] == 1 and high[0] == 0, "panels do not overlap"


def test_load_history_of_a_run_by_class_and_with_long_runs_binned(tmp_path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(60):
            arrays = {"policy/forward/decided": torch.as_tensor(DECIDED[step // 15])}
            writer.write(step, {"loss/sft": 1.0}, arrays | {"policy/layers": torch.tensor([1, 3])})
    fig = routing.load_history(tmp_path / "run", "supervised")
    cells = np.array(fig.data[0].customdata)
    assert cells.shape == (4, routing.BINS) and np.allclose(cells[:, 0], [3, 1, 0, 0])
    turns = np.zeros((2 * routing.BINS, 1, 4, 2))
    turns[::2, 0, 0, 0] = turns[1::2, 0, 0, 1] = 1  # one expert after the other: even in every bin of two steps
    assert np.allclose(routing.load_history(turns).data[0].customdata, 1)
    assert np.allclose(cells[:, -1], [0, 4, 0, 0]) and texts(fig)[::2] == ["<b>layer 1</b>", "<b>layer 3</b>"]


def test_context_is_a_scope() -> None:
    assert series.counts(DECIDED[0], None, "context")[0].tolist() == [[2, 2, 2, 2], [3, 3, 3, 3]]
    assert texts(routing.load_heatmap(DECIDED[0], scope="context"))[0] == "1.0×"


def test_compare_writes_least_and_most_and_keeps_values() -> None:
    panels = {"load": {"all tokens": [2.0, 1.0], "supervised": [3.0, 1.0]}, "loss, nats": {"": [0.5, 0.25]}}
    fig = routing.compare(["a", "b"], panels, title="Settings", limits={"load": (1, 4)})
    dots = [t for t in fig.data if t.mode == "markers"]
    assert [list(t.x) for t in dots] == [[2, 1], [3, 1], [0.5, 0.25]]
    assert dots[1].marker.color == theme.CLASS["supervised"] and dots[2].xaxis == "x2"
    wanted = [
        "3.00",
        "2.00",
        "1.00",
        "<b>load</b>",
        "0.50",
        "0.25",
        "<b>loss, nats</b>",
        "<b>all tokens</b>",
        "<b>supervised</b>",
    ]
    assert texts(fig) == wanted
    assert fig.layout.xaxis.range[0] < 1 and fig.layout.xaxis.range[1] > 4, "room for labels beyond the limits"
    assert fig.layout.xaxis.domain[1] < fig.layout.xaxis2.domain[0]
    fig = routing.compare(["a", "b"], panels, title="Settings", colours={"all tokens": "#123456"})
    (key,) = [n for n in fig.layout.annotations if n.text == "<b>all tokens</b>"]
    assert fig.data[2].marker.color == key.font.color == "#123456"
    with pytest.raises(DataError, match="nothing to compare"):
        routing.compare([], panels, title="Settings")


def test_tile_cost_adds_up_steps_and_draws_half_a_tile() -> None:
    """3 and 1 rows in tiles of 4 multiply 8 rows, half of them for nothing; two steps of that, 6 and 2: 4 of 12."""
    fig = routing.tile_cost(np.tile([3, 1], (2, 1, 1)), tiles=(4,))
    half, got = fig.data
    assert np.allclose(got.x, [2, 4]) and np.allclose(got.y, [50, 100 / 3])
    assert np.allclose(half.y, [50, 100 / 3])  # 2 of 2 + 2, 2 of 4 + 2: here by accident exactly the rule
    assert texts(fig) == ["tile of 4: 50 → 33.3 %"]


@pytest.mark.parametrize(
    "fig",
    [
        routing.load_history(DECIDED),
        routing.compare(["a", "b"], {"load": {"x": [1, 2], "y": [2, 2]}, "z": {"": [1, 1]}}, title="Settings"),
        routing.tile_cost(DECIDED.sum(axis=2)),
    ],
    ids=["history", "compare", "tiles"],
)
def test_the_static_twin_draws_them(fig: theme.Figure) -> None:
    drawn = static.to_matplotlib(fig)
    maps = sum(t.type == "heatmap" for t in fig.data)
    panels = len({(t.xaxis, t.yaxis) for t in fig.data})
    assert len(drawn.axes) == panels + bool(maps), "one colour bar for all maps"
