"""Pipeline stages: which layers each holds, planned by cost, and which rank holds which stage."""

from __future__ import annotations

from itertools import pairwise

from ..config import LearnerConfig, ModelConfig
from ..model.transformer import Part


def plan_stages(shape: ModelConfig, stages: int) -> tuple[tuple[int, int], ...]:
    """Runs of layers [start, stop) for every stage, in order."""
    cuts = [round(i * shape.layers / stages) for i in range(stages + 1)]
    return tuple(pairwise(cuts))


def stages_of(config: LearnerConfig, rank: int) -> tuple[int, ...]:
    """Indices of the stages that pipeline rank `rank` holds, ascending.

    1f1b: stage r on rank r. interleaved: stages go round the ranks. zbv: down the ranks and back up.
    """
    if config.pp == 1:
        return (0,)
    if config.pipeline == "zbv":
        return (rank, 2 * config.pp - 1 - rank)
    return tuple(rank + i * config.pp for i in range(config.stages_per_rank))


def part_of(config: LearnerConfig, shape: ModelConfig, pp_rank: int = 0, ep_rank: int = 0) -> Part:
    """What one rank of a layout holds of the model."""
    total = config.pp * config.stages_per_rank if config.pp > 1 else 1
    plan = plan_stages(shape, total)
    each = shape.experts // config.ep
    return Part(tuple(plan[s] for s in stages_of(config, pp_rank)), (ep_rank * each, (ep_rank + 1) * each))
