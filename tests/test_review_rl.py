"""What a second look at the recipes found: each test failed before its fix."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moekit import ops
from moekit.data.batch import Batch
from moekit.data.report import Report
from moekit.errors import ConfigError, DataError
from moekit.kernels import cpu_choice
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.objectives.reward_model import RewardModel
from moekit.recipes import ppo, rl
from moekit.recipes.reward_model import scorer
from moekit.recipes.sampler import old_samples
from moekit.workloads import PPOConfig, published

spec = importlib.util.spec_from_file_location("updating", Path(__file__).parent / "recipes" / "updating.py")
updating = importlib.util.module_from_spec(spec)
sys.modules.setdefault("updating", updating)
spec.loader.exec_module(updating)
torch.set_num_threads(1)
CUT = [(5, [(4, "stop", 1.0), (7, "length", 0.0)]), (1, [(7, "length", 1.0), (2, "stop", 0.0)])]


@pytest.mark.parametrize("share", [True, False])
def test_a_cut_answer_that_fills_its_row_is_valued(share):
    """Prompt and answer take all of a row; what follows is valued where the last token stands, and takes no position.

    Values do not depend on how much room there is."""
    told, found = updating.experience(CUT), []
    cut_A = torch.tensor([not a.terminated for a in told.answers])
    layout = updating.Forward(updating.seeded(value_head=True))
    torch.nn.init.normal_(layout.model.head.weight)
    for length in (12, 40):
        config = PPOConfig("", "", max_prompt=5, max_new_tokens=7, length=length, share_prompt=share)
        batches = rl.microbatches(told.samples([{}] * 4), config, layout, cut_A=cut_A)
        found.append(rl.by_answer(batches, layout.score(batches), layout, 4))
    for a, b, answer in zip(*found, told.answers):
        assert len(a) == len(answer.ids) + (not answer.terminated)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    config = PPOConfig("", "", max_prompt=5, max_new_tokens=7, length=12, kl=0.0, steps=1, share_prompt=share)
    assert updating.do_ppo(config, World(), told)["metrics"]["step/skipped"] == 0
    values = [torch.cat((torch.zeros(len(a.ids)), torch.full((int(not a.terminated),), 3.0))) for a in told.answers]
    zero = [torch.zeros(len(a.ids)) for a in told.answers]
    fields, *_ = ppo.targets(told, PPOConfig("", "", lam=0.5, whiten=False), zero, zero, values)
    assert [float(f["advantage"][-1]) for f in fields] == [1.0, 3.0, 4.0, 0.0]  # score, and 3 after a cut


def test_the_published_ppo_recipe_has_room_for_its_longest_answer():
    config = published("tulu3-rlvr-ppo", "", "")
    assert config.max_prompt + config.max_new_tokens == config.length


def test_a_warm_up_leaves_the_policy_something():
    """A run in which it never learns had no policy metrics, and failed when it made its card."""
    with pytest.raises(ConfigError, match="critic_warmup=3 leaves the policy none of steps=3"):
        PPOConfig("", "", steps=3, critic_warmup=3)


def test_an_update_without_labels_is_in_no_average():
    full = {"grpo/ratio": 1.0, "tokens/supervised": 8, "rows/dispatched": 20, "step/skipped": 0}
    none = {"grpo/ratio": 0.0, "tokens/supervised": 0, "rows/dispatched": 0, "step/skipped": 1}
    metrics, _ = rl.merge([(full, {}), (none, {})])
    assert metrics == {"grpo/ratio": 1.0, "tokens/supervised": 8, "rows/dispatched": 20, "step/skipped": 1}
    assert rl.merge([(none, {}), (none, {})])[0]["grpo/ratio"] == 0.0


def test_an_answers_values_are_sent_without_their_neighbours():
    """Pickling a view sends all that it is a view of."""
    told = updating.experience([(3, [(6, "stop", 1.0)] * 8)] * 4)
    layout = updating.Forward(updating.seeded())
    batches = rl.microbatches(told.samples([{}] * 32), PPOConfig("", ""), layout)
    found = rl.by_answer(batches, layout.score(batches), layout, 32)
    assert len(pickle.dumps(found[0])) < 1000 and found[0].untyped_storage().nbytes() == 6 * 8


def test_experts_run_in_inference_mode_before_anything_was_measured(monkeypatch):
    monkeypatch.setattr(cpu_choice, "SMALL", 0)
    monkeypatch.setattr(cpu_choice, "_choices", {})
    x, up, down, gate = torch.randn(6, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 12), torch.rand(6, 2)
    rows = ops.sort_rows(torch.tensor([[0, 1], [1, 2], [0, 3], [3, 1], [0, 1], [2, 3]]), 4)
    with torch.inference_mode():
        y = ops.moe_ffn(x, rows, gate, up, down)
        z = ops.moe_ffn(x.clone(), rows, gate, up, down)
    assert torch.equal(y, z) and not cpu_choice.choices()
    with torch.no_grad():
        torch.testing.assert_close(ops.moe_ffn(x, rows, gate, up, down), y)


def test_a_sequence_that_cannot_be_scored_has_no_score(tmp_path):
    """It read 0, which is a score like any other; and one call scores all, as ranks differ in how many they have."""
    model = updating.seeded(torch.float32, value_head=True)
    torch.nn.init.normal_(model.head.weight)
    learner = Learner(model, RewardModel(), replace(updating.LEARNER, bias_rate=0.0))
    learner.save(tmp_path / "saved")
    score = scorer(tmp_path / "saved", rows=2)
    found = score([[5, 6, 7], [5], [1, 2, 3, 4], [8, 9], []])
    assert [math.isnan(x) for x in found] == [False, True, False, False, True]
    assert score([[8, 9]]) == pytest.approx([found[3]], abs=1e-4) and found[0] != found[2]


def test_units_are_asked_where_a_refusal_reaches_all_ranks():
    """An objective refused a rank's batch between two collectives, and the other ranks waited in the second."""
    learner = Learner(updating.seeded(value_head=True), RewardModel(), updating.LEARNER)
    labels = torch.tensor([[-100, 4]])
    one = torch.zeros(1, 2)
    alone = Batch.make(torch.tensor([[3, 4]]), labels=labels, extra={"family": one, "chosen": one})
    for run in (learner.step, learner.evaluate):
        with pytest.raises(DataError, match="rank 0: 1 scored answers are not pairs"):
            run([alone])


def test_other_right_answers_are_other_data():
    prints = {rl.Prompts([[1, 2]], [{"answer": a}], Report()).fingerprint for a in ("3", "4", None)}
    assert len(prints) == 3


def test_samples_with_any_characters_are_kept_on_resume(tmp_path):
    """U+0085 and U+2028 end lines for `splitlines`, and are in answers as they are; a line may be cut after a brace."""
    line = '{"step": %d, "answer": "a\u0085b\u2028c {}"}'
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{line % 0}\n{line % 1}\n{line[:-2] % 1}", encoding="utf-8")
    old_samples(tmp_path, 1)
    assert path.read_text(encoding="utf-8") == f"{line % 0}\n"
