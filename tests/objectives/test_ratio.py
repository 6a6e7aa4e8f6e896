"""KL estimators, ratios of answers and importance weights: hand-computed values, expectations over a vocabulary."""

from math import exp, log

import pytest
import torch

from moekit.errors import ConfigError, DataError, NumericsError
from moekit.objectives.ratio import at_level, importance_weights, kl_estimate


def test_bc_082_values_of_the_estimators():
    """BC-082: logp = ln .5, ref = ln .25: 0.6931472, 0.2402265, 0.1931472; k3 >= 0 on 1000 random pairs."""
    logp, ref = torch.tensor([0.5], dtype=torch.float64).log(), torch.tensor([0.25], dtype=torch.float64).log()
    got = [kl_estimate(logp, ref, kind).item() for kind in ("k1", "k2", "k3")]
    assert got == pytest.approx([0.6931472, 0.2402265, 0.1931472], abs=1e-7)
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        a = -torch.rand(1000, generator=g, dtype=dtype) * 20
        for b in (-torch.rand(1000, generator=g, dtype=dtype) * 20, a, a * (1 + 1e-6), a + 1e-4):
            k3 = kl_estimate(a, b, "k3")
            assert (k3 >= 0).all() and k3.isfinite().all()
    with pytest.raises(ConfigError, match="'k4'"):
        kl_estimate(logp, ref, "k4")


def test_bc_084_the_kl_has_a_gradient():
    """BC-084, the estimator: beta .1, k3, logp = ln .5, ref = ln .8: -0.06; none to the reference."""
    logp = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    ref = torch.tensor([0.8], dtype=torch.float64).log().requires_grad_()
    (0.1 * kl_estimate(logp, ref, "k3")).sum().backward()
    assert logp.grad.item() == pytest.approx(-0.06, abs=1e-12) and ref.grad is None


def test_what_the_estimators_mean():
    """Over a whole vocabulary, weighted with the policy: values and gradients that the docstring states."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(11, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(11, generator=g, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    kl = (logp.exp() * (logp - ref)).sum()
    other = (ref.exp() * (ref - logp)).sum()
    grad = lambda x: torch.autograd.grad(x, logits, retain_graph=True)[0]
    mean = {kind: (p * kl_estimate(logp, ref, kind)).sum() for kind in ("k1", "k2", "k3")}
    for kind in ("k1", "k3"):
        assert mean[kind].item() == pytest.approx(kl.item(), abs=1e-12)
    for kind, want in (("k1", torch.zeros(11).double()), ("k2", grad(kl)), ("k3", grad(other))):
        torch.testing.assert_close(grad(mean[kind]), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [4, 40])
def test_levels(length):
    """Answers of 4 and 40 tokens with log-ratios of .1: the mean does not know the length, the sum does."""
    d = torch.full((length + 1,), 0.1, dtype=torch.float64)
    answer = torch.tensor([0] + [2] * length)  # answer 1 has no token here
    mean, total = (at_level(d, level, answer, 3).exp() for level in ("sequence", "sequence_sum"))
    assert mean.tolist() == pytest.approx([1.1051709] * (length + 1), abs=1e-7)
    assert total[1].item() == pytest.approx({4: 1.4918247, 40: 54.59815}[length], abs=1e-5)
    assert at_level(d, "token", answer, 3) is d
    with pytest.raises(ConfigError, match="'mean'"):
        at_level(d, "mean", answer, 3)


def test_importance_weights():
    learner = torch.tensor([0.5, 2.0, 1.0, 6.0, 0.1], dtype=torch.float64).log()
    engine = torch.zeros(5, dtype=torch.float64)
    cut = importance_weights(learner, engine)
    assert cut.weight_M.tolist() == pytest.approx([0.5, 2.0, 1.0, 2.0, 0.1]) and (cut.below, cut.above) == (0, 1)
    band = importance_weights(learner, engine, form="mask", low=0.25, high=5.0)
    assert band.weight_M.tolist() == pytest.approx([0.5, 2.0, 1.0, 0.0, 0.0]) and (band.below, band.above) == (1, 1)
    same = importance_weights(learner, learner)
    assert torch.equal(same.weight_M, torch.ones_like(learner))
    answer = torch.tensor([70, 70, 3, 3, 3])
    mean = importance_weights(learner, engine, level="sequence", answer_M=answer, high=10.0)
    assert mean.weight_M.tolist() == pytest.approx([1.0] * 2 + [0.6 ** (1 / 3)] * 3)
    product = importance_weights(learner, engine, level="sequence_sum", answer_M=answer, high=10.0)
    assert product.weight_M.tolist() == pytest.approx([1.0] * 2 + [0.6] * 3)
    huge = importance_weights(torch.tensor([500.0]), torch.tensor([0.0]), form="mask", high=1e30)
    assert huge.weight_M.item() == pytest.approx(exp(20.0))  # finite
    learner.requires_grad_()
    assert not importance_weights(learner, engine).weight_M.requires_grad
    nothing = importance_weights(learner[:0], engine[:0], level="sequence", answer_M=answer[:0])
    assert nothing.weight_M.shape == (0,)


def test_the_weight_makes_the_engines_samples_unbiased():
    """Without a cap, the mean of w f(x) under the engine is the mean of f under the learner."""
    g = torch.Generator().manual_seed(2)
    learner, engine = (torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    f = torch.randn(50, generator=g, dtype=torch.float64)
    w = importance_weights(learner, engine, high=1e9).weight_M
    assert (engine.exp() * w * f).sum().item() == pytest.approx((learner.exp() * f).sum().item(), abs=1e-12)


def test_importance_weights_refuse():
    x = torch.tensor([log(0.5), log(0.2)])
    with pytest.raises(ConfigError, match="low=2"):
        importance_weights(x, x, low=2.0)
    with pytest.raises(ConfigError, match="'cut'"):
        importance_weights(x, x, form="cut")
    with pytest.raises(ConfigError, match="need answer_M"):
        importance_weights(x, x, level="sequence")
    with pytest.raises(DataError, match="one entry a token"):
        importance_weights(x, x[:1])
    with pytest.raises(NumericsError, match="not finite at 1 of 2"):
        importance_weights(x, torch.tensor([0.0, float("nan")]))
