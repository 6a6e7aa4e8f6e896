"""The learner: one optimizer step over this rank's microbatches, exact whatever the cut.

`Learner.step` is the whole loop body: count the step's labels over all ranks, run every microbatch forward and backward
with weights that were known before the first backward, sum gradients over ranks, clip, update. The objective and the
recipe know nothing of ranks; the learner knows nothing of chats.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.write import Saving
from ..config import Denominator, LearnerConfig
from ..data.batch import Batch, Flat
from ..errors import ConfigError
from ..measure.cost import rates, step_flops
from ..measure.memory import SavedBytes, saved_bytes
from ..measure.tokens import RowCounter
from ..model.transformer import Outputs, Transformer
from ..objectives.balance import RouterLoss, balance_hf, bias_step, scope_count
from ..objectives.base import Objective
from ..objectives.denominator import StepCounts, step_counts, token_weights
from . import state
from .forward import CLOSED, Forward
from .gradients import Gradients
from .mesh import World
from .optimizer import FlatAdamW
from .precision import ExpertCaches

WIRE = ("rows", "metadata", "gradients", "parameters", "pipeline", "counts")


@dataclass(frozen=True)
class Readings:
    """What one attempt at a step came to, over all ranks; read from the device once."""

    loss: float
    balance: float
    z: float
    norm: float
    need: float  # largest number of rows that a rank was sent, as a share of its buffer; above 1 = overflow
    used: float
    sums: tuple[float, ...] = ()  # the objective's own metrics, each divided by the number of units


class Learner(Forward):
    """A model, an objective and an optimizer, on any layout of processes.

    Args:
        model: a `moekit.Transformer`, or this rank's part of one (`moekit.learner.stages.part_of`). A whole model is
            cut down to the part that the layout gives this rank. Its parameters move into flat buckets.
        objective: ``(flat, outputs) -> Terms``, e.g. `moekit.SFT()` or a function typed in a cell.
        config: optimizer, router losses, elision, layout.
        world: all ranks of the layout; None = torch.distributed's, or one process.
        component: under which its rows are counted, "policy" or "critic".

    Raises:
        ConfigError: a layout, denominator or bias that cannot work. Before anything is moved.

    >>> learner = Learner(model, SFT(), LearnerConfig(lr=1e-3))     # doctest: +SKIP
    >>> learner.step([batch])["loss/total"]                         # doctest: +SKIP
    """

    def __init__(
        self, model: Transformer, objective: Objective, config: LearnerConfig | None = None, world: World | None = None,
        component: str = "policy",
    ):  # fmt: skip
        config = config or LearnerConfig()
        self.objective = objective
        self.denominator: Denominator = getattr(objective, "denominator", "global_tokens")
        self.constant_length = getattr(objective, "constant_length", None)
        self.name = getattr(objective, "name", getattr(objective, "__name__", "objective"))
        self.units: Any = getattr(objective, "units", None)
        self.measured: tuple[str, ...] = tuple(getattr(objective, "metrics", ()))
        self.needs = tuple(getattr(objective, "needs", ()))
        self.temperature: float = getattr(objective, "temperature", 1.0)
        shape = model.config
        if self.denominator == "constant" and not self.constant_length:
            raise ConfigError("denominator 'constant' needs constant_length on the objective")
        if config.bias_rate and not shape.selection_bias:
            raise ConfigError(f"bias_rate={config.bias_rate} needs a model with ModelConfig.selection_bias=True")
        self._place(model, config, world)
        self.gradients = Gradients(model, self.config, self.mesh)
        for bucket in self.gradients.buckets:  # replicas start equal even if they were seeded apart
            bucket.ranks.broadcast(bucket.param)
            if bucket.family.tied:
                self.mesh.tie.broadcast(bucket.param)
            bucket.master.copy_(bucket.param if bucket.zero == 0 else bucket.param[bucket.start : bucket.stop])
        for buffer in self._buffers().values():
            self.mesh.dp.broadcast(buffer)
        for piece, frozen in self.gradients.held():
            self.gradients.ranks(piece.name).broadcast(frozen)
        behind = {n: (b.param, b.master) for b in self.gradients.buckets for n in b.params}
        self.caches = ExpertCaches(model, behind=behind) if self.config.precision == "mxfp8" else None
        self.optimizer = FlatAdamW(self.gradients, self.config)
        self._ready(component, self.gradients.finish_microbatch)
        self.counter = RowCounter.of(shape, component)
        with self.counter.during("recompute"):
            pass  # every rank knows of the pass, also one that holds no expert
        self.updates = 0  # committed optimizer steps: also the weight version
        self.skipped = 0
        self.watch, self.most_saved = False, 0  # whether the next step counts what backwards keep; the most, in bytes
        self._saved: SavedBytes | None = None

    # ------------------------------------------------------------------ one step
    def step(
        self, batches: Sequence[Batch], *, record: bool = False, replay: list[list[Tensor]] | None = None
    ) -> dict[str, float]:
        """Run one optimizer step over this rank's microbatches; every rank calls it, also with an empty list.

        Args:
            batches: this data-parallel rank's microbatches. Ranks that differ only in ep or pp place: those of one dp
                index (`mesh.dp.rank`) pass the same.
            record: keep the routers' choices in `routes`, by microbatch and layer.
            replay: choices to use instead, by microbatch and routing layer of the whole model, [N, K] in flat order.

        Returns:
            Metrics by ``group/name``, the same on every rank; counts, rates and bytes are summed over ranks.

        Raises:
            DataError: a token, label or position outside the model's range, on all ranks. Raised before any work.
            CapacityError: more rows than a buffer holds, with on_overflow="raise". Nothing has moved.
        """
        t0 = time.perf_counter()
        self.mesh.wire.reset()
        flats = self._prepare(batches, self.needs, self.units)
        counts = step_counts(flats, self.mesh.dp.sum_list)
        units = counts.supervised
        if self.units is not None:
            (units,) = self.mesh.dp.sum_list([float(sum(self.units(f) for f in flats))])
        counts = replace(counts, units=units)
        with saved_bytes(self.model) if self.watch else nullcontext() as self._saved:
            found = self._attempt(flats, counts, record, replay)
        self.watch, self._saved = False, None
        redone = self.overflow.must_redo(found.need)
        if redone:  # discard everything; every microbatch runs again on the synchronized path
            with self.overflow.synchronized():
                found = replace(self._attempt(flats, counts, record, replay), need=found.need, used=found.used)
        commit = counts.units > 0 and math.isfinite(found.loss) and math.isfinite(found.norm)
        clipped = False
        self.counter.all_reduce(self.world.group, alone=self.world.size == 1)
        if commit:
            clipped = self.optimizer.step(self.updates, found.norm)
            self._move_bias()
            self.updates += 1
            if self.caches is not None:
                self.caches.rebuild()
        else:
            self.skipped += 1
        seconds, wire = self._wall(time.perf_counter() - t0)
        c = self.config.router
        return {
            "loss/total": found.loss + c.balance * found.balance + c.z * found.z,
            f"loss/{self.name}": found.loss,
            **{f"{self.name}/{key}": value for key, value in zip(self.measured, found.sums)},
            "loss/balance": found.balance,
            "loss/z": found.z,
            "grad/norm": found.norm,
            "grad/clipped": float(clipped),
            "lr": self.optimizer.lr if commit else 0.0,
            "step/index": self.updates,
            "step/skipped": self.skipped,
            "time/step_s": seconds,
            **self.counter.metrics(),
            **rates(self.counter, seconds),
            "flops/step": step_flops(self.model.config, self.counter)["total"] if counts.units else 0.0,
            **wire,
            **self.overflow.metrics(found.need, found.used, redone),
        }

    def _attempt(self, flats: list[Flat], counts: StepCounts, record: bool, replay: Any) -> Readings:
        """All forwards and backwards of a step, and the sum of gradients over ranks. Moves nothing."""
        self.counter.reset()
        self.gradients.start()
        self.overflow.reset()
        self.routes = []
        sums = {key: torch.zeros((), dtype=torch.float64, device=self.model.device) for key in self.measured}
        c, device = self.config.router, self.model.device
        held, zero_E = self.model.blocks, torch.zeros(self.model.config.experts, dtype=torch.long, device=device)
        self.chosen = {i: zero_E.clone() for i, b in held.items() if self.config.bias_rate and b.routes}
        if counts.units == 0:  # nothing to learn from: known before any work, on every rank alike
            self.counter.skip(flats if self.mesh.pp.rank == 0 else [])
            self.gradients.finish()
            return Readings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (0.0,) * len(sums))
        pooled = c.granularity == "hf" and c.balance > 0
        if pooled and (len(flats) > 1 or self.world.size > 1):
            raise ConfigError(
                f"router granularity 'hf' pools one microbatch on one process, got {len(flats)} microbatches, "
                f"world size {self.world.size}; use 'sequence' or 'microbatch'"
            )
        (divisor,) = self.mesh.dp.sum_list([scope_count(flats, c.scope)])
        router = RouterLoss(c, max(divisor, 1.0), self.mesh.dp.sum if self.mesh.dp.size > 1 else None)
        loss = torch.zeros((), dtype=torch.float64, device=device)

        def forward(place: int, x_ND: Tensor | None, i: int) -> Tensor:
            nonlocal loss
            x, routes = self._stage(
                place, x_ND, flats[i], router, self.counter, replay[i] if replay and flats[i].rows else None
            )
            self._record(i, place, routes, record)
            self._count_choices(place, routes, flats[i])
            if self.model.part.stages[place][1] < self.model.config.layers:
                return x
            out = self.model.finish(x, flats[i], routes, temperature=self.temperature)
            terms = self.objective(flats[i], out)
            if self.units is None:
                weight = token_weights(flats[i], counts, self.denominator, self.constant_length)
                value = (terms.loss_M * weight.to(terms.loss_M.dtype)).sum()
            else:
                value = terms.loss_M.sum() / counts.units
            loss += value.detach()
            for key, total in sums.items():
                total += terms.sums[key].detach()
            if not value.requires_grad:  # router losses, and other ranks' experts, wait for this backward all the same
                value = value + out.score_M[:0].sum()
            if pooled:
                balance = balance_hf(out.routes or [], flats[i], c.scope)
                router.values["balance"].append(balance.detach())
                value = value + c.balance * balance
            return value

        self.run(flats, self._watched(forward))
        self.gradients.finish()
        own = [loss, *(sum(v, torch.zeros((), device=device)) for v in router.values.values())]
        own += [self.gradients.square_norm(), *self.overflow.fullness(), *sums.values()]
        mine = torch.stack([torch.as_tensor(x, device=device).to(torch.float64) for x in own])
        all_WX = self.world.all_gather(mine.new_empty(self.world.size, len(own)).view(-1), mine, "counts")
        rows = all_WX.view(self.world.size, -1).tolist()  # the one host read that the update waits for
        total = [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in zip(*rows)]
        most = [max(column) for column in zip(*rows)]
        loss_sum, balance, z, square, *_ = total
        means = tuple(x / counts.units for x in total[6:])
        return Readings(loss_sum, balance, z, math.sqrt(square), need=most[4], used=most[5], sums=means)

    def _watched(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self._saved is None:
            return forward

        def then(*stage: Any) -> Tensor:
            out = forward(*stage)
            if self._saved is not None:
                self.most_saved = max(self.most_saved, self._saved.live)
            return out

        return then

    def _held(self) -> dict[str, Iterable[Tensor | None]]:
        buckets, states = self.gradients.buckets, self.optimizer.adamw.state.values()
        moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq") if name in s]
        gradients = [g for b in buckets for g in (b.grad, b.owned_grad)]
        return super()._held() | {"gradients": gradients, "optimizer": [*(b.master for b in buckets), *moments]}

    def memory(self) -> dict[str, float]:
        """As `Forward.memory`, with gradients, optimizer, and saved."""
        (most,) = self.world.sum_list([float(self.most_saved)])
        return super().memory() | {f"memory/{self.scored.component}_saved_bytes": most}

    def _count_choices(self, place: int, routes: list, flat: Flat) -> None:
        """For the selection bias; a position of a shared prompt counts for each of its children."""
        for layer, route in zip(self._layers(place), routes):
            if layer in self.chosen:
                chosen_NK = route.expert_NK[: flat.real]
                share_NK = flat.share_N[: flat.real, None].expand_as(chosen_NK)
                self.chosen[layer].scatter_add_(0, chosen_NK.reshape(-1), share_NK.reshape(-1))

    def _move_bias(self) -> None:
        for layer, count_E in self.chosen.items():
            bias = self.model.blocks[layer].moe.router.selection_bias
            bias += bias_step(self.mesh.dp.sum(count_E), self.config.bias_rate)

    def _wall(self, seconds: float) -> tuple[float, dict[str, float]]:
        """The slowest rank's time, and the bytes that all ranks sent, by kind."""
        sent = self.mesh.wire.sent
        mine = torch.tensor([seconds, *(float(sent.get(k, 0)) for k in WIRE)], dtype=torch.float64)
        mine = mine.to(self.world.device)
        rows = self.world.all_gather(mine.new_empty(self.world.size * len(mine)), mine, "counts")
        columns = list(zip(*rows.view(self.world.size, -1).tolist()))
        return max(columns[0]), {f"wire/{k}_bytes": sum(c) for k, c in zip(WIRE, columns[1:])}

    # ------------------------------------------------------------------ looking without moving
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Mean loss and metrics per unit over all ranks' batches, without gradient; counted in pass "evaluate"."""
        flats = self._prepare(batches, self.needs, self.units)
        found: dict[int, list[Tensor]] = {}

        def told(i: int, out: Outputs) -> Tensor:
            terms = self.objective(flats[i], out)
            n = terms.loss_M.numel() if self.units is None else self.units(flats[i])
            found[i] = [terms.loss_M.sum(), torch.tensor(n), *(terms.sums[key] for key in self.measured)]
            return terms.loss_M.sum()

        self._pass(flats, told, "evaluate", self.temperature)
        each = [[float(x) for x in sums] for sums in found.values()] or [[0.0] * (2 + len(self.measured))]
        total, n, *sums = self.world.sum_list([math.fsum(column) for column in zip(*each)])
        means = {
            f"eval/{key}": value / n if n else 0.0 for key, value in zip((self.name, *self.measured), (total, *sums))
        }
        return {**means, "eval/tokens" if self.units is None else "eval/units": n}

    # ------------------------------------------------------------------ state (moekit.learner.state)
    def save(
        self, folder: str | Path, extra: dict[str, Any] | None = None, *, overwrite: bool = False, wait: bool = True
    ) -> Saving:
        """Write masters, moments, router bias, step, random state and `extra` (JSON); see `moekit.learner.state`."""
        return state.save(self, folder, extra, overwrite=overwrite, wait=wait)

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of any layout; returns its `extra`. See `moekit.learner.state.restore`."""
        if self.unfit == CLOSED:
            self.check()
        return state.restore(self, folder)

    def close(self) -> None:
        """As `Forward.close`; parameters are plain tensors again, with plain gradients."""
        if self.unfit != CLOSED:
            self.gradients.close()
        super().close()

    def gradient(self) -> dict[str, Tensor]:
        """The last step's gradient by name, whole, on every rank (after clipping, if it was active). A collective."""
        return self.gathered("gradient")

    def gathered(self, kind: str) -> dict[str, Tensor]:
        """Whole "gradient", "parameter", "master", "exp_avg" or "exp_avg_sq" by name, on every rank. A collective."""
        return state.gathered(self, kind)

    def _buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in self.model.named_buffers() if n.endswith("selection_bias")}
