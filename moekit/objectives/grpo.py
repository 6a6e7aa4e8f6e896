r"""The clipped policy objective, and with it GRPO, Dr. GRPO, DAPO, GSPO: one loss with different settings.

Axis letters: M labelled positions (the sampled tokens that are trained on), S documents.

    variant    ratio       clip                denominator       advantages (`moekit.objectives.advantage`)
    GRPO       token       0.2, 0.2            sequence_mean     std
    Dr. GRPO   token       0.2, 0.2            constant          no std
    DAPO       token       0.2, 0.28           global_tokens     std, overlong answers masked, equal groups left out
    GSPO       sequence    3e-4, 4e-4          sequence_mean     std
    PPO        token       0.2, 0.2            global_tokens     GAE, whitened (`moekit.objectives.ppo`)

Sources: GRPO, DeepSeekMath (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783); DAPO (arXiv 2503.14476); GSPO (arXiv
2507.18071); PPO (arXiv 1707.06347); truncated importance weights and masks, see `moekit.objectives.ratio`.

Departures from the papers, here and in the denominators:

- Every mean is over the whole step (all microbatches and ranks), never of means over its parts. GRPO averages within
  an answer, then over a group, then over groups: the same number when all groups have as many valid answers.
- Dr. GRPO divides by answers times a fixed length, as the paper's listing does; its formula has no length.
- DAPO's formula is a mean over the tokens of one prompt's answers, then over prompts; global_tokens is over all tokens
  of the step. DAPO samples until every group has spread; here equal groups can be left out, none is sampled again.
- A masked answer has no labels, so it counts in no numerator and no denominator, in every mode.
- k1, k2 and k3 may stand in the loss; GRPO has k3. The KL is at the tokens and not multiplied by the ratio or weight.
- A log-ratio above 20 is taken as 20, without gradient: an infinite ratio times an advantage of 0 is not a number.
- No dual clip.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import Denominator
from ..data.batch import Flat
from ..errors import ConfigError, DataError
from .base import Terms
from .ratio import KL, LARGEST_LOG_RATIO, Level, at_level, kl_estimate


@dataclass(frozen=True)
class GRPO:
    r"""Clipped policy loss at each sampled token: :math:`\ell = -w\min(rA, \mathrm{clip}(r)A) + \beta\,\mathrm{KL}`.

    r is the ratio of the policy to the one that sampled, from `old_logprob`; without it (one update per rollout) r is
    exactly 1 and its gradient is that of log p. The values come with the batch (`Batch.make(extra=...)`), at the
    position that predicts the token: "advantage"; optional "old_logprob", "ref_logprob" (of the reference) and
    "weight" (w, see `importance_weights`).

    Args:
        clip_low, clip_high: r is clipped to [1 - clip_low, 1 + clip_high], where that lowers the gain.
        ratio: "token", "sequence" (GSPO: one ratio an answer, of the mean log-ratio) or "sequence_sum".
        beta: weight of the KL to the reference in the loss; needs "ref_logprob".
        kl: its estimator, see `kl_estimate`.
        temperature: of the log-probs, > 0: the one that sampled, and the one of all log-probs in the batch.
        denominator, constant_length: see `moekit.objectives.denominator` and the table above.
    Metrics, means over tokens:
        clip_low, clip_high: share of tokens whose ratio is past the bound on the side where the clip acts.
        ratio: 1 on average when the samples are the old policy's.
        kl_old: k3 of KL(old || policy). kl_ref: `kl` of KL(policy || reference), 0 without "ref_logprob".
        entropy: -log p of the sampled tokens, on the policy's own samples an estimate of its entropy.
        weight: mean importance weight.
    Raises:
        ConfigError: temperature <= 0 (greedy sampling has no density to learn from), a negative clip or beta.
        DataError: the batch lacks "advantage", or "ref_logprob" where beta > 0.

    Sources and departures: the module's docstring.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Level = "token"
    beta: float = 0.0
    kl: KL = "k3"
    temperature: float = 1.0
    denominator: Denominator = "global_tokens"
    constant_length: int | None = None
    name: str = "grpo"
    metrics: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "ratio", "kl_old", "kl_ref", "entropy", "weight")

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature}: a policy is trained at a temperature > 0; sample so too"
            )
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.beta >= 0):
            raise ConfigError(
                f"clip_low={self.clip_low} must be in [0, 1], clip_high={self.clip_high} and beta={self.beta} >= 0"
            )
        if self.ratio not in ("token", "sequence", "sequence_sum") or self.kl not in ("k1", "k2", "k3"):
            raise ConfigError(
                f"ratio={self.ratio!r} is 'token', 'sequence' or 'sequence_sum'; kl={self.kl!r} is 'k1', 'k2' or 'k3'"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the extra values that every batch must bring."""
        return ("advantage", "ref_logprob") if self.beta else ("advantage",)

    def __call__(self, flat: Flat, outputs: Any) -> Terms:
        """Terms of one microbatch: ``loss_M``, one per labelled position, and the sums of the metrics."""
        logprob_M: Tensor = outputs.logprob_M
        if not len(logprob_M):
            return Terms(logprob_M, {name: logprob_M.new_zeros(()) for name in self.metrics})
        values = lambda name: flat.at_labels(name).to(logprob_M.dtype)
        advantage_M = values("advantage")
        old_M = values("old_logprob") if "old_logprob" in flat.extra else logprob_M.detach()
        token_M = logprob_M - old_M
        log_ratio_M = at_level(token_M, self.ratio, flat.document_N[flat.label_index_M], flat.documents)
        ratio_M = log_ratio_M.clamp(max=LARGEST_LOG_RATIO).exp()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss_M = -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(low, high) * advantage_M)
        weight_M = values("weight") if "weight" in flat.extra else torch.ones_like(advantage_M)
        loss_M = loss_M * weight_M
        kl_M = torch.zeros_like(advantage_M)
        if "ref_logprob" in flat.extra:
            kl_M = kl_estimate(logprob_M, values("ref_logprob"), self.kl)
        elif self.beta:
            raise DataError(f"beta={self.beta} needs the extra values 'ref_logprob', the reference's log-probs")
        if self.beta:
            loss_M = loss_M + self.beta * kl_M
        with torch.no_grad():
            columns = {
                "clip_low": (ratio_M < low) & (advantage_M < 0),
                "clip_high": (ratio_M > high) & (advantage_M > 0),
                "ratio": ratio_M,
                "kl_old": torch.expm1(token_M.clamp(max=LARGEST_LOG_RATIO)) - token_M,
                "kl_ref": kl_M,
                "entropy": -logprob_M,
                "weight": weight_M,
            }
            return Terms(loss_M, {name: x.sum(dtype=logprob_M.dtype) for name, x in columns.items()})
