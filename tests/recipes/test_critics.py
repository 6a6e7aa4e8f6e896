"""A critic from the policy's backbone, a smaller model, a language model's checkpoint or a reward model's, on a layout
of its own: weights, values and gradient of one process. A value head is cheap, so stages begin elsewhere."""

import importlib.util
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import run_ranks

from moekit.config import LearnerConfig, ModelConfig
from moekit.errors import ConfigError
from moekit.learner.learner import Learner
from moekit.learner.weights import export
from moekit.model.heads import to_value_head
from moekit.model.transformer import Transformer
from moekit.objectives.ppo import ValueLoss
from moekit.objectives.sft import SFT
from moekit.recipes import ppo

HERE = Path(__file__).parent / "critics.py"
spec = importlib.util.spec_from_file_location("critics", HERE)
critics = importlib.util.module_from_spec(spec)
sys.modules["critics"] = critics
spec.loader.exec_module(critics)
SHAPE = ModelConfig(
    vocab=4000, width=16, layers=4, heads=2, experts=4, top_k=2, expert_width=12, max_positions=96, qk_norm="head",
    normalize_gates=True, family="qwen3_moe", init_std=0.3,
)  # fmt: skip
SOURCES = ("backbone", "smaller", "tied", "language model", "reward model")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(critic, layout) -> what rank 0 and rank 1 found, and on one process."""
    folder = tmp_path_factory.mktemp("critics")
    smaller = replace(SHAPE, width=8, expert_width=8, experts=2)
    for name, shape in (("model", SHAPE), ("smaller", smaller), ("tied", replace(SHAPE, tied_head=True))):
        export(Transformer(shape, dtype=torch.float64, seed=4), folder / name)
    model = Transformer(SHAPE, dtype=torch.float64, seed=5)
    Learner(model, SFT()).save(folder / "lm")
    model = to_value_head(Transformer(SHAPE, dtype=torch.float64, seed=6))
    torch.nn.init.normal_(model.head.weight)
    Learner(model, ValueLoss()).save(folder / "rm")
    sources = [None, *(str(folder / n) for n in ("smaller", "tied", "lm", "rm"))]
    (folder / "config.json").write_text(
        json.dumps({"model": str(folder / "model"), "critics": dict(zip(SOURCES, sources))})
    )
    critics.main(0, 1, str(folder))
    assert run_ranks(HERE, [(r, 2, folder) for r in range(2)], timeout=200) == [0, 0]
    return [pickle.loads((folder / n).read_bytes()) for n in ("rank_0_of_2.pkl", "rank_1_of_2.pkl", "rank_0_of_1.pkl")]


@pytest.mark.parametrize("layout", critics.LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_critic_is_the_same_on_every_layout(found, source, layout):
    want = found[2][source, "one"]
    assert want["made"]["head.weight"].shape[0] == 1 and want["norm"] > 0
    assert bool(want["made"]["head.weight"].any()) == (source == "reward model")  # else values begin at 0
    assert ("embed.weight" in want["made"]) and want["made"]["embed.weight"].shape[0] == 4000
    for rank in range(2):
        got = found[rank][source, layout]
        assert got["made"].keys() == want["made"].keys()
        assert all(torch.equal(x, want["made"][n]) for n, x in got["made"].items())
        torch.testing.assert_close(got["values"], want["values"], rtol=1e-9, atol=1e-12)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-9)
        for n, g in want["gradient"].items():
            assert float((got["gradient"][n] - g).norm()) <= 1e-9 * float(g.norm()), n
    if source != "smaller":
        assert found[0]["backbone", "pp2"]["moves"]  # the language model's stages would begin elsewhere
    if layout == "pp2":
        assert found[0][source, layout]["stages"] != found[1][source, layout]["stages"]


def test_a_critic_that_cannot_read_the_policy_is_refused():
    run = SimpleNamespace(
        config=SimpleNamespace(learner=LearnerConfig(), critic_learner=None, critic="tiny", model="tiny", length=64,
                               value_clip=0.2, dtype="float32"),
        waits=SimpleNamespace(size=1), place=SimpleNamespace(rank=0, world=1, device="cpu"),
        shape=replace(SHAPE, vocab=100_000),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="critic='tiny' has .* tokens"):
        ppo.make_critic(run)
