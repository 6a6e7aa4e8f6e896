"""Direct preference optimization as one loop: pairs, the reference's log-probs, one step.

    moekit.submit(train, DPOConfig(model="runs/sft/export", data="pairs.jsonl"), nproc=2)

The reference is a frozen model beside the learner, or a cache of its log-probs that is built once and proves itself
(`moekit.objectives.reference`): the numbers are the same, the memory of a second model is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.batch import Batch
from ..data.chat import load_tokenizer
from ..data.preference import Pairs
from ..data.stream import RowStream
from ..errors import ConfigError
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..measure.tokens import RowCounter
from ..objectives.dpo import DPO
from ..viz.progress import Progress
from ..workloads import DPOConfig
from . import pairs, runs, setup
from .pairs import HeldOut
from .reference_cache import cached, resident
from .runs import Recorder, Run
from .sampler import Stopwatch

SHOWN = {"loss": "loss/dpo", "accuracy": "dpo/accuracy", "margin": "dpo/margin"}


def train(config: DPOConfig) -> dict[str, Any]:
    """Learn from preferences. Every rank calls it.
    Args: `config`: see `moekit.workloads.DPOConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, loss, held-out accuracy before and after, export.
    Raises:
        CheckpointError: a reference cache that was tampered with.
        MoekitError: other bad input, on all ranks, before anything is written."""
    objective = DPO(
        config.beta, config.kind, config.label_smoothing, config.length_normalised, config.reference,
        config.update_every,
    )  # fmt: skip
    run = runs.begin(config, "dpo", lambda tokenizer, _: pairs.load(config, tokenizer))
    learner = Learner(run.model(), objective, config.learner, run.world)
    frozen = Forward(run.model(), config.learner, run.world) if config.reference == "resident" else None
    stream = RowStream(run.data, config.batch_pairs, config.seed)
    held, watch = HeldOut.of(run), Stopwatch()
    tokenizer = load_tokenizer(setup.tokenizer_folder(config))
    data: Pairs | None = run.data
    built: tuple[dict[str, float], dict[str, torch.Tensor]] = {}, {}
    if frozen is None:  # a policy that has not moved is its own reference
        before = learner if not config.resume else Forward(run.model(), config.learner, run.world)
        mine, before.scored = before.scored, RowCounter.of(run.shape, "reference")
        with watch.during("reference"):
            data = _cached(run, before, data, tokenizer)
        built = before.collect()
        held.pairs = _cached(run, before, held.pairs, tokenizer)
        before.scored = mine  # without held-out pairs, which are no work of a step
    assert data is not None
    start, state = runs.continued(run, learner)
    runs.restore_stream(run, stream, state)
    held.scores = state.get("scores", {})
    if frozen is not None and config.update_every and start:
        if start % config.update_every:
            raise ConfigError(
                f"the newest checkpoint is of step {start}, the reference of a step before (update_every="
                f"{config.update_every}), which is not kept; start a new run from it"
            )
        follow(frozen, learner)

    def prepare(batches: Sequence[Batch]) -> list[Batch]:
        return list(batches) if frozen is None else resident(frozen, batches)

    others = [frozen] if frozen is not None else []

    def held_out() -> dict[str, float]:
        told = held.metrics(learner, prepare)
        for layout in others:
            layout.collect()  # no work of a step
        return told

    with Recorder(run, learner, start, shown=SHOWN, others=others, **pairs.card(config, objective)) as record:
        first = held_out() if start == 0 else {}
        for step in range(start, config.steps):
            batches = pairs.microbatches(data, stream.take(), config, learner)
            with watch.during("reference"):
                batches = prepare(batches)
            metrics, arrays = first | built[0] | learner.step(batches), built[1] | learner.counter.arrays()
            for layout in others:
                told, found = layout.collect()
                metrics, arrays = metrics | told, arrays | found
            if frozen is not None and config.update_every and (step + 1) % config.update_every == 0:
                follow(frozen, learner)
            if held.due(step):
                metrics |= held_out()
            record.step(step, metrics | watch.metrics(run.world), arrays, stream.state() | {"scores": held.scores})
            first, built = {}, ({}, {})
    return record.finish(**held.scores)


def _cached(run: Run, layout: Forward, data: Pairs | None, tokenizer: Any) -> Pairs | None:
    """The pairs with the reference's log-probs, from a cache that is built if need be. A collective."""
    if data is None:
        return None
    config: DPOConfig = run.config
    line = Progress(len(data), "reference") if run.world.rank == 0 else None
    found = cached(
        layout, data, tokenizer, config.cache or Path(run.folder) / "reference",
        truncation=f"{config.over_long} {config.length}", microbatch_tokens=config.microbatch_tokens,
        progress=None if line is None else lambda done, _total, _what: line.update(done),
    )  # fmt: skip
    if line is not None:
        line.close()
    return found


@torch.no_grad()
def follow(frozen: Forward, learner: Learner) -> None:
    """Make the reference a copy of the policy, which has the same layout."""
    theirs = dict(learner.model.named_parameters())
    for name, p in frozen.model.named_parameters():
        p.copy_(theirs[name])
    for mine, other in zip(frozen.model.buffers(), learner.model.buffers()):
        mine.copy_(other)
    if frozen.caches is not None:
        frozen.caches.rebuild()
