"""One rank of four: real steps of several layouts, with bytes on the wire and saved activations counted, beside plans.

Routes are replayed and balanced: position n goes to experts n % 2 and 2 + n % 2, of which each ep rank holds one pair.
Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.learner.layouts import plan_rank
from moekit.learner.learner import Learner
from moekit.learner.mesh import World, place
from moekit.measure.memory import saved_bytes
from moekit.measure.plan import Microbatch, activation_bytes
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

SHAPE = ModelConfig(
    vocab=50, width=32, layers=4, heads=4, kv_heads=2, experts=4, top_k=2, expert_width=24, dense_layers=(1,),
    dense_width=40,
)  # fmt: skip
TIED = replace(SHAPE, tied_head=True)
MXFP8 = replace(SHAPE, expert_width=32)
LENGTH, MICROBATCHES = 64, 2
C = LearnerConfig
CASES = {
    "dp 4, zero 0": (C(zero=0), SHAPE),
    "dp 4, zero 1": (C(zero=1), SHAPE),
    "dp 4, zero 2": (C(), SHAPE),
    "dp 4, reduced after every microbatch": (C(reduce="microbatch"), SHAPE),
    "dp 4 ep 2, sync": (C(ep=2), SHAPE),
    "dp 4 ep 2, sync, recompute moe": (C(ep=2, recompute="moe"), SHAPE),
    "dp 4 ep 2, sync, recompute block": (C(ep=2, recompute="block"), SHAPE),
    "dp 4 ep 2, shared memory": (C(ep=2, dispatch="rowwise", transport="shared_memory"), SHAPE),
    "dp 4 ep 2, padded": (C(ep=2, dispatch="rowwise", transport="padded"), SHAPE),
    "dp 4 ep 2, padded, recompute moe": (C(ep=2, dispatch="rowwise", transport="padded", recompute="moe"), SHAPE),
    "dp 4 ep 2, sync, mxfp8": (C(ep=2, precision="mxfp8"), MXFP8),
    "dp 4 ep 2, shared memory, mxfp8": (
        C(ep=2, dispatch="rowwise", transport="shared_memory", precision="mxfp8"),
        MXFP8,
    ),
    "pp 2, tied": (C(pp=2), TIED),
    "pp 2 ep 2, recompute block": (C(pp=2, ep=2, recompute="block"), SHAPE),
    "pp 4, two idle microbatches": (C(pp=4), SHAPE),
    "pp 2 interleaved, tied, zero 1": (C(pp=2, pipeline="interleaved", stages_per_rank=2, zero=1), TIED),
    "pp 2 zbv, ep 2": (C(pp=2, pipeline="zbv", stages_per_rank=2, ep=2), TIED),
}
LOW = ("dp 4, zero 2", "dp 4 ep 2, shared memory", "pp 2 ep 2, recompute block")  # in bfloat16 too
KINDS = ("gradients", "parameters", "rows", "pipeline")


def run(config: LearnerConfig, shape: ModelConfig, dtype: torch.dtype, world: World) -> dict:
    """Bytes of one step on this rank, predicted and counted; saved activations of one microbatch where pp = 1."""
    torch.set_num_threads(1)
    learner = Learner(Transformer(shape, dtype=dtype), SFT(), config, world)
    g = torch.Generator().manual_seed(learner.mesh.dp.rank)
    batch = Batch.make(torch.randint(0, shape.vocab, (MICROBATCHES, LENGTH), generator=g))
    flats = [b.flat for b in batch.split(1)]
    n = torch.arange(LENGTH)
    routes = [torch.stack((n % 2, 2 + n % 2), 1)] * len(shape.moe_layers)
    learner.step(batch.split(1), replay=[routes] * MICROBATCHES)
    sent = {k: learner.mesh.wire.sent[k] for k in KINDS}
    pp_rank, _ = place(config, world.rank, world.size)
    planned = plan_rank(
        shape, config, world.size, dtype, Microbatch.of(flats[0]), MICROBATCHES, pp_rank, "cpu"
    )  # fmt: skip
    result = {"sent": sent, "wire": {k: planned["wire"][k] for k in KINDS}}
    if config.pp == 1:
        with saved_bytes(learner.model) as saved:
            learner.step(batch.split(1)[:1], replay=[routes])
        result["saved"] = saved.bytes
        result["activations"] = activation_bytes(shape, Microbatch.of(flats[0]), dtype, config)["total"]
    return result


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases, leave the results in a file."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {}
    for name, (config, shape) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if name in LOW else 1]:
            results[name, dtype] = run(config, shape, dtype, World.current())
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
