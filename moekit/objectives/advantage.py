r"""Advantages: from rewards to the number that each sampled token is weighted with.

Axis letters: A answers, N tokens of all answers one after another (prompts left out or not valid), G groups.

A *group* is the answers to one prompt. A *valid* answer or token is one that is trained on: a masked answer is in no
mean, no spread and no denominator; a token that the policy did not sample (a tool's answer, padding) is no time step,
and what stands there is never read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, DataError

Scale = Literal["std", "none"]
AllReduce = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of answers, and how many groups and answers had nothing to say."""

    advantage_A: Tensor  # [A], exactly 0 where there is nothing to learn; never NaN
    learns_A: Tensor  # [A] bool, valid and in a group with spread: what zero-variance filtering keeps
    valid_A: Tensor  # [A] bool, valid as given, and with a finite reward
    equal: int  # groups of two or more valid answers with the same reward: advantage 0
    single: int  # groups with one valid answer: advantage 0
    empty: int  # groups without a valid answer
    masked: int  # answers that are not valid, those without a finite reward included
    not_finite: int  # answers whose reward is NaN or infinite


def group_advantages(
    reward_A: Tensor,
    group_A: Tensor,
    valid_A: Tensor | None = None,
    *,
    scale: Scale = "std",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> GroupAdvantages:
    r"""Reward minus the group's baseline: :math:`A_i = (r_i - \bar r) / (s + \epsilon)`.

    :math:`\bar r` and the sample standard deviation s are over the group's valid answers.

    Args:
        reward_A: ``[A]`` float. An answer whose reward is not finite is masked, and counted.
        group_A: ``[A]`` integers, any numbers that tell groups apart.
        valid_A: ``[A]`` bool, answers that are trained on; None = all.
        scale: "std" (GRPO) or "none" (Dr. GRPO): divide by s or not.
        leave_one_out: the baseline is the mean of the *other* valid answers, :math:`n/(n-1)` times the difference from
            the mean (RLOO). s stays that of the whole group.
        eps: added to s; a tiny number will do, as a spread of rounding noise is never divided by. TRL has 1e-4.
    Returns:
        `GroupAdvantages`; in float32, float64 for float64 rewards.
    Raises:
        ConfigError: another scale.
        DataError: shapes differ, or `leave_one_out` with a group of one answer: there is no other. A group that
            masking leaves with one is counted in `single` instead, as a run goes on.

    Source: DeepSeekMath (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783), RLOO (arXiv 2402.14740). Departures: a group
    whose rewards are all the same number in float32 has advantage exactly 0, rather than rounding noise over eps;
    masked answers are in neither mean nor s; s is the sample standard deviation (TRL's; the paper does not say).

    >>> a = group_advantages(torch.tensor([2.0, 8.0, 0.0, 1.0]), torch.zeros(4), torch.tensor([1, 0, 1, 1]).bool())
    >>> [round(x, 3) for x in a.advantage_A.tolist()], a.masked
    ([1.0, 0.0, -1.0, 0.0], 1)
    """
    if scale not in ("std", "none"):
        raise ConfigError(f"scale {scale!r} of group advantages is not known; it is 'std' or 'none'")
    for name, x in (("group_A", group_A), ("valid_A", valid_A)):
        if x is not None and x.shape != reward_A.shape:
            raise DataError(f"{name} has shape {tuple(x.shape)}, reward_A {tuple(reward_A.shape)}; one entry an answer")
    reward = reward_A.detach().to(torch.float64)
    finite = reward.isfinite()
    valid = finite if valid_A is None else finite & valid_A.bool()
    names, group, size_G = torch.unique(group_A, return_inverse=True, return_counts=True)
    if leave_one_out and bool((size_G == 1).any()):
        alone = names[size_G == 1].tolist()
        raise DataError(f"leave-one-out needs another answer, groups {alone[:5]} have one; sample more per prompt")
    total = lambda x: x.new_zeros(len(size_G)).index_add_(0, group, x)
    reward = reward.where(valid, 0.0)
    n_G = total(valid.to(torch.float64))
    others_G = (n_G - 1).clamp(min=1)
    off = (reward - (total(reward) / n_G.clamp(min=1))[group]).where(valid, 0.0)
    single = reward.float()  # equal means equal in float32: 0.1 + 0.2 is 0.3
    edge = lambda how, fill: single.new_full((len(size_G),), fill).scatter_reduce_(
        0, group, single.where(valid, fill), how
    )
    spread_G = edge("amax", -torch.inf) > edge("amin", torch.inf)
    learns = valid & spread_G[group]
    divisor_G = (total(off.square()) / others_G).sqrt() + eps if scale == "std" else torch.ones_like(n_G)
    if leave_one_out:
        divisor_G = divisor_G * others_G / n_G.clamp(min=1)
    advantage = (off / divisor_G[group]).where(learns, 0.0)
    return GroupAdvantages(
        advantage.to(torch.promote_types(reward_A.dtype, torch.float32)), learns, valid,
        equal=int(((n_G > 1) & ~spread_G).sum()), single=int((n_G == 1).sum()), empty=int((n_G == 0).sum()),
        masked=int((~valid).sum()), not_finite=int((~finite).sum()),
    )  # fmt: skip


def overlong_valid(finish: Sequence[str], *, mask_length: bool = True) -> Tensor:
    """``[A]`` bool: answers to train on by how they ended. "abort" never, "length" unless masked, "stop" always.

    Source: overlong filtering of DAPO (arXiv 2503.14476). Departure: a masked answer leaves its group's mean and spread
    too, and the denominator, in every mode.

    >>> overlong_valid(["stop", "length", "abort"]).tolist()
    [True, False, False]
    """
    unknown = set(finish) - {"stop", "length", "abort"}
    if unknown:
        raise DataError(f"finish reasons {sorted(unknown)} are not known; they are 'stop', 'length' and 'abort'")
    return torch.tensor([f == "stop" or (f == "length" and not mask_length) for f in finish], dtype=torch.bool)


def overlong_penalty(length_A: Tensor, limit: int, cushion: int) -> Tensor:
    r"""To add to a reward: 0 up to ``limit - cushion`` tokens, then linearly down to -1 at `limit`, float32.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), equation 13.

    >>> overlong_penalty(torch.tensor([80, 95, 100, 120]), limit=100, cushion=10).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < cushion <= limit:
        raise ConfigError(f"overlong cushion={cushion} must be in 1..limit={limit}")
    return ((limit - cushion - length_A.to(torch.float32)) / cushion).clamp(-1.0, 0.0) + 0.0


def _steps(answer_N: Tensor, valid_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the time steps [P], their answers [P], and which is its answer's last [P]."""
    if valid_N is not None and valid_N.shape != answer_N.shape:
        raise DataError(f"valid_N has shape {tuple(valid_N.shape)}, answer_N {tuple(answer_N.shape)}; they must agree")
    place = torch.nonzero(torch.ones_like(answer_N) if valid_N is None else valid_N)[:, 0]
    answer = answer_N[place]
    if bool((answer[1:] < answer[:-1]).any()):
        raise DataError("answer_N must not fall: the tokens of an answer stand together, in order")
    last = torch.ones_like(answer, dtype=torch.bool)
    last[:-1] = answer[1:] != answer[:-1]
    return place, answer, last


def token_rewards(
    score_A: Tensor, answer_N: Tensor, valid_N: Tensor | None = None, *, kl_N: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    r"""Reward of each token: :math:`r_t = -\beta\,\mathrm{KL}_t`, and the score too at the answer's last valid token.

    Args:
        score_A: ``[A]`` float, one an answer.
        answer_N: ``[N]`` int64 in ``[0, A)``, not falling.
        valid_N: ``[N]`` bool, sampled tokens; None = all. The sampled stop token is one.
        kl_N: ``[N]``, usually `kl_estimate(..., "k1")`; read at valid tokens only, taken as a constant.
        beta: weight of the KL penalty.
    Returns:
        ``[N]`` in the dtype of `score_A`, 0 at tokens that are not valid.
    Raises:
        ConfigError: `beta` without `kl_N`.
        DataError: shapes differ, or answers out of order.

    Source: InstructGPT (arXiv 2203.02155).
    """
    if beta and kl_N is None:
        raise ConfigError(f"beta={beta} needs kl_N, the KL to the reference at each token")
    place, answer, last = _steps(answer_N, valid_N)
    out = score_A.new_zeros(answer_N.shape)
    out[place[last]] = score_A.detach()[answer[last]]
    if beta and kl_N is not None:
        out[place] -= beta * kl_N.detach()[place].to(out.dtype)
    return out


def gae(
    reward_N: Tensor,
    value_N: Tensor,
    answer_N: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    valid_N: Tensor | None = None,
    terminated_A: Tensor | None = None,
    bootstrap_A: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation over answers of any length.

    :math:`A_t = \sum_{k \ge 0} (\gamma\lambda)^k \delta_{t+k}` with
    :math:`\delta_t = r_t + \gamma V_{t+1} - V_t`; the return is :math:`A_t + V_t`. t counts valid tokens only.

    Args:
        reward_N: ``[N]`` float, see `token_rewards`.
        value_N: ``[N]`` float, the value *before* the token is chosen: that of the position that predicts it.
        answer_N: ``[N]`` int64 in ``[0, A)``, not falling.
        gamma, lam: discount and the mixing of estimates, in [0, 1].
        valid_N: ``[N]`` bool, sampled tokens; None = all. A tool's tokens are no time steps and do not discount.
        terminated_A: ``[A]`` bool: the answer came to its end, V after it is 0; None = all did.
        bootstrap_A: ``[A]`` float, V after the last token of answers that were cut off (truncated) instead.
    Returns:
        Advantages and returns, ``[N]`` in the dtype of `value_N`, no gradient, 0 at tokens that are not valid.
    Raises:
        ConfigError: gamma or lam outside [0, 1].
        DataError: shapes differ, answers out of order, or an answer that did not end has no bootstrap value.
    Cost:
        log2(longest answer) passes over the tokens: each pass doubles the span that every sum covers. In float64.

    Source: Schulman et al. 2016 (arXiv 1506.02438). Most post-training code takes a truncated answer as terminated;
    that is ``terminated_A=None``.

    >>> r, v, a = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3), torch.zeros(3, dtype=torch.long)
    >>> gae(r, v, a, gamma=1.0, lam=0.5)[0].tolist()
    [0.25, 0.5, 1.0]
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gamma={gamma} and lam={lam} must be in [0, 1]")
    if not reward_N.shape == value_N.shape == answer_N.shape:
        shapes = [tuple(x.shape) for x in (reward_N, value_N, answer_N)]
        raise DataError(f"reward_N, value_N and answer_N have shapes {shapes}; one entry a token each")
    place, answer, last = _steps(answer_N, valid_N)
    value = value_N.detach()[place].to(torch.float64)
    after = torch.zeros_like(value)
    after[:-1] = value[1:]
    after[last] = 0.0
    if terminated_A is not None:
        cut = last & ~terminated_A.bool()[answer]
        if bootstrap_A is None and bool(cut.any()):
            raise DataError(f"{int(cut.sum())} answers did not end; give bootstrap_A, the value after their last token")
        if bootstrap_A is not None:
            after[cut] = bootstrap_A.detach()[answer[cut]].to(torch.float64)
    total = reward_N.detach()[place].to(torch.float64) + gamma * after - value
    span, longest = 1, int(torch.bincount(answer).max()) if len(answer) else 0
    while span < longest:  # total[t] = the first `span` terms of the sum
        same = answer[span:] == answer[:-span]
        total = torch.cat((total[:-span] + same * ((gamma * lam) ** span * total[span:]), total[-span:]))
        span *= 2
    advantage_N, return_N = torch.zeros_like(value_N), torch.zeros_like(value_N)
    advantage_N[place] = total.to(value_N.dtype)
    return_N[place] = (total + value).to(value_N.dtype)
    return advantage_N.detach(), return_N.detach()


def whiten(
    x_N: Tensor,
    valid_N: Tensor | None = None,
    *,
    shift_mean: bool = True,
    all_reduce: AllReduce | None = None,
    eps: float = 1e-8,
) -> Tensor:
    r"""Zero mean and unit variance over the valid tokens: :math:`(x - \bar x) / \sqrt{s^2 + \epsilon}`.

    Args:
        x_N: ``[N]`` float.
        valid_N: ``[N]`` bool; None = all. The rest is not read and comes back as 0.
        shift_mean: False adds the mean back: only the scale changes.
        all_reduce: sums a list of floats over ranks (`learner.mesh.dp.sum_list`): the mean and variance of all ranks'
            tokens. A collective, called twice, also by a rank without valid tokens. None = one process.
        eps: added to the variance, the sample variance :math:`s^2`.
    Returns:
        ``[N]`` in the dtype of `x_N`, no gradient. One valid token in all has no variance: only its mean is taken.

    Source: advantage normalisation, see Andrychowicz et al. 2020 (arXiv 2006.05990). Departure: over whatever is given,
    a whole step say, where PPO implementations take the minibatch.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    reduce = all_reduce or (lambda part: part)
    place = torch.nonzero(torch.ones_like(x_N) if valid_N is None else valid_N)[:, 0]
    x = x_N.detach()[place].to(torch.float64)
    n, total = reduce([float(len(place)), float(x.sum())])
    mean = total / max(n, 1.0)
    (square,) = reduce([float((x - mean).square().sum())])  # of the differences: no cancellation
    scale = (square / (n - 1) + eps) ** -0.5 if n > 1 else 1.0
    out = torch.zeros_like(x_N).detach()
    out[place] = ((x - mean) * scale + (0.0 if shift_mean else mean)).to(x_N.dtype)
    return out
