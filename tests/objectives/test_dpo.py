"""DPO's values and gradients: TRL's own loss method on the same log-probs, mathematics, and the public cases."""

import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from moekit.data.batch import Batch
from moekit.data.families import Sample, family_rows, with_values
from moekit.data.preference import Pair, Pairs
from moekit.errors import ConfigError, DataError
from moekit.objectives.dpo import DPO

torch.set_num_threads(1)
LENGTHS = [(3, 5), (1, 7), (6, 2), (4, 4)]


def pairs(lengths=LENGTHS, length=24, share=True, reference=None):
    """Pairs of answers of these lengths to prompts of three tokens, in as few rows as they fit in."""
    made = [Pair([9, 9, 9], [10 + i] * a, [20 + i] * b) for i, (a, b) in enumerate(lengths)]
    return Pairs(made, length, share, reference=reference).batch()


def drawn(batch, seed=0, scale=2.0):
    """Random log-probs of policy and reference at the labels, float64."""
    g = torch.Generator().manual_seed(seed)
    return [-scale * torch.rand(batch.flat.label_index_M.numel(), generator=g, dtype=torch.float64) for _ in range(2)]


def ours(objective, batch, policy, reference):
    flat = with_values(batch, "ref_logprob", reference).flat
    terms = objective(flat, SimpleNamespace(logprob_M=policy))
    units = objective.units(flat)
    return terms.loss_M.sum() / units, {k: float(v) / units for k, v in terms.sums.items()}


def trl(batch, policy, reference, loss_type, beta, smoothing=0.0):
    """TRL's `DPOTrainer._compute_loss`, with models that return given log-probs: rows are [chosen..., rejected...]."""
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    flat = batch.flat
    number_M, longest = flat.extra["answer"][flat.label_index_M], 12
    count = int(number_M.max()) // 2 + 1
    mask, rows = torch.zeros(2 * count, longest + 1), []
    for x in (policy, reference):
        row = x.new_zeros(2 * count, longest)
        for answer in range(2 * count):
            place = answer // 2 + (answer % 2) * count
            mine = x[number_M == answer]
            at = torch.arange(2, 2 + len(mine))
            row = row.index_put((torch.full_like(at, place), at), mine)
            mask[place, at + 1] = 1
        rows.append(row)

    def model(logps):
        zeros = torch.zeros_like(logps)
        out = SimpleNamespace(
            log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
        )
        return lambda **_: out

    gather = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda m: m)
    metrics = {"train": defaultdict(list)}
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=gather, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=False, ref_model=model(rows[1]), f_divergence_type="reverse_kl",
        loss_types=[loss_type], loss_weights=[1.0], beta=beta, label_smoothing=smoothing, use_weighting=False,
        _metrics=metrics, _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    inputs = {"input_ids": mask.long(), "attention_mask": torch.ones_like(mask), "completion_mask": mask.long()}
    with patch.object(module, "disable_gradient_checkpointing", lambda *_: nullcontext()):
        loss = module.DPOTrainer._compute_loss(stub, model(rows[0]), inputs, return_outputs=False)
    return loss, {k: v[-1] for k, v in metrics["train"].items() if v}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "loss_type, objective",
    [
        ("sigmoid", DPO(beta=0.3)),
        ("ipo", DPO(beta=0.3, kind="ipo", length_normalised=True)),
        ("sigmoid_norm", DPO(beta=0.3, length_normalised=True)),
    ],
)
def test_against_trl(loss_type, objective, share):
    """Loss and gradient of TRL's own code, and its metrics where they are of the same scores."""
    batch = pairs(length=40, share=share)
    policy, reference = drawn(batch)
    a, b = (policy.clone().requires_grad_() for _ in range(2))
    mine, metrics = ours(objective, batch, a, reference)
    theirs, told = trl(batch, b, reference, loss_type, objective.beta)
    assert abs(mine - theirs) < 1e-6
    mine.backward(), theirs.backward()
    assert (a.grad - b.grad).abs().max() < 1e-6 and a.grad.abs().max() > 1e-3
    assert metrics["logp_chosen"] == pytest.approx(told["logps/chosen"], abs=1e-6)
    assert metrics["logp_rejected"] == pytest.approx(told["logps/rejected"], abs=1e-6)
    if loss_type == "sigmoid":
        names = {
            "accuracy": "accuracies",
            "margin": "margins",
            "reward_chosen": "chosen",
            "reward_rejected": "rejected",
        }
        for name, other in names.items():
            assert metrics[name] == pytest.approx(told[f"rewards/{other}"], abs=1e-6), name
        assert 0 < metrics["accuracy"] < 1


def test_label_smoothing_against_trl():
    """TRL 1.16's "sigmoid" ignores label smoothing; its "aot" is the smoothed form for one pair, and is called so."""
    objective = DPO(beta=0.3, label_smoothing=0.2)
    for pair in LENGTHS:
        batch = pairs([pair])
        policy, reference = drawn(batch, sum(pair))
        a, b = (policy.clone().requires_grad_() for _ in range(2))
        mine, theirs = ours(objective, batch, a, reference)[0], trl(batch, b, reference, "aot", 0.3, 0.2)[0]
        assert abs(mine - theirs) < 1e-6
        mine.backward(), theirs.backward()
        assert (a.grad - b.grad).abs().max() < 1e-6


def test_ipo_as_in_the_paper():
    """Sums, not means: (D - 1/(2 beta))^2 by hand, D = (-1 - -3) - (-4 - -2) = 4."""
    batch = pairs([(1, 2)])
    policy, reference = torch.tensor([-1.0, -2.0, -2.0]), torch.tensor([-3.0, -1.0, -1.0])
    order = batch.flat.at_labels("chosen").argsort(descending=True, stable=True)
    put = lambda x: torch.empty_like(x).index_put((order,), x)
    loss, metrics = ours(DPO(beta=0.25, kind="ipo"), batch, put(policy), put(reference))
    assert loss == (4 - 2) ** 2 and metrics["margin"] == 1.0 and metrics["accuracy"] == 1.0


def test_bc_097_nothing_gained_yet():
    """BC-097: (a) equal scores: loss ln 2 and no win; (b) policy equal to reference: ln 2, gradients -0.05 and 0.05."""
    batch = pairs([(2, 2)])
    mark = batch.flat.at_labels("chosen")
    logps = torch.tensor([-0.3, -0.7, -0.3, -0.7]).requires_grad_()
    objective = DPO(beta=0.1)
    loss, metrics = ours(objective, batch, logps, logps.detach())
    loss.backward()
    assert abs(loss.item() - math.log(2)) < 1e-7 and metrics["accuracy"] == 0.0 and metrics["margin"] == 0.0
    assert torch.allclose(logps.grad, torch.where(mark == 1, -0.05, 0.05), atol=1e-7)
    # (a) the same answer twice: both terms are of the same parameters, whose gradient is exactly zero
    w = torch.tensor([-0.3, -0.7], requires_grad=True)
    loss, metrics = ours(objective, batch, torch.cat((w, w)), torch.tensor([-0.5, -0.1, -0.5, -0.1]))
    loss.backward()
    assert abs(loss.item() - math.log(2)) < 1e-7 and not w.grad.any() and metrics["accuracy"] == 0.0


@pytest.mark.parametrize("eos, mean", [(False, -1.0), (True, -2.0)])
def test_bc_099_one_mask_for_sum_and_count(eos, mean):
    """BC-099: log-probs -1, -1, -4 (eos): the mean is -1.0 without and -2.0 with eos, never -2/3."""
    n = 2 + eos
    batch = pairs([(n, 1)])
    logps = torch.tensor([-1.0, -1.0, -4.0][:n] + [0.0])
    order = batch.flat.at_labels("chosen").argsort(descending=True, stable=True)
    policy = torch.empty_like(logps).index_put((order,), logps)
    _, metrics = ours(DPO(beta=1.0, length_normalised=True), batch, policy, torch.zeros_like(policy))
    assert metrics["reward_chosen"] == mean and metrics["reward_rejected"] == 0.0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_cut_into_microbatches_changes_nothing(rows):
    """Pair means over the step: units and loss add up, also over microbatches whose family numbers coincide."""
    whole = pairs(LENGTHS * 3, length=20)
    policy, reference = drawn(whole)
    batch = with_values(with_values(whole, "policy", policy), "ref_logprob", reference)
    objective = DPO(beta=0.3)
    total, units = 0.0, 0.0
    parts = batch.split(rows)
    parts += [Batch.join(parts[:2]), batch.empty()]  # the same pairs twice, and no pair
    for b in parts:
        terms = objective(b.flat, SimpleNamespace(logprob_M=b.flat.at_labels("policy")))
        total, units = total + terms.loss_M.sum(), units + objective.units(b.flat)
        assert int((terms.loss_M != 0).sum()) == objective.units(b.flat)
    once = objective(batch.flat, SimpleNamespace(logprob_M=batch.flat.at_labels("policy")))
    twice = objective(parts[-2].flat, SimpleNamespace(logprob_M=parts[-2].flat.at_labels("policy")))
    assert objective.units(batch.flat) == 12
    assert torch.allclose(total - twice.loss_M.sum(), once.loss_M.sum())
    assert units - objective.units(parts[-2].flat) == 12


def test_joined_batches_keep_their_pairs_apart():
    """Two batches both number their families from 0; joined, no answer meets another batch's."""
    objective, batches = DPO(beta=0.3), []
    for seed, lengths in enumerate([[(3, 5), (2, 4)], [(4, 1)], [(1, 1), (6, 2)]]):
        batch = pairs(lengths, length=30)
        policy, reference = drawn(batch, seed)
        batches.append(with_values(with_values(batch, "policy", policy), "ref_logprob", reference))
    loss = lambda b: objective(b.flat, SimpleNamespace(logprob_M=b.flat.at_labels("policy"))).loss_M.sum()
    joined = Batch.join(batches)
    assert torch.allclose(loss(joined), sum(map(loss, batches)), rtol=1e-12)
    assert objective.units(joined.flat) == 5


def test_a_pair_that_lost_an_answer_is_no_unit():
    """An answer without its other half has no loss and no gradient."""
    fields = [[{"chosen": [1.0, 1.0]}], [{"chosen": [0.0]}], [{"chosen": [1.0]}, {"chosen": [0.0]}]]
    samples = [Sample([1, 2], [[3, 4]], fields[0]), Sample([1, 2], [[5]], fields[1])]
    batch = family_rows([*samples, Sample([1, 2], [[6], [7]], fields[2])], 16)
    policy, reference = drawn(batch)
    policy.requires_grad_()
    objective = DPO()
    loss, _ = ours(objective, batch, policy, reference)
    loss.backward()
    assert objective.units(batch.flat) == 1.0
    assert ((policy.grad != 0) == (batch.flat.at_labels("family") == 2)).all()


def test_random_scores_are_stable():
    """Large margins stay finite, and the loss is -log sigmoid in float64 to 1e-12."""
    batch = pairs()
    policy, reference = drawn(batch, 3, scale=500.0)
    loss, _ = ours(DPO(beta=5.0), batch, policy.requires_grad_(), reference)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(policy.grad).all()
    delta = torch.linspace(-700, 700, 57, dtype=torch.float64)
    want = torch.log1p(torch.exp(-delta.abs())) + F.relu(-delta)
    assert torch.allclose(DPO(beta=1.0).of_margin(delta), want, rtol=1e-12, atol=0)


def test_refusals():
    for wrong, why in [
        ({"beta": 0.0}, "beta=0.0 must be above 0"),
        ({"kind": "hinge"}, "'hinge' is not one of"),
        ({"label_smoothing": 0.5}, r"must be in \[0, 0.5\)"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "and 0 with kind='ipo'"),
        ({"reference": "disk"}, "'disk' is not one of"),
        ({"reference": "cached", "update_every": 10}, "cached log-probs are one model's for the whole run"),
        ({"update_every": 0}, "at least 1, or None"),
    ]:
        with pytest.raises(ConfigError, match=why):
            DPO(**wrong)
    with pytest.raises(DataError, match="no extra values 'ref_logprob'"):
        DPO()(pairs().flat, SimpleNamespace(logprob_M=torch.zeros(32)))
