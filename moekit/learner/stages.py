"""Pipeline stages: which layers each holds, planned by cost, and which rank holds which stage."""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from ..config import LearnerConfig, ModelConfig
from ..errors import ConfigError
from ..measure.cost import Work, step_flops
from ..model.transformer import Part

LENGTH = 1024  # tokens of the document that costs are taken from: it decides what attention weighs against the rest


def layer_costs(shape: ModelConfig) -> list[int]:
    """FLOPs ("model", `measure.cost`) of every layer for one labelled document of `LENGTH`; the last has the head's."""
    work = Work(LENGTH, LENGTH, LENGTH, LENGTH * (LENGTH + 1) // 2)
    moe, dense = (step_flops(replace(shape, layers=1, dense_layers=d, dense_width=max(1, shape.dense_width)), work)
                  for d in ((), (0,)))  # fmt: skip
    kinds = [dense if i in shape.dense_layers else moe for i in range(shape.layers)]
    return [int(k["total"] - k["head"]) for k in kinds[:-1]] + [int(kinds[-1]["total"])]


@lru_cache(maxsize=256)
def plan_stages(shape: ModelConfig, stages: int) -> tuple[tuple[int, int], ...]:
    """Runs of layers [start, stop), one for each stage, with the smallest possible cost of the dearest stage.

    Of all such cuts the one with the smallest sum of squared costs (so that idle stages share what is left), and of
    those the one whose stages start earliest: the same on every rank. Cost: stages x layers^2 additions, once.

    Raises:
        ConfigError: more stages than layers; every stage gets at least one.

    >>> shape = ModelConfig(vocab=8, width=8, layers=6, heads=2, experts=4, top_k=1, expert_width=8)
    >>> plan_stages(shape, 2)
    ((0, 3), (3, 6))
    >>> plan_stages(replace(shape, vocab=100_000), 2)  # a head as dear as many layers
    ((0, 5), (5, 6))
    """
    if not 1 <= stages <= shape.layers:
        raise ConfigError(f"{shape.layers} layers cannot fill {stages} pipeline stages; a stage needs a layer")
    before = [0, *accumulate(layer_costs(shape))]  # before[i]: cost of the layers [0, i)
    ends = range(1, shape.layers + 1)
    worst = before[1:]  # dearest of so many stages over the layers [0, i)
    for _ in range(stages - 1):
        worst = [min((max(worst[j - 1], before[i] - before[j]) for j in range(1, i)), default=before[-1]) for i in ends]
    limit = worst[-1]
    best = [(c * c, (0,)) if c <= limit else None for c in before[1:]]  # squares and cuts of those below the limit
    for _ in range(stages - 1):
        best = [min(((b[0] + (before[i] - before[j]) ** 2, (*b[1], j)) for j in range(1, i)
                     if (b := best[j - 1]) and before[i] - before[j] <= limit), default=None)
                for i in ends]  # fmt: skip
    starts = best[-1][1]  # pyright: ignore[reportOptionalSubscript]
    return tuple(zip(starts, (*starts[1:], shape.layers)))


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


def chunks(config: LearnerConfig, n: int) -> int:
    """Microbatches that the schedule runs for n given ones: n, and the idle ones that it needs besides.

    >>> chunks(LearnerConfig(pp=4), 2), chunks(LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=2), 5)
    (4, 6)
    """
    if config.pp == 1 or config.pipeline == "zbv":
        return n
    if config.pipeline == "1f1b":
        return max(n, config.pp)
    while n % max(1, n // config.pp):  # torch runs n // pp rounds of equal length
        n += 1
    return n
