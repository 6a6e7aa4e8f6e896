"""What the layout tests run in every process: an unsymmetric batch, cut in many ways, through three AdamW steps.

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
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.learner.stages import stages_of
from moekit.model.transformer import Transformer
from moekit.objectives.sft import SFT

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=1, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, gate="softmax", qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
WHOLE = replace(MODEL, width=32, expert_width=32)  # whole MXFP8 blocks
TIED = replace(MODEL, tied_head=True, top_k=2, gate="sigmoid", normalize_gates=True)
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
    parent = torch.full((8, 12), -1)
    for row, lengths in enumerate([(7, 3), (12,), (2, 2, 2), (5,), (1, 10), (4, 4, 4), (), (11,)]):
        at = 0
        for s, n in enumerate(lengths):
            segment[row, at : at + n] = s
            at += n
    parent[5][segment[5] > 0] = 0  # two answers to one prompt
    whole = Batch.make(ids, segment=segment, parent=parent)
    labels = whole.labels.clone()
    labels[torch.rand(8, 12, generator=g) < 0.4] = -100
    labels[[2, 3, 6, 7]] = -100
    return Batch.make(ids, segment=segment, parent=parent, labels=labels)


def take(whole: Batch, rank: int, size: int) -> Batch:
    """Rows of one rank: pairs of rows go to ranks in turn, so that with 2 ranks rank 1 has no label at all."""
    pick = [r for r in range(whole.rows) if (r // 2) % size == rank]
    return Batch.make(
        whole.input_ids[pick], segment=whole.segment[pick], labels=whole.labels[pick], parent=whole.parent[pick]
    )


def model(dtype, config=MODEL) -> Transformer:
    """Expert 0 gets more than half of the rows in every layer, the last expert none."""
    m = Transformer(config, dtype=dtype, seed=1)
    for block in m.layers:
        if block.routes and config.selection_bias:
            block.moe.router.selection_bias.copy_(torch.tensor([0.4, *[0.0] * 6, -10.0]))
    return m


def plant(learner: Learner, bug: str) -> None:
    """One of three classic bugs, for the tests to catch."""
    gradients, finish, square_norm = learner.gradients, learner.gradients.finish, learner.gradients.square_norm

    def scaled():
        finish()
        for b in gradients.buckets:
            if b.family.expert:
                b.owned_grad.div_(learner.mesh.ep.size)

    if bug == "expert gradients divided by ep":
        gradients.finish = scaled
    if bug == "norm counts dense parameters on every rank":
        gradients.square_norm = lambda: (
            square_norm()
            + (learner.mesh.dp.size - 1)
            * sum(b.owned_grad.double().square().sum() for b in gradients.owned() if not b.family.expert)
        )
    stage = learner.model.stage
    if bug == "router loss lost on a middle stage" and 2 in stages_of(learner.config, learner.mesh.pp.rank):
        learner.model.stage = lambda *a, **k: stage(*a, **(k | {"router_loss": None}))


def remote_rows(learner: Learner, flats) -> int:
    """Routed rows of this rank, by the routers' choices, whose expert lives on another rank; all layers held here."""
    each, n = MODEL.experts // learner.config.ep, 0
    for flat, layers in zip(flats, learner.routes):
        for layer, expert_NK in layers.items():
            keep = expert_NK[: flat.real]
            if learner.config.elide == "none":
                keep = expert_NK
            elif learner.config.elide == "padding+last_layer" and layer == MODEL.layers - 1:
                keep = expert_NK[flat.label_index_M]
            n += int((keep // each != learner.mesh.ep.rank).sum())
    return n


def skewed(microbatch: int, positions: int) -> list[torch.Tensor]:
    """Choices [N, 1] that use all experts alike, but for microbatch 2's in the last layer: experts 0 to 3."""
    n = torch.arange(positions)[:, None]
    last = MODEL.layers - 1
    return [n % 4 if (microbatch, layer) == (1, last) else (n + layer) % 8 for layer in MODEL.moe_layers]


def run(
    world: World, dtype, rows: int, steps: int = 3, learner_config=CONFIG, config=MODEL, denominator="global_tokens",
    bug: str = "", skew: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """`steps` optimizer steps; what every rank must agree on, as plain tensors and numbers."""
    torch.set_num_threads(1)
    learner = Learner(model(dtype, config), SFT(denominator), learner_config, world)
    plant(learner, bug)
    dp, first = learner.mesh.dp, {}
    scored = learner.evaluate(take(batch(9), dp.rank, dp.size).split(rows))
    scored_redone = learner.overflow.redone
    if learner.overflow.rowwise is not None:
        learner.overflow.rowwise.capacity = learner_config.capacity  # so that the step overflows as the pass did
    for step in range(steps):
        parts = take(batch(step), dp.rank, dp.size).split(rows)
        replay = [skewed(i, b.flat.positions) for i, b in enumerate(parts)] if skew and step == 0 else None
        metrics = learner.step(parts, record=True, replay=replay)
        learner.counter.check()
        if step == 0:
            own = sum(learner.world.gather(remote_rows(learner, [b.flat for b in parts])))
            first = metrics | {"gradient": learner.gradient(), "remote": own}
            counts = {key: m.decided_LCE.clone() for key, m in learner.counter.measures.items()}
            ran = {key[1]: m.dispatched_LCE.clone() for key, m in learner.counter.measures.items()}
    biases = {n: b.clone() for n, b in learner.model.named_buffers() if n.endswith("selection_bias")}
    return first | {
        "parameters": learner.gathered("parameter"),
        "bias": {n: b for some in learner.world.gather(biases) for n, b in some.items()},
        "decided": counts["policy", "forward"],
        "ran": ran,
        "last": metrics,
        "scored": scored,
        "scored_redone": scored_redone,
        "redone": learner.overflow.redone - scored_redone,
    }


@dataclass(frozen=True)
class Case:
    """One layout of `world` ranks; `config` = what is not as in CONFIG."""

    world: int
    rows: int = 2  # of a microbatch
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = MODEL
    denominator: str = "global_tokens"
    bug: str = ""
    skew: bool = False

    @property
    def learner(self) -> LearnerConfig:
        """With the layout."""
        return replace(CONFIG, **self.config)

    @property
    def plain(self) -> LearnerConfig:
        """The same mathematics on one process."""
        keep = ("router", "clip_norm", "elide", "precision")
        return replace(CONFIG, **{k: v for k, v in self.config.items() if k in keep})

    def run(self, world: World) -> dict[str, Any]:
        """Every rank of the world calls it."""
        return run(
            world, self.dtype, self.rows, 3 if self.dtype == torch.float64 else 1, self.learner, self.model,
            self.denominator, self.bug, self.skew,
        )  # fmt: skip


def case(
    world, rows=2, dtype=torch.float64, model=MODEL, denominator="global_tokens", bug="", skew=False, **config
) -> Case:
    return Case(world, rows, dtype, config, model, denominator, bug, skew)


ROW = {"dispatch": "rowwise", "capacity": 4.0}
SHM, PADDED = ROW | {"transport": "shared_memory"}, ROW | {"transport": "padded"}
MICROBATCH_BALANCE = {"router": replace(ROUTER, granularity="microbatch"), "clip_norm": None}
MX = {"model": WHOLE, "dtype": torch.float32, "precision": "mxfp8"}
CASES = {
    "1 process": case(1),
    "1, rows one by one": case(1, 1),
    "1, last layer elided": case(1, elide="padding+last_layer"),
    "1, nothing elided": case(1, 4, elide="none"),
    "1, sequence mean": case(1, denominator="sequence_mean"),
    "1, recompute moe": case(1, recompute="moe"),
    "1, recompute block, last layer elided": case(1, recompute="block", elide="padding+last_layer"),
    "1, float32": case(1, dtype=torch.float32),
    "1, mxfp8": case(1, 1, **MX),
    "2, dp2, mxfp8, zero 0": case(2, 8, zero=0, **MX),
    "2, dp2, mxfp8, zero 1": case(2, 1, zero=1, **MX),
    "2, dp2, mxfp8, reduced each microbatch": case(2, reduce="microbatch", **MX),
    "2, ep2, mxfp8": case(2, ep=2, **MX),
    "2, ep2, mxfp8, shared memory, recompute moe": case(2, 1, ep=2, recompute="moe", **SHM, **MX),
    "2, pp2, mxfp8": case(2, pp=2, **MX),
    "2, pp2 interleaved, mxfp8": case(2, pp=2, pipeline="interleaved", stages_per_rank=2, recompute="block", **MX),
    "2, pp2 zbv, mxfp8": case(2, 1, pp=2, pipeline="zbv", stages_per_rank=2, **MX),
    "4, pp2 ep2, mxfp8, padded": case(4, 1, pp=2, ep=2, zero=1, **PADDED, **MX),
    "2, dp2, zero 0": case(2, 8, zero=0),
    "2, dp2, zero 1": case(2, 1, zero=1),
    "2, dp2, zero 2": case(2, zero=2),
    "2, dp2, zero 2, reduced each microbatch": case(2, zero=2, reduce="microbatch", recompute="block"),
    "2, dp2, sequence mean": case(2, denominator="sequence_mean"),
    "2, dp2, nothing elided": case(2, 4, elide="none"),
    "2, dp2, microbatch balance": case(2, 8, **MICROBATCH_BALANCE),
    "2, dp2, float32": case(2, dtype=torch.float32),
    "2, ep2": case(2, ep=2),
    "2, ep2, recompute moe": case(2, 1, ep=2, recompute="moe", zero=0),
    "2, ep2, recompute block": case(2, ep=2, recompute="block", elide="padding+last_layer"),
    "2, ep2, shared memory": case(2, ep=2, **SHM),
    "2, ep2, shared memory, recompute block": case(2, 1, ep=2, recompute="block", elide="padding+last_layer", **SHM),
    "2, ep2, padded": case(2, ep=2, recompute="moe", reduce="microbatch", **PADDED),
    "2, ep2, overflow redone": case(2, ep=2, **SHM | {"capacity": 0.6}),
    "2, ep2, tied, top 2": case(2, ep=2, model=TIED, elide="none"),
    "2, ep2, float32": case(2, dtype=torch.float32, ep=2, **SHM),
    "2, pp2": case(2, pp=2),
    "2, pp2, one microbatch": case(2, 8, pp=2, zero=0),
    "2, pp2, recompute block": case(2, 1, pp=2, recompute="block", elide="padding+last_layer"),
    "2, pp2 interleaved": case(2, pp=2, pipeline="interleaved", stages_per_rank=2),
    "2, pp2 zbv": case(2, 1, pp=2, pipeline="zbv", stages_per_rank=2),
    "2, pp2, tied, top 2": case(2, pp=2, model=TIED, recompute="moe"),
    "2, pp2, microbatch balance": case(2, 8, pp=2, **MICROBATCH_BALANCE),
    "2, pp2, float32": case(2, dtype=torch.float32, pp=2),
    "4, dp4": case(4, zero=1),
    "4, dp4, rows one by one": case(4, 1, zero=2),
    "4, dp4 ep2": case(4, ep=2, zero=1),
    "4, dp4 ep2, shared memory, recompute moe": case(4, 1, ep=2, recompute="moe", **SHM),
    "4, ep4": case(4, ep=4, zero=2, elide="padding+last_layer"),
    "4, ep4, padded": case(4, 1, ep=4, **PADDED),
    "4, pp4": case(4, 1, pp=4, recompute="moe"),
    "4, pp2 dp2": case(4, pp=2, zero=1),
    "4, pp2 dp2, tied, top 2": case(4, 1, pp=2, zero=2, model=TIED),
    "4, pp2 ep2": case(4, 1, pp=2, ep=2, recompute="block"),
    "4, pp2 ep2, shared memory, overflow redone": case(4, 1, pp=2, ep=2, recompute="block", **SHM | {"capacity": 0.7}),
    "4, pp2 ep2, skewed": case(4, 1, pp=2, ep=2, recompute="block", skew=True),
    "4, pp2 ep2, skewed, overflow redone": case(
        4, 1, pp=2, ep=2, recompute="block", skew=True, **SHM | {"capacity": 1.4}
    ),
    "4, pp2 interleaved, ep2, padded": case(4, 1, pp=2, pipeline="interleaved", stages_per_rank=2, ep=2, **PADDED),
    "4, pp2 zbv, ep2, tied, top 2": case(4, pp=2, pipeline="zbv", stages_per_rank=2, ep=2, model=TIED, **SHM),
    "4, pp2 ep2, float32": case(4, dtype=torch.float32, pp=2, ep=2),
    "8, dp8": case(8, zero=2),
    "8, ep8, shared memory": case(8, ep=8, **SHM | {"capacity": 8.0}),
    "8, dp8 ep4": case(8, 1, ep=4, zero=1, recompute="block"),
    "8, pp2 dp4 ep2": case(8, 1, pp=2, ep=2, zero=2, recompute="moe", elide="padding+last_layer"),
    "8, pp2 ep4, shared memory": case(8, 1, pp=2, ep=4, recompute="block", **SHM),
    "8, pp4 dp2 ep2, padded": case(8, 1, pp=4, ep=2, zero=0, **PADDED),
    "8, pp2 dp4 ep2, float32": case(8, 1, dtype=torch.float32, pp=2, ep=2),
}
BUGS = {
    "expert gradients divided by ep": case(2, ep=2, bug="expert gradients divided by ep"),
    "norm counts dense parameters on every rank": case(2, bug="norm counts dense parameters on every rank"),
    "router loss lost on a middle stage": case(4, 1, pp=4, bug="router loss lost on a middle stage"),
}


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases of its size, leave the results in a file."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {}
    for name, one in (CASES | BUGS).items():
        if one.world == size:
            results[name] = one.run(World.current())
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
