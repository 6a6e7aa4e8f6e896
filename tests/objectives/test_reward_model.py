"""Bradley-Terry loss: hand-computed values, pairs in any order, and what is no pair."""

from math import exp, log, log1p
from types import SimpleNamespace

import pytest
import torch

from moekit.data.batch import Batch
from moekit.errors import ConfigError, DataError
from moekit.objectives.reward_model import RewardModel


def scored(family, chosen, **extra):
    """One answer a row, of growing lengths; the label is at its last token. Returns the flat view and M's rows."""
    n = len(family)
    labels = torch.full((n, n + 2), -100)
    segment = torch.full((n, n + 2), -1)
    for row in range(n):
        segment[row, : row + 2] = 0
        labels[row, row + 1] = 0
    spread = lambda x: torch.as_tensor(x)[:, None].expand(-1, n + 2).clone()
    values = {"family": spread(family), "chosen": spread(chosen)} | {k: spread(x) for k, x in extra.items()}
    flat = Batch.make(torch.zeros_like(segment), labels=labels, segment=segment, extra=values).flat
    return flat, flat.order_N[flat.label_index_M] // (n + 2)


def test_values_gradients_and_metrics():
    """Scores (2, 1), (0, 3), and a tie: terms by hand; a tie is no win; pairs may stand in any order."""
    family, chosen = [900, 7, 7, 8, 900, 8], [0, 1, 0, 1, 1, 0]
    score = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    flat, row_M = scored(family, chosen)
    terms = RewardModel()(flat, SimpleNamespace(value_M=score[row_M]))
    want = {7: log1p(exp(-1.0)), 8: log(2.0), 900: log1p(exp(3.0))}
    assert sorted(terms.loss_M.tolist()) == pytest.approx(sorted(want.values()), abs=1e-12)
    terms.loss_M.sum().backward()
    slope = {7: -1 / (1 + exp(1.0)), 8: -0.5, 900: -1 / (1 + exp(-3.0))}
    signs = [slope[f] * (1 if c else -1) for f, c in zip(family, chosen)]
    assert score.grad.tolist() == pytest.approx(signs, abs=1e-12)
    assert RewardModel().units(flat) == 3.0 == len(terms.loss_M)
    got = {name: x.item() for name, x in terms.sums.items()}
    assert got == pytest.approx({"accuracy": 1.0, "margin": -2.0, "chosen": 2.5, "rejected": 4.5})


def test_margin_and_centering():
    """-log sigmoid(s_c - s_r - m) + c (s_c + s_r)^2, with m read at the chosen answer."""
    flat, row_M = scored([0, 0], [1, 0], margin=[0.5, 99.0])
    score = torch.tensor([2.0, 1.0], dtype=torch.float64)
    loss = RewardModel(center=0.01)(flat, SimpleNamespace(value_M=score[row_M])).loss_M
    assert loss.tolist() == pytest.approx([log1p(exp(-0.5)) + 0.01 * 9.0])


@pytest.mark.parametrize("apart", [-200.0, 200.0])
def test_far_scores_stay_finite(apart):
    flat, row_M = scored([0, 0], [1, 0])
    score = torch.tensor([apart, 0.0], requires_grad=True)
    loss = RewardModel()(flat, SimpleNamespace(value_M=score[row_M])).loss_M.sum()
    loss.backward()
    assert loss.item() == pytest.approx(max(0.0, -apart)) and score.grad.isfinite().all()


@pytest.mark.parametrize(
    "family,chosen",
    [([0, 0, 0], [1, 0, 0]), ([0, 1], [1, 0]), ([0, 0], [1, 1]), ([0, 0], [0, 0]), ([0, 0, 0, 0], [1, 1, 0, 0])],
    ids=["three", "strangers", "both-chosen", "none-chosen", "two-pairs-in-one"],
)
def test_what_is_no_pair_is_refused(family, chosen):
    flat, row_M = scored(family, chosen)
    with pytest.raises(DataError, match="not pairs"):
        RewardModel().units(flat)
    with pytest.raises(DataError, match="not pairs"):
        RewardModel()(flat, SimpleNamespace(value_M=torch.zeros(len(row_M))))


def test_nothing_to_score_and_bad_settings():
    flat = Batch.make(torch.zeros(1, 2, dtype=torch.long)).empty().flat
    terms = RewardModel()(flat, SimpleNamespace(value_M=torch.zeros(0, requires_grad=True)))
    assert (
        RewardModel().units(flat) == 0.0 and terms.loss_M.shape == (0,) and set(terms.sums) == set(RewardModel.metrics)
    )
    with pytest.raises(ConfigError, match="center=-1"):
        RewardModel(center=-1.0)
    with pytest.raises(DataError, match="'family'"):
        RewardModel().units(Batch.make(torch.zeros(1, 2, dtype=torch.long)).flat)
