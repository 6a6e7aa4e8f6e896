"""Log-probs and entropy without logits, in Triton's interpreter: against log_softmax in float64 and the torch form."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moekit.kernels import token_logprobs_triton as fused
from moekit.kernels.token_logprobs_triton import token_logprobs
from moekit.objectives import logprobs

torch.set_num_threads(1)

# M, D, V: odd, several slices of the vocabulary, one token, zero tokens, a vocabulary of one
SIZES = [(19, 21, 67), (17, 33, 150), (1, 5, 16), (0, 5, 7), (3, 1, 1)]


def case(M, D, V, dtype, scale=1.0):
    """hidden and head are the first rows of larger buffers full of NaN."""
    g = torch.Generator().manual_seed(M + V)
    made = []
    for rows in (M, V):
        buffer = torch.full((rows + 3, D), torch.nan, dtype=dtype)
        buffer[:rows] = (scale * torch.randn(rows, D, generator=g)).to(dtype)
        made.append(buffer[:rows].requires_grad_())
    return (*made, torch.randint(0, V, (M,), generator=g), torch.randn(2, M, generator=g))


def exact(hidden, head, label, weight, temperature):
    """(log p, H, d hidden, d head) in float64 for the loss sum(weight_0 log p + weight_1 H)."""
    h, w = (t.detach().double().requires_grad_() for t in (hidden, head))
    log_p = (h @ w.T / temperature).log_softmax(-1)
    own, entropy = log_p.gather(1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    loss = (weight.double() * torch.stack((own, entropy))).sum()
    return own.detach(), entropy.detach(), *torch.autograd.grad(loss, (h, w))


def near(found, wanted, tolerance, floor=1e-30):
    assert found.shape == wanted.shape
    if wanted.numel():
        assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=floor)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("M, D, V", SIZES)
@pytest.mark.parametrize("mix", [(1, 0), (0, 1), (1, 1)], ids=["logprob", "entropy", "both"])
def test_values_and_gradients_of_both(M, D, V, dtype, tolerance, mix, temperature=0.7):
    hidden, head, label, weight = case(M, D, V, dtype, scale=0.5)
    weight = weight * torch.tensor(mix)[:, None]
    own, entropy, d_hidden, d_head = exact(hidden, head, label, weight, temperature)
    found = token_logprobs(hidden, head, label, temperature=temperature, chunk_bytes=M * hidden.element_size() * 40)
    assert found[0].dtype == found[1].dtype == torch.float32
    near(found[0], own, 1e-5, floor=1.0)  # the products are in float32 whatever the operands are
    near(found[1], entropy, 1e-5, floor=1.0)
    used = [w * f for w, f, m in zip(weight, found, mix) if m]  # an output that is not used gives no gradient
    grads = torch.autograd.grad(torch.stack(used).sum(), (hidden, head))
    assert all(g.dtype == dtype for g in grads)
    near(grads[0], d_hidden, tolerance, floor=1e-6)
    near(grads[1], d_head, tolerance, floor=1e-6)


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_equals_the_torch_form(chunk_bytes):
    """`moekit.objectives.logprobs.token_logprobs`, float32: values and gradients, one slice or many."""
    hidden, head, label, weight = case(19, 21, 67, torch.float32)
    both = []
    for found in (
        token_logprobs(hidden, head, label, temperature=0.7, chunk_bytes=chunk_bytes)[0],
        logprobs.token_logprobs(hidden, head, label, temperature=0.7),
    ):
        both.append((found.detach(), *torch.autograd.grad((weight[0] * found).sum(), (hidden, head))))
    for a, b in zip(*both):
        near(a, b.double(), 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_strides_and_addresses_of_any_kind(dtype, tolerance):
    """Every second column, a transposed head, and a label that begins in the middle of its memory."""
    hidden, head, label, weight = case(9, 21, 35, dtype, scale=0.5)
    strided = torch.full((9, 43), torch.nan, dtype=dtype)
    strided[:, 1::2] = hidden.detach()
    strided = strided[:, 1::2].requires_grad_()
    turned = head.detach().T.contiguous().T.requires_grad_()
    late = torch.cat((label[:1], label))[1:]
    want = exact(hidden, head, label, weight, 0.7)
    found = token_logprobs(strided, turned, late, temperature=0.7, chunk_bytes=1)
    grads = torch.autograd.grad((weight * torch.stack(found)).sum(), (strided, turned))
    for a, b, limit in zip((*found, *grads), want, (1e-5, 1e-5, tolerance, tolerance)):
        near(a, b, limit, floor=1.0 if limit == 1e-5 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("M, D, V", [*SIZES, (32, 64, 128), (1, 1, 1)])
def test_every_launch_is_of_a_form_that_is_compiled_ahead(monkeypatch, M, D, V, dtype):
    """Triton compiles anew where a size is 1, or a size or an address stops being a multiple of 16. None does that
    here, whatever the sizes: the forms that `shipped.py` names, which do not spill, are all that there are."""
    shipped = runpy.run_path(str(Path(__file__).with_name("shipped.py")))["token_logprobs"]()
    forms = {name: types for name, _, types, *_ in shipped if str(dtype)[6] == name.split()[2][0]}
    for kernel in ("_forward", "_backward"):
        inner = getattr(fused, kernel)
        types = forms[next(n for n in forms if kernel[1:] in n)]
        free = {a for a in inner.arg_names if a in types and not types[a].endswith(":16") and types[a] != "fp32"}
        assert free == set(inner.kwargs["do_not_specialize"])
        monkeypatch.setattr(fused, kernel, Watched(inner, free))
    buffer = torch.randn(M + V + 1, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden, head = buffer[1 : M + 1].requires_grad_(), buffer[M + 1 :].requires_grad_()
    label = torch.zeros(M + 1, dtype=torch.int64)[1:]
    token_logprobs(hidden, head, label, chunk_bytes=1)[0].sum().backward()
    assert M == 0 or all(getattr(fused, kernel).launches for kernel in ("_forward", "_backward"))


class Watched:
    """A kernel whose specialised arguments are looked at when it is launched."""

    def __init__(self, inner, free):
        self.inner, self.free, self.launches = inner, free, 0

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches += 1
            for name, value in zip(self.inner.arg_names, args):
                if name in self.free or name[:2] in ("BM", "BV", "BD") or isinstance(value, float):
                    continue
                number = value.data_ptr() if isinstance(value, torch.Tensor) else value
                assert number % 16 == 0, (name, number)
            self.inner[grid](*args, **options)

        return launch


def test_extreme_logits():
    """z = (1000, 0, -1000): log p = (0, -1000, -2000), H = 0; equal logits of 1e4: -log V and log V."""
    head = torch.tensor([[1000.0], [0.0], [-1000.0]], requires_grad=True)
    hidden = torch.ones(3, 1, requires_grad=True)
    own, entropy = token_logprobs(hidden, head, torch.arange(3))
    assert own.tolist() == [0.0, -1000.0, -2000.0] and entropy.tolist() == [0.0, 0.0, 0.0]
    (own.sum() + entropy.sum()).backward()
    assert hidden.grad.flatten().tolist() == [0.0, -1000.0, -2000.0]  # z_y - sum_v p_v z_v over the head's values
    assert head.grad.flatten().tolist() == [-2.0, 1.0, 1.0]
    own, entropy = token_logprobs(torch.full((2, 1), 100.0), torch.full((50, 1), 100.0), torch.tensor([0, 49]))
    assert own.tolist() == pytest.approx([-math.log(50)] * 2, rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(50)] * 2, rel=1e-6)


def test_a_broken_position_stays_alone():
    hidden, head, label, _ = case(20, 6, 30, torch.float32)
    whole = token_logprobs(hidden, head, label)
    broken = hidden.detach().clone()
    broken[4] = torch.nan
    broken.requires_grad_()
    part = token_logprobs(broken, head, label)
    others = torch.arange(20) != 4
    for a, b in zip(part, whole):
        assert a[4].isnan() and torch.equal(a[others], b[others])
    grad = torch.autograd.grad(part[0][others].sum(), broken)[0]
    assert grad[others].isfinite().all()


def test_a_frozen_head_or_trunk_gets_no_gradient():
    hidden, head, label, _ = case(5, 6, 30, torch.float32)
    token_logprobs(hidden, head.detach(), label)[0].sum().backward()
    assert hidden.grad is not None and head.grad is None
    token_logprobs(hidden.detach(), head, label)[1].sum().backward()
    assert head.grad is not None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"head_VD": torch.zeros(7, 4)}, r"\[7, 4\]"),
        ({"head_VD": torch.zeros(7, 5, dtype=torch.bfloat16)}, "one dtype"),
        ({"label_M": torch.zeros(2, dtype=torch.int64)}, r"\[2\]"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"hidden_MD": torch.zeros(3, 5).double(), "head_VD": torch.zeros(7, 5).double()}, "float64"),
    ],
)
def test_what_it_refuses(change, says):
    given = {"hidden_MD": torch.zeros(3, 5), "head_VD": torch.zeros(7, 5), "label_M": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=says):
        token_logprobs(**given | change)
