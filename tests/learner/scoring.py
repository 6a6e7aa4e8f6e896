"""What the scoring tests run in every process: passes without gradient on many layouts, a critic's step, pairs' sums.

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
from moekit.data.batch import Batch
from moekit.learner.forward import Forward
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.ppo import ValueLoss

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
TIED = replace(MODEL, tied_head=True, gate="sigmoid", normalize_gates=True)
VALUE = replace(MODEL, value_head=True)
CONFIG = LearnerConfig(
    lr=0.01, weight_decay=0.1, clip_norm=0.5, router=RouterLossConfig(balance=0.05, z=0.01), bias_rate=0.01
)
ROWS, LENGTH = 9, 12


def batch() -> Batch:
    """9 rows of 12: uneven lengths, a shared prompt, a row of padding, rows 2 and 3 without label. `place` names each
    position, so that what is said of it can be compared between layouts."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, MODEL.vocab, (ROWS, LENGTH), generator=g)
    segment, parent = torch.full((ROWS, LENGTH), -1), torch.full((ROWS, LENGTH), -1)
    for row, lengths in enumerate([(7, 3), (12,), (2, 2, 2), (5,), (1, 10), (4, 4, 4), (), (11,), (3,)]):
        at = 0
        for s, n in enumerate(lengths):
            segment[row, at : at + n] = s
            at += n
    parent[5][segment[5] > 0] = 0
    labels = Batch.make(ids, segment=segment, parent=parent).labels
    labels[torch.rand(ROWS, LENGTH, generator=g) < 0.4] = -100
    labels[[2, 3]] = -100
    value = torch.randn(2, ROWS, LENGTH, generator=g, dtype=torch.float64)
    extra = {"place": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH), "return": value[0], "old_value": value[1] / 10}
    return Batch.make(ids, segment=segment, parent=parent, labels=labels, extra=extra)


def take(whole: Batch, rank: int, size: int, rows: int) -> list[Batch]:
    """Microbatches of one rank: of 2 ranks the first has 6 rows, of 4 the last has none at all."""
    cuts = {1: [0, 9], 2: [0, 6, 9], 4: [0, 4, 5, 9, 9]}[size]
    mine = list(range(cuts[rank], cuts[rank + 1]))
    return whole.take(mine).split(rows) if mine else []


def chosen(flat) -> list[torch.Tensor]:
    """Experts [N, 2] by layer, as told by the position's name; every third position is left to the router."""
    place_N, out = flat.extra["place"], []
    for layer in MODEL.moe_layers:
        first_N = (place_N * 5 + layer) % 7
        out.append(
            torch.stack((first_N, (first_N + 1 + place_N % 3) % 7), 1).masked_fill(place_N[:, None] % 3 == 0, -1)
        )
    return out


def seeded(shape: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Expert 0 gets more than half of the positions in every layer, the last expert none."""
    model = Transformer(shape, dtype=dtype, seed=1)
    for block in model.layers:
        if block.routes and shape.selection_bias:
            block.moe.router.selection_bias.copy_(torch.tensor([0.4, *[0.0] * 6, -10.0]))
    return model


@dataclass(frozen=True)
class Case:
    """One layout of `world` ranks; `config` = what is not as in CONFIG."""

    world: int
    rows: int = 2  # of a microbatch
    dtype: torch.dtype = torch.float64
    shape: ModelConfig = MODEL
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> "Case":
        """The same mathematics on one process, in one microbatch."""
        keep = {k: v for k, v in self.config.items() if k == "elide"}
        return replace(self, world=1, rows=ROWS, config=keep)

    def run(self, world: World) -> dict[str, Any]:
        """What this rank was told: scores by the positions' names, over all data-parallel ranks; counts; a step."""
        torch.set_num_threads(1)
        config = replace(CONFIG, **self.config)
        layout = Forward(seeded(self.shape, self.dtype), config, world, component="reference")
        dp = layout.mesh.dp
        parts = take(batch(), dp.rank, dp.size, self.rows)
        told: dict[str, Any] = {}

        def by_place(name: str, **how: Any) -> None:
            found: dict[int, float] = {}
            for part, score_M in zip(parts, layout.score(parts, **how), strict=True):
                found |= dict(zip(part.flat.at_labels("place").tolist(), score_M.tolist(), strict=True))
            told[name] = {place: x for one in dp.gather(found) for place, x in one.items()}
            if layout.overflow.rowwise is not None:
                layout.overflow.rowwise.capacity = config.capacity  # so that the next pass overflows too

        by_place("plain")
        told["metrics"], told["arrays"] = layout.collect()
        by_place("tempered", temperature=0.7, pass_name="evaluate")
        by_place("replayed", replay=[chosen(p.flat) for p in parts], record=True)
        chose = True  # the given experts where experts were given
        for part, layers in zip(parts, layout.routes):
            for layer, want_NK in zip(MODEL.moe_layers, chosen(part.flat)):
                if layer in layers:
                    got_NK = layers[layer]
                    want_NK = want_NK[: len(got_NK)]
                    chose &= bool((got_NK == want_NK)[want_NK[:, 0] >= 0].all())
        told["chose"], told["redone"] = chose, layout.overflow.redone
        told["both"], _ = layout.collect()
        told["empty"] = layout.collect()
        if self.shape.value_head:
            critic = Learner(seeded(self.shape, self.dtype), ValueLoss(0.2), config, world, component="critic")
            told["step"] = critic.step(parts)
            told["gradient"] = critic.gradient()
            critic.counter.check()
        return told


SHM = {"ep": 2, "dispatch": "rowwise", "transport": "shared_memory", "capacity": 4.0}
FULL = SHM | {"capacity": 0.4}
INTERLEAVED = {"pp": 2, "pipeline": "interleaved", "stages_per_rank": 2}
ZBV = {"pp": 2, "pipeline": "zbv", "stages_per_rank": 2}
WIDE = torch.float32
CASES = {
    "1, row by row": Case(1, 1),
    "1, values, row by row, last layer elided": Case(1, 1, shape=VALUE, config={"elide": "padding+last_layer"}),
    "2, dp2": Case(2),
    "2, dp2, values, nothing elided": Case(2, 3, shape=VALUE, config={"elide": "none"}),
    "2, ep2": Case(2, config={"ep": 2, "elide": "padding+last_layer"}),
    "2, ep2, float32": Case(2, dtype=WIDE, config={"ep": 2}),
    "2, ep2, shared memory, values": Case(2, 1, shape=VALUE, config=SHM),
    "2, ep2, overflow": Case(2, config=FULL),
    "2, ep2, overflow, values": Case(2, 9, shape=VALUE, config=FULL),
    "2, pp2": Case(2, config={"pp": 2}),
    "2, pp2, tied": Case(2, 1, shape=TIED, config={"pp": 2, "bias_rate": 0.0}),
    "2, pp2, values": Case(2, shape=VALUE, config={"pp": 2, "recompute": "block"}),
    "2, pp2, float32": Case(2, dtype=WIDE, config={"pp": 2}),
    "2, pp2 interleaved": Case(2, config=INTERLEAVED),
    "2, pp2 interleaved, values": Case(2, 9, shape=VALUE, config=INTERLEAVED),
    "2, pp2 zbv": Case(2, config=ZBV),
    "2, pp2 zbv, values": Case(2, 1, shape=VALUE, config=ZBV),
    "4, ep4, values": Case(4, shape=VALUE, config={"ep": 4, "zero": 2}),
    "4, ep2 dp2, overflow": Case(4, 1, config=FULL),
    "4, pp2 ep2, overflow, values": Case(4, shape=VALUE, config={"pp": 2, "recompute": "moe", **FULL}),
    "4, pp2 dp2": Case(4, 1, config={"pp": 2}),
    "4, pp2 zbv ep2, overflow": Case(4, config=ZBV | FULL),
    "4, pp4, values": Case(4, 1, shape=VALUE, config={"pp": 4}),
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
