"""What the figures say: expert load, work by class, denominators against the exact gradient, metrics over steps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moekit.errors import DataError
from moekit.viz import curves, denominators, masking, routing, series, theme

COUNTS = np.zeros((2, 4, 4))  # layers, classes, experts
COUNTS[0, 0] = [1, 1, 2, 0]  # supervised
COUNTS[0, 1] = [3, 0, 1, 0]  # context
COUNTS[0, 3] = [9, 9, 9, 9]  # padding
COUNTS[1, :3] = 5


def test_load_is_a_share_of_the_balanced_load_without_padding() -> None:
    fig = routing.load_heatmap(COUNTS)
    (cells,) = fig.data
    assert np.allclose(cells.customdata, [[2.0, 0.5, 1.5, 0.0], [1, 1, 1, 1]])  # [4, 1, 3, 0] of 8 rows, 4 experts
    assert np.allclose(cells.z, [[1, -1, np.log2(1.5), -2], [0, 0, 0, 0]])  # log2, clipped at 1/4
    assert (cells.zmin, cells.zmax) == (-2, 2) and cells.text[0][3] == "×"
    assert cells.colorscale[3] == (0.5, theme.DIVERGING[3][1])
    supervised = routing.load_heatmap({"policy/forward/decided": COUNTS, "policy/layers": [1, 3]}, scope="supervised")
    assert np.allclose(supervised.data[0].customdata[0], [1.0, 1.0, 2.0, 0.0])
    assert list(supervised.data[0].y) == ["1", "3"]


def test_dead_experts_are_crossed_out_where_no_number_fits() -> None:
    count = np.ones((2, 64))
    count[1, 5] = 0
    cells, dead = routing.load_heatmap(count).data
    assert cells.text is None and (list(dead.x), list(dead.y)) == (["5"], ["1"])


def test_a_layer_without_rows_is_blank_and_counts_must_have_classes_for_a_scope() -> None:
    fig = routing.load_heatmap(np.array([[0, 0], [1, 3]]))
    assert [*fig.data[0].z[0], *fig.data[0].text[0]] == [None, None, "", ""]
    with pytest.raises(DataError, match="hold no classes"):
        routing.load_heatmap(np.ones((2, 2)), scope="supervised")
    with pytest.raises(DataError, match="'all', 'supervised'"):
        routing.load_heatmap(COUNTS, scope="valid")


def test_routed_work_keeps_every_row_and_bins_long_runs() -> None:
    steps = np.arange(1000)
    run = {"step": steps, "rows/supervised": steps, "rows/context": 2 * steps}
    fig = masking.routed_work(run)
    assert [t.name for t in fig.data] == ["supervised", "context"]  # classes without rows are left out
    assert [t.marker.color for t in fig.data] == [theme.CLASS["supervised"], theme.CLASS["context"]]
    assert len(fig.data[0].y) == 200 and "mean of 5 steps" in theme.heading(fig)[1]
    assert 5 * sum(fig.data[0].y) == steps.sum() and fig.data[0].y[1] == 7.0  # mean of 5..9
    words = [n.text for n in fig.layout.annotations]
    assert words == ["supervised 33 %", "context 67 %"]


def test_costs_are_ratios_of_sums() -> None:
    run = {"rows/supervised": [10, 30], "rows/padding": [10, 0], "tokens/supervised": [1, 4], "time/step_s": [1.0, 3.0]}
    cost = masking.per_supervised(run)
    assert cost["rows"] == 10.0 and cost["rows/padding"] == 2.0 and cost["seconds"] == 0.8 and "bytes" not in cost
    with pytest.raises(DataError, match="no supervised tokens"):
        masking.per_supervised({"rows/context": [5], "tokens/supervised": [0]})
    fig = masking.cost_bars({"a": run, "b": {**cost, "seconds": 0.4}})
    assert [t.name for t in fig.data] == ["supervised", "padding", "time, ms"]
    assert list(fig.data[2].x) == [800.0, 400.0]


def test_denominators_take_readings_in_any_form_and_mark_what_differs() -> None:
    class Reading:
        mode, loss, norm_ratio, cosine = "rank_mean", 2.5, 0.8, 0.99

    exact = {"mode": "global_tokens", "loss": 2.0, "norm_ratio": 1.0, "cosine": 1.0}
    fig = denominators.side_by_side([exact, Reading()])
    bars, dots = fig.data
    assert list(bars.y) == ["global_tokens", "rank_mean"] and np.allclose(bars.x, [0, -0.2]) and bars.base == 1
    assert np.isclose(dots.x[1], 0.01)
    assert bars.marker.color == (theme.RULE, theme.SERIES[1])
    said = [n.text for n in fig.layout.annotations]
    assert {"0.800×", "0.01", "2.5", "same direction"} <= set(said)
    with pytest.raises(DataError, match="no norm_ratio"):
        denominators.side_by_side({"constant": {"loss": 1.0, "cosine": 1.0}})
    nothing = denominators.side_by_side({"constant": {"loss": 0.0, "norm_ratio": float("nan"), "cosine": float("nan")}})
    assert nothing.data[0].x == (None,)  # no label at all: no gradient to compare


def test_the_lab_measures_each_setting_once_and_refuses_others() -> None:
    calls = []

    def measure(mode: str, ranks: int, microbatches: int, removed: tuple = ()) -> dict[str, float]:
        calls.append((mode, ranks, microbatches, removed))
        return {"loss": 1.0, "norm_ratio": 1.0 + 0.1 * (ranks - 1), "cosine": 1.0}

    lab = denominators.lab(measure, modes=("global_tokens", "rank_mean"), ranks=(1, 2), removed=((), (0,)))
    assert lab.readings["rank_mean"]["norm_ratio"] == 1.0
    assert lab.set(ranks=2, removed=(0,)).readings["rank_mean"]["norm_ratio"] == 1.1
    lab.set(ranks=1, removed=())
    assert len(lab.readings) == 2 and len(calls) == 4
    assert calls[-1] == ("rank_mean", 2, 1, (0,))
    assert theme.heading(lab.figure)[1] == "ranks 1, microbatches 1, removed ()"
    with pytest.raises(DataError, match="ranks=3 is not one of 1, 2"):
        lab.set(ranks=3)
    with pytest.raises(DataError, match="no control 'cuts'"):
        lab.set(cuts=1)


def test_metrics_come_from_whatever_holds_them() -> None:
    table = pd.DataFrame(
        {"loss/sft": [2.0, np.nan, 1.0], "note": ["a", "b", "c"]}, index=pd.Index([3, 4, 5], name="step")
    )
    for source in (table, {"step": [3, 4, 5], "loss/sft": [2.0, None, 1.0]}, [{"step": 3, "loss/sft": 2.0},
                   {"step": 4}, {"step": 5, "loss/sft": 1.0}]):  # fmt: skip
        step, found = series.pick(source, "loss/sft")
        assert step.tolist() == [3, 5] and found["loss/sft"].tolist() == [2.0, 1.0]
    with pytest.raises(DataError, match="no metric 'loss/stf' in this run; it has loss/sft"):
        series.pick(table, "loss/stf")
    with pytest.raises(DataError, match="cannot read metrics from int"):
        series.columns(3)


def test_curves_label_the_exact_last_value_and_show_rare_metrics_as_points() -> None:
    loss, rare_values = np.linspace(3, 1, 50), {9: 2.0, 11: 2.5, 13: 2.0, 39: 1.5, 49: 1.0}
    run = {"step": np.arange(50), "loss/sft": loss, "eval/sft": [rare_values.get(i) for i in range(50)]}
    fig = curves.curves(run, ("loss/sft", "eval/sft"), smooth=5)
    raw, smooth, _, rare = fig.data
    assert list(raw.y) == loss.tolist() and np.allclose(smooth.y[2:-2], loss[2:-2])  # the mean of a line is the line
    assert (
        list(rare.x) == [9, 11, 13, 39, 49]
        and list(rare.y) == [2.0, 2.5, 2.0, 1.5, 1.0]
        and rare.mode == "lines+markers"
    )
    assert "<b>loss/sft  1</b>" in [n.text for n in fig.layout.annotations]
    units = {"loss/dpo": "loss/dpo, nats a pair", "loss/critic": "loss/critic", "eval/exact": "eval/exact"}
    fig = curves.curves({name: [1.0, 2.0] for name in units}, *units)
    assert [n.text for n in fig.layout.annotations][::2] == list(units.values())  # a token's loss is not a pair's
    long = curves.curves({"loss/sft": np.r_[np.zeros(5000), 7.0, np.zeros(5000)]}, "loss/sft")
    assert len(long.data[0].y) <= 4000 and max(long.data[0].y) == 7.0  # thinned, and the spike is there
