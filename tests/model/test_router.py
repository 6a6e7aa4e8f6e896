"""The router: gates by hand, the selection bias, replay."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch

from moekit.errors import ConfigError
from moekit.model.router import Router


def router(small, logits, **changes):
    """A router whose scores for the input [[1]] are `logits`."""
    config = replace(small.config, width=1, head_dim=4, experts=len(logits), **changes)
    made = Router(config, torch.float64)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(logits, dtype=torch.float64)[:, None])
        if made.selection_bias is not None:
            made.selection_bias.zero_()
    return made, torch.ones(1, 1, dtype=torch.float64)


LOGITS = [log(4), log(3), log(2), log(1)]


@pytest.mark.parametrize(
    "settings, want",
    [
        ({"gate": "softmax"}, [0.4, 0.3]),  # OLMoE
        ({"gate": "softmax", "normalize_gates": True}, [4 / 7, 3 / 7]),  # Qwen3-MoE checkpoints
        ({"gate": "topk_softmax"}, [4 / 7, 3 / 7]),  # Mixtral
        ({"gate": "sigmoid"}, [0.8, 0.75]),  # sigmoid(ln a) = a / (a + 1)
        ({"gate": "sigmoid", "normalize_gates": True}, [0.8 / 1.55, 0.75 / 1.55]),
    ],
    ids=["softmax", "softmax-normalized", "topk_softmax", "sigmoid", "sigmoid-normalized"],
)
def test_bc_028_gates_are_renormalised_only_when_asked(small, settings, want):
    """BC-028: logits ln 4, ln 3, ln 2, ln 1, top-2: full softmax gives [.4, .3], renormalised [4/7, 3/7]."""
    made, x = router(small, LOGITS, **settings)
    route = made(x)
    torch.testing.assert_close(route.gate_NK, torch.tensor([want], dtype=torch.float64), rtol=0, atol=1e-7)
    assert route.expert_NK.tolist() == [[0, 1]]
    torch.testing.assert_close(route.probs_NE.sum(), torch.tensor(1.0, dtype=torch.float64))
    if settings["gate"] != "sigmoid":
        torch.testing.assert_close(route.probs_NE, torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64))


def test_bc_038_selection_bias_stays_float32_and_moves_the_choice_only(small):
    """BC-038: equal scores 0.5, bias [7.000, 7.010], top-1, model cast to bf16: expert 1, gate 0.5."""
    made, x = router(small, [0.0, 0.0], gate="sigmoid", selection_bias=True, top_k=1)
    bias = torch.tensor([7.000, 7.010])
    made.selection_bias.copy_(bias)
    made = made.to(torch.bfloat16)
    assert made.weight.dtype == torch.bfloat16 and made.selection_bias.dtype == torch.float32
    assert torch.equal(made.selection_bias, bias)
    route = made(x.to(torch.bfloat16))
    assert route.expert_NK.tolist() == [[1]] and route.gate_NK.tolist() == [[0.5]]
    assert made.double().selection_bias.dtype == torch.float32


def test_selection_bias_steers_softmax_gates_too(small):
    """probs [.4, .3, .2, .1] + bias [0, 0, 0, .25]: expert 3 (.35) is second, with its own gate .1."""
    made, x = router(small, LOGITS, selection_bias=True)
    made.selection_bias[3] = 0.25
    route = made(x)
    assert route.expert_NK.tolist() == [[0, 3]]
    torch.testing.assert_close(route.gate_NK, torch.tensor([[0.4, 0.1]], dtype=torch.float64))


def test_replay_takes_the_choice_and_recomputes_the_gates(small):
    made, x = router(small, LOGITS)
    route = made(x, torch.tensor([[3, 1]]))
    torch.testing.assert_close(route.gate_NK, torch.tensor([[0.1, 0.3]], dtype=torch.float64))
    (grad,) = torch.autograd.grad(route.gate_NK.sum(), made.weight)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)  # d(p1 + p3)/dz_j = p1 (d_1j - p_j) + p3 (d_3j - p_j)
    want = 0.3 * (torch.eye(4).double()[1] - p) + 0.1 * (torch.eye(4).double()[3] - p)
    torch.testing.assert_close(grad[:, 0], want)
    with pytest.raises(ConfigError, match=r"\(2, 2\), this layer needs \(1, 2\)"):
        made(x, torch.zeros(2, 2, dtype=torch.long))


def test_scores_of_a_bf16_model_are_float32(small):
    """Two experts whose scores differ by less than bf16 can say (2^-9 of 4) are still told apart."""
    made, x = router(small, [4.0, 4.0], top_k=1)
    made, x = made.to(torch.bfloat16), torch.tensor([[1.0]], dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[4.0], [4.0]]))
    wide = torch.cat((x, x * 2**-7), -1)
    made.weight.data = torch.tensor([[4.0, 0.0], [4.0, 1.0]], dtype=torch.bfloat16)
    route = made(wide)
    assert route.logits_NE.dtype == torch.float32 and route.logits_NE.tolist() == [[4.0, 4.0078125]]
    assert route.expert_NK.tolist() == [[1]]


def test_sigmoid_scores_that_underflow_do_not_give_nan(small):
    made, x = router(small, [-200.0, -300.0, -400.0], gate="sigmoid", normalize_gates=True)
    made, x = made.float(), x.float()
    route = made(x)
    assert torch.isfinite(route.gate_NK).all() and torch.isfinite(route.probs_NE).all()
