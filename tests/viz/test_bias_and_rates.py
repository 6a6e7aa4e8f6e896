"""What the figures of bias and rates say, and that each has a static twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from moekit.errors import DataError
from moekit.viz import bias, masking, static, theme


@dataclass
class Reading:
    mode: str = "global_tokens"
    ranks: int = 1
    microbatches: int = 1
    norm_ratio: float = 1.0
    cosine: float = 1.0
    loss: float = 2.0
    exact_loss: float = 2.0
    supervised: int = 10
    removed: int = 0


def test_two_rates_joins_points_and_draws_rows_per_supervised_token() -> None:
    points = {
        ("padded", "none"): {masking.ROUTED: [900, 1000, 5000], masking.USEFUL: [10, 10, 10]},  # the median step counts
        ("padded", "padding"): {masking.ROUTED: 800, masking.USEFUL: 40},
        ("packed", "none"): {masking.ROUTED: 900, masking.USEFUL: 45},
    }
    fig = masking.two_rates(points)
    padded, packed = fig.data
    assert (list(padded.x), list(padded.y)) == ([1000, 800], [10, 40]) and list(packed.x) == [900]
    assert padded.marker.color == (theme.tint(theme.SERIES[0], 0.35), theme.tint(theme.SERIES[0], 1.0))
    slopes = [s.x1 / s.y1 for s in fig.layout.shapes]
    assert np.allclose(slopes, [20, 50, 100])  # 1000/10 and 800/40 are both on a line
    words = [n.text for n in fig.layout.annotations]
    assert {"20 rows each", "100 rows each", "<b>padded</b> 40", "<b>packed</b> 45"} <= set(words)
    assert static.render(fig)[:4] == b"\x89PNG"
    slow = points | {("slow", "none"): {masking.ROUTED: 50, masking.USEFUL: 5}}  # its name would lie over the ticks
    named = [note for note in masking.two_rates(slow).layout.annotations if note.text.startswith("<b>")]
    sides = {note.text[3 : note.text.index("</b>")]: note.xanchor for note in named}
    assert sides["slow"] == "left" and set(sides.values()) == {"left", "right"}
    with pytest.raises(DataError, match="packed · none has no metric rate/routed_rows_s"):
        masking.two_rates({("packed", "none"): {masking.USEFUL: 1}})
    with pytest.raises(DataError, match="must be positive"):
        masking.two_rates({("packed", "none"): {masking.USEFUL: 0, masking.ROUTED: 5}})


def test_weights_are_shown_against_the_exact_ones_in_order_of_labels() -> None:
    weights = {"global_tokens": [0.1] * 3, "sequence_mean": [0.05, 0.4, 0.0]}
    fig = bias.weight_map(weights, [6, 1, 3])
    (cells,) = fig.data
    assert list(fig.layout.xaxis.ticktext) == ["1", "3", "6"]
    assert np.allclose(cells.customdata[1], [4.0, 0.0, 0.5])  # the document with 1 label, with 3, with 6
    assert np.allclose(cells.z[1], [2, -3, -1])  # log2, clipped
    assert static.render(fig)[:4] == b"\x89PNG"
    with pytest.raises(DataError, match="no 'global_tokens'"):
        bias.weight_map({"constant": [1.0]}, [1])
    with pytest.raises(DataError, match="there are 2 documents"):
        bias.weight_map({"global_tokens": [1.0]}, [1, 2])


def test_cuts_are_drawn_by_convention_with_rounding_as_exact() -> None:
    cuts = [Reading(m, r, k, 1 + 0.5 * (m == "rank_mean") * (r - 1), 1.0 if m == "global_tokens" else 0.9)
            for m in ("global_tokens", "rank_mean") for r in (1, 2) for k in (1, 4)]  # fmt: skip
    fig = bias.across_cuts(cuts)
    norm, turn, other_norm, other_turn = fig.data
    assert list(norm.x) == ["1 × 1", "1 × 4", "2 × 1", "2 × 4"]
    assert list(norm.y) == [1, 1, 1, 1] and list(other_norm.y) == [1, 1, 1.5, 1.5]
    assert set(turn.y) == {bias.FLOOR} and np.allclose(list(other_turn.y), 0.1)
    assert static.render(fig)[:4] == b"\x89PNG"
    with pytest.raises(DataError, match="no readings"):
        bias.across_cuts([])


def test_filter_bias_draws_the_formula_beside_what_was_measured() -> None:
    series = [Reading(), Reading(loss=1.0, supervised=9, removed=1)]
    formula, measured = bias.filter_bias({10: series}).data
    assert list(formula.y) == [1.0, 0.5] and list(measured.y) == [1.0, 0.5]  # 9 / (9 + 1 * 9)
    assert list(bias.filter_bias({19: series}).data[0].y) == [1.0, 9 / 27]
    assert static.render(bias.filter_bias({10: series, 19: series}))[:4] == b"\x89PNG"
    with pytest.raises(DataError, match="no readings"):
        bias.filter_bias({10: []})
