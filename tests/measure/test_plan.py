"""Predicted activations against what autograd saves on the real model; storage and wire bytes against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.data.families import Sample, family_rows
from moekit.kernels import cpu_ffn
from moekit.kernels.explain import SHORT
from moekit.learner.precision import ExpertCaches
from moekit.measure import plan
from moekit.measure.measures import attention_pairs
from moekit.measure.memory import saved_bytes
from moekit.measure.plan import (
    Held,
    Microbatch,
    activation_bytes,
    buckets,
    exchange_bytes,
    kv_cache_bytes,
    storage_bytes,
    wire_bytes,
)
from moekit.model.transformer import Part, Transformer
from moekit.objectives import logprobs
from moekit.objectives.balance import RouterLoss

torch.set_num_threads(1)
BASE = ModelConfig(vocab=300, width=64, layers=3, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=48)
SHAPES = {
    "grouped queries": BASE,
    "OLMoE": replace(BASE, kv_heads=4, qk_norm="full", experts=16, top_k=4),
    "Qwen3": replace(BASE, qk_norm="head", normalize_gates=True, head_dim=24),
    "Mixtral": replace(BASE, gate="topk_softmax", experts=4, expert_width=128, tied_head=True),
    "shared, dense, sigmoid": replace(
        BASE, shared_width=32, dense_layers=(0,), dense_width=160, gate="sigmoid", normalize_gates=True
    ),
    "last layer dense": replace(BASE, dense_layers=(2,), dense_width=100),
    "critic": replace(BASE, value_head=True),
}
OPTIONS = {
    "padding": LearnerConfig(),
    "last layer, router losses": LearnerConfig(elide="padding+last_layer", router=RouterLossConfig(0.01, 0.01)),
    "nothing elided, balance": LearnerConfig(elide="none", router=RouterLossConfig(0.01, 0.0)),
}


def batch(vocab: int, length: int = 160) -> Batch:
    """3 rows: one document; two and padding; three equal ones and padding. Half of the positions labelled."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (3, length), generator=g)
    segment = torch.full_like(ids, -1)
    segment[0], segment[1, : length // 2], segment[1, length // 2 : length - 10] = 0, 0, 1
    third = length // 4
    for i in range(3):
        segment[2, i * third : (i + 1) * third] = i
    labels = Batch.make(ids, segment=segment).labels.clone()
    labels[torch.rand(ids.shape, generator=g) < 0.5] = -100
    return Batch.make(ids, segment=segment, labels=labels)


def measured(shape: ModelConfig, dtype: torch.dtype, c: LearnerConfig, flat) -> int:
    """What autograd saves, each storage once."""
    model = Transformer(shape, dtype=dtype)
    loss = RouterLoss(c.router, 100.0)
    if c.precision == "mxfp8":
        ExpertCaches(model)
    with saved_bytes(model) as saved:
        out = model(flat, recompute=c.recompute, elide=c.elide, router_loss=loss if loss.per_layer else None)
    del out
    return saved.bytes


@pytest.mark.parametrize("recompute", ("none", "moe", "block"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_what_autograd_saves(name, dtype, recompute):
    """Within 15 % by every policy, shape, dtype and elision (5 % but for blocks: the choices that a block keeps in
    its memo are no saved tensor, but they are kept)."""
    shape = SHAPES[name]
    flat = batch(shape.vocab).flat
    work = Microbatch.of(flat)
    for c in OPTIONS.values():
        c = replace(c, recompute=recompute)
        got, want = activation_bytes(shape, work, dtype, c)["total"], measured(shape, dtype, c, flat)
        assert got == pytest.approx(want, rel=0.15 if recompute == "block" else 0.05), c.elide


@pytest.mark.parametrize("recompute", ("none", "moe", "block"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_activations_with_mxfp8_experts(dtype, recompute):
    """Gathered rows and expert outputs are kept as well; exact where all of the table is."""
    shape = replace(BASE, expert_width=64)
    flat = batch(shape.vocab).flat
    for name, c in OPTIONS.items():
        c = replace(c, recompute=recompute, precision="mxfp8")
        got = activation_bytes(shape, Microbatch.of(flat), dtype, c)["total"]
        want = measured(shape, dtype, c, flat)
        assert got == pytest.approx(want, rel=0.15 if recompute == "block" else 0.05), name
        if (recompute, dtype, name) == ("none", torch.float32, "padding"):
            assert got == want


def test_nothing_recomputed_in_float32_is_exact():
    """The table has every tensor: equality where no random row count and no index of a mask comes in."""
    for name in ("grouped queries", "OLMoE", "Qwen3", "shared, dense, sigmoid"):
        flat, c = batch(SHAPES[name].vocab).flat, LearnerConfig()
        assert activation_bytes(SHAPES[name], Microbatch.of(flat), torch.float32, c)["total"] == measured(
            SHAPES[name], torch.float32, c, flat
        ), name


def test_long_documents_and_a_vocabulary_whose_probabilities_are_not_kept():
    """600 positions in bfloat16 take another attention; 40,000 tokens x 450 labels in fp32 pass 64 MiB."""
    shape = replace(BASE, layers=1, vocab=40_000)
    for length in (160, 600):
        flat = batch(shape.vocab, length).flat
        work = Microbatch.of(flat)
        assert (work.labels * 40_000 * 4 > 64 * 2**20) == (length == 600)
        got = activation_bytes(shape, work, torch.bfloat16, LearnerConfig())
        assert got["total"] == pytest.approx(measured(shape, torch.bfloat16, LearnerConfig(), flat), rel=0.03)
        assert (got["head"] > 30 * 2**20) == (length == 160)


def test_a_stage_keeps_what_its_layers_keep():
    """Stages add up to the whole; each is what the part saves."""
    flat = batch(BASE.vocab).flat
    work, c = Microbatch.of(flat), LearnerConfig()
    cuts = [(0, 1), (1, 3)]
    parts = [activation_bytes(BASE, work, torch.float32, c, cut) for cut in cuts]
    assert sum(p["total"] for p in parts) == activation_bytes(BASE, work, torch.float32, c)["total"]
    x = torch.randn(flat.positions, BASE.width, requires_grad=True)
    part = Transformer(BASE, part=Part(tuple(cuts[1:]), (0, 8)))
    with saved_bytes(part) as saved:
        y, _ = part.stage(0, x, flat)
        out = part.finish(y, flat)
    assert saved.bytes == parts[1]["total"] and out.logprob_M.shape[0] == work.labels


def test_again_is_what_the_largest_recomputation_holds():
    """recompute="block": one block without its input and choices; "moe": one layer's experts."""
    work = Microbatch.full(2, 96)
    none, moe, block = (
        activation_bytes(BASE, work, torch.float32, LearnerConfig(recompute=r)) for r in ("none", "moe", "block")
    )
    assert none["again"] == 0
    assert moe["again"] * 3 == none["experts"] == 3 * 192 * 2 * (2 * 48 * 4 + 16)
    layers = none["total"] - none["head"] - none["embedding"]
    assert block["again"] == layers // 3 - 192 * 64 * 4 - 192 * 2 * 8
    assert block["total"] + 3 * block["again"] == none["total"]


def test_constants_are_those_of_the_code():
    assert (plan.CHUNK_BYTES, plan.SHORT) == (logprobs.CHUNK_BYTES, SHORT)


@pytest.mark.skipif(not cpu_ffn.fits(torch.bfloat16)[0], reason="torch's form of the experts pads their rows")
def test_experts_in_bfloat16_keep_no_padding():
    """Some 30 rows each for 64 experts: padding to 16s, which torch's form keeps, would be 22 % of the experts' rows.
    Another form of the experts takes its rows unpadded: what they keep is R x (2 F x 2 bytes + 16) to the byte."""
    shape = replace(BASE, layers=1, experts=64, top_k=4, expert_width=64)  # small: never timed
    flat = batch(shape.vocab).flat
    work = Microbatch.of(flat)
    whole, moe = (measured(shape, torch.bfloat16, LearnerConfig(recompute=r), flat) for r in ("none", "moe"))
    assert whole - moe == work.real * 4 * (2 * 64 * 2 + 16)
    got = activation_bytes(shape, work, torch.bfloat16, LearnerConfig())
    assert got["experts"] == whole - moe and got["total"] == pytest.approx(whole, rel=0.03)


def test_pairs_are_those_that_are_counted():
    """Of documents, of a shared prompt's children, and of padding, which has none."""
    for b in (batch(50), family_rows([Sample([1] * 9, [[2] * 4, [3] * 7])], 32)):
        assert Microbatch.of(b.flat).pairs == attention_pairs(b.flat)


def test_the_exchange_by_hand():
    """10 and 30 positions of 2 ranks, top 2 in float32: 60 rows of 256 bytes leave the fullest rank; a room of
    ceil(1.25 x 2 x 40 / 2) = 50 rows; whole pages of memory for rows and for their classes, two windows."""
    rows, page = 64 * 4, lambda n: -(-n // 4096) * 4096
    for how, want in (
        ({}, 60 * rows),
        ({"dispatch": "rowwise"}, 2 * (page(2 * 51 * rows) + page(2 * 51)) // 2),
        ({"dispatch": "rowwise", "transport": "symmetric"}, 2 * (page(50 * rows) + page(50))),
        ({"dispatch": "rowwise", "transport": "padded"}, 2 * (2 * 50 + 1) * rows),
    ):
        assert exchange_bytes(BASE, LearnerConfig(ep=2, **how), [10, 30], torch.float32) == want, how
    assert exchange_bytes(BASE, LearnerConfig(), [30], torch.float32) == 0


def test_keys_and_values_by_hand():
    assert kv_cache_bytes(BASE, 3, 50, torch.bfloat16) == 2 * 3 * 3 * 2 * 50 * 16 * 2


HELD = [
    Held("embed.weight", (10, 8)),  # 80 elements: a span of 128
    Held("a.norm", (8,)),  # 64
    Held("b.norm", (8,)),  # 64
    Held("moe.gate_up", (2, 12, 8), expert=True),  # 192
    Held("moe.down", (2, 8, 6), expert=True),  # 96: 128
]


def test_buckets_by_hand():
    """dp=4, ep=2: dense buckets in multiples of 4 x 64 elements, expert ones of 2 x 64."""
    got = [(b.elements, b.ranks, b.names) for b in buckets(HELD, LearnerConfig(ep=2), 4)]
    assert got == [
        (384, 2, ["moe.down", "moe.gate_up"]), (256, 4, ["b.norm", "a.norm"]), (256, 4, ["embed.weight"])
    ]  # fmt: skip
    assert [b.elements for b in buckets(HELD, LearnerConfig(), 1)] == [320, 128, 128]


@pytest.mark.parametrize(
    ("zero", "reduce", "masters", "moments", "gradients", "peak"),
    [
        (0, "step", 896, 1792, 896, 896),
        (1, "step", 320, 640, 896, 896),
        (2, "step", 320, 640, 896 + 320, 896 + 320),
        (2, "microbatch", 320, 640, 320, 320 + 384),
    ],
)
def test_storage_by_hand(zero, reduce, masters, moments, gradients, peak):
    """896 elements; a rank owns 64 + 64 + 192 of them. bfloat16 has fp32 masters, float32 and float64 have none. Each
    bucket is whole, and given back, before the next one is begun: the largest stands beside the shards."""
    c = LearnerConfig(ep=2, zero=zero, reduce=reduce)
    got = storage_bytes(HELD, c, torch.bfloat16, 4)
    assert got == {
        "parameters": 896 * 2, "gradients": gradients * 4, "masters": masters * 4, "moments": moments * 4,
        "total": 896 * 2 + (gradients + masters + moments) * 4, "gradients_peak": peak * 4, "caches": 0,
    }  # fmt: skip
    for dtype, width in ((torch.float32, 4), (torch.float64, 8)):
        got = storage_bytes(HELD, c, dtype, 4)
        assert (got["parameters"], got["masters"], got["moments"]) == (896 * width, 0, moments * width)


def test_wire_by_hand():
    """Rings: all-reduce 2 (g-1)/g, reduce-scatter and all-gather (g-1)/g; rows (ep-1)/ep, four or six times."""
    work = Microbatch(positions=100, real=80, labels=40, runs=((1, 80),))
    many = {"microbatches": 3, "layers": range(1, 3), "transfers": 6}
    dense, expert = 512 * 3 / 4, 384 / 2
    for c, gradients, parameters, passes, routed in (
        (LearnerConfig(ep=2, zero=0), 2 * (dense + expert), 0, 4, 160),
        (LearnerConfig(ep=2, zero=1, recompute="moe"), 2 * (dense + expert), dense + expert, 6, 160),
        (LearnerConfig(ep=2, zero=2, elide="none"), dense + expert, dense + expert, 4, 200),
        (LearnerConfig(ep=2, reduce="microbatch"), 3 * (dense + expert), dense + expert, 4, 160),
        (LearnerConfig(ep=2, elide="padding+last_layer", recompute="block"), dense + expert, dense + expert, 6, 120),
    ):
        got = wire_bytes(HELD, BASE, c, work, torch.bfloat16, 4, **many)
        want = {"gradients": gradients * 4, "parameters": parameters * 2, "rows": passes * 3 * routed * 2 * 64 * 2 / 2,
                "pipeline": 3 * 2 * 100 * 64 * 2}  # fmt: skip
        assert got == want | {"total": sum(want.values())}
    alone = wire_bytes(HELD, BASE, LearnerConfig(), work, torch.bfloat16, 1, microbatches=3, layers=range(3))
    assert set(alone.values()) == {0.0}


def test_a_tied_embedding_crosses_once():
    """Two copies, dp=2: each rank's share of its own bucket, and the whole bucket once to the other copy."""
    held = [Held("embed.weight", (16, 8), tied=True)]
    c = LearnerConfig(pp=2)
    got = wire_bytes(held, BASE, c, Microbatch.full(1, 8), torch.float32, 2, microbatches=1, layers=())
    assert got["gradients"] == 128 * 4 / 2 + 128 * 4 and got["parameters"] == 128 * 4 / 2
