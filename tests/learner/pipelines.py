"""What the pipeline tests run in every process: the gradient of a few steps, by every schedule, hooks and slots on.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import contextlib
import pickle
import sys
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.errors import DataError
from moekit.learner.mesh import Mesh
from moekit.learner.pipeline import Pipeline, Stage
from moekit.learner.stages import part_of, stages_of
from moekit.model.transformer import Transformer
from moekit.objectives.balance import RouterLoss, scope_count
from moekit.ops import GradSlot

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=5, top_k=1, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, gate="softmax", qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
DEEP = replace(MODEL, layers=9, dense_layers=(1, 4), init_std=0.2)
TIED = replace(MODEL, tied_head=True)
ROUTER = RouterLossConfig(balance=0.05, z=0.01)
LENGTH = 12
ROWS = [(7, 3), (12,), (2, 2, 2), (5,), (1, 10), (4, 4, 4), (11,)]  # documents of a row


def packed(seed: int, rows: list[int]) -> Batch:
    """Some of `ROWS`: several documents each, padding; rows 2, 3 and 6 have no label, the others some."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MODEL.vocab, (len(rows), LENGTH), generator=g)
    segment = torch.full_like(ids, -1)
    for at, row in enumerate(rows):
        documents = torch.arange(len(ROWS[row])).repeat_interleave(torch.tensor(ROWS[row]))
        segment[at, : len(documents)] = documents
    labels = Batch.make(ids, segment=segment).labels.masked_fill(torch.rand(ids.shape, generator=g) < 0.4, -100)
    labels[[row in (2, 3, 6) for row in rows]] = -100
    return Batch.make(ids, segment=segment, labels=labels)


def shared(seed: int) -> Batch:
    """Two rows of a prompt with children that continue it (`parent` segments)."""
    ids = torch.randint(0, MODEL.vocab, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    segment = torch.tensor([[0] * 3 + [1] * 4 + [2] * 5, [0] * 5 + [1] * 2 + [2] * 3 + [-1] * 2])
    return Batch.make(ids, segment=segment, parent=torch.where(segment > 0, 0, -1))


def step(n: int, place: int) -> list[Batch]:
    """n microbatches of dp rank `place`: different sizes, one of nothing, one without a label, an uneven last one."""
    kinds = [
        packed(place, [0, 1, 2]), shared(10 + place), packed(place, [2, 3, 6]), packed(place, [0]).empty(),
        packed(place, [6]), packed(place, [4, 5]), packed(place, [3]),
    ]  # fmt: skip
    return kinds[:n] if n > 1 else kinds[1:2]


def make(shape, part=None) -> Transformer:
    """A model in float64, or a part of it: expert 0 gets more than half of the rows of a layer, the last none."""
    held = Transformer(shape, dtype=torch.float64, seed=1, part=part)
    for block in held.blocks.values():
        if block.routes:
            block.moe.router.selection_bias.copy_(torch.tensor([0.8, 0.0, 0.0, 0.0, -10.0]))
    return held


class Watcher:
    """Counts the rows of forward, recompute and backward, layer by layer."""

    def __init__(self):
        self.rows = Counter()

    def layer(self, layer, decided_CE, dispatched_CE, elided_C, dropped_C):
        """A forward."""
        self.rows["forward", layer] += int(dispatched_CE.sum())

    def recompute(self, layer, dispatched_CE, elided_C, dropped_C):
        """A recomputation."""
        self.rows["recompute", layer] += int(dispatched_CE.sum())

    def backward(self, layer, dispatched_CE):
        """A backward."""
        self.rows["backward", layer] += int(dispatched_CE.sum())


def collect(held: Transformer) -> dict[str, torch.Tensor]:
    """Gradients as a learner takes them: experts' from slots, all others' by hooks that clear `.grad`."""
    total = {name: torch.zeros_like(p) for name, p in held.named_parameters() if p.requires_grad}
    for name, p in held.named_parameters():
        if p.requires_grad:
            p.grad_slot = GradSlot(total[name], True)

            def drain(p, into=total[name]):
                if p.grad is not None:
                    into.add_(p.grad)
                    p.grad = None

            p.register_post_accumulate_grad_hook(drain)
    return total


def freeze(held: Transformer, frozen: tuple[str, ...]) -> None:
    """No gradient for parameters whose name starts so."""
    for name, p in held.named_parameters():
        p.requires_grad_(not name.startswith(frozen) if frozen else True)


def alone(n, dp=1, shape=MODEL, elide="padding", router=ROUTER, frozen=(), **_):
    """The same step in one process, by plain autograd: loss, gradient, router loss."""
    held = make(shape)
    freeze(held, frozen)
    rounds = [Batch.join(list(each)) for each in zip(*(step(n, place) for place in range(dp)))]
    flats = [b.flat for b in rounds]
    labels = sum(f.label_index_M.numel() for f in flats)
    loss_of = RouterLoss(router, scope_count(flats, router.scope))
    watcher, loss = Watcher(), 0.0
    for flat in flats:
        out = held(flat, elide=elide, router_loss=loss_of, observer=watcher)
        value = -out.logprob_M.sum() / labels
        value.backward()
        loss += value.item()
    return {
        "loss": loss,
        "gradient": {name: p.grad for name, p in held.named_parameters() if p.grad is not None},
        "balance": float(sum(loss_of.values["balance"])),
        "rows": watcher.rows,
    }


def run(config, ns, shape=MODEL, frozen=(), **options):
    """Each step of ns[i] microbatches on this rank, one pipeline for all of them."""
    mesh = Mesh.make(config, shape)
    held = make(shape, part_of(config, shape, mesh.pp.rank))
    freeze(held, frozen)
    total = collect(held)
    pipeline = Pipeline(config, shape, mesh.pp, torch.float64, torch.device("cpu"))
    return [run_step(config, mesh, held, total, pipeline, n, **options) for n in ns]


def run_step(config, mesh, held, total, pipeline, n, elide="padding", router=ROUTER, slow=False):
    """One step, and the same forward only."""
    flats = [b.flat for b in step(n, mesh.dp.rank)]
    everyone = [b.flat for place in range(mesh.dp.size) for b in step(n, place)]
    labels = sum(f.label_index_M.numel() for f in everyone)
    many = mesh.dp.sum if mesh.dp.size > 1 else None
    loss_of = RouterLoss(router, scope_count(everyone, router.scope), many)
    watcher = Watcher()
    last = stages_of(config, mesh.pp.rank)[-1] == config.pp * config.stages_per_rank - 1

    def fn(place, x_ND, i):
        if slow and mesh.pp.rank == 1:
            time.sleep(0.02)
        y_ND, _ = held.stage(
            place, x_ND, flats[i], elide=elide, router_loss=loss_of, observer=watcher, recompute=config.recompute
        )
        if not (last and place == len(held.part.stages) - 1):
            return y_ND
        if not flats[i].positions:
            return torch.zeros(())  # a loss may come without a graph
        return -held.finish(y_ND, flats[i]).logprob_M.sum() / labels

    mesh.wire.reset()
    for slot in total.values():
        slot.zero_()
    with counted_buffers() as peak:
        losses = pipeline.run(flats, fn)
    gradient = {name: g.clone() for name, g in total.items()}
    sent, rows = mesh.wire.sent["pipeline"], watcher.rows.copy()
    mesh.wire.reset()
    again = pipeline.run(flats, fn, backward=False)
    return {
        "losses": losses, "again": again, "gradient": gradient, "rows": rows, "sent": sent,
        "sent again": mesh.wire.sent["pipeline"], "moved": any(not total[k].equal(gradient[k]) for k in total),
        "balance": float(sum(loss_of.values["balance"])) / 2,  # the forward-only pass counted once more
        "place": (mesh.pp.rank, mesh.dp.rank), "longest": max(f.positions for f in flats),
        "peak": max(peak, default=0), "kept": sum(t.nbytes for stage in stages(pipeline) for t in buffers(stage)),
    }  # fmt: skip


@contextlib.contextmanager
def counted_buffers():
    """After every receive, how many of the buffers that the stages made are alive."""
    fill, made, alive = Stage._fill, [], []

    def counted(self, infos):
        fill(self, infos)
        made.extend(weakref.ref(i.buffer) for i in infos if not i.is_root_arg)
        alive.append(sum(r() is not None for r in made))

    Stage._fill = counted
    yield alive
    Stage._fill = fill


def stages(pipeline):
    """torch's stages of a pipeline, training and forward only."""
    for _, _, call in pipeline._made.values():
        schedule = call.__self__
        yield from getattr(schedule, "_stages", None) or [schedule._stage]


def buffers(stage):
    """Tensors that a stage still holds after a run."""
    for infos in [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]:
        yield from (i.buffer for i in infos if i.buffer is not None)
    for outputs, inputs in stage.fwd_cache.values():
        yield from (t for t in (*outputs, *inputs) if t.is_floating_point())


LOOP = LearnerConfig(pp=2, pipeline="interleaved", stages_per_rank=2)
V = LearnerConfig(pp=2, pipeline="zbv", stages_per_rank=2)
TWO, FOUR = LearnerConfig(pp=2), LearnerConfig(pp=4)
POOLED = replace(ROUTER, granularity="microbatch")
CASES = {
    2: {
        "1f1b": {"config": TWO, "ns": [7, 1, 3, 2]},
        "1f1b, experts recomputed": {"config": replace(TWO, recompute="moe"), "ns": [5]},
        "1f1b, blocks recomputed": {"config": replace(TWO, recompute="block"), "ns": [5, 1]},
        "1f1b, last layer elided": {"config": TWO, "ns": [6], "elide": "padding+last_layer"},
        "1f1b, tied, a slow rank": {"config": TWO, "ns": [4], "shape": TIED, "slow": True},
        "1f1b, first stage frozen": {"config": TWO, "ns": [3], "frozen": ("embed", "layers.0", "layers.1")},
        "interleaved": {"config": LOOP, "ns": [7, 1, 3, 2], "shape": TIED},
        "interleaved, blocks recomputed": {
            "config": replace(LOOP, recompute="block"), "ns": [5], "elide": "padding+last_layer",
        },
        "zbv": {"config": V, "ns": [7, 1, 3, 2]},
        "zbv, tied": {"config": V, "ns": [6], "shape": TIED, "frozen": ("layers.0",)},
    },
    4: {
        "1f1b, 4 stages": {"config": FOUR, "ns": [7, 2], "shape": TIED},
        "1f1b x dp, pooled balance, blocks recomputed": {
            "config": replace(TWO, recompute="block"), "ns": [5], "router": POOLED, "dp": 2,
        },
        "interleaved x dp, pooled balance, experts recomputed": {
            "config": replace(LOOP, recompute="moe"), "ns": [3], "router": POOLED, "dp": 2,
        },
        "interleaved, 8 stages, 9 layers": {"config": replace(LOOP, pp=4), "ns": [6, 1], "shape": DEEP},
        "zbv, 8 stages, 9 layers": {"config": replace(V, pp=4), "ns": [6, 1], "shape": DEEP},
        "zbv x dp": {"config": V, "ns": [5], "dp": 2},
    },
}  # fmt: skip


def refused(rank: int) -> str:
    """What the first stage's rank sees when its function raises: the error itself, not torch's."""
    mesh = Mesh.make(TWO, MODEL)
    pipeline = Pipeline(TWO, MODEL, mesh.pp, torch.float64, torch.device("cpu"))
    flats = [b.flat for b in step(2, 0)]
    pipeline.run(flats, lambda place, x, i: x.sum() if rank else torch.zeros(flats[i].positions, 16).double())

    def fn(place, x_ND, i):
        raise DataError("a bad row")

    try:
        return "" if rank else str(pipeline.run(flats, fn))
    except DataError as error:
        return str(error)


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases, leave the results in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {}
    for name, case in CASES[size].items():
        t0 = time.perf_counter()
        results[name] = run(**{k: v for k, v in case.items() if k != "dp"})
        if rank == 0:
            print(f"{name}: {time.perf_counter() - t0:.2f} s", flush=True)
    if size == 2:
        results["refused"] = refused(rank)
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
