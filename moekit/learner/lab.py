r"""The denominator lab: one batch, every denominator, every cut into ranks and microbatches, at once.

Within one document every convention gives all labels the same weight, so the gradient of any of them is
:math:`\sum_s w_s g_s` with :math:`g_s` the gradient of document s's summed loss. The lab computes the :math:`g_s` once
and keeps their Gram matrix :math:`G_{st} = \langle g_s, g_t \rangle`. Loss, norm and angle of any convention under any
cut then cost S^2 multiplications, which is what makes a slider live, and they are exact: the weights come from
`moekit.objectives.denominator`, the function that the learner uses.

Axis letters: S documents with labels, P parameters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Denominator
from ..data.batch import Batch
from ..errors import ConfigError, DataError
from ..objectives.denominator import step_counts, token_weights


@dataclass(frozen=True)
class Reading:
    """One convention under one cut, against the exact token mean of the same kept documents."""

    mode: str
    ranks: int
    microbatches: int
    loss: float  # what the run would report
    exact_loss: float  # sum of losses / supervised tokens
    norm_ratio: float  # |gradient| / |exact gradient|
    cosine: float  # of the angle between them
    supervised: int
    removed: int

    def as_dict(self) -> dict[str, Any]:
        """For plotting and tables."""
        return dict(self.__dict__)


class DenominatorLab:
    """Per-document gradients of one batch, and what each denominator makes of them.

    Args:
        model: a `moekit.Transformer` that no learner holds (its gradients are taken by plain autograd).
        batch: rows; parents are not supported.
        objective: ``(flat, outputs) -> Terms`` with one term per labelled position.

    Cost:
        One forward and one backward per document, and ``S x P`` numbers while the Gram matrix is made.
    """

    def __init__(self, model: nn.Module, batch: Batch, objective: Any):
        if bool((batch.parent >= 0).any()):
            raise DataError("the denominator lab takes batches without shared prompts (parent = -1 everywhere)")
        if any(hasattr(p, "grad_slot") for p in model.parameters()):
            raise ConfigError("this model belongs to a Learner; give the lab a model of its own")
        self.batch = batch
        self.documents: list[tuple[int, int]] = []  # (row, segment)
        losses, gradients = [], []
        for row in range(batch.rows):
            for segment in batch.segment[row].unique().tolist():
                here = batch.segment[row] == segment
                if segment < 0 or not bool((batch.labels[row][here] != batch.ignore_index).any()):
                    continue
                flat = Batch.make(
                    batch.input_ids[row][here][None],
                    labels=batch.labels[row][here][None],
                    position=batch.position[row][here][None],
                    ignore_index=batch.ignore_index,
                ).flat
                loss = objective(flat, model(flat)).loss_M.sum()
                grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
                losses.append(loss.detach().double())
                gradients.append(torch.cat([g.reshape(-1).double() for g in grads if g is not None]))
                self.documents.append((row, segment))
        if not self.documents:
            raise DataError("the batch has no labelled document, so there is no gradient to compare")
        self.loss_S = torch.stack(losses)
        stacked_SP = torch.stack(gradients)
        self.gram_SS: Tensor = stacked_SP @ stacked_SP.T

    def weights(
        self,
        mode: Denominator,
        ranks: int = 1,
        microbatches: int = 1,
        removed: Sequence[int] = (),
        constant_length: int | None = None,
    ) -> Tensor:
        """Weight of each document's summed loss, ``[S]`` float64, zero for removed documents.

        Args:
            mode: the denominator.
            ranks: rows go to ranks in contiguous shares, as even as possible (`moekit.data.stream.share`).
            microbatches: each rank's rows are cut into this many contiguous parts, as even as possible.
            removed: documents (index into `documents`) that an instance filter removes.
            constant_length: for ``mode="constant"``; None = the row length.
        """
        batch, place = self._filtered(removed), {d: i for i, d in enumerate(self.documents)}
        if not 1 <= ranks <= batch.rows:
            raise ConfigError(f"ranks={ranks} must be between 1 and the batch's {batch.rows} rows")
        out = torch.zeros(len(self.documents), dtype=torch.float64)
        cut: list[list[tuple[list[int], Batch]]] = []
        for rank in range(ranks):
            rows = torch.arange(batch.rows).tensor_split(ranks)[rank].tolist()
            edges = [round(i * len(rows) / microbatches) for i in range(microbatches + 1)]
            cut.append([(rows[a:b], batch.take(rows[a:b])) for a, b in pairwise(edges) if b > a])
        counted = [step_counts([b.flat for _, b in mine]) for mine in cut]
        total = [sum(x) for x in zip(*([c.supervised, c.sequences, c.microbatches, c.ranks] for c in counted))]
        everything = total + [float(batch.removed * (batch.length - 1))]
        for mine, own in zip(cut, counted):
            counts = type(own)(*everything, rank_supervised=own.supervised)
            for rows, part in mine:
                flat = part.flat
                w_M = token_weights(flat, counts, mode, constant_length or batch.length)
                at = flat.order_N[flat.label_index_M]
                for w, p in zip(w_M.tolist(), at.tolist()):
                    row, t = divmod(p, flat.length)
                    out[place[(rows[row], int(part.segment[row, t]))]] = w
        return out

    def measure(
        self,
        mode: Denominator = "global_tokens",
        ranks: int = 1,
        microbatches: int = 1,
        removed: Sequence[int] = (),
        constant_length: int | None = None,
    ) -> Reading:
        """Loss, gradient norm ratio and cosine of one convention against the exact token mean; see `weights`."""
        w_S = self.weights(mode, ranks, microbatches, removed, constant_length)
        exact_S = self.weights("global_tokens", removed=removed)
        dot = lambda a, b: float(a @ self.gram_SS @ b)
        norm, exact = dot(w_S, w_S) ** 0.5, dot(exact_S, exact_S) ** 0.5
        alive = norm > 0 and exact > 0
        supervised = int(step_counts([self._filtered(removed).flat]).supervised)
        loss, exact_loss = float(w_S @ self.loss_S), float(exact_S @ self.loss_S)
        ratio, cosine = (norm / exact, min(1.0, dot(w_S, exact_S) / (norm * exact))) if alive else (math.nan, math.nan)
        return Reading(mode, ranks, microbatches, loss, exact_loss, ratio, cosine, supervised, len(removed))

    def _filtered(self, removed: Sequence[int]) -> Batch:
        if not removed:
            return self.batch
        b, mask = self.batch, self.batch.filtered.clone()
        for i in removed:
            row, segment = self.documents[i]
            mask[row] |= b.segment[row] == segment
        count = b.removed + len(set(removed))
        return replace(b, labels=b.labels.masked_fill(mask, b.ignore_index), filtered=mask, removed=count)
