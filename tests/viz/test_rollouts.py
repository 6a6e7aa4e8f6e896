"""Figures of rollouts: the parts of a step add up, tokens stand in the cells that their numbers colour."""

from __future__ import annotations

import pytest

from moekit.errors import DataError
from moekit.viz import static
from moekit.viz.rollouts import step_parts, token_values


def drawn(fig) -> bool:
    return static.render(fig, scale=1)[:4] == b"\x89PNG"


def test_the_parts_of_a_step_are_stacked_with_their_shares():
    """Two steps of 0.3 and 0.1 s: three quarters of the time are rollout."""
    fig = step_parts({"step/index": [1, 2], "time/rollout_s": [0.2, 0.1], "time/train_s": [0.1, 0.0]})
    assert [t.name for t in fig.data] == ["rollout", "policy, training"] and list(fig.data[0].y) == [200.0, 100.0]
    assert {"rollout 75 %", "policy, training 25 %"} <= {n.text for n in fig.layout.annotations} and drawn(fig)
    with pytest.raises(DataError, match="no part of a step was timed"):
        step_parts({"step/index": [1], "loss/sft": [1.0]})


def test_tokens_stand_in_cells_and_short_answers_leave_blanks():
    fig = token_values(["a", "b"], [["x", "y"], ["z"]], {"reward": [[0.0, 1.0], [-2.0]], "value": [[0.5, 0.5], [0.0]]})
    reward, value = fig.data
    assert [list(r) for r in reward.z] == [[0.0, 1.0], [-2.0, None]] and [list(r) for r in reward.text][1] == ["z", ""]
    assert (reward.zmin, reward.zmax, value.zmax) == (-2.0, 2.0, 0.5) and drawn(fig)
    with pytest.raises(DataError, match="every token of every answer"):
        token_values(["a"], [["x", "y"]], {"reward": [[1.0]]})
