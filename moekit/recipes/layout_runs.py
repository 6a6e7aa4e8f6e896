"""One layout on every rank of it: the steps, and what is measured while they run (for `moekit.recipes.layouts`).

Axis letters: B rows of a step, T positions of a row, N positions seen flat, K experts per position.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import ops
from ..config import LearnerConfig, ModelConfig, SFTConfig
from ..data.batch import Batch
from ..launch.worker import Here, here
from ..learner.dispatch import ExpertParallel
from ..learner.layouts import held
from ..learner.learner import Learner
from ..learner.mesh import World
from ..learner.state import owned
from ..measure.plan import storage_bytes
from ..model.moe import LocalDispatcher
from ..objectives.sft import SFT
from .setup import make_model

READS = ("item", "tolist", "numpy", "nonzero", "masked_select", "unique",
         "__int__", "__float__", "__bool__", "__index__")  # fmt: skip
PLACES = {f.__code__: place for place, f in (
    (0, ExpertParallel.__call__), (0, LocalDispatcher.__call__), (1, ops.moe_ffn), (1, ops.expert_ffn)
)}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One layout: its learner, on `world` processes, with microbatches of at most `rows` rows."""

    name: str
    world: int
    rows: int
    config: LearnerConfig


@dataclass(frozen=True)
class Work:
    """What all layouts have in common; travels to every process."""

    model: str  # a folder or a preset; "" = the tiny one
    shape: ModelConfig
    dtype: str
    batches: tuple[Batch, ...]  # one a step, over all ranks
    folder: str  # of what the reference left
    plant: Callable[[Learner], None] | None = None

    def learner(self, case: Case, world: World) -> Learner:
        """With this rank's part of the same weights, in every layout."""
        config = SFTConfig(self.model or "tiny", "", dtype=self.dtype, seed=1, learner=case.config)  # type: ignore
        model = make_model(config, self.shape, Here(world.rank, world.size, world.rank, "cpu", None))
        for block in model.blocks.values():
            if not self.model and block.routes and self.shape.selection_bias:  # expert 0 has most rows, the last none
                block.moe.router.selection_bias.copy_(torch.tensor([0.4, *[0.0] * (self.shape.experts - 2), -10.0]))
        return Learner(model, SFT(), case.config, world)


class HostReads(TorchFunctionMode):
    """Counts values that reach the host inside MoE layers: `.most` in one forward, (dispatch, expert matmuls, rest).

    Seen are item, tolist, int, float, bool and index of a tensor, and operations whose shape depends on values. On a
    CPU nothing waits for them; on a GPU each stops the host until the device has caught up.
    """

    def __init__(self, learner: Learner):
        super().__init__()
        self.most, self.now = [0, 0, 0], None
        for moe in (block.moe for block in learner.model.blocks.values() if block.routes):
            moe.register_forward_pre_hook(self._enter)
            moe.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self.now = [0, 0, 0]

    def _leave(self, *_: Any) -> None:
        self.most, self.now = [max(pair) for pair in zip(self.most, self.now or self.most)], None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the name of what is called, and at who calls it; then call it."""
        name = getattr(func, "__name__", "")
        index = args[1] if name == "__getitem__" else ()
        masks = [i for i in (index if isinstance(index, tuple) else (index,)) if getattr(i, "dtype", 0) == torch.bool]
        if self.now is not None and (name in READS or masks):
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code not in PLACES:
                frame = frame.f_back
            self.now[PLACES[frame.f_code] if frame else 2] += 1
        return func(*args, **(kwargs or {}))


def optimizer_bytes(learner: Learner) -> tuple[int, int]:
    """(predicted, measured) bytes of masters and moments here, masters that share the parameters' storage left out."""
    mesh, config, shape = learner.mesh, learner.config, learner.model.config
    mine = held(shape, config, mesh.pp.rank, mesh.ep.rank)
    told = storage_bytes(mine, config, next(learner.model.parameters()).dtype, mesh.dp.size)
    state = learner.optimizer.adamw.state
    tensors = [t for _, m in learner.optimizer.masters for t in (m, *(state[m][k] for k in ("exp_avg", "exp_avg_sq")))]
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    for bucket in learner.gradients.buckets:
        found.pop(bucket.param.untyped_storage().data_ptr(), None)
    return told["masters"] + told["moments"], sum(found.values())


def replicas_agree(learner: Learner) -> bool:
    """Whether all ranks that should hold the same parameters hold the same bits. Every rank calls it."""
    same, mesh = True, learner.mesh
    for b in learner.gradients.buckets:
        told = hashlib.blake2b(b.param.detach().cpu().view(torch.uint8).numpy().data).digest()
        for ranks in (b.ranks, mesh.tie) if b.family.tied else (b.ranks,):
            same &= len(set(ranks.gather(told))) == 1
    return all(learner.world.gather(same))


def difference(learner: Learner, kind: str, want: Any) -> tuple[float, str]:
    """Largest relative difference of a parameter's "gradient" or "parameter", and its name. Every rank calls it."""
    sums: dict[str, Tensor] = {}
    for piece, flat in owned(learner, kind):
        x0 = want.get_tensor(f"{kind} {piece.name}").view(-1)[piece.start : piece.stop].double()
        apart, norm = (flat.double() - x0).square().sum(), x0.square().sum()
        found = torch.stack((apart, norm, torch.tensor(len(piece), dtype=torch.float64)))  # squares: too small for fp32
        sums[piece.name] = sums[piece.name] + found if piece.name in sums else found
    worst = (0.0, "")
    ranks = learner.world.gather(sums)
    for key in (k for k in want.keys() if k.startswith(kind)):  # noqa: SIM118 (not a mapping)
        name = key.removeprefix(f"{kind} ")
        apart, norm, count = sum((r[name] for r in ranks if name in r), torch.zeros(3, dtype=torch.float64)).tolist()
        value = math.sqrt(apart / norm) if norm else (math.inf if apart else 0.0)
        if count != math.prod(want.get_slice(key).get_shape()) or math.isnan(value):
            value = math.inf  # not every element has exactly one owner, or it is no number
        worst = max(worst, (value, name))
    return worst


def run_case(work: Work, case: Case, world: World, reference: bool = False) -> dict[str, Any]:
    """All steps in one layout; its numbers, the same on every rank. The reference leaves its tensors in a file."""
    path = Path(work.folder, "reference.safetensors")
    if reference:
        return _steps(work, case, world, path, None)
    with safe_open(str(path), "pt") as want:
        found = _steps(work, case, world, path, want)
        if found["flips"]:  # what differs now is not the arithmetic: compare on the reference's routes
            found = _steps(work, case, world, path, want, replay=True) | {"flips": found["flips"], "replayed": True}
        return found


def _steps(work: Work, case: Case, world: World, path: Path, want: Any, replay: bool = False) -> dict[str, Any]:
    learner = work.learner(case, world)
    if work.plant is not None and want is not None:
        work.plant(learner)
    dp, layers, reads = learner.mesh.dp, work.shape.moe_layers, HostReads(learner)
    out, kept, flips = {}, {}, 0
    for step, whole in enumerate(work.batches):
        shares = [[r for r in range(whole.rows) if r // 2 % dp.size == rank] for rank in range(dp.size)]
        cuts = [[s[i : i + case.rows] for i in range(0, len(s), case.rows)] for s in shares]
        mine = cuts[dp.rank] + [[]] * (max(map(len, cuts)) - len(cuts[dp.rank]))
        parts = [_pick(whole, rows) for rows in mine]
        routes = None
        if replay and want is not None:
            told = {i: want.get_tensor(f"routes {step} {i}") for i in layers}
            routes = [[told[i][rows].flatten(0, 1)[p.flat.order_N] for i in layers] for rows, p in zip(mine, parts)]
        with reads if step + 1 == len(work.batches) else nullcontext():  # buffers have their size by then
            metrics = learner.step(parts, record=True, replay=routes)
        for rows, part, chosen in zip(mine, parts, learner.routes):
            for layer, expert_NK in chosen.items():
                rows_BTK, key = part.flat.to_rows(expert_NK), f"routes {step} {layer}"
                if want is None:
                    kept[key] = rows_BTK
                else:
                    other = want.get_tensor(key)[rows].sort(-1).values != rows_BTK.sort(-1).values
                    flips += int((other.any(-1) & (part.segment >= 0)).sum())
        if step == 0:
            wire = {k.removeprefix("wire/").removesuffix("_bytes"): v for k, v in metrics.items() if "wire/" in k}
            out = {"loss": metrics["loss/total"], "norm": metrics["grad/norm"], "rows": metrics["rows/dispatched"],
                   "wire": wire, "wire_bytes": sum(wire.values()), "redone": metrics.get("dispatch/redone", 0.0),
                   "clipped": metrics["grad/clipped"]}  # fmt: skip
            if want is None:
                kept |= {f"gradient {n}": g for n, g in learner.gradient().items()}
            else:
                out["gradient"], out["worst"] = difference(learner, "gradient", want)
    if want is None:
        save_file({k: v.contiguous() for k, v in kept.items()} | {
            f"parameter {n}": p for n, p in learner.gathered("parameter").items()}, path)  # fmt: skip
        out |= {"gradient": 0.0, "worst": "", "parameters": 0.0}
    else:
        out["parameters"], _ = difference(learner, "parameter", want)
    ranks = world.gather((flips, reads.most, optimizer_bytes(learner)))
    out |= {"flips": sum(f for f, _, _ in ranks), "replayed": False, "replicas": replicas_agree(learner)}
    out["host_reads"] = [max(found) for found in zip(*(most for _, most, _ in ranks))]
    out["optimizer_predicted"], out["optimizer_measured"] = max(b for _, _, b in ranks)
    close = getattr(learner.overflow.dispatcher, "close", None)
    if close is not None:
        close()
    return out


def _pick(whole: Batch, rows: list[int]) -> Batch:
    return Batch.join([whole.empty(), *(b for r, b in enumerate(whole.split(1)) if r in rows)])


def run_cases(work: Work, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """All layouts of one world size, on every rank of it."""
    found = []
    for case in cases:
        try:
            found.append(run_case(work, case, World.current()))
        except Exception as error:
            error.add_note(f"in the layout {case.name!r}")
            raise
        if here().rank == 0 and (folder := here().folder) is not None:
            with (folder / "layouts.txt").open("a") as file:
                file.write(f"{case.name}\n")
    return found
