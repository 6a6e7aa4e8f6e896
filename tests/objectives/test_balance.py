"""Router losses: hand-computed values, Transformers as oracle, and independence of the cut."""

from math import log
from types import SimpleNamespace

import pytest
import torch

from moekit.config import RouterLossConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError
from moekit.objectives.balance import (
    RouterLoss,
    balance_by_microbatch,
    balance_by_sequence,
    balance_hf,
    bias_step,
    convert_coefficient,
    scope_count,
)


def route(logits, top_k):
    logits = torch.as_tensor(logits, dtype=torch.float64)
    probs = logits.softmax(-1)
    return SimpleNamespace(logits_NE=logits, probs_NE=probs, expert_NK=probs.topk(top_k, -1).indices)


def one_row(n, pad=0):
    return Batch.make(torch.zeros(1, n + pad, dtype=torch.long), segment=torch.tensor([[0] * n + [-1] * pad])).flat


def loss(r, flat, **config):
    c = RouterLossConfig(balance=1.0, **config)
    return RouterLoss(c, scope_count([flat], c.scope))(0, r, flat)


@pytest.mark.parametrize("granularity", ["sequence", "microbatch"])
def test_bc_029_probabilities_are_softmaxed_once(granularity):
    logits = torch.tensor([[log(4), log(3), log(2), log(1)]] * 2, dtype=torch.float64, requires_grad=True)
    r = route(logits, 1)
    value = loss(r, one_row(2), granularity=granularity)
    assert value.item() == pytest.approx(1.6, abs=1e-12)
    f = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    numeric = lambda z: 4 * (f * z.softmax(-1).mean(0)).sum()
    (got,) = torch.autograd.grad(value, logits)
    want = torch.autograd.functional.jacobian(numeric, logits.detach())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bc_030_conventions_differ_by_top_k():
    r = SimpleNamespace(
        logits_NE=torch.zeros(4, 4, dtype=torch.float64),
        probs_NE=torch.full((4, 4), 0.25, dtype=torch.float64),
        expert_NK=torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]),
    )
    assert loss(r, one_row(4)).item() == pytest.approx(1.0)
    assert balance_hf([r], one_row(4), "valid").item() == pytest.approx(2.0)
    assert convert_coefficient(0.01, "hf", "moekit", 2) == pytest.approx(0.02)
    assert convert_coefficient(0.02, "moekit", "hf", 2) == pytest.approx(0.01)
    with pytest.raises(ConfigError, match="megatron"):
        convert_coefficient(1.0, "megatron", "hf", 2)


def test_conventions_differ_by_the_layers_that_are_pooled():
    """Three layers that route alike: equal gradients of every layer's logits at converted coefficients."""
    values = torch.tensor([[3.0, 1, 0, 0], [2, 0, 1, 0], [0, 2, 0, 1]], dtype=torch.float64)
    leaves = [values.clone().requires_grad_() for _ in range(6)]
    pooled, apart = [route(z, 2) for z in leaves[:3]], [route(z, 2) for z in leaves[3:]]
    (0.01 * balance_hf(pooled, one_row(3), "valid")).backward()
    c = convert_coefficient(0.01, "hf", "moekit", 2, layers=3)
    (c * sum(loss(r, one_row(3), granularity="microbatch") for r in apart)).backward()
    for a, b in zip(leaves[:3], leaves[3:]):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("pads", [0, 2, 20])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("granularity", ["sequence", "microbatch"])
def test_bc_031_padding_is_not_counted(pads, side, granularity):
    real, pad = [[log(0.7), log(0.3)], [log(0.4), log(0.6)]], [[log(0.9), log(0.1)]] * pads
    segment = [0, 0] + [-1] * pads if side == "right" else [-1] * pads + [0, 0]
    flat = Batch.make(torch.zeros(1, 2 + pads, dtype=torch.long), segment=torch.tensor([segment])).flat
    r = route(real + pad, 1)  # flat order puts padding last on either side
    assert loss(r, flat, granularity=granularity).item() == pytest.approx(1.0, abs=1e-12)
    if pads == 2 and granularity == "microbatch":
        assert loss(r, flat, granularity=granularity, scope="all").item() == pytest.approx(1.225, abs=1e-12)


def test_hf_form_equals_transformers():
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    g = torch.Generator().manual_seed(1)
    layers = [torch.randn(12, 5, generator=g) for _ in range(3)]
    segment = torch.tensor([[0] * 4 + [-1] * 2, [0] * 6])
    flat = Batch.make(torch.zeros(2, 6, dtype=torch.long), segment=segment).flat
    mine = balance_hf([route(x[flat.order_N], 2) for x in layers], flat, "valid")
    want = load_balancing_loss_func(tuple(layers), 5, 2, attention_mask=(segment >= 0).long())
    assert mine.item() == pytest.approx(want.item(), rel=1e-5)


def direct_sequence_loss(r, flat):
    """(1/N) sum_s n_s E sum_e f_se P_se, written out document by document."""
    total, n = 0.0, 0
    e = r.probs_NE.shape[1]
    for s in range(flat.documents):
        at = flat.document_N == s
        n_s = int(at.sum())
        f = torch.bincount(r.expert_NK[at].reshape(-1), minlength=e).double() / r.expert_NK[at].numel()
        total, n = total + n_s * e * (f * r.probs_NE[at].mean(0)).sum(), n + n_s
    return total / n


def documents(seed=0):
    segment = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [-1] * 6])
    return Batch.make(torch.arange(24).view(4, 6), segment=segment)


def test_sequence_form_does_not_depend_on_the_cut():
    batch = documents()
    logits = torch.randn(24, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)  # by row place
    whole = route(logits[batch.flat.order_N], 2)
    want = direct_sequence_loss(whole, batch.flat)
    parts = [b.flat for b in batch.split(1)]
    c = RouterLossConfig(balance=1.0)
    for flats in ([batch.flat], parts):
        term = RouterLoss(c, scope_count(flats, "valid"))
        places = [f.order_N + (0 if len(flats) == 1 else 6 * i) for i, f in enumerate(flats)]
        got = sum(term(0, route(logits[p], 2), f) for p, f in zip(places, flats))
        assert float(got) == pytest.approx(float(want), abs=1e-12)


def test_microbatch_form_depends_on_the_cut_and_sums_over_ranks():
    """BC-042: with counts pooled over ranks, the ranks' terms add up to one process' loss and gradient."""
    even = [[log(0.7), log(0.3)], [log(0.4), log(0.6)]] * 2
    for rows, value in ((even, 1.0), ([*even[:3], even[0]], 2 * (0.75 * 0.625 + 0.25 * 0.375))):
        logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
        whole = balance_by_microbatch(route(logits, 1), one_row(4), "valid") / 4
        counts = torch.bincount(route(logits, 1).expert_NK[:, 0], minlength=2).double()
        pooled = lambda _, counts=counts: counts
        halves = sum(
            balance_by_microbatch(route(logits[at : at + 2], 1), one_row(2), "valid", pooled) / 4 for at in (0, 2)
        )
        assert whole.item() == pytest.approx(value) and halves.item() == pytest.approx(value)
        a, b = torch.autograd.grad(whole, logits)[0], torch.autograd.grad(halves, logits)[0]
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert a.abs().max() > 0.01  # the uneven case has something to push on


def test_shared_prompt_counts_once_for_each_child():
    """Two answers to one prompt: shared or written out twice, the same statistics."""
    shared = Batch.make(
        torch.tensor([[1, 2, 3, 4, 3, 5, 6]]),
        segment=torch.tensor([[0, 0, 1, 1, 2, 2, 2]]),
        parent=torch.tensor([[-1, -1, 0, 0, 0, 0, 0]]),
    )
    apart = Batch.make(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5, 6]]), segment=torch.tensor([[0] * 4 + [1] * 5]))
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for scope in ("valid", "supervised"):
        pooled = lambda r, flat, scope: balance_hf([r, r], flat, scope)
        for form in (balance_by_sequence, balance_by_microbatch, pooled):
            values = [form(route(table[b.flat.ids_N], 2), b.flat, scope) for b in (shared, apart)]
            if scope == "valid":
                assert scope_count([shared.flat], scope) == scope_count([apart.flat], scope) == 9
                assert values[0].item() == pytest.approx(values[1].item(), abs=1e-12)


def test_z_loss_and_scope():
    batch = Batch.make(torch.zeros(1, 4, dtype=torch.long), labels=torch.tensor([[-100, 5, -100, -100]]))
    r = route([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], 1)
    lse = [log(2) + x for x in (0, 1, 2, 3)]
    for scope, want in (("valid", sum(x * x for x in lse) / 4), ("supervised", lse[1] ** 2)):
        c = RouterLossConfig(z=1.0, scope=scope)
        assert float(RouterLoss(c, scope_count([batch.flat], scope))(0, r, batch.flat)) == pytest.approx(want)


def test_bc_040_bias_step():
    plain, centred = (bias_step(torch.tensor([5, 1, 0]), 0.001, zero_mean=z).tolist() for z in (False, True))
    assert plain == pytest.approx([-0.001, 0.001, 0.001], abs=1e-9)
    assert centred == pytest.approx([-0.0013333333, 0.0006666667, 0.0006666667], abs=1e-9)
    scores = torch.tensor([0.3, 0.2999, 0.2])
    assert torch.equal((scores + torch.tensor(plain)).topk(2).indices, (scores + torch.tensor(centred)).topk(2).indices)
