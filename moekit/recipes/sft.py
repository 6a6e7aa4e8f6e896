"""Supervised fine-tuning on chats, as one loop: read, mask, pack, step, record, save, export.

    moekit.submit(train, SFTConfig(model="path/to/olmoe", data="chats.jsonl"), nproc=2)     several processes
    train(SFTConfig(model="path/to/olmoe", data="chats.jsonl"))                            this process, one rank

Everything is checked before anything is written (`moekit.recipes.setup`). A run that was stopped goes on with
`resume=True`, bitwise as if it had never stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.save import latest
from ..config import SFTConfig
from ..data.dataset import build
from ..data.pack import Rows, check_vocabulary
from ..data.stream import RowStream
from ..launch.worker import here
from ..learner.learner import Learner
from ..learner.mesh import World
from ..learner.weights import export, from_checkpoint
from ..measure.card import RunCard, base_checkpoint
from ..measure.record import RunWriter, open_run
from ..model.presets import parameter_counts
from ..model.transformer import Part
from ..objectives.sft import SFT
from ..viz.progress import Progress
from . import setup
from .setup import CHECKPOINTS, EXPORT, share, together


def train(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a model on the assistant's turns of chats. Every rank calls it.
    Args: `config`: see `moekit.SFTConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, first and last loss, tokens and rows, rates,
        checkpoint and export. All of it, and more, is in the run folder.
    Raises:
        DataError, ConfigError, CheckpointError, NumericsError, RunExistsError, StorageError: bad input, on all ranks,
            before anything is written."""
    place, world = here(), World.current()
    waits = setup.patient(world)
    found: Any = None
    with together(waits):
        if world.rank == 0:
            folder, shape, tokenizer = setup.check(config, place)
            rows = build(config.data, tokenizer, config.rows)
            check_vocabulary(rows, shape.vocab)
            print(f"{config.data}: {rows.report}", flush=True)
            found = folder, shape, rows
    folder, shape, rows = share(waits, found)
    with together(waits):
        model = setup.make_model(config, shape, place)
    learner = Learner(model, SFT(config.denominator, config.constant_length), config.learner, world)
    stream = RowStream(rows, config.batch_rows, config.rows.seed, config.rows.shuffle)
    start = 0
    with together(waits):
        if config.resume:
            start = setup.restore(learner, stream, folder, config)
    with together(waits):
        if world.rank == 0 and place.folder is None and config.overwrite:
            setup.clear(folder)
        writer = RunWriter(folder, resume=start if config.resume else None, rank=world.rank)
        card = _card(config, learner, rows, folder) if world.rank == 0 else None
        if card is not None:
            writer.card(card)
            writer.config(config.to_dict())

    progress = Progress(config.steps, "step") if world.rank == 0 else None
    with writer:
        for step in range(start, config.steps):
            began = time.perf_counter()
            batches = stream.next(learner.mesh.dp.rank, learner.mesh.dp.size, config.microbatch_rows)
            ready = time.perf_counter() - began
            metrics = learner.step(batches)
            metrics |= {"data/epoch": stream.epoch, "data/row": stream.position, "time/data_s": ready}
            writer.write(step, metrics, learner.counter.arrays())
            if progress is not None:
                told = {"loss": metrics["loss/sft"], "supervised_tokens/s": metrics["rate/supervised_tokens_s"]}
                progress.update(step + 1, **told, **({"skipped": learner.skipped} if learner.skipped else {}))
            last = step + 1 == config.steps
            if last or (config.save_every is not None and (step + 1) % config.save_every == 0):
                setup.save(learner, stream, folder, config, step + 1)
    if progress is not None:
        progress.close()
    summary: dict[str, Any] = {}
    with together(waits):
        if world.rank == 0:
            out = folder / EXPORT if config.export else None
            if out is not None:
                if learner.model.part != Part.whole(shape):  # put together from the checkpoint, on the CPU
                    model = from_checkpoint(latest(folder / CHECKPOINTS) or folder)
                export(model, out, setup.tokenizer_folder(config), overwrite=out.exists())
            assert card is not None
            card = card.finish(open_run(folder).metrics)
            writer.card(card)
            summary = _summary(card, folder, out, learner)
    return share(waits, summary)


def _card(config: SFTConfig, learner: Learner, rows: Rows, folder: Path) -> RunCard:
    return RunCard(
        name=folder.resolve().name,
        base=base_checkpoint(config.model, seed=config.seed),
        model={"config": learner.model.config.to_dict(), "parameters": parameter_counts(learner.model.config)},
        objective={"name": "sft", "denominator": config.denominator, "constant_length": config.constant_length},
        learner={**config.learner.to_dict(), "dtype": config.dtype},
        layout={"world": learner.world.size, "dp": learner.mesh.dp.size, "threads of a rank": torch.get_num_threads(),
                **{name: getattr(config.learner, name) for name in setup.LAYOUT}},
        batch={"data": config.data, "rows of a step": config.batch_rows, "rows of a microbatch": config.microbatch_rows,
               "rows": config.rows.to_dict(), "fingerprint": rows.fingerprint, "report": rows.report.to_dict()},
    )  # fmt: skip


def _summary(card: RunCard, folder: Path, out: Path | None, learner: Learner) -> dict[str, Any]:
    loss, sums = card.results["losses"].get("loss/sft", {}), card.accounting
    positions, rate = sums["positions"], sums["rates over the run"]["supervised tokens/s"]
    return {
        "run": str(folder), "steps": sums["steps"], "skipped": learner.skipped,
        "loss_first": loss.get("first"), "loss_last": loss.get("last"),
        "supervised_tokens": positions["supervised"], "tokens": positions["total"] - positions["padding"],
        "rows_dispatched": sums["routed rows"].get("dispatched", 0),
        "rows_per_supervised_token": sums["per supervised token"]["rows dispatched"], "supervised_tokens_s": rate,
        "seconds": card.seconds, "checkpoint": str(latest(folder / CHECKPOINTS) or ""),
        "export": str(out) if out is not None else None,
    }  # fmt: skip
