"""What an objective is: a function from a microbatch and the model's outputs to per-unit loss terms.

Axis letters: M labelled positions of the microbatch.

An objective returns terms, never a mean. The learner multiplies each term by a weight that it knew before the first
backward (`moekit.objectives.denominator`), sums, and adds over microbatches and ranks. That is why the gradient does
not depend on how the step was cut.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..data.batch import Flat


class Outputs(Protocol):
    """What an objective may read of a forward pass (`moekit.model.transformer.Outputs` has more)."""

    logprob_M: Tensor  # float32 or float64, log p(label) at flat.label_index_M, at the objective's temperature
    hidden_MD: Tensor  # final hidden states at flat.label_index_M
    value_M: Tensor | None  # float32 or float64, at flat.label_index_M, of a model with a value head


@dataclass(frozen=True)
class Terms:
    """Loss terms of one microbatch, one per labelled position, or per unit of an objective that has `units`."""

    loss_M: Tensor  # differentiable, not yet divided by anything
    sums: dict[str, Tensor] = field(default_factory=dict)  # scalars by the names in `Objective.metrics`


class Objective(Protocol):
    """`objective(flat, outputs) -> Terms`. What else it may have, all of it optional:

    name: of its loss in the metrics, ``loss/<name>``.
    denominator, constant_length: what its terms are divided by, see `moekit.objectives.denominator`.
    units: ``units(flat) -> float``, how many units a microbatch has, for an objective whose unit is not the labelled
        position (a pair). It gives one term for each, and the divisor is their number in the step, over all ranks.
    metrics: names of `Terms.sums`. The learner adds them up over microbatches and ranks and divides by the number of
        units (labelled positions, when there is no `units`): ``<name>/<metric>``.
    needs: names of the extra values that every batch must bring (`Batch.extra`).
    temperature: of `Outputs.logprob_M`; 1 when absent.
    """

    def __call__(self, flat: Flat, outputs: Any) -> Terms: ...
