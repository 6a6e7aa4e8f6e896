"""The objectives teach: a half-trained model spells words backward better after GRPO, and prefers right answers after
DPO; with rewards in any order nothing is learnt. PPO is in `learning.py` and not yet here: its gain was below the goal.

Fixed step counts, three seeds and a control, two runs at a time with one thread each.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")
sys.path.append(str(Path(__file__).parent))  # the processes find the module by its name

import learning

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and the model that all start from."""
    made = tmp_path_factory.mktemp("learning")
    learning.several("start", made, [0])
    return made


def gains(found: list[dict[str, Any]]) -> list[float]:
    """Of held-out exact match; all runs start from the same model, which answers 0.2 to 0.6 of the questions right."""
    for run in found:
        assert run["before"]["eval/items"] >= 200 and 0.2 <= run["before"]["eval/exact"] <= 0.6
    return [run["after"]["eval/exact"] - run["before"]["eval/exact"] for run in found]


# Seen from 0.363: GRPO 0.550, 0.550, 0.577, its control 0.317 (and 0.02 without the KL); DPO 0.965, 0.975, 0.955. The
# bounds of the control say that it does not learn; steps along noise may cost a little.
@pytest.mark.parametrize("name", ["grpo"])
def test_rewards_teach_and_shuffled_rewards_do_not(folder, name):
    *learnt, control = gains(learning.several(name, folder, [*SEEDS, learning.CONTROL]))
    assert min(learnt) >= 0.15, learnt
    assert -0.15 < control < 0.05, control


def test_right_answers_are_preferred_to_those_to_other_questions(folder):
    """Accuracy starts at 0: a policy that has not moved prefers nothing."""
    for run in learning.several("dpo", folder, SEEDS):
        assert run["before"]["eval/units"] == 200 and run["before"]["eval/accuracy"] < 0.6
        assert run["after"]["eval/accuracy"] > 0.9, run["after"]
