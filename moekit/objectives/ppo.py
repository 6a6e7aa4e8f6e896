r"""PPO: the clipped policy loss with advantages of each token, and the critic's loss.

Axis letters: M labelled positions.

The policy's loss is that of `moekit.objectives.grpo` with PPO's settings; what makes it PPO is the advantages (`gae`
over a critic's values, then `whiten`). The critic is a learner of its own, on a model with a value head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import Denominator
from ..data.batch import Flat
from ..errors import ConfigError
from .base import Terms
from .grpo import GRPO


@dataclass(frozen=True)
class PPO(GRPO):
    """`GRPO` under PPO's name: a symmetric clip of 0.2, token ratios, the mean over all tokens, no KL in the loss.

    Source: Schulman et al. 2017 (arXiv 1707.06347). Departures: no entropy bonus, and the value loss is the critic's
    own; for text the KL to the reference goes into the reward (`token_rewards`), as in InstructGPT (arXiv 2203.02155).
    """

    name: str = "ppo"


@dataclass(frozen=True)
class ValueLoss:
    r"""Squared error of the critic: :math:`\tfrac12\max\{(V-R)^2, (\mathrm{clip}(V, V_0 \pm \epsilon)-R)^2\}`.

    Reads ``outputs.value_M`` and the extra values "return" (R, from `gae`) and, with a clip, "old_value" (:math:`V_0`,
    the values that the advantages were made from).

    Args:
        clip: epsilon > 0; None = no clip: half the squared error. The *larger* error counts, so a value that has
            moved further than epsilon, away from what was stored and towards the return, gets no gradient.
        denominator, constant_length: see `moekit.objectives.denominator`.
    Metrics, means over tokens:
        clipped: share of tokens where the clipped error is the larger. error: R - V, error_sq: its square.
        value, return, return_sq: for `explained_variance`.

    Source: ppo2 of OpenAI's baselines; studied by Engstrom et al. 2020 (arXiv 2005.12729).
    """

    clip: float | None = 0.2
    denominator: Denominator = "global_tokens"
    constant_length: int | None = None
    name: str = "critic"
    metrics: ClassVar[tuple[str, ...]] = ("clipped", "error", "error_sq", "value", "return", "return_sq")

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip={self.clip} of the value loss must be > 0, or None for no clip")

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the extra values that every batch must bring."""
        return ("return",) if self.clip is None else ("return", "old_value")

    def __call__(self, flat: Flat, outputs: Any) -> Terms:
        """Terms of one microbatch: ``loss_M``, one per labelled position, and the sums of the metrics."""
        value_M: Tensor = outputs.value_M
        if not len(value_M):
            return Terms(value_M, {name: value_M.new_zeros(()) for name in self.metrics})
        return_M = flat.at_labels("return").to(value_M.dtype)
        square_M = plain_M = (value_M - return_M).square()
        if self.clip is not None:
            old_M = flat.at_labels("old_value").to(value_M.dtype)
            moved_M = value_M - old_M
            near_M = old_M + moved_M.clamp(-self.clip, self.clip)
            near_M = torch.where(moved_M.abs() > self.clip, near_M, value_M)  # old + (value - old) may round off value
            square_M = torch.maximum(plain_M, (near_M - return_M).square())
        with torch.no_grad():  # in float64: a variance from the mean of squares cancels
            value, back = value_M.double(), return_M.double()
            columns = (square_M > plain_M, back - value, (back - value).square(), value, back, back.square())
            sums = {name: x.sum(dtype=torch.float64) for name, x in zip(self.metrics, columns)}
        return Terms(square_M / 2, sums)


def explained_variance(metrics: Mapping[str, float], name: str = "critic") -> float:
    r"""Share of the returns' variance that the values explain, :math:`1 - \mathrm{Var}(R-V)/\mathrm{Var}(R)`.

    Args:
        metrics: a step's, with ``critic/error`` and the others. They are means over the whole step, so this is too.
    Returns:
        At most 1; 0 for values that say nothing, and where the returns do not vary.

    >>> step = {"critic/error": 0.0, "critic/error_sq": 1.0, "critic/return": 2.0, "critic/return_sq": 8.0}
    >>> explained_variance(step)
    0.75
    """
    spread = metrics[f"{name}/return_sq"] - metrics[f"{name}/return"] ** 2
    left = metrics[f"{name}/error_sq"] - metrics[f"{name}/error"] ** 2
    return 1 - left / spread if spread > 1e-12 * metrics[f"{name}/return_sq"] else 0.0
