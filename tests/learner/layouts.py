"""What the layout tests run in every process: an unsymmetric batch, cut in many ways, through three AdamW steps.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=5, top_k=1, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, gate="softmax", qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
ROUTER = RouterLossConfig(balance=0.05, z=0.01)
CONFIG = LearnerConfig(
    lr=0.01, weight_decay=0.1, clip_norm=0.5, warmup_steps=2, router=ROUTER, bias_rate=0.01, schedule="cosine",
    total_steps=10,
)  # fmt: skip


def batch(seed=0) -> Batch:
    """8 rows of 12: uneven lengths and labels; rows 2, 3, 6 and 7 have no label (so has rank 1 of 2, see `take`)."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MODEL.vocab, (8, 12), generator=g)
    segment = torch.full((8, 12), -1)
    for row, lengths in enumerate([(7, 3), (12,), (2, 2, 2), (5,), (1, 10), (4, 4, 4), (), (11,)]):
        at = 0
        for s, n in enumerate(lengths):
            segment[row, at : at + n] = s
            at += n
    whole = Batch.make(ids, segment=segment)
    labels = whole.labels.clone()
    labels[torch.rand(8, 12, generator=g) < 0.4] = -100
    labels[[2, 3, 6, 7]] = -100
    return Batch.make(ids, segment=segment, labels=labels)


def take(whole: Batch, rank: int, size: int) -> Batch:
    """Rows of one rank: pairs of rows go to ranks in turn, so that with 2 ranks rank 1 has no label at all."""
    pick = [r for r in range(whole.rows) if (r // 2) % size == rank]
    return Batch.make(whole.input_ids[pick], segment=whole.segment[pick], labels=whole.labels[pick])


def model(dtype, config=MODEL) -> Transformer:
    """Expert 0 gets more than half of the rows in every layer, the last expert none."""
    m = Transformer(config, dtype=dtype, seed=1)
    for block in m.layers:
        if block.routes and config.selection_bias:
            block.moe.router.selection_bias.copy_(torch.tensor([0.8, 0.0, 0.0, 0.0, -10.0]))
    return m


def run(
    world: World, dtype, rows: int, steps: int = 3, learner_config=CONFIG, config=MODEL, denominator="global_tokens"
):
    """`steps` optimizer steps; what every rank must agree on, as plain tensors and numbers."""
    torch.set_num_threads(1)
    learner = Learner(model(dtype, config), SFT(denominator), learner_config, world)
    first = None
    for step in range(steps):
        metrics = learner.step(take(batch(step), world.rank, world.size).split(rows))
        learner.counter.check()
        if step == 0:
            first = metrics | {"gradient": {n: g.clone() for n, g in learner.gradient().items()}}
            counts = learner.counter.measures["policy", "forward"].decided_LCE.clone()
    return first | {
        "parameters": learner.gathered("parameter"),
        "bias": {n: b.clone() for n, b in learner.model.named_buffers() if n.endswith("selection_bias")},
        "decided": counts,
        "last": metrics,
    }


CASES = {
    "float64": {"dtype": torch.float64, "rows": 8},
    "float64, 4 microbatches": {"dtype": torch.float64, "rows": 2},
    "float64, rows one by one": {"dtype": torch.float64, "rows": 1},
    "float64, last layer elided": {
        "dtype": torch.float64, "rows": 2, "learner_config": replace(CONFIG, elide="padding+last_layer")
    },
    "float64, nothing elided": {"dtype": torch.float64, "rows": 4, "learner_config": replace(CONFIG, elide="none")},
    "float64, sequence mean": {"dtype": torch.float64, "rows": 2, "denominator": "sequence_mean"},
    "float64, one microbatch a rank, microbatch balance": {
        "dtype": torch.float64, "rows": 8,
        "learner_config": replace(CONFIG, router=replace(ROUTER, granularity="microbatch"), clip_norm=None),
    },
    "float32": {"dtype": torch.float32, "rows": 8},
    "float32, 4 microbatches": {"dtype": torch.float32, "rows": 2},
}  # fmt: skip


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases, leave the results in a file."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World.current()
    results = {name: run(world, **case) for name, case in CASES.items()}
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
