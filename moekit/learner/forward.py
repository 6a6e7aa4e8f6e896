"""A model placed on a layout and run forward: reference policy, reward model, and what a learner is before it learns.

No gradient, no optimizer state, forward weight caches only. Microbatches may differ in number and size between ranks;
a pass in which a rowwise buffer overflows is run again on the synchronized path, so nothing is ever computed from
dropped rows unasked.

Axis letters: N positions of a microbatch, M labelled positions, K experts per position, D width.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import LearnerConfig
from ..data.batch import Batch, Flat
from ..errors import DataError, LearnerError
from ..measure.memory import held_bytes
from ..measure.tokens import RowCounter
from ..model.transformer import Outputs, Transformer, check
from . import loop
from .gradients import is_expert
from .mesh import Mesh, World
from .overflow import Overflow
from .precision import ExpertCaches, check_shape
from .stages import part_of

CLOSED = "it was closed, and its memory freed; make a new one of the model"


class Forward:
    """A frozen model on any layout of processes.

    Args:
        model: a `moekit.Transformer`, or this rank's part of one. A whole model is cut down to the part that the layout
            gives this rank.
        config: its layout, elision and precision are used.
        world: all ranks of the layout; None = torch.distributed's, or one process.
        component: under which its rows are counted, see `moekit.measure.tokens`.

    Raises:
        ConfigError: a layout that cannot work. Before anything is moved.
    """

    def __init__(
        self,
        model: Transformer,
        config: LearnerConfig | None = None,
        world: World | None = None,
        component: str = "reference",
    ):
        self._place(model, config or LearnerConfig(), world)
        model.requires_grad_(False)
        for name, p in model.named_parameters():  # replicas are equal even if they were seeded apart
            (self.mesh.expert_dp if is_expert(name) else self.mesh.dp).broadcast(p.data)
        for name, buffer in model.named_buffers():
            self.mesh.dp.broadcast(buffer)
        self.caches = ExpertCaches(model, backward=False) if self.config.precision == "mxfp8" else None
        self._ready(component)

    def _place(self, model: Transformer, config: LearnerConfig, world: World | None) -> None:
        """Make the meshes, and cut the model down to what this rank holds."""
        self.model, self.config = model, config
        if config.precision == "mxfp8":
            check_shape(model.config)
        self.mesh = Mesh.make(config, model.config, world)
        self.world = self.mesh.world
        part = part_of(config, model.config, self.mesh.pp.rank, self.mesh.ep.rank)
        if model.part != part:
            model.keep(part)

    def _ready(self, component: str, told: Any = None) -> None:
        """Make what runs microbatches, and what counts them."""
        shape = self.model.config
        self.run: Any = partial(loop.run, told=told)
        if self.mesh.pp.size > 1:
            from .pipeline import Pipeline  # torch's schedules take a second to import

            dtype = next(self.model.parameters()).dtype
            self.run = Pipeline(self.config, shape, self.mesh.pp, dtype, self.model.device).run
        self.overflow = Overflow(self.model, self.config, self.mesh.ep)
        self.unfit = ""  # why it cannot be used, if so; the same on every rank
        self.scored = RowCounter.of(shape, component)  # of all passes without gradient since `collect`
        self.routes: list[dict[int, Tensor]] = []  # where asked for: expert choices [N, K] by layer held here
        self.sent: Counter[str] = Counter()  # bytes that this rank sent in those passes, by pass

    # ------------------------------------------------------------------ a pass
    @torch.no_grad()
    def score(
        self, batches: Sequence[Batch], *, temperature: float = 1.0, pass_name: str = "score", record: bool = False,
        replay: list[list[Tensor]] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Log-probs of the labels, or values with a value head, without gradient. Every rank calls it.

        Args:
            batches: this data-parallel rank's microbatches, as for `Learner.step`.
            temperature: of the log-probs.
            pass_name: under which rows are counted ("score", "evaluate").
            record: keep the routers' choices in `routes`, by microbatch and layer held here.
            replay: choices to use instead, by microbatch and routing layer of the whole model; -1 = the router's own.

        Returns:
            [M] for each microbatch, float32 (float64 of a float64 model), in the order of `flat.label_index_M`, the
            same on all ranks of a pipeline.

        Raises:
            DataError: a token, label or position outside the model's range, on all ranks. Before any work.
        """
        flats = self._prepare(batches)

        def told(i: int, out: Outputs) -> Tensor:
            found[i] = out.score_M
            return out.score_M.sum()

        found: dict[int, Tensor] = {}
        self._pass(flats, told, pass_name, temperature, record, replay)
        last = self._last_stage
        if self.mesh.pp.size > 1:
            sizes = [f.label_index_M.shape[0] for f in flats]
            wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
            whole = torch.empty(sum(sizes), dtype=wide, device=self.model.device)
            if flats and self.mesh.pp.rank == last:
                torch.cat([found[i] for i in range(len(flats))], out=whole)
            found = dict(enumerate(self.mesh.pp.broadcast(whole, last).split(sizes)))
        return [found[i] for i in range(len(batches))]

    def _pass(
        self, flats: list[Flat], told: Any, pass_name: str, temperature: float = 1.0, record: bool = False,
        replay: list[list[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Run microbatches forward; `told(i, outputs)` where the last stage is, again if a buffer has overflowed."""

        def attempt() -> float:
            self.overflow.reset()
            self.routes = []
            counter = RowCounter.of(self.model.config, self.scored.component)

            def forward(place: int, x_ND: Tensor | None, i: int) -> Tensor:
                given = replay[i] if replay and flats[i].rows else None
                x, routes = self._stage(place, x_ND, flats[i], None, counter, given)
                self._record(i, place, routes, record)
                if self.model.part.stages[place][1] < self.model.config.layers:
                    return x
                return told(i, self.model.finish(x, flats[i], routes, temperature=temperature))

            with counter.during(pass_name):
                self.run(flats, forward, backward=False)
            need = self.world.max_list([float(self.overflow.fullness()[0])])[0]
            if need <= 1.0 or self.config.on_overflow == "drop" or self.overflow.rowwise is None or again:
                self.scored.add(counter)
            return need

        again, before = False, self._sent()
        if self.overflow.must_redo(attempt()):
            again = True
            with self.overflow.synchronized():
                attempt()
        self.sent[pass_name] += self._sent() - before

    def collect(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics and arrays of the passes without gradient since the last call, over all ranks. A collective.

        rows/<component>_<pass>: dispatched rows. positions/<component>_<pass>: positions, padding included.
        wire/<component>_<pass>_bytes: bytes sent, a pass that was run twice counted twice.
        """
        self.scored.all_reduce(self.world.group, alone=self.world.size == 1)
        metrics: dict[str, float] = {}
        for (component, name), m in self.scored.host().items():
            metrics[f"rows/{component}_{name}"] = int(m.dispatched_LCE.sum())
            metrics[f"positions/{component}_{name}"] = int(m.positions_C.sum())
        keys = list(self.scored.host())
        for (component, name), sent in zip(keys, self.world.sum_list(float(self.sent[name]) for _, name in keys)):
            metrics[f"wire/{component}_{name}_bytes"] = int(sent)
        arrays = self.scored.arrays()
        self.scored.reset()
        self.sent.clear()
        return metrics, arrays

    def memory(self) -> dict[str, float]:
        """memory/<component>_<kind>_bytes: storages held between steps, over all ranks; each counts once. A collective.

        parameters; caches (of MXFP8 experts); of a learner that has taken a step also gradients, optimizer (masters
        and moments), and saved: the most kept for backwards at one time, where `Learner.watch` asked for it.
        """
        found = held_bytes(self._held())
        total = self.world.sum_list(float(n) for n in found.values())
        return {f"memory/{self.scored.component}_{kind}_bytes": n for kind, n in zip(found, total)}

    def close(self) -> None:
        """Give the model back, free exchange buffers and MXFP8 copies; refuse passes from then on. Can be repeated.

        The model keeps its weights, and this rank's part of them. Every rank calls it before another use of the model
        on another layout; a later `Learner` or `Forward` of the same model on the same layout does not need it."""
        if self.unfit != CLOSED:
            self.overflow.close()
            if self.caches is not None:
                self.caches.close()
        self.unfit, self.caches = CLOSED, None

    def check(self) -> None:
        """Raise LearnerError if it cannot be used: closed, or after a `restore` that failed half-way."""
        if self.unfit:
            raise LearnerError(self.unfit)

    def _held(self) -> dict[str, Iterable[Tensor | None]]:
        weights = self.caches.caches.values() if self.caches is not None else ()
        operands = [q for w in weights for q in (w.operands.forward, w.operands.transposed) if q is not None]
        caches = [t for q in operands for t in vars(q).values() if isinstance(t, Tensor)]
        return {"parameters": [*self.model.parameters(), *self.model.buffers()], "caches": caches}

    def _sent(self) -> int:
        return sum(self.world.wire.sent.values())

    # ------------------------------------------------------------------ parts of a pass
    @property
    def _last_stage(self) -> int:
        """The pipeline rank that holds the last layers: zbv leads the stages down the ranks and back up."""
        return 0 if self.config.pipeline == "zbv" or self.mesh.pp.size == 1 else self.mesh.pp.size - 1

    def _stage(self, place: int, x_ND: Tensor | None, flat: Flat, router: Any, counter: RowCounter, replay=None):
        recompute = self.config.recompute if torch.is_grad_enabled() else "none"
        if place == 0 and self.mesh.pp.rank == 0:  # positions count once, not once a pipeline rank
            counter.positions(flat)
            if recompute != "none":
                with counter.during("recompute"):
                    counter.positions(flat)
        return self.model.stage(
            place,
            x_ND,
            flat,
            elide=self.config.elide,
            router_loss=router if router is not None and router.per_layer else None,
            observer=counter,
            replay=replay,
            recompute=recompute,
        )

    def _record(self, microbatch: int, place: int, routes: list, record: bool) -> None:
        while record and len(self.routes) <= microbatch:
            self.routes.append({})
        if record:
            self.routes[microbatch] |= {k: r.expert_NK.detach() for k, r in zip(self._layers(place), routes)}

    def _layers(self, place: int) -> list[int]:
        """The layers of a stage that route."""
        start, stop = self.model.part.stages[place]
        return [i for i in self.model.config.moe_layers if start <= i < stop]

    def _prepare(self, batches: Sequence[Batch], needs: tuple[str, ...] = (), units: Any = None) -> list[Flat]:
        """Flat microbatches, checked, and as many on every rank (missing ones are empty and route nothing).

        `needs`: names of the extra values that every batch must bring. `units`: an objective's; it may refuse."""
        self.check()
        flats, problem = list[Flat](), ""
        try:
            for b in batches:
                if missing := [n for n in needs if n not in b.extra]:
                    raise DataError(f"the batch lacks the extra values {', '.join(missing)} that the objective reads")
                check(b.flat, self.model.config)
                _ = units and units(b.flat)
                flats.append(b.flat)
        except DataError as error:
            problem = f"rank {self.world.rank}: {error}"
        # all ranks learn of a bad batch before the first collective of the step, or the others would wait for ever
        rounds, bad = self.world.max_list([len(batches), bool(problem)])
        if bad:
            raise DataError("; ".join(p for p in self.world.gather(problem) if p))
        if len(flats) < rounds:
            nothing = torch.zeros(1, 2, dtype=torch.long)
            template = batches[0] if batches else Batch.make(nothing, extra=dict.fromkeys(needs, nothing.float()))
            flats += [template.empty().flat] * (int(rounds) - len(flats))
        if self.mesh.ep.size > 1:  # everyone learns how many rows can come from whom, here and not in the layers
            theirs = self.mesh.ep.gather([f.size for f in flats])
            flats = [replace(f, peers=peers) for f, peers in zip(flats, zip(*theirs))]
        return [f.to(self.model.device) for f in flats]
