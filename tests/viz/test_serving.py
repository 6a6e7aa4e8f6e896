"""The figure of serving costs draws what it is given, and has a static twin."""

from __future__ import annotations

import pandas as pd
import pytest

from moekit.errors import DataError
from moekit.viz import static
from moekit.viz.serving import costs_by_batch

COSTS = pd.DataFrame(
    {
        "rows_per_expert_decode": [1.0, 2.5], "rows_per_expert_prefill": [8.0, 300.0], "idle_slots": [0.0, 0.25],
        "below_crossover_decode": [1.0, 0.75], "below_crossover_prefill": [1.0, 0.0],
    },
    index=pd.Index([1, 16], name="batch"),
)  # fmt: skip


def test_rows_are_at_the_left_and_shares_in_percent_at_the_right():
    fig = costs_by_batch(COSTS, crossover=12, subtitle="s")
    assert [(t.xaxis, list(t.x), list(t.y)) for t in fig.data] == [
        ("x", [1, 16], [1, 2.5]), ("x", [1, 16], [8, 300]),
        ("x2", [1, 16], [100, 75]), ("x2", [1, 16], [100, 0]), ("x2", [1, 16], [0, 25]),
    ]  # fmt: skip
    texts = {n.text for n in fig.layout.annotations}
    assert {"crossover 12", "decode 2.5", "prefill 300", "decode below 12: 75 %", "empty slots: 25 %"} <= texts
    assert fig.layout.shapes[0].y0 == 12 and static.render(fig, scale=1)[:4] == b"\x89PNG"


def test_a_column_that_is_missing_is_named():
    with pytest.raises(DataError, match="no column idle_slots; give what serving_costs returned"):
        costs_by_batch(COSTS.drop(columns="idle_slots"))
