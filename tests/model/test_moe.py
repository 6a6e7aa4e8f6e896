"""One layer and many: row accounting, elision, router losses by way of the output, drops that never happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moekit import ops
from moekit.data.batch import CLASSES, CONTEXT, FILTERED, PADDING, SUPERVISED, Batch
from moekit.model.moe import LocalDispatcher

KINDS = ["padded", "packed", "interleaved", "shared", "full", "filtered"]
ELIDE = ["none", "padding", "padding+last_layer"]


@pytest.mark.parametrize("elide", ELIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_row_identity(small, kind, elide):
    """For every layer and pass: positions x top_k = dispatched + dropped + elided, class by class and expert by expert.

    The expected elision is written from its definition: no padding row, and in the last layer labelled rows only.
    """
    made, batch, watch = small.model("dense+shared"), small.batch(kind), small.Watcher()
    made(batch, elide=elide, observer=watch).logprob_M.sum().backward()
    top_k, positions_C = 2, torch.bincount(batch.classes.reshape(-1), minlength=len(CLASSES))
    assert list(watch.forward) == [1, 2] and sorted(watch.backwards) == [1, 2]  # layer 0 is dense
    for layer, (decided_CE, dispatched_CE, elided_C, dropped_C) in watch.forward.items():
        assert torch.equal(positions_C * top_k, dispatched_CE.sum(1) + dropped_C + elided_C)
        # a position of a shared prompt decides for each of its children
        saved_C = torch.zeros_like(positions_C).scatter_add(0, batch.flat.class_N, batch.flat.share_N - 1)
        assert torch.equal(decided_CE.sum(1), (positions_C + saved_C) * top_k) and int(dropped_C.sum()) == 0
        want = torch.zeros(len(CLASSES), dtype=torch.long)
        if elide != "none":
            want[PADDING] = positions_C[PADDING]
        if elide == "padding+last_layer" and layer == 2:
            want[CONTEXT], want[FILTERED] = positions_C[CONTEXT], positions_C[FILTERED]
        assert torch.equal(elided_C, want * top_k)
        assert torch.equal(dispatched_CE, torch.where(want[:, None] > 0, 0, decided_CE)) or bool(saved_C.any())
        assert torch.equal(watch.backwards[layer], dispatched_CE)


@pytest.mark.parametrize("variant", ["plain", "olmoe", "qwen3", "mixtral", "sigmoid", "dense+shared"])
@pytest.mark.parametrize("kind", ["padded", "packed", "shared"])
def test_loss_and_gradient_are_equal_in_all_elision_modes(small, kind, variant):
    made, batch = small.model(variant), small.batch(kind)
    found = []
    for elide in ELIDE:
        out = made(batch, elide=elide)
        weight = torch.linspace(0.5, 2.0, out.logprob_M.numel(), dtype=torch.float64)
        loss = -(out.logprob_M * weight).sum()
        found.append((loss.item(), small.gradients(made, loss)))
    for loss, grads in found[1:]:
        assert abs(loss - found[0][0]) <= 1e-12 * abs(found[0][0])
        assert small.distance(grads, found[0][1]) <= 1e-12


def router_loss(layer, route, flat, again=False):
    """A stand-in that touches all positions but padding, so that elision must not change it."""
    mean = route.logits_NE[: flat.real].logsumexp(-1).square().sum()
    return (layer + 1) * (mean + route.probs_NE[: flat.real].square().sum())


@pytest.mark.parametrize("elide", ELIDE)
@pytest.mark.parametrize("kind", ["padded", "shared"])
def test_router_loss_reaches_every_layer_as_if_it_had_been_added(small, kind, elide):
    """Attached to the output, its gradient is that of loss + sum of router losses; also in the last layer."""
    made, batch = small.model(), small.batch(kind)
    attached = small.gradients(made, 3 * made(batch, elide=elide, router_loss=router_loss).logprob_M.sum())
    out = made(batch, elide=elide, record=True)
    added = 3 * out.logprob_M.sum() + sum(router_loss(i, r, out.flat) for i, r in enumerate(out.routes))
    assert small.distance(attached, small.gradients(made, added)) <= 1e-12


def test_router_loss_counts_where_there_is_no_label(small):
    """A rank without labels still owes the router its gradient."""
    made, batch = small.model(), small.batch("packed")
    bare = replace(batch, labels=torch.full_like(batch.labels, -100))
    for elide in ELIDE:
        out = made(bare, elide=elide, router_loss=router_loss)
        grads = small.gradients(made, out.logprob_M.sum())
        assert out.logprob_M.numel() == 0 and grads["layers.0.moe.router.weight"].norm() > 0


def test_sft_and_pretraining_labels_route_alike_without_elision(small):
    """The baseline of the source: with elide="none" a mask changes no route and no count, only whose row it is."""
    made, seen = small.model(), []
    for labels in ("response", "all"):
        batch, watch = small.batch("packed", labels=labels), small.Watcher()
        out = made(batch, elide="none", observer=watch, record=True)
        out.logprob_M.sum().backward()
        seen.append((out.routes, watch))
    (routes, watch), (routes_all, watch_all) = seen
    assert all(torch.equal(a.expert_NK, b.expert_NK) for a, b in zip(routes, routes_all))
    for layer in watch.forward:
        a, b = watch.forward[layer], watch_all.forward[layer]
        assert torch.equal(a[0].sum(0), b[0].sum(0)) and torch.equal(a[1].sum(0), b[1].sum(0))
        assert torch.equal(watch.backwards[layer].sum(0), watch_all.backwards[layer].sum(0))
        assert a[1][SUPERVISED].sum() < b[1][SUPERVISED].sum()


def test_no_backward_is_counted_without_gradient(small):
    made, watch = small.model(), small.Watcher()
    with torch.no_grad():
        made(small.batch("padded"), observer=watch)
    assert len(watch.forward) == 3 and not watch.backwards


def test_counts_come_from_the_rows_that_enter(small, monkeypatch):
    """A sort that loses one row per layer breaks the identity by one: the counter is not the formula that it checks."""
    made, watch, real_sort = small.model(), small.Watcher(), ops.sort_rows

    def leaky(expert_NK, experts):
        rows = real_sort(expert_NK, experts)
        lost = (torch.arange(experts) >= int(rows.expert_R[0])).long()
        return ops.Sorted(rows.row_R[1:], rows.slot_R[1:], rows.offset_E - lost)

    monkeypatch.setattr(ops, "sort_rows", leaky)
    made(small.batch("full"), observer=watch).logprob_M.sum().backward()
    for decided_CE, dispatched_CE, elided_C, dropped_C in watch.forward.values():
        assert int(decided_CE.sum() - dispatched_CE.sum() - elided_C.sum() - dropped_C.sum()) == 1
        assert int((decided_CE - dispatched_CE).min()) == 0  # and it is missing where it was lost


def test_bc_033_dropless_by_default(small):
    """BC-033: expert 0 gets everything, gates 0.6 and 0.9: both served, dropped = 0. No expert has a capacity.

    (The victim rules of `on_overflow="drop"` belong to the rowwise dispatch.)
    """
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    gate = torch.tensor([[0.6], [0.9]], dtype=torch.float64)
    gate_up, down = torch.randn(4, 6, 2, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    y, counts = LocalDispatcher()(
        x, torch.zeros(2, 1, dtype=torch.long), gate, gate_up, down, torch.tensor([SUPERVISED, CONTEXT])
    )
    torch.testing.assert_close(y, gate * (ops.swiglu(x @ gate_up[0].T) @ down[0].T))
    assert counts.dispatched_CE[:, 0].tolist() == [1, 1, 0, 0] and counts.dropped_C.tolist() == [0, 0, 0, 0]


def test_bc_036_all_positions_on_one_expert(small):
    """BC-036: E=4, top-1, a selection bias that sends all 7 tokens to expert 2, float64, against the dense FFN."""
    made = small.model(experts=4, top_k=1, gate="sigmoid", selection_bias=True, layers=1).layers[0].moe
    made.router.selection_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    batch, watch = Batch.make(torch.zeros(1, 7, dtype=torch.long)), small.Watcher()
    x = torch.randn(7, 16, dtype=torch.float64)
    y, _ = made(x, batch.flat, real=7, observer=watch)
    gate, up = (x @ made.gate_up[2].T).chunk(2, -1)
    want = torch.sigmoid(x @ made.router.weight[2])[:, None] * ((F.silu(gate) * up) @ made.down[2].T)
    assert (y - want).abs().max() <= 1e-12
    assert watch.forward[0][1].sum(0).tolist() == [0, 0, 7, 0]
    for grad in torch.autograd.grad(y.square().sum(), (made.gate_up, made.down)):
        assert torch.equal(grad[[0, 1, 3]], torch.zeros_like(grad[[0, 1, 3]])) and grad[2].norm() > 0
