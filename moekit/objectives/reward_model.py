r"""A reward model: one score an answer, such that the chosen answer of a pair has the higher one.

Axis letters: M scored answers (one labelled position each, the last token of the document), P = M / 2 pairs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.batch import Flat
from ..errors import ConfigError, DataError
from .base import Terms


def _paired(flat: Flat) -> Tensor:
    """``[2, P]`` int64 into the labelled positions: each pair's chosen and rejected answer."""
    family_M, chosen_M = flat.at_labels("family").long(), flat.at_labels("chosen").long()
    order_M = torch.argsort(family_M * 2 + (1 - chosen_M), stable=True)
    family_M, chosen_M = family_M[order_M], chosen_M[order_M]
    if len(order_M) % 2 or bool(
        ((family_M[::2] != family_M[1::2]) | (chosen_M[::2] != 1) | (chosen_M[1::2] != 0)).any()
    ):
        raise DataError(
            f"{len(order_M)} scored answers are not pairs: every 'family' of a microbatch needs one labelled position "
            "with chosen=1 and one with chosen=0. Keep pairs whole when rows are made, and label last tokens only"
        )
    return order_M.view(-1, 2).t()


@dataclass(frozen=True)
class RewardModel:
    r"""Bradley-Terry loss of each pair: :math:`-\log\sigma(s_c - s_r - m) + c\,(s_c + s_r)^2`.

    Reads ``outputs.value_M`` at the labelled positions, the last token of each document, and the extra values
    "family" (integer: which pair), "chosen" (1 or 0) and, optional, "margin" (m, at the chosen answer). The unit is
    the pair: the loss is the mean over all pairs of the step.

    Args:
        center: c >= 0; keeps scores near zero, which the first term does not fix. 0.01 is usual.
    Metrics, means over pairs:
        accuracy: share of pairs with s_c > s_r; a tie is no win.
        margin: s_c - s_r. chosen, rejected: the scores.
    Raises:
        ConfigError: c < 0.
        DataError: labelled positions that are not pairs.

    Source: InstructGPT (arXiv 2203.02155); margin, Llama 2 (arXiv 2307.09288); centering, Eisenstein et al. 2023
    (arXiv 2312.09244), as TRL's RewardTrainer has them. Departure: the mean is over all pairs of the step, also
    where InstructGPT keeps all pairs of one prompt together.
    """

    center: float = 0.0
    name: str = "reward_model"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen", "rejected")
    needs: ClassVar[tuple[str, ...]] = ("family", "chosen")

    def __post_init__(self) -> None:
        if not self.center >= 0:
            raise ConfigError(f"center={self.center} must be >= 0")

    def units(self, flat: Flat) -> float:
        """Pairs of a microbatch."""
        return float(_paired(flat).shape[1]) if len(flat.label_index_M) else 0.0

    def __call__(self, flat: Flat, outputs: Any) -> Terms:
        """Terms of one microbatch, one per pair, and the sums of the metrics."""
        value_M: Tensor = outputs.value_M
        if not len(value_M):
            return Terms(value_M, {name: value_M.new_zeros(()) for name in self.metrics})
        pair_2P = _paired(flat)
        chosen_P, rejected_P = value_M[pair_2P[0]], value_M[pair_2P[1]]
        apart_P = chosen_P - rejected_P
        margin_P = flat.at_labels("margin").to(apart_P.dtype)[pair_2P[0]] if "margin" in flat.extra else 0.0
        loss_P = F.softplus(margin_P - apart_P)
        if self.center:
            loss_P = loss_P + self.center * (chosen_P + rejected_P).square()
        with torch.no_grad():
            columns = (apart_P > 0, apart_P, chosen_P, rejected_P)
            return Terms(loss_P, {name: x.sum(dtype=value_M.dtype) for name, x in zip(self.metrics, columns)})
