"""Token log-probs against torch's own cross-entropy, values and gradients, in one chunk and in many."""

import pytest
import torch
from torch.nn import functional as F

from moekit.objectives.logprobs import token_logprobs


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 11 * 8, 1 << 20], ids=["one-row", "seven-rows", "all"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_cross_entropy(chunk_bytes, temperature):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 5, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 5, generator=g, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, 11, (23,), generator=g)
    upstream = torch.randn(23, generator=g, dtype=torch.float64)
    got = token_logprobs(hidden, head, label, temperature=temperature, chunk_bytes=chunk_bytes)
    want = -F.cross_entropy(hidden @ head.T / temperature, label, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got, (hidden, head), upstream), torch.autograd.grad(want, (hidden, head), upstream)
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_backward_twice_gives_the_same():
    hidden = torch.randn(4, 3, requires_grad=True)
    head = torch.randn(6, 3, requires_grad=True)
    loss = token_logprobs(hidden, head, torch.tensor([0, 1, 2, 3])).sum()
    first = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, head))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_no_positions():
    hidden = torch.zeros(0, 3, requires_grad=True)
    head = torch.randn(6, 3, requires_grad=True)
    token_logprobs(hidden, head, torch.zeros(0, dtype=torch.long)).sum().backward()
    assert hidden.grad.shape == (0, 3) and torch.equal(head.grad, torch.zeros_like(head))


def test_half_precision_input_gives_float32():
    hidden, head = torch.randn(5, 8), torch.randn(7, 8)
    label = torch.tensor([0, 1, 2, 3, 6])
    got = token_logprobs(hidden.bfloat16(), head.bfloat16(), label)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, token_logprobs(hidden, head, label), rtol=0.05, atol=0.05)


def test_the_head_s_gradient_does_not_get_worse_with_the_number_of_chunks():
    """bfloat16, 512 chunks of one row: added up in bfloat16 their sum was off by 1.2 %, in one chunk by 0.3 %."""
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=g).bfloat16().requires_grad_() for n in (512, 64))
    label = torch.randint(0, 64, (512,), generator=g)
    wide = head.detach().double().requires_grad_()
    F.cross_entropy(hidden.detach().double() @ wide.T, label, reduction="sum").backward()
    for rows in (512, 8, 1):
        (got,) = torch.autograd.grad(-token_logprobs(hidden, head, label, chunk_bytes=rows * 64 * 4).sum(), head)
        assert got.dtype == torch.bfloat16 and (got.double() - wide.grad).norm() < 0.004 * wide.grad.norm()
