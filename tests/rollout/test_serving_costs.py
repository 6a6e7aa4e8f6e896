"""Serving costs against values by hand, from a router whose choices are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moekit import ops
from moekit.errors import ConfigError
from moekit.kernels.tuning import gemm_tile
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.serving_costs import serving_costs
from moekit.rollout.stats import Loads


def crowd(n: torch.Tensor) -> torch.Tensor:
    """Every position to expert 0, and to 1, 2, 3 in turn."""
    return torch.stack((0 * n, 1 + n % 3), 1)


def pairs(n: torch.Tensor) -> torch.Tensor:
    """Even positions to experts 0 and 2, odd ones to 1 and 3."""
    return torch.stack((n % 2, 2 + n % 2), 1)


# Two layers, four experts; prompts of 3 tokens and of 1 are read together, and the last layer runs rows for the two
# last positions only, 2 and 3. Answers of 3 and 2 tokens: a decoding step of two slots, then one of one.
# crowd: prefill, rows by expert: 4 2 1 1 | 2 1 0 1; decode, in both layers: 2 1 1 0, then 1 1 0 0
# pairs: prefill: 2 2 2 2 | 1 1 1 1; decode: 1 1 1 1, then 1 0 1 0
BY_HAND = {
    crowd: {"prefill": (12 / 7, 2.0, 0.5, 4), "decode": (12 / 10, 2.0, 1.0, 2)},
    pairs: {"prefill": (12 / 8, 1.0, 0.5, 2), "decode": (12 / 12, 1.5, 1.0, 1)},
}


@pytest.mark.parametrize("choose", BY_HAND, ids=lambda f: f.__name__)
def test_loads_are_those_of_the_routers_choices(small, monkeypatch, choose):
    monkeypatch.setattr(ops, "choose_experts", lambda z_NE, *_: choose(torch.arange(len(z_NE))))
    made = Transformer(replace(small.config, experts=4, layers=2), seed=1)
    engine = EmbeddedEngine(made, slots=3, crossover=2)
    engine.generate([[5, 6, 7], [8]], Sampling(max_new_tokens=3), limits=[3, 2])
    got = engine.metrics()
    for name, (rows, imbalance, below, most) in BY_HAND[choose].items():
        assert got[f"engine/rows_per_expert_{name}"] == pytest.approx(rows)
        assert got[f"engine/expert_imbalance_{name}"] == pytest.approx(imbalance)
        assert got[f"engine/below_crossover_{name}"] == below  # a mean of exactly 2 rows is not below 2
        assert got[f"engine/rows_per_expert_max_{name}"] == most
    # kept: 2 layers x 2 choices of 2 bytes for 4 prompt tokens, and for the 3 tokens that were decoded; read: where the
    # rows of 4 experts end, 8 bytes each, in 2 layers of 1 pass and of 2
    assert (got["engine/route_bytes_prefill"], got["engine/route_bytes_decode"]) == (32 + 64, 24 + 128)
    assert got["engine/idle_slots"] == 1 - 3 / 4 and got["engine/idle_steps"] == 0
    again = engine.metrics()  # everything was told
    assert (
        not any(v for name, v in again.items() if name != "engine/cache_bytes")
        and "engine/route_bytes_decode" not in again
    )
    engine.generate([[5, 6, 7], [8]], Sampling(max_new_tokens=3), limits=[3, 2])
    assert engine.metrics().items() >= {k: v for k, v in got.items() if "expert" in k or "bytes_" in k}.items()


def test_the_crossover_is_the_lowest_tile_unless_given(small):
    assert EmbeddedEngine(small.model()).passes.crossover == gemm_tile(1, 1, torch.bfloat16).rows == 16


def test_adding_up_reads_nothing_on_the_host():
    """Under fake tensors a host read raises; a layer without rows, and a model without layers that route, count 0."""
    with FakeTensorMode():
        Loads().add(torch.ones(3, 4, dtype=torch.int64), 16)
    loads = Loads()
    loads.add(torch.zeros(2, 4, dtype=torch.int64), 16)
    loads.add(torch.zeros(0, 4, dtype=torch.int64), 16)
    assert set(loads.metrics("decode").values()) == {0.0}
    loads.add(torch.tensor([[0, 0, 0, 0], [3, 0, 0, 1]]), 2.5)
    assert list(loads.metrics("x").values()) == [2.0, 3.0, 1.0, 3.0, 0.0]


def test_serving_costs_by_batch(small):
    """Requests of 4 tokens, answers of 2 to 6: with 1 request 6 tokens, with 2 6 + 2, with 4 6 + 5 + 3 + 2."""
    engine = EmbeddedEngine(small.model(), slots=4)
    costs = serving_costs(engine, (1, 2, 4), prompt=4, shortest=2, longest=6)
    assert costs.index.tolist() == [1, 2, 4] and costs.index.name == "batch"
    assert costs["answer_tokens"].tolist() == [6, 8, 16] and costs["prompt_tokens"].tolist() == [4, 8, 16]
    assert costs["steps"].tolist() == [5, 5, 5]
    assert costs["idle_slots"].tolist() == pytest.approx([0, 1 - 6 / 10, 1 - 12 / 20])
    assert costs["rows_per_expert_decode"][1] == 1 and costs["expert_imbalance_decode"][1] == 6 / 2  # 2 of 6 experts
    # 3 layers x 2 choices x 2 bytes for each decoded token, 3 layers x 6 experts x 8 bytes for each of 5 steps
    assert costs["route_bytes_per_token"].tolist() == pytest.approx([12 + 144 * 5 / n for n in (5, 6, 12)])
    assert (costs["decode_step_s"] * costs["steps"]).tolist() == pytest.approx(costs["decode_seconds"].tolist())
    with pytest.raises(ConfigError, match="5 requests need as many slots, the engine has 4"):
        serving_costs(engine, (1, 5))
