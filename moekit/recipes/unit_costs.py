"""Seconds of a plan from the unit costs of a machine: measured here, read from a file, or peak figures for a floor.

Axis letters: N positions, E experts, K experts per position, D width, F expert width, H heads, d head width.
"""

from __future__ import annotations

import json
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, exp, log
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .. import ops
from ..config import LearnerConfig, ModelConfig
from ..data.batch import Batch
from ..errors import ConfigError
from ..launch.submit import submit
from ..measure.cost import Work, step_flops
from ..measure.machine import processor
from ..measure.plan import Microbatch
from ..model.attention import document_attention
from ..model.transformer import Transformer
from ..rollout.embedded import EmbeddedEngine
from ..rollout.engine import Sampling
from ..workloads import RLConfig
from . import plan_bytes
from .plan_step import Ranks, Step
from .setup import DTYPES


@dataclass(frozen=True)
class UnitCosts:
    """Rates of one rank. `load` and `save` keep them as JSON.

    Rates of matmuls and attention are over forward and backward together, with the FLOPs of `measure.cost.CONVENTION`.
    """

    name: str  # what was measured, where and how; or whose peak figures these are
    device: str
    dtype: str
    experts: tuple[tuple[float, float], ...]  # (rows of an expert, FLOP/s of its matmuls), by rows
    matmul: float  # FLOP/s of other matmuls
    attention: float  # FLOP/s of causal attention
    copy: float  # bytes/s, read and written
    wire: float | None = None  # bytes/s that a rank sends in an all-to-all; None = unknown: no seconds for many ranks
    layer_s: float = 0.0  # seconds of a layer's forward and backward besides its work
    decode_layer_s: float = 0.0  # seconds of a layer in a decoding step besides its work
    floor: bool = False  # peak figures: computing, memory and wire overlap wholly, so that no run is faster

    @staticmethod
    def peak(name: str, flops: float, copy: float, wire: float | None = None, device: str = "cuda") -> UnitCosts:
        """A floor from a device's figures, which you give: FLOP/s in the dtype of the run, bytes/s of memory and wire.

        >>> UnitCosts.peak("a data sheet", 1e15, 3e12, 4e11).floor
        True
        """
        return UnitCosts(name, device, "", ((1.0, flops),), flops, flops, copy, wire, floor=True)

    @staticmethod
    def load(path: str | Path) -> UnitCosts:
        """Read a file that `save` wrote. Raises ConfigError: there is none, or it is another kind of file."""
        try:
            found = json.loads(Path(path).read_text())
            return UnitCosts(**found | {"experts": tuple(map(tuple, found["experts"]))})
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(
                f"costs={str(path)!r}: no unit costs ({problem}); measure_unit_costs().save(path)"
            ) from None

    def save(self, path: str | Path) -> Path:
        """Write them to a file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")
        return Path(path)

    def expert_rate(self, rows: float) -> float:
        """FLOP/s of experts with so many rows each: between measured ones by logarithms, beyond them the nearest.

        >>> UnitCosts("", "cpu", "", ((1.0, 1e9), (100.0, 1e11)), 1, 1, 1).expert_rate(10)
        10000000000.0
        """
        known = [r for r, _ in self.experts]
        at = bisect_left(known, rows)
        if at in (0, len(known)):
            return self.experts[min(at, len(known) - 1)][1]
        (a, x), (b, y) = self.experts[at - 1 : at + 1]
        return round(exp(log(x) + (log(y) - log(x)) * (log(rows) - log(a)) / (log(b) - log(a))), 3)


def measure_unit_costs(
    model: ModelConfig, *, dtype: str = "float32", device: str = "cpu", ranks: int = 1,
    rows: Sequence[int] = (1, 4, 16, 64, 256), positions: int = 1024,
) -> UnitCosts:  # fmt: skip
    """Measure this machine's unit costs for the widths of a model: some seconds, best of three of each.

    Args:
        model: its width, experts, heads and vocabulary are taken; of its layers one.
        ranks: above 1 the wire too: an all-to-all of 8 MB between so many processes on this machine.
        rows: rows of an expert at which its matmuls are timed.
        positions: of a document in attention and in the other matmuls.
    """
    kind, g = DTYPES[dtype], torch.Generator().manual_seed(0)
    make = lambda *size: (torch.randn(size, generator=g) * 0.02).to(kind).to(device).requires_grad_()
    D, Fx, E = model.width, model.expert_width, model.experts
    weights, curve = (make(E, 2 * Fx, D), make(E, D, Fx)), []
    for n in rows:
        order = ops.sort_rows(torch.arange(n * E, device=device)[:, None] % E, E)
        x, gate = make(n * E, D), make(n * E, 1)
        seconds = _best(lambda: ops.moe_ffn(x, order, gate, *weights), (x, *weights), device)  # noqa: B023
        curve.append((float(n), 18 * D * Fx * n * E / seconds))
    x, w = make(positions, D), make(max(D, model.vocab // 4), D)
    matmul = 6 * w.numel() * positions / _best(lambda: F.linear(x, w), (x, w), device)
    flat = Batch.make(torch.zeros(1, positions, dtype=torch.long)).flat.to(device)
    q, k, v = (make(positions, h, model.head_dim) for h in (model.heads, model.kv_heads, model.kv_heads))
    spent = _best(lambda: document_attention(q, k, v, flat), (q, k, v), device)
    attention = 12 * model.heads * model.head_dim * Microbatch.full(1, positions).pairs / spent
    a, b = torch.ones(2, 1 << 26, dtype=torch.uint8, device=device)
    copy = 2 * a.nbytes / _best(lambda: a.copy_(b), (), device)
    small = replace(model, layers=8, vocab=32, dense_layers=(), width=32, heads=2, kv_heads=2, head_dim=16,
                    expert_width=32, experts=min(E, 8), top_k=min(model.top_k, 8))  # fmt: skip
    tiny, batch = Transformer(small, dtype=kind, device=device), Batch.make(torch.arange(8)[None])
    layer_s = _best(lambda: tiny(batch).logprob_M, tuple(tiny.parameters()), device) / 8
    decode = _decode(tiny, device) / 8
    wire = _wire_rate(ranks, device) if ranks > 1 else None
    where = processor() if device == "cpu" else torch.cuda.get_device_name()
    what = f"measure_unit_costs({D=}, F={Fx}, {E=}, {dtype=}, {ranks=}) on {where}, {torch.get_num_threads()} threads, "
    name = what + f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    return UnitCosts(name, device, dtype, tuple(curve), matmul, attention, copy, wire, layer_s, decode)


def _best(forward: Callable[[], Any], inputs: Sequence[torch.Tensor], device: str) -> float:
    """Seconds of a forward, with its backward where there are inputs to differentiate by: the best of three."""
    spent = []
    for _ in range(4):
        began = time.perf_counter()
        y = forward()
        if inputs:
            torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return min(spent[1:])


def _decode(model: Transformer, device: str) -> float:
    """Seconds of one decoding step of one slot."""
    engine = EmbeddedEngine(model, device=device)
    how = lambda n: Sampling(max_new_tokens=n, temperature=0.0)
    few, many = (_best(lambda: engine.generate([[1, 2]], how(n)), (), device) for n in (2, 34))  # noqa: B023
    return max(1e-9, (many - few) / 32)


def _wire_rate(ranks: int, device: str) -> float:
    """Bytes/s that a rank sends in an all-to-all of 8 MB."""
    with tempfile.TemporaryDirectory() as folder:
        return min(submit(exchanged, nproc=ranks, threads=1, device=device, runs=folder).result())


def exchanged() -> float:
    """On every rank: bytes/s sent, the best of three exchanges after one."""
    size, device = dist.get_world_size(), "cuda" if "nccl" in dist.get_backend() else "cpu"
    x = torch.ones(size, (8 << 20) // size, dtype=torch.uint8, device=device)

    def exchange() -> torch.Tensor:
        dist.all_to_all_single(out := torch.empty_like(x), x)
        return out

    return (size - 1) / size * x.nbytes / _best(exchange, (), device)


def predict(
    costs: UnitCosts, shape: ModelConfig, critic: ModelConfig | None, step: Step, learner: LearnerConfig,
    own: LearnerConfig, world: int, wire: dict[str, float], held: dict[str, int],
) -> dict[str, float] | None:  # fmt: skip
    """Seconds of a step by phase and in all: computing at the measured rates, saved bytes once written and once read
    for each pass over them, wire. They are added up, or with `costs.floor` the longest of the three counts. So are
    phases; but sampling that goes on beside the rest, on a server or for a floor, counts where it takes longer.

    Predicted over measured, at width 256, 4 layers, 4 of 16 experts, float32, one thread a rank of an AMD EPYC, in CPU
    seconds, for others used the machine (2026-11-30): optimizer steps of SFT 1.03, DPO 0.91 and GRPO 0.97, on two
    ranks with ep=2 SFT 0.85, DPO 0.92 and GRPO 0.94; reference passes 0.90 to 0.94; sampling 0.76, on two ranks 1.06.
    A rank that waits for another, with more rows, comes on top. SFT's ratio here:
    pytest -s tests/recipes/test_plan.py -k predicted_against

    None: many ranks, and `costs.wire` is not known.
    """
    if world > 1 and costs.wire is None:
        return None
    c, out = step.config, dict[str, float]()
    sent = lambda *kinds: sum(wire.get(k, 0.0) for k in kinds) / (costs.wire or 1.0)
    join = lambda *parts: max(parts) if costs.floor else sum(parts)
    for name, model, how, mark in (("train", shape, learner, ""), ("critic", critic, own, "critic ")):
        if model is None:
            continue
        state = lambda k: held.get(f"{mark.replace(' ', '/')}{k}", 0)  # noqa: B023
        moved = 2 * (state("masters") + state("moments") + state("parameters")) + state("gradients")
        fullest = [_fullest(ranks) for ranks in step.trained(world // how.pp)]
        compute, memory = (sum(x) for x in zip(*(_work(costs, model, how, rank, c.dtype) for rank in fullest)))
        on_wire = sent(*(f"{mark}{k}" for k in ("gradients", "parameters", "rows", "pipeline")))
        out[name] = join(compute, memory + len(fullest) * moved / costs.copy, on_wire)
    for name in (k for k, needed in step.scores.items() if needed):
        model, how = (critic, own) if name == "critic" and critic else (shape, learner)
        rank = _fullest(step.scored(world // how.pp))
        out[f"{name} score"] = join(*_work(costs, model, how, rank, c.dtype, trains=False), sent(f"{name} score"))
    if isinstance(c, RLConfig):
        out["rollout"] = join(*_rollout(costs, shape, step, world))
        out["transfer"] = join(2 * held.get("serving", 0) / costs.copy, sent("transfer"))
    total, rollout = sum(out.values()), out.get("rollout", 0.0)
    if getattr(c, "staleness", 0) and (costs.floor or c.engine == "vllm"):  # type: ignore[attr-defined]
        total = max(rollout, total - rollout)
    return out | {"total": total}


def _fullest(ranks: Ranks) -> list[Microbatch]:
    return max(ranks, key=lambda rank: sum(m.positions for m in rank))


def _work(
    costs: UnitCosts, shape: ModelConfig, config: LearnerConfig, rank: Sequence[Microbatch], dtype: str,
    trains: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of computing and of memory traffic of one rank's microbatches, the idle time of 1F1B with them."""
    compute, memory, times, plain = 0.0, 0.0, 3 if trains else 1, replace(config, recompute="none")
    again = {"none": (0, 0), "moe": (1, 0), "block": (1, 1)}[config.recompute if trains else "none"]
    for m in rank:
        layers = [m.routed(config.elide, i == shape.layers - 1) for i in shape.moe_layers]
        rows = shape.top_k * sum(layers)
        work = Work(m.positions, m.real, m.labels, m.pairs)
        f = step_flops(shape, work, rows=(rows, 0), backward=False, elide=config.elide)
        each = rows / max(1, len(layers)) * config.ep / shape.experts
        compute += f["experts"] * (times + again[0]) / costs.expert_rate(each)
        compute += f["attention_scores"] * (times + again[1]) / costs.attention
        rest = f["forward"] - f["experts"] - f["attention_scores"]
        compute += (rest * (times + again[1]) - f["head"] * again[1]) / costs.matmul
        compute += shape.layers * costs.layer_s * (times + again[1]) / 3
        kept, _ = plan_bytes.kept_bytes(shape, m, DTYPES[dtype], plain, (0, shape.layers), costs.device)
        memory += 2 * kept * (times + again[1]) / costs.copy
    bubble = (len(rank) + config.pp - 1) / max(1, len(rank)) / config.pp
    return compute * bubble, memory * bubble


def _rollout(costs: UnitCosts, shape: ModelConfig, step: Step, world: int) -> tuple[float, float]:
    """Of the first rank, which has most prompts: reading them, then decoding steps of as many slots as are filled."""
    c, mine = step.config, step.mine(0, world)
    assert isinstance(c, RLConfig)
    kind = c.rollout_dtype or c.dtype
    answers = [(p, n) for p, a in mine for n in a if n > 1]
    tokens = sum(n - 1 for _, n in answers)
    runs = tuple((1, p) for p, _ in mine)
    read = Microbatch(sum(p for p, _ in mine), sum(p for p, _ in mine), len(mine), runs)
    compute, memory = _work(costs, shape, LearnerConfig(), [read], kind, trains=False)
    slots = min(c.slots, max(1, len(answers)))
    passes = max(max((n - 1 for _, n in answers), default=0), ceil(tokens / slots))
    pairs = sum((n - 1) * p + n * (n - 1) // 2 for p, n in answers)
    rows = tokens * shape.top_k * len(shape.moe_layers)
    f = step_flops(shape, Work(tokens, tokens, tokens, pairs), rows=(rows, 0), backward=False)
    each = tokens / max(1, passes) * shape.top_k / shape.experts
    compute += f["experts"] / costs.expert_rate(each) + (f["forward"] - f["experts"]) / costs.matmul
    compute += passes * shape.layers * costs.decode_layer_s
    dense = sum(torch.Size(h.shape).numel() for h in plan_bytes.held(shape, LearnerConfig(), 0) if not h.expert)
    width = DTYPES[kind].itemsize
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * pairs
    return compute, memory + (passes * dense + cached) * width / costs.copy
