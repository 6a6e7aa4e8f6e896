"""What the prefix-sharing tests run in every process: DPO pairs, with and without a shared prompt, on many layouts.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.preference import Pair, Pairs
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.dpo import DPO

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
CONFIG = LearnerConfig(
    lr=0.01, weight_decay=0.1, clip_norm=0.5, warmup_steps=2, router=RouterLossConfig(balance=0.05, z=0.01),
    bias_rate=0.01,
)  # fmt: skip
COUNT, LENGTH = 7, 64


def pairs(share: bool, dtype=torch.float64) -> Pairs:
    """Seven uneven pairs, one of them with a prompt of one token; reference log-probs drawn from the answers' ids."""
    g = torch.Generator().manual_seed(3)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    ids = lambda n: torch.randint(0, MODEL.vocab, (n,), generator=g).tolist()
    made = [Pair(ids(1 if i == 4 else draw(3, 14)), ids(draw(1, 6)), ids(draw(2, 12)), "made", i) for i in range(COUNT)]
    reference = lambda prompt, answer: -3 - torch.tensor(answer, dtype=dtype).sin() / (1 + len(prompt))
    return Pairs(made, LENGTH, share, reference=reference)


def take(data: Pairs, rank: int, size: int, each: int) -> list:
    """Microbatches of one rank: of 2 ranks the second has two pairs of seven, of 4 the last has none."""
    cuts = {1: [0, 7], 2: [0, 5, 7], 4: [0, 3, 4, 7, 7]}[size]
    mine = range(cuts[rank], cuts[rank + 1])
    return [data.batch(mine[at : at + each]).trim() for at in range(0, len(mine), each)]


@dataclass(frozen=True)
class Case:
    """One layout of `world` ranks; `config` = what is not as in CONFIG."""

    world: int
    share: bool = True
    each: int = 2  # pairs of a microbatch
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)

    def run(self, world: World) -> dict[str, Any]:
        """Three optimizer steps (one in float32); what every rank must agree on."""
        torch.set_num_threads(1)
        model = Transformer(MODEL, dtype=self.dtype, seed=1)
        for block in model.layers:
            if block.routes:  # expert 0 gets more than half of the positions, the last expert none
                block.moe.router.selection_bias.copy_(torch.tensor([0.4, *[0.0] * 6, -10.0]))
        learner = Learner(model, DPO(beta=0.5), replace(CONFIG, **self.config), world)
        dp, first = learner.mesh.dp, {}
        parts = take(pairs(self.share, self.dtype), dp.rank, dp.size, self.each)
        for step in range(3 if self.dtype == torch.float64 else 1):
            metrics = learner.step(parts)
            learner.counter.check()
            if step == 0:
                decided = learner.counter.measures["policy", "forward"].decided_LCE.clone()
                first = metrics | {"gradient": learner.gradient(), "decided": decided}
        return first | {"parameters": learner.gathered("parameter"), "last": metrics}


ROWWISE = {"dispatch": "rowwise", "transport": "shared_memory", "capacity": 4.0}
CASES = {
    "1, unshared, one microbatch": Case(1, False, 7),
    "1, unshared": Case(1, False),
    "1, one microbatch": Case(1, each=7),
    "1, pair by pair": Case(1, each=1),
    "1, recompute block, last layer elided": Case(1, config={"recompute": "block", "elide": "padding+last_layer"}),
    "1, unshared, float32": Case(1, False, 7, torch.float32),
    "1, float32": Case(1, dtype=torch.float32),
    "2, dp2": Case(2),
    "2, dp2, unshared": Case(2, False),
    "2, ep2": Case(2, config={"ep": 2}),
    "2, ep2, rowwise": Case(2, each=1, config={"ep": 2, **ROWWISE}),
    "2, pp2": Case(2, config={"pp": 2}),
    "2, ep2, float32": Case(2, dtype=torch.float32, config={"ep": 2}),
    "2, pp2, float32": Case(2, dtype=torch.float32, config={"pp": 2}),
    "4, dp4": Case(4, config={"zero": 1}),
    "4, pp2 ep2": Case(4, config={"pp": 2, "ep": 2, "recompute": "moe"}),
    "4, ep4": Case(4, config={"ep": 4}),
}


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases of its size, leave the results in a file."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {name: case.run(World.current()) for name, case in CASES.items() if case.world == size}
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
