"""What the figures of rows, tiles, blocks and operands draw, and that each has a static twin."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moekit.errors import DataError
from moekit.viz import static, tables
from moekit.viz.kernels import block_error, crossover, rate_by_rows, skew_cost, spread_by_kind


def drawn(fig) -> bool:
    return static.render(fig, scale=1)[:4] == b"\x89PNG"


def test_crossover_lies_between_points_on_a_log_axis():
    """Half of 60 is met at a point; half of 80 is two thirds of the way from (4, 20) to (16, 50), in the logarithm."""
    assert crossover([1, 4, 16], [10, 30, 60]) == pytest.approx(4)
    assert crossover([4, 16], [20, 50], of=80) == pytest.approx(4 * 4 ** (2 / 3))
    assert crossover([2, 4], [9, 10]) == 2 and math.isnan(crossover([1, 4], [1, 2], of=100))


def test_rates_are_lines_with_the_bound_dashed_and_the_crossover_marked():
    fig = rate_by_rows((1, 4, 16), {"ours": [10, 30, 60], "theirs": [5, 6, 7], "dense": [40, 50, 60]}, subtitle="s")
    assert [t.name for t in fig.data] == ["ours", "theirs", "dense"]
    assert [t.line.dash for t in fig.data] == ["solid", "solid", "dash"] and list(fig.data[0].y) == [10, 30, 60]
    (ruler,) = fig.layout.shapes
    assert ruler.x0 == pytest.approx(4)
    assert {"ours 60", "theirs 7", "half of the bound: 4 rows"} <= {n.text for n in fig.layout.annotations}
    assert drawn(fig)
    assert not rate_by_rows((1, 4), {"ours": [1, 2], "dense": [90, 99]}).layout.shapes  # never half: no ruler
    with pytest.raises(DataError, match="each of 2 row counts"):
        rate_by_rows((1, 2), {"ours": [1.0]})


def test_skew_has_waste_at_the_left_and_time_at_the_right():
    fig = skew_cost([1.0, 4.0], {"16 rows": [0, 25.0], "64 rows": [0, 30.0]}, {"64 rows": [1.0, 1.5]})
    assert [(t.xaxis, list(t.y)) for t in fig.data] == [("x", [0, 25]), ("x", [0, 30]), ("x2", [1, 1.5])]
    assert {"16 rows: 25 %", "64 rows: 1.50"} <= {n.text for n in fig.layout.annotations}
    assert drawn(fig)
    with pytest.raises(DataError, match="each of 2 skews"):
        skew_cost([1.0, 4.0], {"16 rows": [0]}, {})


def test_blocks_are_points_and_medians_by_mantissa():
    m = np.array([1.1, 1.1, 1.1, 1.9])
    fig = block_error(m, {"ceil": [0.01, 0.02, 0.06, 0.02], "floor": [0.01, 0.02, 0.06, 0.05]}, bins=2)
    points, line, others, other_line = fig.data
    assert list(points.x) == list(others.x) == list(m)
    assert list(line.x) == [1.25, 1.75] and np.allclose(line.y, [2, 5]) and np.allclose(other_line.y, [2, 2])
    assert [row.split() for row in tables.text(fig).split("\n")[-2:]] == [["1.25", "2", "2"], ["1.75", "5", "2"]]
    assert fig.layout.shapes[0].x0 == 1.75 and drawn(fig)


def test_kinds_have_dots_and_a_median_over_the_first():
    fig = spread_by_kind({"zeros": [3.0, 1.0, 2.0], "normal": [3.0, 4.0, 9.0]}, title="t", unit="ms")
    assert [list(t.x) for t in fig.data] == [[3, 1, 2, 3, 4, 9], [2, 4]]
    assert [line.split() for line in tables.text(fig).split("\n")] == [
        ["t"],
        ["median,", "ms"],
        ["zeros", "2"],
        ["normal", "4"],
    ]
    assert {"2 ms, 1.00×", "4 ms, 2.00×"} <= {n.text for n in fig.layout.annotations}
    assert drawn(fig)
