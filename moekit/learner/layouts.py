"""The layouts that a model and a world allow, and what each takes: memory of the fullest rank, bytes on the wire."""

from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch

from ..config import LearnerConfig, ModelConfig
from ..errors import ConfigError
from ..measure.plan import Held, Microbatch, activation_bytes, storage_bytes, wire_bytes
from ..model.transformer import Transformer
from .gradients import is_expert
from .precision import check_shape
from .stages import chunks, part_of, plan_stages, stages_of


class Layout(NamedTuple):
    """A world of dp x pp ranks whose data-parallel ranks split the experts ep ways."""

    dp: int
    ep: int
    pp: int


def legal_layouts(shape: ModelConfig, world: int) -> list[Layout]:
    """Every layout that `check_layout` takes with one stage a rank: dp pp = world, ep | dp, ep | experts, pp <= layers.

    >>> shape = ModelConfig(vocab=8, width=8, layers=2, heads=2, experts=6, top_k=1, expert_width=8)
    >>> [(x.dp, x.ep, x.pp) for x in legal_layouts(shape, 4)]
    [(4, 1, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)]
    """
    if world < 1:
        raise ConfigError(f"world={world} must be at least 1")
    pps = [n for n in range(1, min(world, shape.layers) + 1) if world % n == 0]
    eps = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0]
    return [Layout(world // pp, ep, pp) for pp in pps for ep in eps if world // pp % ep == 0]


def held(shape: ModelConfig, config: LearnerConfig, pp_rank: int = 0, ep_rank: int = 0) -> list[Held]:
    """The parameters that one rank of a layout holds, by name and shape; nothing is allocated."""
    model = Transformer(shape, device="meta", seed=None, part=part_of(config, shape, pp_rank, ep_rank))
    tied = ("embed.weight",) if shape.tied_head and config.pp > 1 and config.pipeline != "zbv" else ()
    return [Held(n, tuple(p.shape), is_expert(n), n in tied) for n, p in model.named_parameters()]


def in_flight(config: LearnerConfig, pp_rank: int, microbatches: int) -> int:
    """How many (microbatch, stage) pairs a pipeline rank keeps activations of at its fullest moment.

    As torch's schedules warm up: pp - rank, interleaved (stages - 1) pp + 2 (pp - 1 - rank) + 1, zbv at most 2 pp.
    """
    stages, behind = config.stages_per_rank, config.pp - 1 - pp_rank
    most = {"1f1b": behind + 1, "zbv": 2 * config.pp, "interleaved": (stages - 1) * config.pp + 2 * behind + 1}
    return 1 if config.pp == 1 else min(most[config.pipeline], stages * microbatches)


def plan_rank(
    shape: ModelConfig, config: LearnerConfig, world: int, dtype: torch.dtype, work: Microbatch, microbatches: int,
    pp_rank: int = 0, device: str = "cuda",
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Memory (gradients at their peak, activations of all microbatches in flight) and wire bytes of one pipeline rank.

    All data-parallel and expert ranks of one are alike. `work` is a microbatch; see `measure.plan`.
    """
    if config.precision == "mxfp8":
        check_shape(shape)
    mine, dp = held(shape, config, pp_rank), world // config.pp
    stages, runs = stages_of(config, pp_rank), part_of(config, shape, pp_rank).stages
    kept = [activation_bytes(shape, work, dtype, config, run, device) for run in runs]
    flying = in_flight(config, pp_rank, microbatches) * sum(k["total"] for k in kept) // len(runs)
    stored = storage_bytes(mine, config, dtype, dp)
    memory = {
        "parameters": stored["parameters"], "gradients": stored["gradients_peak"],
        "optimizer": stored["masters"] + stored["moments"], "activations": flying + max(k["again"] for k in kept),
        **({"mxfp8": stored["caches"]} if config.precision == "mxfp8" else {}),
    }  # fmt: skip
    total = config.pp * len(runs)
    sends = sum(0 <= n < total and n not in stages for s in stages for n in (s - 1, s + 1))
    wire = wire_bytes(
        mine, shape, config, work, dtype, dp, microbatches=microbatches, transfers=chunks(config, microbatches) * sends,
        layers=[i for start, stop in runs for i in range(start, stop)],
    )  # fmt: skip
    return {"memory": memory | {"total": sum(memory.values())}, "wire": wire}


def layout_table(
    shape: ModelConfig, world: int, *, dtype: torch.dtype = torch.bfloat16, config: LearnerConfig | None = None,
    microbatch_rows: int = 1, length: int | None = None, batch_rows: int | None = None, device: str = "cuda",
) -> list[dict[str, Any]]:  # fmt: skip
    """Every legal layout with its predicted memory and wire bytes, the one that needs least memory a rank first.

    Args:
        config: of everything but ep and pp; the schedule is 1f1b.
        length: tokens of a row; None = 4096, or the model's longest if that is less.
        batch_rows: rows of one step over all ranks; None = one microbatch for each rank of the world.
    Returns:
        Dictionaries: dp, ep, pp, experts (of a rank), layers (of each stage), microbatches (of a rank and step), rank
        (the pipeline rank with most memory), memory (its, see `plan_rank`), wire (of the rank that sends most).
    Raises:
        ConfigError: a number below 1, or rows longer than the model's positions.
    """
    layouts = legal_layouts(shape, world)
    length = min(4096, shape.max_positions) if length is None else length
    batch_rows = world * microbatch_rows if batch_rows is None else batch_rows
    for name, n in {"microbatch_rows": microbatch_rows, "length": length, "batch_rows": batch_rows}.items():
        if n < 1:
            raise ConfigError(f"{name}={n} must be at least 1")
    if length > shape.max_positions:
        raise ConfigError(
            f"length={length} is more than the model's {shape.max_positions} positions; make rows shorter"
        )
    work, table = Microbatch.full(microbatch_rows, length), []
    for x in layouts:
        c = replace(config or LearnerConfig(), ep=x.ep, pp=x.pp, pipeline="1f1b", stages_per_rank=1)
        count = ceil(batch_rows / (x.dp * microbatch_rows))
        ranks = [plan_rank(shape, c, world, dtype, work, count, r, device) for r in range(x.pp)]
        fullest = max(range(x.pp), key=lambda r: ranks[r]["memory"]["total"])
        layers = [stop - start for start, stop in plan_stages(shape, x.pp)]
        table.append(x._asdict() | {
            "experts": shape.experts // x.ep, "layers": layers, "microbatches": count, "rank": fullest,
            "memory": ranks[fullest]["memory"], "wire": max((r["wire"] for r in ranks), key=lambda w: w["total"]),
        })  # fmt: skip
    return sorted(table, key=lambda row: (row["memory"]["total"], row["wire"]["total"]))


CONVENTION = """\
Memory: of the fullest rank. Parameters, gradients, optimizer (fp32 masters and moments) and mxfp8 (copies of experts)
are exact; activations are what autograd keeps for the microbatches in flight under 1F1B, plus one recomputation.
Buffers of kernels, collectives and the allocator come on top. Wire: what the rank that sends most sends in one training
step, with balanced routing; all-reduces are counted as rings. Rows are one document each, every position labelled."""


def render(table: list[dict[str, Any]]) -> str:
    """The table as text, in GiB (MiB where all is small), with its convention."""
    large = max(max(row["memory"]["total"], row["wire"]["total"]) for row in table) >= 2**30
    unit, name = (2**30, "GiB") if large else (2**20, "MiB")
    lines = [["dp", "ep", "pp", "experts", "layers", "microb.", *("|", *table[0]["memory"]), *("|", *table[0]["wire"])]]
    for row in table:
        few, many = min(row["layers"]), max(row["layers"])
        numbers = [f"{row[k]}" for k in ("dp", "ep", "pp", "experts")]
        numbers += [f"{few}-{many}" if few < many else f"{few}", f"{row['microbatches']}"]
        lines.append(
            numbers + [c for k in ("memory", "wire") for c in ("|", *(f"{v / unit:.2f}" for v in row[k].values()))]
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join(map(str.rjust, line, widths)) for line in lines]
    first, second = (i for i, c in enumerate(text[0]) if c == "|")
    top = "a rank holds".ljust(first) + f"|  memory of a rank, {name}".ljust(second - first)
    return "\n".join([f"{top}|  sent by a rank in a step, {name}", *text, "", CONVENTION])
