r"""Two log-probabilities of the same tokens: KL estimators, ratios of answers, importance weights.

Axis letters: M labelled positions or sampled tokens, A answers.

The words for the level of a ratio are the same everywhere:

    token         r_t = exp(d_t), each token its own
    sequence      r = exp(mean of d over the answer), one for all its tokens: it does not depend on the length
    sequence_sum  r = exp(sum of d over the answer), the ratio of the answers' probabilities

with d_t the difference of the log-probs of token t.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError, DataError, NumericsError

KL = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence", "sequence_sum"]
Correction = Literal["truncate", "mask"]
LARGEST_LOG_RATIO = 20.0  # a ratio of e^20 is past use, and e^89 is infinite in float32


def kl_estimate(logprob_M: Tensor, reference_M: Tensor, kind: KL = "k3") -> Tensor:
    r"""Estimate of :math:`\mathrm{KL}(\pi\|\pi_\mathrm{ref})` from each token drawn from :math:`\pi`.

    With :math:`d = \log\pi_\mathrm{ref} - \log\pi`: k1 = :math:`-d`, k2 = :math:`d^2/2`, k3 = :math:`e^d - 1 - d`.

    Args:
        logprob_M: ``[M]`` float, of the policy.
        reference_M: ``[M]``, of the reference; taken as a constant.
    Returns:
        ``[M]`` in the dtype of `logprob_M`. k1 may be negative; k2 and k3 may not.
    Gradients:
        To `logprob_M`: 1, :math:`-d` and :math:`1 - e^d`. As a loss term k1 has the mean gradient 0 on the policy's
        own samples, k2 that of the KL, k3 that of the other direction, :math:`\mathrm{KL}(\pi_\mathrm{ref}\|\pi)`.
        The size of the KL is a matter of value, hence k1 for a reward; a penalty is a matter of gradient.
    Raises:
        ConfigError: an estimator of another name.

    Source: Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); DeepSeekMath (arXiv 2402.03300)
    has k3 in its loss.

    >>> p, q = torch.tensor([0.5], dtype=torch.float64).log(), torch.tensor([0.25], dtype=torch.float64).log()
    >>> [round(kl_estimate(p, q, k).item(), 7) for k in ("k1", "k2", "k3")]
    [0.6931472, 0.2402265, 0.1931472]
    """
    d_M = reference_M.detach().to(logprob_M.dtype) - logprob_M
    if kind == "k1":
        return -d_M
    if kind == "k2":
        return d_M.square() / 2
    if kind == "k3":
        return torch.expm1(d_M) - d_M
    raise ConfigError(f"KL estimator {kind!r} is not known; it is 'k1', 'k2' or 'k3'")


def at_level(log_ratio_M: Tensor, level: Level, answer_M: Tensor, answers: int) -> Tensor:
    """Log-ratio of each token at a level (see the module's docstring), ``[M]``; differentiable.

    Args:
        log_ratio_M: ``[M]`` float, difference of log-probs.
        answer_M: ``[M]`` int64 in ``[0, answers)``, the answer of each token; not read at level "token".
        answers: A.
    """
    if level == "token":
        return log_ratio_M
    total_A = log_ratio_M.new_zeros(answers).index_add(0, answer_M, log_ratio_M)
    if level == "sequence":
        total_A = total_A / ops.count(answer_M, answers).clamp(min=1)
    elif level != "sequence_sum":
        raise ConfigError(f"ratio {level!r} is not known; it is 'token', 'sequence' or 'sequence_sum'")
    return total_A[answer_M]


@dataclass(frozen=True)
class Importance:
    """Weights that correct for samples of another distribution, and how many tokens were outside the bounds."""

    weight_M: Tensor  # [M] >= 0, no gradient
    below: int  # tokens whose ratio was under `low`
    above: int  # tokens whose ratio was over `high`


def importance_weights(
    learner_M: Tensor,
    engine_M: Tensor,
    *,
    form: Correction = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    level: Level = "token",
    answer_M: Tensor | None = None,
) -> Importance:
    r"""Weight of each token sampled by an engine whose numbers are not the learner's.

    With r the ratio of learner to engine at `level`: truncate = :math:`\min(\max(r, \mathrm{low}), \mathrm{high})`,
    mask = r where low <= r <= high, else 0.

    Args:
        learner_M: ``[M]`` float, log-probs of the learner at the weights that sampled.
        engine_M: ``[M]``, what the engine sampled with.
        low, high: the bounds of the ratio. 0 and 2 are truncated importance sampling; ``form="mask"`` with 0.5 and 5
            is IcePop.
        answer_M: ``[M]`` integers, any numbers that tell answers apart; needed unless `level` is "token".
    Raises:
        ConfigError: bounds that hold no ratio, an unknown form or level, or no `answer_M` where it is needed.
        DataError: shapes differ.
        NumericsError: log-probs that are not finite. An engine that has none for a token must say so earlier.

    Source: truncation, Ionides 2008, brought to engine mismatch by Yao et al. 2025 ("Your efficient RL framework
    secretly brings you off-policy RL training"), who cap at a constant; mask, IcePop (arXiv 2510.18855). Departures:
    truncation takes a lower bound too; a masked token keeps its place in the denominator, as in IcePop. TRL's
    ``sequence_truncate`` and ``sequence_mask`` are the level "sequence_sum" here.

    >>> w = importance_weights(torch.tensor([0.0, 1.0, -3.0]), torch.zeros(3))
    >>> [round(x, 4) for x in w.weight_M.tolist()], w.above
    ([1.0, 2.0, 0.0498], 1)
    """
    if not 0 <= low < high:
        raise ConfigError(f"importance bounds low={low}, high={high}: need 0 <= low < high")
    if form not in ("truncate", "mask"):
        raise ConfigError(f"importance form {form!r} is not known; it is 'truncate' or 'mask'")
    if level != "token" and answer_M is None:
        raise ConfigError(f"importance weights at level {level!r} need answer_M, the answer of each token")
    if learner_M.shape != engine_M.shape or (answer_M is not None and answer_M.shape != engine_M.shape):
        raise DataError(f"learner_M {tuple(learner_M.shape)}, engine_M {tuple(engine_M.shape)}: one entry a token each")
    difference_M = (learner_M - engine_M.to(learner_M.dtype)).detach()
    bad = int((~difference_M.isfinite()).sum())
    if bad:
        raise NumericsError(f"log-probs of learner or engine are not finite at {bad} of {difference_M.numel()} tokens")
    names, index_M = (
        torch.unique(answer_M, return_inverse=True) if answer_M is not None else (difference_M, difference_M)
    )
    ratio_M = at_level(difference_M, level, index_M, names.numel()).clamp(max=LARGEST_LOG_RATIO).exp()
    below_M, above_M = ratio_M < low, ratio_M > high
    weight_M = ratio_M.clamp(low, high) if form == "truncate" else ratio_M.masked_fill(below_M | above_M, 0.0)
    return Importance(weight_M, int(below_M.sum()), int(above_M.sum()))
