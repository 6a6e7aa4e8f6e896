"""The learner: one optimizer step over this rank's microbatches, exact whatever the cut.

`Learner.step` is the whole loop body: count the step's labels over all ranks, run every microbatch forward and backward
with weights that were known before the first backward, sum gradients over ranks, clip, update. The objective and the
recipe know nothing of ranks; the learner knows nothing of chats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.save import open_state, write_state
from ..config import Denominator, LearnerConfig
from ..data.batch import Batch, Flat
from ..errors import CheckpointError, ConfigError, DataError
from ..measure.cost import rates, step_flops
from ..measure.tokens import RowCounter
from ..objectives.balance import RouterLoss, balance_hf, bias_step, scope_count
from ..objectives.base import Objective
from ..objectives.denominator import StepCounts, step_counts, token_weights
from .gradients import Gradients
from .mesh import World, check_layout
from .optimizer import FlatAdamW

if TYPE_CHECKING:
    from ..model.transformer import Transformer


class Learner:
    """A model, an objective and an optimizer, on 1..N data-parallel processes.

    Args:
        model: a `moekit.Transformer`. Its parameters move into flat buckets and stay usable as before.
        objective: ``(flat, outputs) -> Terms``, e.g. `moekit.SFT()` or a function typed in a cell.
        config: optimizer, router losses, elision.
        world: the ranks; None = torch.distributed's, or one process.

    >>> learner = Learner(model, SFT(), LearnerConfig(lr=1e-3))     # doctest: +SKIP
    >>> learner.step([batch])["loss/total"]                         # doctest: +SKIP
    """

    def __init__(
        self, model: Transformer, objective: Objective, config: LearnerConfig | None = None, world: World | None = None
    ):
        self.model, self.objective = model, objective
        self.config = config or LearnerConfig()
        self.world = world or World.current()
        self.denominator: Denominator = getattr(objective, "denominator", "global_tokens")
        self.constant_length = getattr(objective, "constant_length", None)
        self.name = getattr(objective, "name", getattr(objective, "__name__", "objective"))
        shape = model.config
        check_layout(self.config, shape, self.world.size)
        if self.denominator == "constant" and not self.constant_length:
            raise ConfigError("denominator 'constant' needs constant_length on the objective")
        if self.config.bias_rate and not shape.selection_bias:
            raise ConfigError(f"bias_rate={self.config.bias_rate} needs a model with ModelConfig.selection_bias=True")
        self.gradients = Gradients(model, {n for n, _ in model.named_parameters() if is_expert(n)})
        for bucket in self.gradients.buckets:  # replicas start equal even if they were seeded apart
            self.world.broadcast(bucket.master)
            bucket.refresh()
        self.optimizer = FlatAdamW(self.gradients, self.config)
        self.counter = RowCounter.of(shape)
        self.updates = 0  # committed optimizer steps: also the weight version
        self.skipped = 0

    # ------------------------------------------------------------------ one step
    def step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Run one optimizer step over this rank's microbatches; every rank calls it, also with an empty list.

        Returns:
            Metrics by ``group/name``, the same on every rank; counts and rates are summed over ranks.

        Raises:
            DataError: a token id outside the vocabulary. Raised before any work.
        """
        t0 = time.perf_counter()
        flats = self._prepare(batches)
        self.counter.reset()
        self.gradients.start()
        counts = step_counts(flats, self.world.sum_list)
        loss, router = self._backward(flats, counts)
        self.gradients.finish()
        for bucket in self.gradients.buckets:
            self.world.sum(bucket.grad)
        norm = self.gradients.norm()
        commit = counts.supervised > 0 and math.isfinite(loss) and math.isfinite(norm)
        clipped = False
        self.counter.all_reduce(self.world.group if self.world.size > 1 else None)
        if commit:
            clipped = self.optimizer.step(self.updates, norm)
            self._move_bias()
            self.updates += 1
        else:
            self.skipped += 1
        seconds = self.world.max_list([time.perf_counter() - t0])[0]
        total = loss + self.config.router.balance * router["balance"] + self.config.router.z * router["z"]
        return {
            "loss/total": total,
            f"loss/{self.name}": loss,
            "loss/balance": router["balance"],
            "loss/z": router["z"],
            "grad/norm": norm,
            "grad/clipped": float(clipped),
            "lr": self.optimizer.lr if commit else 0.0,
            "step/index": self.updates,
            "step/skipped": self.skipped,
            "time/step_s": seconds,
            **self.counter.metrics(),
            **rates(self.counter, seconds),
            "flops/step": step_flops(self.model.config, self.counter)["total"] if counts.supervised else 0.0,
        }

    def _prepare(self, batches: Sequence[Batch]) -> list[Flat]:
        """Flat microbatches, checked, and as many on every rank (missing ones are empty and route nothing)."""
        vocab = self.model.config.vocab
        flats = [b.flat for b in batches]
        problem = ""
        for f in flats:
            if f.positions and not 0 <= int(f.ids_N.min()) <= int(f.ids_N.max()) < vocab:
                low, high = int(f.ids_N.min()), int(f.ids_N.max())
                problem = f"token ids from {low} to {high}, but the model's vocabulary has {vocab} entries"
        # all ranks learn of a bad batch before the first collective of the step, or the others would wait for ever
        rounds, bad = self.world.max_list([len(flats), bool(problem)])
        if bad:
            raise DataError(problem or "another rank got token ids outside the model's vocabulary")
        if len(flats) < rounds:
            template = batches[0] if batches else Batch.make(torch.zeros(1, 2, dtype=torch.long))
            flats += [template.empty().flat] * (int(rounds) - len(flats))
        device = next(self.model.parameters()).device
        return [f.to(device) for f in flats]

    def _backward(self, flats: list[Flat], counts: StepCounts) -> tuple[float, dict[str, float]]:
        """All forwards and backwards of a step. Returns the loss and the router losses, summed over ranks."""
        c = self.config.router
        if counts.supervised == 0:  # nothing to learn from: known before any work, on every rank alike
            self.counter.skip(flats)
            return 0.0, {"balance": 0.0, "z": 0.0}
        pooled = c.granularity == "hf" and c.balance > 0
        if pooled and (len(flats) > 1 or self.world.size > 1):
            raise ConfigError(
                f"router granularity 'hf' pools one microbatch on one process, got {len(flats)} microbatches on "
                f"{self.world.size} ranks; use 'sequence' or 'microbatch'"
            )
        (divisor,) = self.world.sum_list([scope_count(flats, c.scope)])
        router = RouterLoss(c, max(divisor, 1.0), self.world.sum if self.world.size > 1 else None)
        loss = torch.zeros((), dtype=torch.float64)
        for flat in flats:
            out = self._forward(flat, router, self.counter, record=pooled)
            terms = self.objective(flat, out)
            weight = token_weights(flat, counts, self.denominator, self.constant_length)
            value = (terms.loss_M * weight.to(terms.loss_M.dtype)).sum()
            loss += value.detach().to(loss)
            if pooled:
                balance = balance_hf(out.routes, flat, c.scope)
                router.values["balance"].append(balance.detach())
                value = value + c.balance * balance
            if value.requires_grad:
                value.backward()
        own = [float(loss), *(float(sum(v, torch.zeros(()))) for v in router.values.values())]
        loss_sum, balance_sum, z_sum = self.world.sum_list(own)
        return loss_sum, {"balance": balance_sum, "z": z_sum}

    def _forward(self, flat: Flat, router: RouterLoss | None, counter: RowCounter, record: bool = False) -> Any:
        counter.positions(flat)
        return self.model(
            flat,
            elide=self.config.elide,
            router_loss=router if router is not None and router.per_layer else None,
            observer=counter,
            record=record,
        )

    def _move_bias(self) -> None:
        if not self.config.bias_rate:
            return
        for layer, block in enumerate(self.model.layers):
            moe = getattr(block, "moe", None)
            if moe is not None:
                count_E = self.counter.decided(layer, scope="valid")
                bias = moe.router.selection_bias
                bias += bias_step(count_E, self.config.bias_rate).to(bias.device)

    # ------------------------------------------------------------------ looking without moving
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Mean loss per supervised token over all ranks' batches, without gradient; counts in pass "evaluate"."""
        flats = self._prepare(batches)
        counter = RowCounter.of(self.model.config)
        sums = [0.0, 0.0]
        with counter.during("evaluate"):
            for flat in flats:
                loss_M = self.objective(flat, self._forward(flat, None, counter)).loss_M
                sums = [sums[0] + float(loss_M.sum(dtype=torch.float64)), sums[1] + loss_M.numel()]
        total, n = self.world.sum_list(sums)
        return {f"eval/{self.name}": total / n if n else 0.0, "eval/tokens": n}

    # ------------------------------------------------------------------ saving
    def save(self, folder: str | Path, extra: dict[str, Any] | None = None, *, overwrite: bool = False) -> Path:
        """Write masters, moments, router bias, step, random state and `extra` (JSON). Rank 0 writes, all wait."""
        problem = 0.0
        error: Exception | None = None
        if self.world.rank == 0:
            tensors = self.optimizer.state() | self._buffers() | {"rng.torch": torch.get_rng_state()}
            manifest = {
                "updates": self.updates,
                "skipped": self.skipped,
                "learner": self.config.to_dict(),
                "model": self.model.config.to_dict(),
                "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
                "extra": extra or {},
            }
            try:
                write_state(folder, {n: t.contiguous() for n, t in tensors.items()}, manifest, overwrite=overwrite)
            except Exception as e:  # noqa: BLE001 (all ranks must learn of it, or they would wait for ever)
                problem, error = 1.0, e
        (problem,) = self.world.sum_list([problem])
        if problem:
            raise error or CheckpointError(f"rank 0 could not write {folder}; its log says why")
        return Path(folder)

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Continue from `save`: bitwise the same steps follow. Returns `extra`.

        Raises:
            CheckpointError: broken files, or a checkpoint of another model shape.
        """
        with open_state(folder) as (manifest, read):
            if manifest["model"] != _plain(self.model.config.to_dict()):
                theirs, ours = manifest["model"], _plain(self.model.config.to_dict())
                differ = [k for k in ours if theirs.get(k) != ours[k]]
                raise CheckpointError(f"{folder} is of another model: {', '.join(differ)} differ")
            self.optimizer.load(read, manifest["updates"])
            for name, buffer in self._buffers().items():
                buffer.copy_(read(name))
            torch.set_rng_state(read("rng.torch"))
            self.updates, self.skipped = manifest["updates"], manifest["skipped"]
        return manifest["extra"]

    def _buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in self.model.named_buffers() if n.endswith("selection_bias")}

    def gradient(self) -> dict[str, Tensor]:
        """The last step's gradient by parameter name (after clipping, if it was active): views."""
        return dict(self.gradients.named())


def is_expert(name: str) -> bool:
    """Whether a parameter is a stack of routed experts, the kind that expert parallelism splits."""
    return name.endswith((".moe.gate_up", ".moe.down"))


def _plain(value: Any) -> Any:
    """As JSON would give it back: tuples become lists."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
