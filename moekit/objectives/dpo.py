r"""Direct preference optimisation: of two answers to a prompt, the chosen one is to gain on the rejected one.

Axis letters: M labelled positions of the microbatch, S its documents.

With the sums over an answer's tokens :math:`s = \sum_t \log\pi(y_t) - \log\pi_{ref}(y_t)` (their means, if length-
normalised) and :math:`\Delta = s_{chosen} - s_{rejected}`, the loss of a pair is

    sigmoid   -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)        e = label smoothing
    ipo       (D - 1 / (2 beta))^2

and the loss of a step is the mean over its pairs, over all ranks and microbatches.

Sources: Rafailov et al. 2023 (arXiv 2305.18290); Mitchell 2023, "A note on DPO with noisy preferences" (smoothing);
Azar et al. 2023 (arXiv 2310.12036, IPO); Lambert et al. 2024 (arXiv 2411.15124, length-normalised).
Departures: none in the sums. TRL's "ipo" and "sigmoid_norm" are the length-normalised forms here; rewards and accuracy
are those of the scores that the loss uses, where TRL shows sums for all of them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Config
from ..data.batch import Flat
from ..errors import ConfigError
from .base import Terms

Kind = Literal["sigmoid", "ipo"]
Reference = Literal["resident", "cached"]


@dataclass(frozen=True)
class DPO(Config):
    """The loss of pairs; a microbatch holds both answers of each of its pairs (`moekit.data.preference.Pairs`).

    Reads at labels ``extra["ref_logprob"]`` (the reference's log-prob of the token), ``extra["family"]`` (which pair)
    and ``extra["chosen"]`` (1 at the chosen answer's, 0 at the rejected one's).

    Args:
        beta: strength of the tie to the reference, above 0.
        kind: "sigmoid" or "ipo".
        label_smoothing: share of pairs taken to be the wrong way round, in [0, 0.5); kind "sigmoid" only.
        length_normalised: mean over an answer's tokens for the sum.
        reference: where its log-probs come from: a model beside the learner, or scores made before the first step.
        update_every: steps after which a resident reference becomes a copy of the policy; None = never.

    >>> round(DPO(beta=0.1).of_margin(torch.tensor([0.0]))[0].item(), 7)
    0.6931472
    """

    beta: float = 0.1
    kind: Kind = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False
    reference: Reference = "resident"
    update_every: int | None = None
    name: str = "dpo"

    needs: ClassVar[tuple[str, ...]] = ("ref_logprob", "family", "chosen")
    metrics: ClassVar[tuple[str, ...]] = (
        "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected",
    )  # fmt: skip

    def _check(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"DPO.beta={self.beta} must be above 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind == "ipo"):
            raise ConfigError(
                f"DPO.label_smoothing={self.label_smoothing} must be in [0, 0.5), and 0 with kind='ipo' "
                f"(kind={self.kind!r})"
            )
        if self.update_every is not None and (self.reference == "cached" or self.update_every < 1):
            raise ConfigError(
                f"DPO.update_every={self.update_every} with reference={self.reference!r}: cached log-probs are one "
                "model's for the whole run; take reference='resident' and at least 1, or None"
            )

    def units(self, flat: Flat) -> float:
        """Pairs of which both answers have labels in the microbatch."""
        return float(_partner(flat)[1].sum())

    def of_margin(self, delta: Tensor) -> Tensor:
        """The loss of a pair whose scores differ by `delta`, elementwise."""
        if self.kind == "ipo":
            return (delta - 1 / (2 * self.beta)).square()
        e, z = self.label_smoothing, self.beta * delta
        return -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)

    def __call__(self, flat: Flat, outputs: Any) -> Terms:
        """Terms of one microbatch: one entry for each document, zero unless it is a pair's chosen answer; no host read.

        Gradients: dl/dlogp = -beta sigmoid(-beta D) at every token of the chosen answer, with the other sign at the
        rejected one's (kind "sigmoid", no smoothing). Cost: S^2 comparisons.
        """
        partner_S, pair_S = _partner(flat)
        logp_M, document_M = outputs.logprob_M, flat.document_N[flat.label_index_M]
        ref_M = flat.at_labels("ref_logprob").to(logp_M.dtype)
        add = lambda x_M: x_M.new_zeros(flat.documents).index_add(0, document_M, x_M)
        logp_S, score_S = add(logp_M), add(logp_M - ref_M)
        if self.length_normalised:  # one mask for the sum and the count
            score_S = score_S / add(torch.ones_like(logp_M)).clamp(min=1)
        delta_S = torch.where(pair_S, score_S - score_S[partner_S], 0)
        loss_S = torch.where(pair_S, self.of_margin(delta_S), 0)

        mine, other = (torch.where(pair_S, x, 0) for x in (score_S.detach(), score_S.detach()[partner_S]))
        sums = {
            "accuracy": (delta_S.detach() > 0).to(logp_M.dtype),  # a tie is no win
            "margin": self.beta * delta_S.detach(),
            "reward_chosen": self.beta * mine,
            "reward_rejected": self.beta * other,
            "logp_chosen": torch.where(pair_S, logp_S.detach(), 0),
            "logp_rejected": torch.where(pair_S, logp_S.detach()[partner_S], 0),
        }
        return Terms(loss_S, {key: x_S.sum() for key, x_S in sums.items()})


def _partner(flat: Flat) -> tuple[Tensor, Tensor]:
    """For every document the rejected answer of its pair [S] int64, and whether it is a chosen answer that has one.

    A pair is in one row, and rows of different steps may have been joined: family numbers count within a row."""
    document_M = flat.document_N[flat.label_index_M]
    row_M = flat.order_N[flat.label_index_M] // max(flat.length, 1)
    blank = document_M.new_full((flat.documents,), -1)
    family_S = blank.index_put((document_M,), flat.at_labels("family").long() * flat.rows + row_M)
    chosen_S = blank.index_put((document_M,), flat.at_labels("chosen").long())
    same_SS = (family_S[:, None] == family_S) & (chosen_S[:, None] == 1) & (chosen_S == 0)
    if not flat.documents:
        return blank, blank > 0
    return same_SS.to(torch.uint8).argmax(1), same_SS.any(1)
