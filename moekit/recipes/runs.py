"""What all training recipes do around their loop: begin, continue, record, and end with a card and an export.

run = begin(config, "sft", load=...)             everything is checked, nothing is written
learner = Learner(run.model(), ...)
start, state = continued(run, learner)           0 and {} for a new run
with Recorder(run, learner, start, ...) as record:
    for step in range(start, config.steps): ...; record.step(step, metrics, arrays, state)
return record.finish()
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .. import ops
from ..checkpoint.save import latest
from ..config import LearnerConfig, ModelConfig, RunConfig
from ..data.stream import RowStream
from ..launch.worker import Here, here
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..learner.mesh import World
from ..learner.weights import export, from_checkpoint
from ..measure.card import RunCard, base_checkpoint, hash_data
from ..measure.record import RunWriter, open_run
from ..model.presets import parameter_counts
from ..model.transformer import Part, Transformer
from ..viz.progress import Progress
from . import setup
from .setup import CHECKPOINTS, EXPORT, share, together


@dataclass(frozen=True)
class Run:
    """A run that has been checked and not yet begun."""

    name: str  # of the recipe
    config: Any
    folder: Path
    shape: ModelConfig
    data: Any
    place: Here
    world: World
    waits: World  # the same ranks, with patience
    words: dict[str, str] = field(default_factory=dict)  # hashes of tokenizer and chat template

    def model(
        self, name: str | None = None, layout: LearnerConfig | None = None, shape: ModelConfig | None = None
    ) -> Transformer:
        """This rank's part of the run's model, or of another one: of the layers and experts that a model of `shape`
        has there. Raises on all ranks what one raises."""
        with together(self.waits):
            model = setup.make_model(self.config, shape or self.shape, self.place, name, layout)
        return model


def begin(
    config: RunConfig, name: str, load: Callable[[Any, ModelConfig], Any], *, task: bool = False,
    check: Callable[[ModelConfig, Here], None] | None = None,
) -> Run:  # fmt: skip
    """Check everything and read the data, on rank 0 for all. Nothing is written.

    Args:
        load: `(tokenizer, shape) -> data`; what has a `report` is printed with it.
        task: `config.data` may name a task.
        check: what else this recipe refuses.
    """
    place, world = here(), World.current()
    waits = setup.patient(world)
    found: Any = None
    with together(waits):
        if world.rank == 0:
            folder, shape, tokenizer = setup.check(config, place, name, task)
            if check is not None:
                check(shape, place)
            told = {"tokenizer": tokenizer.backend_tokenizer.to_str(), "template": tokenizer.get_chat_template()}
            words = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in told.items()}
            data = load(tokenizer, shape)
            print(f"{config.data}: {data.report}", flush=True)
            found = folder, shape, data, words
    folder, shape, data, words = share(waits, found)
    return Run(name, config, folder, shape, data, place, world, waits, words)


def continued(run: Run, learner: Learner, critic: Learner | None = None) -> tuple[int, dict[str, Any]]:
    """Steps done and what the recipe remembered, from the newest checkpoint; 0 and {} for a new run."""
    start, state = 0, dict[str, Any]()
    with together(run.waits):
        if run.config.resume:
            start, state = setup.restore(learner, run.folder, run.config, critic)
    return start, state


def restore_stream(run: Run, stream: RowStream, state: dict[str, Any]) -> None:
    """Put the stream where it was. Raises DataError: it was another stream."""
    with together(run.waits):
        if state:
            stream.restore(state)


class Recorder:
    """Writes a run's folder: card, metrics, arrays, checkpoints, progress, and at the end card and export.

    Args:
        start: steps done; above 0, or with `config.resume`, the record goes on after them.
        objective, batch: what the card says of them.
        critic: a second learner that is saved with the first.
        others: models whose memory is recorded beside the learners'.
        shown: metrics of the progress line, by the name they have there.
    """

    def __init__(
        self, run: Run, learner: Learner, start: int, *, objective: dict[str, Any], batch: dict[str, Any],
        shown: dict[str, str], critic: Learner | None = None, others: Sequence[Forward] = (),
    ):  # fmt: skip
        self.run, self.learner, self.critic, self.shown = run, learner, critic, shown
        self.weighed: list[Forward] | None = [learner, *([critic] if critic is not None else []), *others]
        for one in (learner, critic):
            if one is not None:  # zero-bubble schedules take a backward apart, which hooks on saved tensors forbid
                one.watch = not one.config.pipeline.startswith("zb")
        config, lead = run.config, run.world.rank == 0
        self.card: RunCard | None = None
        with together(run.waits):
            if lead and config.overwrite and run.folder != run.place.folder:
                setup.clear(run.folder)
            self.writer = RunWriter(run.folder, resume=start if config.resume else None, rank=run.world.rank)
            if lead:
                self.card = self._card(objective, batch)
                self.writer.card(self.card)
                self.writer.config(config.to_dict())
        self.progress = Progress(config.steps, "step") if lead else None

    def __enter__(self) -> Self:
        self.writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036
        self.writer.__exit__(*error)
        if self.progress is not None and error[0] is None:
            self.progress.close()

    def step(self, step: int, metrics: dict[str, float], arrays: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Record a step that has been taken, the first one with what is held in memory; save where the config says so.
        A collective."""
        if self.weighed is not None:
            metrics = metrics | {name: n for one in self.weighed for name, n in one.memory().items()}
            self.weighed = None
        self.writer.write(step, metrics, arrays)
        if self.progress is not None:
            told: dict[str, Any] = {key: metrics[name] for key, name in self.shown.items() if name in metrics}
            self.progress.update(step + 1, **told, **({"skipped": s} if (s := self.learner.skipped) else {}))
        every = self.run.config.save_every
        if step + 1 == self.run.config.steps or (every is not None and (step + 1) % every == 0):
            self.writer.flush()  # a run that goes on from here has the arrays of all steps before
            setup.save(self.learner, state, self.run.folder, self.run.config, step + 1, self.critic)

    def finish(self, **results: Any) -> dict[str, Any]:
        """Export, close the card, and say what came out, on every rank. A collective."""
        run, config, learner = self.run, self.run.config, self.learner
        summary: dict[str, Any] = {}
        with together(run.waits):
            if run.world.rank == 0:
                out = run.folder / EXPORT if config.export else None
                if out is not None:
                    model = learner.model
                    if model.part != Part.whole(run.shape):  # put together from the checkpoint, on the CPU
                        model = from_checkpoint(latest(run.folder / CHECKPOINTS) or run.folder)
                    export(model, out, setup.tokenizer_folder(config), overwrite=out.exists())
                assert self.card is not None
                measured = {bucket: choice["form"] for bucket, choice in ops.choices().items()}
                layout = {**self.card.layout, "kernels": {**self.card.layout["kernels"], **measured}}
                card = replace(self.card, layout=layout).finish(open_run(run.folder).metrics, **results)
                self.writer.card(card)
                summary = _summary(run, card, out, learner) | results
        return share(run.waits, summary)

    def _card(self, objective: dict[str, Any], batch: dict[str, Any]) -> RunCard:
        run, config, learner = self.run, self.run.config, self.learner
        report = getattr(run.data, "report", None)
        there = isinstance(config.data, str) and Path(config.data).exists()  # else a task, or what is in memory
        known = ops.explain(run.place.device, setup.DTYPES[config.dtype]).items()
        kernels = {name: re.split("[:(,]", told)[0].strip() for name, told in known}
        return RunCard(
            name=run.folder.resolve().name,
            base=base_checkpoint(config.model, seed=config.seed),
            model={"config": learner.model.config.to_dict(), "parameters": parameter_counts(learner.model.config)},
            objective={"name": run.name, **objective},
            learner={**config.learner.to_dict(), "dtype": config.dtype},
            layout={"world": run.world.size, "dp": learner.mesh.dp.size, "threads of a rank": torch.get_num_threads(),
                    "device": torch.device(run.place.device).type, "backend": ops.backend(), "kernels": kernels,
                    **{name: getattr(config.learner, name) for name in setup.LAYOUT}},
            batch={"data": config.data, **({"sha256": hash_data(config.data)} if there else {}), **run.words, **batch,
                   "fingerprint": run.data.fingerprint,
                   "report": report.to_dict() if report is not None else {}},
        )  # fmt: skip


def _summary(run: Run, card: RunCard, out: Path | None, learner: Learner) -> dict[str, Any]:
    loss, sums = card.results["losses"].get(f"loss/{learner.name}", {}), card.accounting
    positions, rate = sums["positions"], sums["rates over the run"]["supervised tokens/s"]
    return {
        "run": str(run.folder), "steps": sums["steps"], "skipped": learner.skipped,
        "loss_first": loss.get("first"), "loss_last": loss.get("last"),
        "supervised_tokens": positions["supervised"], "tokens": positions["total"] - positions["padding"],
        "rows_dispatched": sums["routed rows"].get("dispatched", 0),
        "rows_per_supervised_token": sums["per supervised token"]["rows dispatched"], "supervised_tokens_s": rate,
        "seconds": card.seconds, "checkpoint": str(latest(run.folder / CHECKPOINTS) or ""),
        "export": str(out) if out is not None else None,
    }  # fmt: skip
