"""Response-only supervised fine-tuning: the negative log-probability of every labelled position.

Which positions carry a label is the batch's business (`moekit.data.chat`), and what the sum is divided by is the
learner's (`moekit.objectives.denominator`): a supervised batch differs from a pretraining batch in its label tensor
and its divisor, and in nothing else (Section 22.1 of the Olmo-core 3 report).
"""

from dataclasses import dataclass
from typing import Any

from ..config import Denominator
from ..data.batch import Flat
from .base import Terms


@dataclass(frozen=True)
class SFT:
    r"""Cross-entropy at the labelled positions: :math:`\ell_m = -\log p(y_m \mid x_{\le m})`.

    Args:
        denominator: what the sum of the terms is divided by, see `moekit.objectives.denominator`.
        constant_length: tokens per sequence, with ``denominator="constant"``.
    """

    denominator: Denominator = "global_tokens"
    constant_length: int | None = None
    name: str = "sft"

    def __call__(self, flat: Flat, outputs: Any) -> Terms:
        """Terms of one microbatch: ``loss_M``, one per labelled position."""
        return Terms(-outputs.logprob_M)
