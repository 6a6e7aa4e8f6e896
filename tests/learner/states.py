"""What the tests of learner state run in every process: saving and resuming at many layouts, and injected gradients."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.batch import Batch
from moekit.errors import CapacityError
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.presets import preset
from moekit.model.transformer import Part, Transformer
from moekit.objectives.sft import SFT

MODEL = ModelConfig(
    vocab=23, width=12, layers=4, heads=2, experts=4, top_k=2, expert_width=10, selection_bias=True, tied_head=True,
    dense_layers=(2,), dense_width=14,
)  # fmt: skip
CONFIG = LearnerConfig(
    lr=0.01, warmup_steps=3, weight_decay=0.1, router=RouterLossConfig(balance=0.1), bias_rate=0.01, clip_norm=0.5
)
# (dp, ep, pp, zero)
MATRIX = [(1, 1, 1, 2), (2, 1, 1, 1), (4, 2, 1, 2), (2, 2, 1, 0), (4, 4, 1, 2), (2, 2, 2, 1), (1, 1, 4, 2)]
KINDS = ("master", "exp_avg", "exp_avg_sq", "parameter")


def config(layout) -> LearnerConfig:
    _, ep, pp, zero = layout
    return replace(CONFIG, ep=ep, pp=pp, zero=zero, recompute="block" if pp > 1 else "none")


def learner(layout, seed=0, dtype=torch.bfloat16) -> Learner:
    return Learner(Transformer(MODEL, dtype=dtype, seed=seed), SFT(), config(layout))


def rows(step: int, dp: World) -> list[Batch]:
    """Uneven documents; microbatches of one row."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, MODEL.vocab, (4, 9), generator=g)
    segment = torch.zeros_like(ids)
    for row, n in enumerate((9, 3, 5, 7)):
        segment[row, n:] = -1
    pick = [r for r in range(4) if r % dp.size == dp.rank]
    return Batch.make(ids[pick], segment=segment[pick]).split(1)


def everything(one: Learner) -> dict:
    """All state, whole, by name: bitwise comparable between layouts."""
    biases = {n: b.clone() for n, b in one.model.named_buffers()}
    found = {kind: one.gathered(kind) for kind in KINDS}
    found["bias"] = {n: b for some in one.world.gather(biases) for n, b in some.items()}
    return found | {"updates": one.updates, "skipped": one.skipped}


def save(folder: Path, layout) -> dict:
    """Two steps, a checkpoint, three more steps."""
    torch.manual_seed(5)
    one = learner(layout)
    for step in range(2):
        one.step(rows(step, one.mesh.dp))
    saving = one.save(folder / name(layout), {"row": 7}, wait=layout[1] > 1)
    state = everything(one)
    losses = [one.step(rows(step, one.mesh.dp))["loss/total"] for step in range(2, 5)]
    saving.wait()
    one.world.barrier()
    return {"state": state, "losses": losses}


def restore(folder: Path, layout, source) -> dict:
    """Another learner, that has done something else before, goes on from what `source` saved."""
    one = learner(layout, seed=3)
    one.step(rows(9, one.mesh.dp))
    extra = one.restore(folder / name(source))
    state = everything(one)
    losses = [one.step(rows(step, one.mesh.dp))["loss/total"] for step in range(2, 5)]
    return {"state": state, "losses": losses, "extra": extra}


def name(layout) -> str:
    return "dp{}_ep{}_pp{}_zero{}".format(*layout)


def world_of(layout) -> int:
    return layout[0] * layout[2]


# ------------------------------------------------------------------ gradients put in by hand


def inject(one: Learner, values: dict[str, float]) -> None:
    """This rank's gradients: zero, but for the first element held here of the named parameters."""
    one.gradients.start()
    for bucket in one.gradients.buckets:
        for slot in bucket.slots:
            slot.view.zero_()
            slot.filled = True
            if slot.span.name in values:
                slot.view.view(-1)[0] = values[slot.span.name]
    one.gradients.finish()


def norm(one: Learner) -> float:
    """As `Learner.step` takes it."""
    return one.world.sum(one.gradients.square_norm()).sqrt().item()


def first(one: Learner, parameter: str) -> float | None:
    """The first element held here of the reduced gradient of a parameter; None where another rank owns it."""
    for bucket in one.gradients.buckets:
        for span in bucket.spans:
            low, high = (0, bucket.param.shape[0]) if bucket.zero == 0 else (bucket.start, bucket.stop)
            if span.name == parameter and low <= span.start < high:
                return float(bucket.owned_grad[span.start - low])
    return None


def bc_051(zero: int) -> dict:
    """Shared gradient 2 (1 from each rank), expert gradients 3 and 6, largest norm 3.5."""
    one = learner((2, 2, 1, zero), dtype=torch.float32)
    one.optimizer.config = replace(one.config, clip_norm=3.5)
    inject(one, {"final_norm.weight": 1.0, "layers.0.moe.down": 3.0 if one.world.rank == 0 else 6.0})
    before = norm(one)
    one.optimizer.step(0, before)
    shared, expert = first(one, "final_norm.weight"), first(one, "layers.0.moe.down")
    return {"norm": before, "shared": shared, "expert": expert, "parameter": one.gathered("parameter")}


def bc_055() -> float | None:
    """PP=2, DP=2: lookup gradients 1 and 3, head gradients 2 and 6, halved because moekit sums over ranks."""
    one = learner((2, 1, 2, 0), dtype=torch.float32)
    mean = {0: 0.5, 1: 1.5} if one.mesh.pp.rank == 0 else {0: 1.0, 1: 3.0}
    inject(one, {"embed.weight": mean[one.mesh.dp.rank]})
    return first(one, "embed.weight")


def bc_058(zero: int) -> float:
    """Stage 0: 3; stage 1: 6; the tied weight: 2, of which each stage has a half."""
    one = learner((1, 1, 2, zero), dtype=torch.float32)
    own = {0: ("layers.0.attention.out.weight", 3.0), 1: ("final_norm.weight", 6.0)}[one.mesh.pp.rank]
    inject(one, {"embed.weight": 1.0, own[0]: own[1]})
    return norm(one)


def tied_copies(layout) -> list:
    """After three steps, the embedding on every rank that holds one."""
    one = learner(layout)
    for step in range(3):
        one.step(rows(step, one.mesh.dp))
    held = one.model.embed
    return [t for t in one.world.gather(held.weight.detach() if held is not None else None) if t is not None]


SIGNS = [(1, 1, -1), (1, -1, 1), (-1, 1, 1), (1, 1, 1)]  # of experts 0 to 3


def adam(layout, folder: Path, steps: range) -> dict:
    """BC-060: every expert's weights start at 1 and get gradients of its signs; resumes where `steps` starts."""
    c = replace(config(layout), lr=0.1, betas=(0.9, 0.999), clip_norm=None, weight_decay=0.0, warmup_steps=0)
    one = Learner(Transformer(MODEL, dtype=torch.float32, seed=0), SFT(), c)
    if steps.start:
        one.restore(folder / "adam")
    else:
        for bucket in one.gradients.buckets:
            bucket.master.fill_(1.0)
            bucket.refresh()
    for step in steps:
        one.gradients.start()
        for bucket in one.gradients.buckets:
            bucket.owned_grad = torch.zeros_like(bucket.master)
            low, high = (0, bucket.param.shape[0]) if bucket.zero == 0 else (bucket.start, bucket.stop)
            for piece, flat in bucket.cover(bucket.owned_grad, low, high):
                if len(piece.shape) == 3:
                    expert = torch.arange(piece.start, piece.stop) // (piece.shape[1] * piece.shape[2])
                    flat.copy_(torch.tensor([float(s[step]) for s in SIGNS])[expert])
        one.optimizer.step(step, 1.0)
        one.updates += 1
    if not steps.start:
        one.save(folder / "adam")
    return {kind: {n: t for n, t in one.gathered(kind).items() if t.ndim == 3} for kind in ("master", "exp_avg")}


class OneWeight(nn.Module):
    """loss of a labelled position = w * label."""

    def __init__(self):
        super().__init__()
        self.config = preset("tiny")
        self.part, self.blocks, self.device = Part.whole(self.config), {}, torch.device("cpu")
        self.w = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def stage(self, place, x_ND, flat, **_):
        return self.w, []

    def finish(self, w, flat, routes, temperature=1.0):
        return SimpleNamespace(logprob_M=-w[0, 0] * flat.label_M.double())


def bc_053() -> dict:
    """Rank 0 has microbatches with token losses 1, 2, 3, rank 1 has one with 6; on the real model rows are counted."""
    labels = [[1], [2], [3]] if dist.get_rank() == 0 else [[6]]
    parts = [Batch.make(torch.zeros(1, 2, dtype=torch.long), labels=torch.tensor([[n[0], -100]])) for n in labels]
    loss = Learner(OneWeight(), SFT(), LearnerConfig(clip_norm=None)).step(parts)["loss/sft"]
    one = learner((2, 2, 1, 2))
    batches = rows(0, World())[:3] if dist.get_rank() == 0 else rows(1, World())[:1]
    metrics = one.step(batches)
    one.counter.check()
    real = sum(one.world.gather(sum(b.flat.real for b in batches)))
    return {"loss": loss, "rows": metrics["rows/dispatched"], "want": real * MODEL.top_k * len(MODEL.moe_layers)}


def policy(on_overflow: str) -> dict:
    """A step whose buffers are too small; router losses and counts must not see what happens to the rows."""
    c = replace(config((2, 2, 1, 2)), dispatch="rowwise", capacity=0.3, on_overflow=on_overflow)
    one = Learner(Transformer(MODEL, dtype=torch.float64, seed=0), SFT(), c)
    before = one.gathered("parameter")
    try:
        metrics = one.step(rows(0, one.mesh.dp))
        one.counter.check()
    except CapacityError as error:
        metrics = {"error": str(error)}
    moved = any((p != before[n]).any() for n, p in one.gathered("parameter").items())
    return metrics | {"moved": moved, "updates": one.updates, "capacity_now": one.overflow.rowwise.capacity}


def first_phase(size: int, folder: Path) -> dict:
    """Saves of every layout of this world size, and the injected cases."""
    out = {name(layout): save(folder, layout) for layout in MATRIX if world_of(layout) == size}
    if size == 2:
        out |= {f"bc_051 {zero}": bc_051(zero) for zero in (0, 1, 2)} | {"bc_053": bc_053()}
        out |= {f"bc_058 {zero}": bc_058(zero) for zero in (0, 2)} | {"tied": tied_copies((1, 1, 2, 2))}
        out["adam"] = adam((2, 2, 1, 2), folder, range(2))
        out |= {p: policy(p) for p in ("redo", "drop", "raise")}
    if size == 4:
        out |= {"bc_055": bc_055(), "tied": tied_copies((2, 1, 2, 1))}
    return out


def second_phase(size: int, folder: Path) -> dict:
    """Every layout of this world size resumes from every checkpoint."""
    out = {
        (name(source), name(layout)): restore(folder, layout, source)
        for layout in MATRIX if world_of(layout) == size for source in MATRIX
    }  # fmt: skip
    if size in (1, 4):
        out["adam"] = adam((size, size, 1, 2), folder, range(2, 3))
    return out


def main(rank: int, size: int, folder: str, phase: str) -> None:
    """One rank of a gloo world."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / f"store_{phase}_{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = {"first": first_phase, "second": second_phase}[phase](size, Path(folder))
    Path(folder, f"{phase}_{size}_{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
