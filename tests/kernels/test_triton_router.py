"""The fused choice of experts in Triton's interpreter: the router's own choices, a sort written out, ties and NaN."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from moekit.config import ModelConfig
from moekit.kernels.router_topk import choose
from moekit.model.router import Router

torch.set_num_threads(1)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("N, E, K", [(37, 11, 3), (1, 5, 5), (0, 6, 2), (9, 1, 1), (70, 64, 8)])
def test_the_router_chooses_the_same_experts(N, E, K, biased, gate):
    """With its own torch.topk, on logits where no two scores are within a rounding error."""
    config = ModelConfig(
        vocab=8, layers=1, heads=1, expert_width=4, experts=E, top_k=K, width=12, gate=gate, selection_bias=biased
    )
    torch.manual_seed(N + E)
    router = Router(config, torch.float32)
    torch.nn.init.normal_(router.weight)
    if biased:
        router.selection_bias.normal_()  # large against scores in [0, 1]: it decides most choices
    route = router(torch.randn(N, 12))
    counted = torch.arange(N) % 3 != 0
    expert, count = choose(route.logits_NE, K, gate=gate, bias_E=router.selection_bias, counted_N=counted)
    assert expert.dtype == count.dtype == torch.int64
    assert torch.equal(expert, route.expert_NK)
    assert torch.equal(count, torch.bincount(route.expert_NK[counted].flatten(), minlength=E))
    if biased and N > 9:  # the bias is for scores: on logits, or not at all, it would choose differently
        assert not torch.equal(expert, (route.logits_NE + router.selection_bias).topk(K).indices)
        assert not torch.equal(expert, route.logits_NE.topk(K).indices)


def test_equal_scores_by_index_and_nan_first():
    """By hand: a sort by (NaN first, larger first, lower index first)."""
    inf, nan = math.inf, math.nan
    rows = [
        [0.0] * 7,
        [1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 2.0],
        [-0.0, 0.0, -0.0, -1.0, 0.0, -2.0, -0.0],
        [-inf] * 7,
        [-1.0, -3.0, -2.0, -inf, -1.0, -1e-45, 1e-45],
        [nan] * 7,
        [inf, nan, 3.0, -nan, inf, -inf, 0.0],
    ]
    expert, count = choose(torch.tensor(rows), 4, gate="softmax")
    for row, found in zip(rows, expert.tolist()):
        key = [(0, 0) if math.isnan(z) else (1, -z) for z in row]
        assert found == sorted(range(7), key=lambda e: (*key[e], e))[:4]
    assert count.sum() == 28


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_broken_row_still_names_distinct_experts(gate):
    """A softmax over NaN or two infinities is NaN everywhere; an index out of range would read foreign memory."""
    z = torch.zeros(3, 5)
    z[0, 2], z[1, :2], z[2, 4] = torch.nan, torch.inf, -torch.inf
    expert, _ = choose(z, 5, gate=gate, bias_E=torch.zeros(5))
    assert expert.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_all_on_one_expert_and_strided_logits():
    z = torch.zeros(300, 10)
    z[:, 6] = 1.0
    expert, count = choose(z[:, 1::3], 1, gate="softmax")  # columns 1, 4, 7: none is 6
    assert expert.unique().tolist() == [0] and count.tolist() == [300, 0, 0]
    expert, count = choose(z[:, ::2], 1, gate="softmax", counted_N=torch.arange(300) < 7)
    assert expert.unique().tolist() == [3] and count.tolist() == [0, 0, 0, 7, 0]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"top_k": 6}, "top_k=6, E=5"),
        ({"top_k": 0}, "top_k=0"),
        ({"gate": "tanh"}, "'tanh'"),
        ({"logits_NE": torch.zeros(4, 5, dtype=torch.bfloat16)}, "float32"),
        ({"bias_E": torch.zeros(4)}, r"\[5\]"),
        ({"counted_N": torch.zeros(3, dtype=torch.bool)}, r"\[4\]"),
        ({"logits_NE": torch.zeros(1, 1025)}, "E=1025"),
    ],
)
def test_what_it_refuses(change, says):
    with pytest.raises(ValueError, match=says):
        choose(**{"logits_NE": torch.zeros(4, 5), "top_k": 2, "gate": "softmax"} | change)
