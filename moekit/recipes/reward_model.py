"""A reward model from preference pairs, as one loop: a value head learns to score the chosen answer higher.

    moekit.submit(train, RewardConfig(model="runs/sft/export", data="pairs.jsonl"), nproc=2)
    score = scorer("runs/reward")                          # [prompt + answer, ...] -> scores, for rollouts

It has no Hugging Face family; what it leaves is a checkpoint, from which a critic can start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.save import latest
from ..config import LearnerConfig
from ..data.families import Sample, family_rows
from ..data.stream import RowStream
from ..errors import CheckpointError
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..learner.mesh import World
from ..learner.weights import from_checkpoint
from ..model.heads import to_value_head
from ..objectives.reward_model import RewardModel
from ..workloads import RewardConfig
from . import pairs, runs
from .pairs import HeldOut
from .runs import Recorder
from .setup import CHECKPOINTS

SHOWN = {"loss": "loss/reward_model", "accuracy": "reward_model/accuracy"}


def train(config: RewardConfig) -> dict[str, Any]:
    """Fit the scores of pairs by the Bradley-Terry model. Every rank calls it.
    Args: `config`: see `moekit.workloads.RewardConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, loss, held-out accuracy before and after.
    Raises: MoekitError: bad input, on all ranks, before anything is written."""
    objective = RewardModel(center=config.center)

    def load(tokenizer: Any, _: Any) -> Any:
        return replace(pairs.load(config, tokenizer), labels="last")

    run = runs.begin(config, "reward_model", load)
    shape = replace(run.shape, value_head=True, tied_head=False)
    learner = Learner(to_value_head(run.model(shape=shape)), objective, config.learner, run.world)
    stream = RowStream(run.data, config.batch_pairs, config.seed)
    start, state = runs.continued(run, learner)
    runs.restore_stream(run, stream, state)
    held = HeldOut.of(run)
    held.scores = state.get("scores", {})
    with Recorder(run, learner, start, shown=SHOWN, **pairs.card(config, objective)) as record:
        first = held.metrics(learner, list) if start == 0 else {}
        for step in range(start, config.steps):
            metrics = first | learner.step(pairs.microbatches(run.data, stream.take(), config, learner))
            if held.due(step):
                metrics |= held.metrics(learner, list)
            record.step(step, metrics, learner.counter.arrays(), stream.state() | {"scores": held.scores})
            first = {}
    return record.finish(**held.scores)


def scorer(
    path: str | Path, config: LearnerConfig | None = None, *, device: str = "cpu", rows: int = 8
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """A trained reward model as a function of token ids, for `moekit.rollout.rewards.ModelReward`.

    Args:
        path: a run folder or a checkpoint.
        config: the layout that it runs on; None = alone in this process.
        rows: sequences of one forward.
    Returns: the function; a sequence of fewer than two tokens has no score: NaN. On a layout of several ranks it is a
        collective, with each data-parallel rank's own sequences, and as many or as few as it has.
    Raises CheckpointError: no checkpoint, or a model without a value head.
    """
    model = from_checkpoint(latest(Path(path) / CHECKPOINTS) or path, device=device)
    if not model.config.value_head:
        raise CheckpointError(
            f"{path} holds a language model, not a reward model; train one with `moekit reward-model`"
        )
    layout = Forward(model, config, None if config else World(), component="reward")

    def scores(sequences: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, sequences), default=1)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        order = [i for i in order if len(sequences[i]) > 1]
        found = torch.full((len(sequences),), torch.nan)
        parts = [order[at : at + rows] for at in range(0, len(order), rows)]
        samples = [[Sample(sequences[i][:1], [sequences[i][1:]]) for i in some] for some in parts]
        batches = [family_rows(some, longest, share=False, labels="last").trim() for some in samples]
        for some, batch, value_M in zip(parts, batches, layout.score(batches)):  # one call: ranks differ in number
            found[torch.tensor(some)[batch.flat.at_labels("answer")]] = value_M.cpu().float()
        return found.tolist()

    return scores
