"""What one rank of one layout holds and sends in a step, component by component: `moekit.plan`'s bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.save import MANIFEST
from ..config import LearnerConfig, ModelConfig, RunConfig
from ..learner import layouts
from ..learner.stages import chunks, part_of, stages_of
from ..learner.weights import from_checkpoint
from ..measure import plan as sizes
from ..measure.plan import Held, Microbatch
from ..rollout.weight_transfer import CHUNK
from ..workloads import RLConfig
from .plan_step import Ranks, Step
from .setup import DTYPES, model_shape

AHEAD = 4096  # prompt tokens that an engine reads together
NOTHING = Microbatch(0, 0, 0, ())
STATE = ("parameters", "gradients", "masters", "moments", "mxfp8")


def held(shape: ModelConfig, config: LearnerConfig, pp_rank: int) -> tuple[Held, ...]:
    """As `layouts.held`, made once for each layout."""
    return _held(shape, _plain(config, zero=2, reduce="step", recompute="none"), pp_rank)


@lru_cache(maxsize=4096)
def _plain(config: LearnerConfig, **changes: Any) -> LearnerConfig:
    """The config with what does not matter set to one value, so that what is alike is computed once."""
    return replace(config, **changes)


@lru_cache(maxsize=4096)
def _held(shape: ModelConfig, config: LearnerConfig, pp_rank: int) -> tuple[Held, ...]:
    return tuple(layouts.held(shape, config, pp_rank))


@lru_cache(maxsize=16384)
def _stored(shape: ModelConfig, config: LearnerConfig, dtype: torch.dtype, dp: int, pp_rank: int) -> dict[str, int]:
    return sizes.storage_bytes(held(shape, config, pp_rank), config, dtype, dp)


@lru_cache(maxsize=16384)
def _summed(shape, config: LearnerConfig, dtype, dp: int, pp_rank: int, microbatches: int) -> dict[str, float]:
    mine = held(shape, config, pp_rank)
    return sizes.wire_bytes(mine, shape, config, NOTHING, dtype, dp, microbatches=microbatches, layers=())


def model_bytes(shape: ModelConfig, config: LearnerConfig, pp_rank: int, dtype: torch.dtype) -> int:
    """Parameters of a rank tensor by tensor, without buckets, and the router's selection biases."""
    return _numel(shape, _plain(config, zero=2, reduce="step", recompute="none"), pp_rank) * dtype.itemsize + (
        bias_bytes(shape, config, pp_rank)
    )


@lru_cache(maxsize=4096)
def _numel(shape: ModelConfig, config: LearnerConfig, pp_rank: int) -> int:
    return sum(prod(h.shape) for h in held(shape, config, pp_rank))


def bias_bytes(shape: ModelConfig, config: LearnerConfig, pp_rank: int) -> int:
    """Selection biases, float32, of the layers of a pipeline rank."""
    runs = part_of(config, shape, pp_rank).stages if shape.selection_bias else ()
    return 4 * shape.experts * sum(i not in shape.dense_layers for a, b in runs for i in range(a, b))


def critic_shape(config: RunConfig, shape: ModelConfig) -> ModelConfig:
    """Of the critic that a config names: a checkpoint's, a folder's or preset's, or the policy's, with a value head."""
    name = getattr(config, "critic", None)
    if name is not None:
        saved = (Path(name) / MANIFEST).exists()
        shape = from_checkpoint(name, device="meta").config if saved else model_shape(name)
    return replace(shape, value_head=True, tied_head=False)


@lru_cache(maxsize=65536)
def kept_bytes(
    shape, work: Microbatch, dtype, config: LearnerConfig, run: tuple[int, int], device: str
) -> tuple[int, int]:
    """Bytes of the activations of layers [start, stop) and of the largest recomputation, remembered."""
    found = sizes.activation_bytes(shape, work, dtype, config, run, device)
    return found["total"], found["again"]


def learner_bytes(
    shape: ModelConfig, config: LearnerConfig, updates: list[Ranks], dtype: torch.dtype, dp: int, pp_rank: int,
    device: str,
) -> dict[str, int]:  # fmt: skip
    """A learner's state, the activations of the fullest dp rank at its fullest moment, and buffers of the exchange."""
    found = _stored(shape, _plain(config, recompute="none"), dtype, dp, pp_rank)
    out = {k: found[k] for k in ("parameters", "masters", "moments")}
    out |= {"gradients": found["gradients_peak"], "mxfp8": found["caches"]}
    out["parameters"] += bias_bytes(shape, config, pp_rank)
    runs, plain = part_of(config, shape, pp_rank).stages, _plain(config, zero=2, reduce="step")
    most = again = 0
    for rank in {tuple(rank) for ranks in updates for rank in ranks}:
        flying = layouts.in_flight(config, pp_rank, len(rank))
        kept = {m: [kept_bytes(shape, m, dtype, plain, run, device) for run in runs] for m in set(rank)}
        each = [sum(total for total, _ in kept[m]) // len(runs) for m in rank]
        windows = [sum(each[at : at + flying]) for at in range(max(1, len(each) - flying + 1))]
        most = max(most, max(windows, default=0))
        again = max(again, max((a for k in kept.values() for _, a in k), default=0))
    return out | {"activations": most, "recomputed": again, "dispatch": exchange(shape, config, updates, dtype, device)}


def exchange(shape: ModelConfig, config: LearnerConfig, updates: list[Ranks], dtype: torch.dtype, device: str) -> int:
    """`sizes.exchange_bytes` of the largest microbatch that the ranks of one expert group run together."""
    most = 0
    for ranks in updates if config.ep > 1 else ():
        for at in range(0, len(ranks), config.ep):
            peers = ranks[at : at + config.ep]
            for i in range(max(map(len, peers))):
                rows = [r[i].routed(config.elide, last=False) if i < len(r) else 0 for r in peers]
                most = max(most, sizes.exchange_bytes(shape, config, rows, dtype, device))
    return most


def rank_bytes(
    shape: ModelConfig, critic: ModelConfig | None, step: Step, learner: LearnerConfig, own: LearnerConfig, world: int,
    rank: int, device: str,
) -> dict[str, int]:  # fmt: skip
    """What one rank of the world holds of policy, reference and critic (whose layout is `own`), by component."""
    dtype, dp = DTYPES[step.config.dtype], world // learner.pp
    out = learner_bytes(shape, learner, step.trained(dp), dtype, dp, rank // dp, device)
    if step.scores["reference"]:
        out["reference"] = model_bytes(shape, learner, rank // dp, dtype)
        if learner.precision == "mxfp8":
            out["reference"] += sizes.cache_bytes(held(shape, learner, rank // dp), backward=False)
    if critic is not None:
        dp = world // own.pp
        found = learner_bytes(critic, own, step.trained(dp), dtype, dp, rank // dp, device)
        out |= {f"critic/{k}": n for k, n in found.items()}
    return out


def engine_bytes(shape: ModelConfig, step: Step, learner: LearnerConfig, world: int, rank: int, device: str):
    """A rank's engine: its weights, what a transfer takes besides, keys and values, and those of prompts that wait. An
    engine on the learner's own weights needs none, vLLM's are on its server; of those rank 0 keeps a copy in its
    host's memory ("staging" on a CPU).

    transfer: a staging copy ("atomic"), the ring of an engine in a process of its own, two chunks where weights are
    cast. On a CPU the copy and the ring are kept ("staging"), and so is the copy that starts such an engine again.
    """
    c = step.config
    if not isinstance(c, RLConfig):
        return {}
    if c.engine == "vllm":
        return {"staging": served_bytes(c, shape)} if rank == 0 and device == "cpu" else {}
    kind, mine = DTYPES[c.rollout_dtype or c.dtype], step.mine(rank, world)
    out: dict[str, int] = {"serving": 0, "staging": 0, "transfer": 0}
    if not shares(c, learner):
        out["serving"] = whole = served_bytes(c, shape)
        kept = c.engine == "process" and device == "cpu" and (c.staleness > 0 or learner.pp * learner.ep > 1)
        casts = c.rollout_dtype not in (None, c.dtype)
        copies = whole * ((c.update_mode == "atomic") + kept) + 4 * CHUNK * (c.engine == "process")
        out |= {"staging": copies * (device == "cpu"), "transfer": copies * (device != "cpu") + 2 * CHUNK * casts}
    if mine:
        slots, room = min(c.slots, sum(len(a) for _, a in mine)), max(p for p, _ in mine) + c.max_new_tokens
        reads = [0]
        for p, _ in mine:
            reads.append(reads[-1] + p if reads[-1] and reads[-1] + p <= AHEAD else p)
        out["kv_cache"] = sizes.kv_cache_bytes(shape, slots, room, kind)
        out["prompts"] = sizes.kv_cache_bytes(shape, 1, max(reads), kind)
    return out


def served_bytes(config: RLConfig, shape: ModelConfig) -> int:
    """Weights of one engine: of the whole model, or of the slice of its experts that a rank serves."""
    served = LearnerConfig(ep=config.serve_ep or 1)
    return model_bytes(shape, served, 0, DTYPES[config.rollout_dtype or config.dtype])


def shares(config: RLConfig, learner: LearnerConfig) -> bool:
    """Whether the engine stands on the learner's own weights (`placement.engine_of`)."""
    same = config.rollout_dtype in (None, config.dtype) and (config.serve_ep or 1) == 1
    return config.engine == "embedded" and same and learner.pp == learner.ep == 1


def sent_bytes(
    shape: ModelConfig, config: LearnerConfig, dtype: torch.dtype, ranks: Ranks, pp_rank: int, trains: bool
) -> dict[str, float]:
    """What the busiest dp rank of a pipeline rank sends in one optimizer step, or in one pass without gradient."""
    most = dict[str, float]()
    plain = _plain(config, zero=2, reduce="step", recompute=config.recompute if trains else "none")
    for rank in {tuple(r) for r in ranks}:
        sums = _summed(shape, _plain(config, recompute="none"), dtype, len(ranks), pp_rank, len(rank))
        out = dict.fromkeys(("gradients", "parameters"), 0.0) | (sums if trains else {})
        out["rows"], out["pipeline"] = _travels(shape, plain, dtype, rank, pp_rank, trains)
        most = max(most, out, key=lambda w: sum(w.values()) if w else -1.0)
    return {k: n for k, n in most.items() if k != "total"}


@lru_cache(maxsize=65536)
def _travels(
    shape: ModelConfig, config: LearnerConfig, dtype: torch.dtype, rank: tuple[Microbatch, ...], pp_rank: int,
    trains: bool,
) -> tuple[float, float]:  # fmt: skip
    """Bytes of expert rows and of hidden states that a rank sends."""
    runs, stages = part_of(config, shape, pp_rank).stages, stages_of(config, pp_rank)
    inner, total = [i for a, b in runs for i in range(a, b)], config.pp * len(runs)
    sends = sum(0 <= n < total and n not in stages for s in stages for n in ((s - 1, s + 1) if trains else (s + 1,)))
    each = lambda m: sizes.wire_bytes((), shape, config, m, dtype, 1, microbatches=1, layers=inner)["rows"]
    rows = sum(n * each(m) for m, n in Counter(rank).items())
    longest = max((m.positions for m in rank), default=0)
    hidden = chunks(config, len(rank)) * sends * longest * shape.width * dtype.itemsize
    return rows / (1 if trains else 2), float(hidden)


def wire(
    shape: ModelConfig, critic: ModelConfig | None, step: Step, learner: LearnerConfig, own: LearnerConfig, world: int
) -> dict[str, float]:
    """Bytes by kind that the busiest rank sends in one step; those of passes without gradient by component, and of the
    weights on their way to the engines the mean of all ranks."""
    dtype, most = DTYPES[step.config.dtype], dict[str, float]()
    for rank in range(0, world, min(world // learner.pp, world // own.pp)):
        out = dict[str, float]()
        for name, model, how in (("", shape, learner), ("critic ", critic, own)):
            dp = world // how.pp
            for ranks in step.trained(dp) if model is not None else ():
                assert model is not None
                for kind, n in sent_bytes(model, how, dtype, ranks, rank // dp, True).items():
                    out[f"{name}{kind}"] = out.get(f"{name}{kind}", 0.0) + n
        for name, needed in step.scores.items():
            how, model = (own, critic) if name == "critic" else (learner, shape)
            if needed and model is not None:
                dp = world // how.pp
                out[f"{name} score"] = sum(sent_bytes(model, how, dtype, step.scored(dp), rank // dp, False).values())
        most = max(most, out, key=lambda w: sum(w.values()) if w else -1.0)
    c = step.config
    if isinstance(c, RLConfig):
        kind = DTYPES[c.rollout_dtype or c.dtype]
        have = [model_bytes(shape, learner, pp_rank, kind) for pp_rank in range(learner.pp)]
        each = [max(0, served_bytes(c, shape) - n) for n in have]
        most["transfer"] = each[0] / world if c.engine == "vllm" else sum(each) / learner.pp
    return most | {"total": sum(most.values())}
