r"""What a sum of token losses is divided by: every convention, as weights known before the first backward.

With per-token losses l and weights w the loss of a step is sum(w * l) over all labelled positions of all microbatches
and ranks; the gradient is summed the same way, so no convention needs an average anywhere else. U = supervised tokens
of the step, over all ranks and microbatches; S = sequences, documents with at least one label.

    global_tokens       1 / U                                 exact for the token mean, however the step is cut
    sequence_mean       1 / (S * labels of my sequence)       exact for the mean over sequences
    constant            1 / (S * fixed length)                Dr. GRPO's form
    kept_plus_filtered  1 / (U + (T-1) * removed instances)   the source's convention for filtered pretraining
    rank_mean           1 / (ranks with labels * U of my rank)            depends on the cut: kept for study
    microbatch_mean     1 / (microbatches with labels * U of my microbatch)      the same

Axis letters: M labelled positions of a microbatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..config import Denominator
from ..data.batch import Flat
from ..errors import ConfigError


@dataclass(frozen=True)
class StepCounts:
    """Counts of one optimizer step: global ones summed over ranks, and this rank's own supervised tokens."""

    supervised: float  # U
    sequences: float  # documents with at least one label
    microbatches: float  # (rank, microbatch) pairs with at least one label
    ranks: float  # ranks with at least one label
    removed_positions: float  # (T - 1) for each instance that the filter removed
    rank_supervised: float  # U of this rank alone
    units: float = 0.0  # what an objective with units of its own counts (pairs), else U


def labels_per_document(flat: Flat) -> Tensor:
    """``[S]`` int64: how many labels each document of the microbatch has."""
    return ops.count(flat.document_N[flat.label_index_M], flat.documents)


def step_counts(flats: Sequence[Flat], all_reduce: Callable[[list[float]], list[float]] | None = None) -> StepCounts:
    """Count a step. `all_reduce` sums a list over ranks; None = one process."""
    supervised = [f.label_index_M.numel() for f in flats]
    local = [  # this rank's part of the global fields, in their order
        float(sum(supervised)),
        float(sum(int((labels_per_document(f) > 0).sum()) for f in flats)),
        float(sum(n > 0 for n in supervised)),
        float(any(n > 0 for n in supervised)),
        float(sum(f.removed * (f.length - 1) for f in flats)),
    ]
    total = all_reduce(local) if all_reduce else local
    return StepCounts(*total, rank_supervised=local[0])


def token_weights(
    flat: Flat, counts: StepCounts, mode: Denominator = "global_tokens", constant_length: int | None = None
) -> Tensor:
    """Weight of each labelled position's loss, ``[M]`` float64, for one microbatch of this rank.

    Args:
        counts: of the whole step, see `step_counts`.
        mode: one of the module's conventions.
        constant_length: tokens per sequence, only with ``mode="constant"``.
    Raises:
        ConfigError: ``mode="constant"`` without `constant_length`.

    >>> from moekit.data.batch import Batch
    >>> a = Batch.make(torch.tensor([[1, 2]])).flat            # one label
    >>> b = Batch.make(torch.tensor([[1, 2, 3, 4]])).flat      # three labels
    >>> c = step_counts([a, b])
    >>> [[round(x, 4) for x in token_weights(f, c, "global_tokens").tolist()] for f in (a, b)]
    [[0.25], [0.25, 0.25, 0.25]]
    >>> [[round(x, 4) for x in token_weights(f, c, "microbatch_mean").tolist()] for f in (a, b)]
    [[0.5], [0.1667, 0.1667, 0.1667]]
    """
    m = flat.label_index_M.numel()
    if mode == "sequence_mean":
        per_document = labels_per_document(flat).to(torch.float64)
        return 1.0 / (counts.sequences * per_document[flat.document_N[flat.label_index_M]])
    if mode == "constant" and not constant_length:
        raise ConfigError("denominator 'constant' needs constant_length, the tokens that stand for one sequence")
    divisors = {
        "global_tokens": counts.supervised,
        "constant": counts.sequences * (constant_length or 0),
        "kept_plus_filtered": counts.supervised + counts.removed_positions,
        "rank_mean": counts.ranks * counts.rank_supervised,
        "microbatch_mean": counts.microbatches * m,
    }
    if mode not in divisors:
        raise ConfigError(f"denominator {mode!r} is not known; see moekit.objectives.denominator")
    return torch.full((m,), 1.0 / divisors[mode] if m else 0.0, dtype=torch.float64, device=flat.label_N.device)
