"""Denominators through `Learner.step`, on a model of one weight whose token losses are w * x.

A token's x is its label, so losses can be written down by hand. The function under test is the one that recipes call.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moekit.config import LearnerConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError, DataError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.learner.optimizer import KINDS
from moekit.model.presets import preset
from moekit.model.transformer import Part
from moekit.objectives.base import Terms
from moekit.objectives.sft import SFT


class OneWeight(nn.Module):
    """loss of a labelled position = w * label."""

    def __init__(self, w=1.0):
        super().__init__()
        self.config = preset("tiny")
        self.part, self.blocks, self.device = Part.whole(self.config), {}, torch.device("cpu")
        self.w = nn.Parameter(torch.tensor([[w]], dtype=torch.float64))

    def stage(self, place, x_ND, flat, **_):
        return self.w, []

    def finish(self, w, flat, routes, temperature=1.0):
        return SimpleNamespace(logprob_M=-w[0, 0] * flat.label_M.double())


def rows(*labels, length=5):
    """One row a list: a document whose labels are the list, then padding."""
    ids = torch.zeros(len(labels), length, dtype=torch.long)
    target, segment = torch.full_like(ids, -100), torch.full_like(ids, -1)
    for i, row in enumerate(labels):
        target[i, : len(row)] = torch.tensor(row)
        segment[i, : max(len(row), 1)] = 0
    return Batch.make(ids, labels=target, segment=segment)


def step(microbatches, mode="global_tokens", **objective):
    learner = Learner(OneWeight(), SFT(mode, **objective), LearnerConfig(clip_norm=None), World())
    metrics = learner.step(microbatches)
    return metrics["loss/sft"], learner.gradient()["w"].item()


def state(learner):
    return {f"{n}.{kind}": t for kind in KINDS for n, t in learner.gathered(kind).items()}


IGNORED = [-100, -100, -100]


def test_bc_011_microbatch_means_are_not_the_batch_mean():
    for cut in ([[4], [1, 1, 1]],), ([[4]], [[1, 1, 1]]), ([[4]], [[1, 1]], [[1]]):
        assert step([rows(*part) for part in cut]) == pytest.approx((1.75, 1.75), abs=1e-12)
    assert step([rows([4]), rows([1, 1, 1])], "microbatch_mean") == pytest.approx((2.5, 2.5), abs=1e-12)


def test_bc_016_token_mean_whatever_the_split():
    a, b = [[1, 1]], [[2], [3], [4]]
    for cut in ((a, b), (a + b,), tuple([row] for row in a + b)):
        assert step([rows(*part) for part in cut])[0] == pytest.approx(2.2, abs=1e-12)


def test_bc_018_divided_once_for_every_number_of_microbatches():
    for rows_each in (1, 2, 4):
        whole = rows([2], [2], [2], [2])
        assert step(whole.split(rows_each))[1] == pytest.approx(2.0, abs=1e-12)


def test_bc_008_a_row_without_target_counts_in_neither_sum():
    """As a document it counts in no convention; 1.0 would be the mean with a sample of loss 0."""
    for mode in ("global_tokens", "sequence_mean", "microbatch_mean", "rank_mean"):
        for cut in ([rows(IGNORED, [1, 2, 3])], [rows(IGNORED), rows([1, 2, 3])]):
            assert step(cut, mode) == pytest.approx((2.0, 2.0), abs=1e-12), mode
    assert step([rows(IGNORED, [1, 2, 3])], "constant", constant_length=4) == pytest.approx((1.5, 1.5), abs=1e-12)


def test_all_denominators_by_hand():
    """Documents with losses [6] and [1, 1, 1] in two microbatches; fixed length 4."""
    cut = [rows([6]), rows([1, 1, 1])]
    want = {"global_tokens": 9 / 4, "sequence_mean": 3.5, "constant": 9 / 8, "microbatch_mean": 3.5, "rank_mean": 9 / 4}
    for mode, value in want.items():
        extra = {"constant_length": 4} if mode == "constant" else {}
        assert step(cut, mode, **extra) == pytest.approx((value, value), abs=1e-12), mode


def test_kept_plus_filtered_adds_every_label_position_of_a_removed_instance():
    """Two of three instances of 6 positions removed: U + 2 * (6 - 1), whatever their own labels were."""
    b = rows([2, 4], [1], [3, 3, 3], length=6)
    removed = torch.zeros(3, 6, dtype=torch.bool)
    removed[1:] = True
    b = Batch.make(b.input_ids, labels=b.labels, segment=b.segment, filtered=removed, removed=2)
    assert step([b])[0] == pytest.approx(3.0)
    assert step([b], "kept_plus_filtered")[0] == pytest.approx(6 / (2 + 2 * 5))
    for parts in (b.split(1), b.split(2)):
        assert step(parts, "kept_plus_filtered")[0] == pytest.approx(6 / (2 + 2 * 5))


@dataclass(frozen=True)
class Broken:
    """An objective whose loss is not a number."""

    name: str = "broken"

    def __call__(self, flat, outputs):
        return Terms(outputs.logprob_M * float("nan"))


@pytest.mark.parametrize("case", ["no label", "not finite"])
def test_bc_014_nothing_to_learn_from_moves_nothing(case):
    """With moments and decay in play: parameters, moments, schedule and step count stay; the skip is counted."""
    config = LearnerConfig(lr=0.1, weight_decay=0.1, warmup_steps=5)
    learner = Learner(OneWeight(), SFT(), config, World())
    learner.step([rows([4])])
    before = {k: v.clone() for k, v in state(learner).items()}
    assert before["w.exp_avg"].abs() > 0
    if case == "not finite":
        learner.objective, learner.name = Broken(), "sft"
        metrics = learner.step([rows([4])])
        assert metrics["loss/sft"] != metrics["loss/sft"]
    else:
        metrics = learner.step([rows(IGNORED), rows(IGNORED)])
        assert metrics["loss/sft"] == 0.0 and metrics["grad/norm"] == 0.0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in learner.gradient().values())
    assert metrics["step/skipped"] == 1 and metrics["step/index"] == 1
    assert all(torch.equal(before[k], v) for k, v in state(learner).items())
    assert torch.equal(learner.model.w.detach(), before["w.master"])
    learner.objective = SFT()
    assert learner.step([rows([4])])["lr"] == pytest.approx(0.1 * 2 / 5)  # the schedule did not advance


@pytest.mark.parametrize(
    "ranks,ep,named", [(4, 4, "6 experts cannot be split over ep=4"), (4, 3, "4 ranks"), (4, 0, "0")]
)
def test_experts_that_cannot_be_split_are_refused_with_both_numbers(ranks, ep, named):
    """BC-054's principle, before any work; 6 experts."""
    model = OneWeight()
    model.config = replace(model.config, experts=6)
    with pytest.raises(ConfigError, match=named):
        Learner(model, SFT(), LearnerConfig(ep=ep), World(0, ranks))


def test_constant_needs_a_length_and_ids_must_be_in_the_vocabulary():
    with pytest.raises(ConfigError, match="constant_length"):
        Learner(OneWeight(), SFT("constant"), world=World())
    bad = Batch.make(torch.tensor([[1, 10**6]]))
    with pytest.raises(DataError, match="1000000"):
        Learner(OneWeight(), SFT(), world=World()).step([bad])
