"""FLOPs against torch's own counter on the real model, closed forms, rates and MFU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moekit import ops
from moekit.data.batch import Batch
from moekit.errors import ConfigError
from moekit.measure.cost import (
    CONVENTION,
    PARTS,
    Work,
    executed_flops,
    mfu,
    rates,
    step_flops,
)
from moekit.measure.tokens import RowCounter


def attention_of_torch(flat, config) -> int:
    """What torch's counter takes for the scores of the model's attention: full rectangles, causal or not."""
    pairs = sum(r.documents * r.length**2 for r in flat.runs)
    pairs += sum(c.length * (c.length + c.parent_length) for c in flat.children)
    return 4 * config.heads * config.head_dim * pairs * config.layers


@pytest.fixture
def plain_kernels():
    """The reference kernels: no row is padded in scratch, so that a counter sees the rows and nothing else."""
    before = ops.backend()
    ops.set_backend("reference")
    yield
    ops.set_backend(before)


@pytest.mark.parametrize("elide", ("none", "padding", "padding+last_layer"))
def test_executed_against_torchs_counter(small, plain_kernels, elide):
    """Forward and backward of the real model; attention scores apart, as torch counts whole squares for them."""
    made, flat, counter = small.model(), small.batch().flat, RowCounter.of(small.config)
    counter.positions(flat)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as ahead:
            loss = made(flat, elide=elide, observer=counter).logprob_M.sum()
        with FlopCounterMode(display=False) as behind:
            loss.backward()
    squares = attention_of_torch(flat, small.config)
    got = executed_flops(small.config, counter, elide)
    scores = got["attention_scores"] / 3
    assert got["forward"] - scores == ahead.get_total_flops() - squares
    # torch's backward of a matmul is two matmuls; only the embedding needs no gradient for its input
    assert got["backward"] - 2 * scores == behind.get_total_flops() - 2 * squares
    assert got["total"] == pytest.approx(sum(got[p] for p in PARTS), rel=1e-12)


def test_model_flops_in_closed_form(small):
    """All linear weights that a token uses, twice per token; head at labels; scores by document."""
    c, flat = small.config, small.batch().flat
    made = small.model()
    sizes = {n: p.numel() for n, p in made.named_parameters() if p.ndim > 1}
    routed = sum(s for n, s in sizes.items() if n.endswith((".moe.gate_up", ".moe.down")))
    dense = sum(sizes.values()) - routed - sizes["embed.weight"] - sizes["head.weight"]
    tokens, labels, pairs = 31, 9, 125
    want = 2 * tokens * (dense + routed * c.top_k // c.experts) + 2 * labels * sizes["head.weight"]
    want += 4 * c.width * pairs * c.layers
    got = step_flops(c, flat, backward=False)
    assert got["total"] == want and got["backward"] == 0
    assert step_flops(c, flat)["total"] == 3 * want
    assert step_flops(c, [flat, small.batch()])["total"] == 6 * want


def test_work_from_flat_equals_work_from_counts(small):
    flat, counter = small.batch().flat, RowCounter.of(small.config)
    for _ in range(2):
        counter.positions(flat)
    assert Work.of(counter.measures["policy", "forward"]) == Work.of([flat, flat]) == Work(80, 62, 18, 250)
    assert step_flops(small.config, counter) == step_flops(small.config, [flat, flat])


def test_cutting_a_row_into_documents_lowers_attention_only(small):
    ids = torch.zeros(1, 8, dtype=torch.long)
    whole = step_flops(small.config, Batch.make(ids, labels=ids))
    cut = step_flops(small.config, Batch.make(ids, labels=ids, segment=torch.tensor([[0] * 4 + [1] * 4])))
    assert cut["attention_scores"] == whole["attention_scores"] * (10 + 10) / 36
    assert all(cut[p] == whole[p] for p in PARTS if p != "attention_scores")


def test_rates_by_hand(small):
    counter = RowCounter.of(small.config)
    counter.positions(small.batch().flat)
    counter.measures["policy", "forward"].dispatched_LCE[0, 0, 0] += 12
    assert rates(counter, 0.5) == {
        "rate/supervised_tokens_s": 18.0, "rate/tokens_s": 62.0, "rate/positions_s": 80.0, "rate/routed_rows_s": 24.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="seconds=0"):
        rates(counter, 0)


def test_mfu():
    assert mfu(6e12, seconds=2.0, peak=1e12, devices=4) == 0.75
    with pytest.raises(ConfigError, match="peak"):
        mfu(1.0, 1.0, peak=0)
    assert "top_k" in CONVENTION and "L(L+1)/2" in CONVENTION
