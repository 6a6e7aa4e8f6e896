"""One step's microbatches on a process that holds all layers: forward, backward, the next one.

Apart from `pipeline.py`, so that a learner without a pipeline does not pay for importing torch's schedules.

Axis letters: N positions of a microbatch, D width.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..data.batch import Flat


class StageFn(Protocol):
    """`(stage_place, x_ND, i)`: this rank's stage `stage_place` on microbatch i.

    `x_ND` is None for the first stage of the pipeline. The last one returns the weighted loss of the microbatch, a
    scalar; the others hidden states [N, D].
    """

    def __call__(self, stage_place: int, x_ND: Tensor | None, i: int, /) -> Tensor: ...


def run(
    flats: list[Flat], fn: StageFn, *, backward: bool = True, told: Callable[[], None] | None = None
) -> list[Tensor]:
    """Losses, detached, one a microbatch.

    Args:
        flats: the microbatches.
        fn: see `StageFn`; there is one stage, 0.
        backward: False = forward only, without a graph.
        told: called after each microbatch's backward.
    """
    losses = []
    with torch.set_grad_enabled(backward):
        for i in range(len(flats)):
            loss = fn(0, None, i)
            if loss.requires_grad:
                loss.backward()
            if told is not None and backward:
                told()
            losses.append(loss.detach())
    return losses
