"""What an objective is: a function from a microbatch and the model's outputs to per-unit loss terms.

Axis letters: M labelled positions of the microbatch.

An objective returns terms, never a mean. The learner multiplies each term by a weight that it knew before the first
backward (`moekit.objectives.denominator`), sums, and adds over microbatches and ranks. That is why the gradient does
not depend on how the step was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..data.batch import Flat


class Outputs(Protocol):
    """What an objective may read of a forward pass (`moekit.model.transformer.Outputs` has more)."""

    logprob_M: Tensor  # float32 or float64, log p(label) at flat.label_index_M
    hidden_MD: Tensor  # final hidden states at flat.label_index_M


@dataclass(frozen=True)
class Terms:
    """Loss terms of one microbatch, one per labelled position."""

    loss_M: Tensor  # differentiable, not yet divided by anything
    sums: dict[str, Tensor] = field(default_factory=dict)  # extra scalars; the learner sums them and divides by U


class Objective(Protocol):
    """`objective(flat, outputs) -> Terms`; attributes `name` and `denominator` when it wants other than defaults."""

    def __call__(self, flat: Flat, outputs: Any) -> Terms: ...
