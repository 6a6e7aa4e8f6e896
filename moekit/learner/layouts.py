"""The layouts that a model and a world allow, and what each takes: memory of the fullest rank, bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from ..config import LearnerConfig, ModelConfig
from ..errors import ConfigError
from ..measure.plan import Held, Microbatch, activation_bytes, storage_bytes, wire_bytes
from ..model.transformer import Transformer
from .mesh import check_layout
from .stages import part_of, stages_of


@dataclass(frozen=True)
class Layout:
    """A world of dp x pp ranks whose data-parallel ranks split the experts ep ways."""

    dp: int
    ep: int
    pp: int

    def config(self, base: LearnerConfig | None = None) -> LearnerConfig:
        """`base` in this layout."""
        return replace(base or LearnerConfig(), ep=self.ep, pp=self.pp)


def legal_layouts(shape: ModelConfig, world: int) -> list[Layout]:
    """Every layout that `check_layout` takes with one stage a rank: dp pp = world, ep | dp, ep | experts, pp <= layers.

    >>> shape = ModelConfig(vocab=8, width=8, layers=2, heads=2, experts=6, top_k=1, expert_width=8)
    >>> [(x.dp, x.ep, x.pp) for x in legal_layouts(shape, 4)]
    [(4, 1, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)]
    """
    if world < 1:
        raise ConfigError(f"world={world} must be at least 1")
    return [
        Layout(world // pp, ep, pp)
        for pp in range(1, min(world, shape.layers) + 1)
        for ep in range(1, shape.experts + 1)
        if world % pp == 0 and (world // pp) % ep == 0 and shape.experts % ep == 0
    ]


def held(shape: ModelConfig, config: LearnerConfig, pp_rank: int = 0, ep_rank: int = 0) -> list[Held]:
    """The parameters that one rank of a layout holds, by name and shape; nothing is allocated."""
    part = part_of(config, shape, pp_rank, ep_rank)
    model = Transformer(shape, device="meta", seed=None, part=part)
    twice = shape.tied_head and config.pp > 1 and config.pipeline != "zbv"
    return [
        Held(name, tuple(p.shape), expert=p.ndim == 3, tied=twice and name == "embed.weight")
        for name, p in model.named_parameters()
    ]


def rank_storage(
    shape: ModelConfig, config: LearnerConfig, world: int, dtype: torch.dtype, pp_rank: int = 0, ep_rank: int = 0
) -> dict[str, int]:
    """`measure.plan.storage_bytes` of one rank of a world."""
    check_layout(config, shape, world)
    return storage_bytes(held(shape, config, pp_rank, ep_rank), config, dtype, world // config.pp)


def in_flight(config: LearnerConfig, pp_rank: int, microbatches: int) -> int:
    """How many (microbatch, stage) pairs a pipeline rank keeps activations of at its fullest moment.

    1f1b: those that left before the first comes back, pp - rank. interleaved: the warm-up of
    torch's schedule, (stages - 1) pp + 2 (pp - 1 - rank), and the one that runs. zbv: at most 2 pp.
    """
    if config.pp == 1:
        return 1
    chunks, behind = config.stages_per_rank, config.pp - 1 - pp_rank
    most = {"1f1b": behind + 1, "zbv": 2 * config.pp}
    return min(most.get(config.pipeline, (chunks - 1) * config.pp + 2 * behind + 1), chunks * microbatches)


def _boundaries(config: LearnerConfig, pp_rank: int) -> int:
    """Transfers that one microbatch makes from this pipeline rank to others, forward and backward."""
    if config.pp == 1:
        return 0
    home = {s: r for r in range(config.pp) for s in stages_of(config, r)}
    return sum(home.get(n, pp_rank) != pp_rank for s in stages_of(config, pp_rank) for n in (s - 1, s + 1))


def plan_rank(
    shape: ModelConfig, config: LearnerConfig, world: int, dtype: torch.dtype, work: Microbatch, microbatches: int,
    pp_rank: int = 0, device: str = "cuda",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Memory and wire bytes of one pipeline rank (all its data-parallel and expert ranks are alike).

    Returns:
        memory: parameters, gradients (at their peak), optimizer (masters and moments), activations (of all
        microbatches in flight, and one recomputation), total; wire: as `measure.plan.wire_bytes`.
    """
    mine, dp = held(shape, config, pp_rank), world // config.pp
    stored = storage_bytes(mine, config, dtype, dp)
    runs = part_of(config, shape, pp_rank).stages
    kept = [activation_bytes(shape, work, dtype, config, run, device) for run in runs]
    memory = {
        "parameters": stored["parameters"],
        "gradients": stored["gradients_peak"],
        "optimizer": stored["masters"] + stored["moments"],
        "activations": in_flight(config, pp_rank, microbatches) * sum(k["total"] for k in kept) // len(runs)
        + max(k["again"] for k in kept),
    }
    layers = [i for start, stop in runs for i in range(start, stop)]
    wire = wire_bytes(mine, shape, config, work, dtype, dp, microbatches=microbatches, layers=layers,
                      boundaries=_boundaries(config, pp_rank))  # fmt: skip
    return {"memory": memory | {"total": sum(memory.values())}, "wire": wire}


def layout_table(
    shape: ModelConfig,
    world: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: LearnerConfig | None = None,
    microbatch_rows: int = 1,
    length: int | None = None,
    batch_rows: int | None = None,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Every legal layout with its predicted memory and wire bytes, the one that needs least memory a rank first.

    Args:
        shape: the model's.
        world: ranks.
        dtype: of the parameters.
        config: zero, recompute, elide; its ep and pp are replaced, its schedule is 1f1b.
        microbatch_rows: rows of one forward on one rank.
        length: tokens of a row; None = 4096, or the model's longest if that is less.
        batch_rows: rows of one step over all ranks; None = one microbatch for each rank of the world.
        device: "cuda" or "cpu"; see `activation_bytes`.

    Returns:
        Dictionaries: dp, ep, pp, experts (of a rank), layers (of each stage), microbatches (of a rank and step), rank
        (the pipeline rank with the most memory), memory (its bytes, see `plan_rank`), wire (of the rank that sends
        most).

    Raises:
        ConfigError: a number below 1, or rows longer than the model's positions.
    """
    length = min(4096, shape.max_positions) if length is None else length
    batch_rows = world * microbatch_rows if batch_rows is None else batch_rows
    for name, n in {"microbatch_rows": microbatch_rows, "length": length, "batch_rows": batch_rows}.items():
        if n < 1 and world >= 1:
            raise ConfigError(f"{name}={n} must be at least 1")
    if length > shape.max_positions:
        raise ConfigError(
            f"length={length} is more than the model's {shape.max_positions} positions; make rows shorter"
        )
    base = replace(config or LearnerConfig(), pipeline="1f1b", stages_per_rank=1)
    work, table = Microbatch.full(microbatch_rows, length), []
    for layout in legal_layouts(shape, world):
        c = layout.config(base)
        count = ceil(batch_rows / (layout.dp * microbatch_rows))
        ranks = [plan_rank(shape, c, world, dtype, work, count, r, device) for r in range(c.pp)]
        fullest = max(range(c.pp), key=lambda r: ranks[r]["memory"]["total"])
        stages = [part_of(c, shape, r).stages[0] for r in range(c.pp)]
        table.append(
            {"dp": layout.dp, "ep": layout.ep, "pp": layout.pp, "experts": shape.experts // layout.ep,
             "layers": [stop - start for start, stop in stages], "microbatches": count, "rank": fullest,
             "memory": ranks[fullest]["memory"],
             "wire": max((r["wire"] for r in ranks), key=lambda w: w["total"])}
        )  # fmt: skip
    return sorted(table, key=lambda row: (row["memory"]["total"], row["wire"]["total"]))


CONVENTION = """\
Memory: of the fullest rank. Parameters, gradients and optimizer (fp32 masters and moments) are exact; activations are
what autograd keeps for the microbatches in flight under 1F1B, plus one recomputation. Buffers of kernels, collectives
and the allocator come on top. Wire: what the rank that sends most sends in one training step, with balanced routing;
all-reduces are counted as rings. Rows are one document each, every position labelled."""


def render(table: list[dict[str, Any]]) -> str:
    """The table as text, in GiB (MiB where all is small), with its convention."""
    large = max(max(row["memory"]["total"], row["wire"]["total"]) for row in table) >= 2**30
    unit, name = (2**30, "GiB") if large else (2**20, "MiB")
    memory = ("parameters", "gradients", "optimizer", "activations", "total")
    wire = ("gradients", "parameters", "rows", "pipeline", "total")
    head = ("dp", "ep", "pp", "experts", "layers", "microb.")
    lines = [[*head, *memory, *wire]]
    for row in table:
        few, many = min(row["layers"]), max(row["layers"])
        lines.append([
            *(str(row[k]) for k in ("dp", "ep", "pp", "experts")), f"{few}-{many}" if few < many else str(few),
            str(row["microbatches"]),
            *(f"{row['memory'][k] / unit:.2f}" for k in memory), *(f"{row['wire'][k] / unit:.2f}" for k in wire),
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    cut = len(head) + len(memory)  # a bar before memory and before wire
    text = ["  ".join(("| " if i in (len(head), cut) else "") + cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(line, widths))) for line in lines]  # fmt: skip
    spans = [sum(widths[a:b]) + 2 * (b - a) for a, b in ((0, len(head)), (len(head), cut))]
    top = f"{'a rank holds':<{spans[0]}}| {f'memory of a rank, {name}':<{spans[1]}}| sent by a rank in a step, {name}"
    return "\n".join([top, *text, "", CONVENTION])
