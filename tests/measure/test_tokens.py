"""Row counters against counts by hand, against the recorded routes, and over processes."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# (pandas annotates a column as anything that a column can be)

from __future__ import annotations

import numpy as np
import pytest
import torch
from forked import run_ranks

from moekit.data.batch import CLASSES, Batch
from moekit.errors import ConfigError, NumericsError
from moekit.measure.measures import attention_pairs
from moekit.measure.tokens import RowCounter

ELISIONS = ("none", "padding", "padding+last_layer")


def run(small, elide="padding", labels="response"):
    """One training microbatch through a counter; returns it, the flat batch and the recorded routes."""
    made, counter = small.model(), RowCounter.of(small.config)
    flat = small.batch(labels).flat
    counter.positions(flat)
    out = made(flat, elide=elide, observer=counter, record=True)
    out.logprob_M.sum().backward()
    return counter, flat, out.routes


def test_positions_by_class(small):
    """By hand. Row 0: documents of 5 and 3 with labels at 2, 3 and 5, 6. Row 1: filtered. Row 2: no labels.
    Row 3: a prompt of 3 without labels; children of 3 and 4, with labels at all positions but their last."""
    counter = RowCounter.of(small.config)
    counter.positions(small.batch().flat)
    m = counter.measures["policy", "forward"]
    assert dict(zip(CLASSES, m.positions_C.tolist())) == {
        "supervised": 2 + 2 + 2 + 3, "context": 2 + 1 + 1 + 3 + 3 + 1 + 1, "filtered": 10, "padding": 2 + 7,
    }  # fmt: skip
    assert m.shared_C.tolist() == [0, 3, 0, 0], "the prompt's 3 positions serve 2 children: 3 x (2 - 1) are saved"
    # pairs: 15 + 6, 55, 6, prompt 6, children 6 + 3*3 and 10 + 4*3
    assert int(m.pairs) == 15 + 6 + 55 + 6 + 6 + 6 + 9 + 10 + 12


@pytest.mark.parametrize("elide", ELISIONS)
def test_rows_equal_a_recount_of_the_recorded_routes(small, elide):
    """Dispatched rows by layer, class and expert against a numpy recount of what the routers recorded."""
    counter, flat, routes = run(small, elide)
    classes, k = flat.class_N.numpy(), small.config.top_k
    labelled = np.zeros(flat.positions, bool)
    labelled[flat.label_index_M.numpy()] = True
    m = counter.measures["policy", "forward"]
    assert m.layers == (0, 2, 3) and len(routes) == 3, "layer 1 is dense"
    for at, (layer, route) in enumerate(zip(m.layers, routes)):
        runs = {
            "none": np.ones(flat.positions, bool),
            "padding": classes != 3,
            "padding+last_layer": labelled if layer == 3 else classes != 3,
        }[elide]
        want_CE = np.zeros((4, small.config.experts), int)
        decided_CE = np.zeros_like(want_CE)
        for n, chosen in enumerate(route.expert_NK.tolist()):
            for e in chosen:
                want_CE[classes[n], e] += runs[n]
                decided_CE[classes[n], e] += int(flat.share_N[n])  # a shared prompt decides for each child
        np.testing.assert_array_equal(m.dispatched_LCE[at].numpy(), want_CE)
        np.testing.assert_array_equal(m.decided_LCE[at].numpy(), decided_CE)
        np.testing.assert_array_equal(m.elided_LC[at].numpy(), np.bincount(classes[~runs], minlength=4) * k)
    assert torch.equal(counter.measures["policy", "backward"].dispatched_LCE, m.dispatched_LCE)
    counter.check()


def test_pretraining_labels_give_the_same_routes_and_counts(small):
    """elide="none": labels change classes only; rows by layer and expert, and in all, stay."""
    sft, _, sft_routes = run(small, "none")
    pretraining, _, routes = run(small, "none", labels="all")
    assert all(torch.equal(a.expert_NK, b.expert_NK) for a, b in zip(sft_routes, routes))
    for name in ("forward", "backward"):
        a, b = sft.measures["policy", name], pretraining.measures["policy", name]
        assert torch.equal(a.dispatched_LCE.sum(1), b.dispatched_LCE.sum(1))
        assert not torch.equal(a.dispatched_LCE, b.dispatched_LCE)
        assert int(a.dispatched_LCE.sum()) == 40 * 2 * 3, "positions x top_k x routing layers"


def filled(k=2) -> RowCounter:
    """Events by hand: 2 layers, 3 experts; 5 supervised, 4 context and 1 padding position."""
    counter = RowCounter(2, 3, top_k=k)
    flat = Batch.make(
        torch.zeros(1, 10, dtype=torch.long),
        segment=torch.tensor([[0] * 9 + [-1]]),
        labels=torch.tensor([[-100] * 3 + [1] * 5 + [-100] * 2]),
    ).flat
    counter.positions(flat)
    for layer, split in ((0, [[6, 4, 0], [0, 8, 0]]), (1, [[10, 0, 0], [4, 2, 2]])):
        dispatched = torch.tensor([*split, [0, 0, 0], [0, 0, 0]])
        decided = dispatched + torch.tensor([[0, 0, 0]] * 3 + [[1, 0, 1]])
        counter.layer(layer, decided, dispatched, torch.tensor([0, 0, 0, 2]), torch.zeros(4, dtype=torch.long))
        counter.backward(layer, dispatched)
    return counter


def test_metrics_by_hand():
    counter = filled()
    counter.check()
    got = counter.metrics()
    want = {
        "tokens/supervised": 5, "tokens/context": 4, "tokens/filtered": 0, "tokens/padding": 1,
        "rows/dispatched": 36, "rows/elided": 4, "rows/dropped": 0, "rows/shared": 0, "rows/backward": 36,
        "rows/supervised": 20, "rows/context": 16, "rows/filtered": 0, "rows/padding": 0,
        "load/max_over_mean": (12 * 3 / 18 + 14 * 3 / 18) / 2, "load/max_over_mean_worst": 14 * 3 / 18,
        "load/dead_experts": 1, "load_supervised/dead_experts": 1 + 2,
        "load_supervised/max_over_mean": (6 * 3 / 10 + 3) / 2,
    }  # fmt: skip
    assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-12)
    assert all(isinstance(v, (int, float)) for v in got.values())


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda ahead, _: ahead.dispatched_LCE[1, 0, 2].add_(1), "layer 1, supervised positions: 5 x top_k 2"),
        (lambda ahead, _: ahead.elided_LC[0, 3].sub_(1), "layer 0, padding positions: 1 x top_k 2"),
        (lambda _, behind: behind.dispatched_LCE[0, 1, 1].sub_(8), "policy/backward, layer 0, context"),
        (lambda ahead, _: ahead.positions_C.zero_(), "no positions"),
        (lambda ahead, _: ahead.decided_LCE[0, 0].copy_(torch.tensor([4, 6, 0])), "only 4 decided"),
    ],
)  # fmt: skip
def test_check_finds_a_row_too_many_or_too_few(spoil, message):
    counter = filled()
    spoil(counter.measures["policy", "forward"], counter.measures["policy", "backward"])
    with pytest.raises(NumericsError, match=message):
        counter.check()


def test_check_needs_the_right_top_k():
    with pytest.raises(NumericsError, match="5 x top_k 3 = 15 rows, but 10 dispatched"):
        filled(k=3).check()
    with pytest.raises(ConfigError, match="top_k"):
        RowCounter(2, 3).check()


def test_passes_are_kept_apart(small):
    """A forward without gradients, and another pass, leave the backward's counts alone."""
    made, flat, counter = small.model(), small.batch().flat, RowCounter.of(small.config)
    with torch.no_grad(), counter.during("evaluate"):
        counter.positions(flat)
        made(flat, observer=counter)
    assert counter.pass_name == "forward"
    assert set(counter.host()) == {("policy", "evaluate")}
    counter.check()
    assert counter.metrics("evaluate")["rows/dispatched"] == (40 - 9) * 2 * 3
    assert counter.metrics()["rows/dispatched"] == 0
    with pytest.raises(ConfigError, match="'evaluation' is not one of forward"):
        counter.pass_name = "evaluation"
    with pytest.raises(ConfigError, match="policies"):
        RowCounter(2, 3, "policies")
    with pytest.raises(ConfigError, match="layer 1 is not"):
        counter.decided(1)


def test_a_forward_without_gradients_expects_no_backward(small):
    """Scoring under no_grad beside a training forward: the backward's identity holds for the latter's rows alone."""
    counter, flat, _ = run(small)
    with torch.no_grad():
        counter.positions(flat)
        small.model()(flat, observer=counter)
    counter.check()
    assert counter.metrics()["rows/dispatched"] == 2 * counter.metrics()["rows/backward"]


def test_load_is_the_routers_decision_and_rows_are_what_ran():
    """4 supervised positions choose experts 0, 0, 0, 1; two of expert 0's rows are over capacity and dropped."""
    counter = RowCounter(1, 2, top_k=1)
    counter.positions(Batch.make(torch.zeros(1, 5, dtype=torch.long)).flat)  # 4 supervised, 1 context (the last)
    decided = torch.tensor([[3, 1], [0, 1], [0, 0], [0, 0]])
    ran = torch.tensor([[1, 1], [0, 1], [0, 0], [0, 0]])
    counter.layer(0, decided, ran, torch.zeros(4, dtype=torch.long), torch.tensor([2, 0, 0, 0]))
    counter.check()
    got = counter.metrics()
    assert (got["rows/dispatched"], got["rows/dropped"], got["rows/supervised"]) == (3, 2, 2)
    assert got["load/max_over_mean"] == 3 * 2 / 5 and got["load_supervised/max_over_mean"] == 3 * 2 / 4


def test_decided_in_scope():
    counter = filled()
    assert counter.decided(0, "all").tolist() == [7, 12, 1]
    assert counter.decided(0, "valid").tolist() == [6, 12, 0]
    assert counter.decided(0, "supervised").tolist() == [6, 4, 0]


def test_skipped_step_counts_every_row_as_elided(small):
    counter = RowCounter.of(small.config)
    counter.skip([small.batch().flat, small.batch().flat])
    counter.check()
    got = counter.metrics()
    assert (got["rows/elided"], got["rows/dispatched"], got["rows/backward"]) == (2 * 40 * 2 * 3, 0, 0)
    assert got["load/dead_experts"] == 15 and got["load/max_over_mean"] == 0, "idle, and no NaN"


def test_another_component_is_a_prefix_and_reset_leaves_nothing():
    critic = RowCounter((4,), 7, "critic")
    critic.positions(Batch.make(torch.zeros(1, 4, dtype=torch.long)).flat)
    assert critic.metrics()["critic_tokens/supervised"] == 3
    counter = filled().reset()
    assert counter.host() == {} and counter.metrics()["tokens/supervised"] == 0


def test_sum_over_ranks_happens_once():
    counter = filled().all_reduce()
    assert counter.ranks["policy", "forward"].tolist() == [[[10, 8, 0, 0], [10, 8, 0, 0]]]
    with pytest.raises(ConfigError, match="reset"):
        counter.all_reduce()
    with pytest.raises(ConfigError, match="reset"):
        counter.positions(Batch.make(torch.zeros(1, 4, dtype=torch.long)).flat)
    counter.reset().positions(Batch.make(torch.zeros(1, 4, dtype=torch.long)).flat)


def test_frame_and_arrays_agree_with_the_counts():
    counter = filled().all_reduce()
    table = counter.frame()
    assert list(table.columns) == [
        "component", "pass", "layer", "class", "rows", "decided", "elided", "dropped", "positions", "shared"
    ]  # fmt: skip
    assert len(table) == 2 * 2 * 4
    here = table[(table["pass"] == "forward") & (table["class"] == "context")].set_index("layer")
    assert here["rows"].to_dict() == {0: 8, 1: 8} and here["positions"].to_dict() == {0: 4, 1: 4}
    fine = counter.frame(experts=True)
    assert len(fine) == 2 * 2 * 4 * 3
    assert (
        fine.groupby(["pass", "layer", "class"])["rows"]
        .sum()
        .equals(table.groupby(["pass", "layer", "class"])["rows"].sum())
    )
    arrays = counter.arrays()
    assert arrays["policy/layers"].tolist() == [0, 1]
    assert arrays["policy/forward/dispatched"].shape == (2, 4, 3)
    assert arrays["policy/forward/positions"].tolist() == [5, 4, 0, 1]
    assert int(arrays["policy/backward/dispatched"].sum()) == 36
    assert arrays["policy/forward/ranks"].shape == (1, 2, 4)
    assert RowCounter(2, 3).arrays() == {} and len(RowCounter(2, 3).frame()) == 0


@pytest.mark.parametrize("seed", range(20))
def test_attention_pairs_against_the_definition(seed):
    """Count pairs j <= t in the own or the parent segment, one by one, on random rows."""
    g = torch.Generator().manual_seed(seed)
    segment = torch.randint(-1, 4, (3, 11), generator=g).sort(dim=1, stable=True).values
    if seed % 2:  # interleaved: order does not matter without parents
        segment = segment[:, torch.randperm(11, generator=g)]
        parent = torch.full_like(segment, -1)
    else:
        first = segment.clamp(min=0).where(segment >= 0, torch.full_like(segment, 9)).min(1, keepdim=True).values
        parent = torch.where((segment > first) & (segment >= 0), first, torch.full_like(segment, -1))
    made = Batch.make(torch.zeros(3, 11, dtype=torch.long), segment=segment, parent=parent)
    want = 0
    for row in range(3):
        for t in range(11):
            s, p = segment[row, t], parent[row, t]
            want += sum(int(s >= 0 and segment[row, j] in ((s, p) if p >= 0 else (s,))) for j in range(t + 1))
    assert attention_pairs(made.flat) == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counting_reads_nothing_to_the_host_on_a_gpu(small):
    """Events of a step on CUDA, with torch told to raise on any synchronization; same counts as on the CPU."""
    flat, want = small.batch().flat, RowCounter.of(small.config)
    counter, here = RowCounter.of(small.config), flat.to("cuda")
    rows = torch.arange(20).view(4, 5)
    none = torch.zeros(4, dtype=torch.long)
    rows_there, none_there = rows.cuda(), none.cuda()
    counter.positions(here)  # the first event moves the buffers
    counter.layer(0, rows_there, rows_there, none_there, none_there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        counter.reset()
        counter.positions(here)
        counter.layer(2, rows_there, rows_there, none_there, none_there)
        counter.backward(2, rows_there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want.positions(flat)
    want.layer(2, rows, rows, none, none)
    want.backward(2, rows)
    assert counter.metrics() == want.metrics()


WORKER = """
import sys, torch, torch.distributed as dist
from moekit.measure.tokens import RowCounter
from moekit.data.batch import Batch
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
calls = []
real = dist.all_reduce
dist.all_reduce = lambda *a, **k: (calls.append(1), real(*a, **k))
counter = RowCounter(2, 3, top_k=1)
with counter.during("score"):
    pass
if rank == 1:  # rank 0 counts nothing at all
    counter.positions(Batch.make(torch.zeros(1, 4, dtype=torch.long)).flat)
    one = torch.tensor([[3, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    for layer in (0, 1):
        counter.layer(layer, one, one, torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))
        counter.backward(layer, one)
counter.all_reduce()
counter.check()
assert len(calls) == 1, "one collective for everything"
assert counter.ranks["policy", "forward"][:, 0].tolist() == [[0, 0, 0, 0], [3, 1, 0, 0]]
m = counter.metrics()
assert (m["tokens/supervised"], m["rows/dispatched"], m["rows/backward"]) == (3, 8, 8), m
counter.reset()
counter.positions(Batch.make(torch.zeros(1, 4 + rank, dtype=torch.long)).flat)
assert counter.all_reduce().metrics()["tokens/supervised"] == 3 + 4
dist.destroy_process_group()
"""


def test_all_reduce_over_two_processes(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    assert run_ranks(tmp_path / "worker.py", [(r, tmp_path) for r in range(2)], timeout=120) == [0, 0]
