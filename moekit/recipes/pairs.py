"""What DPO and the reward model share: pairs as data, the microbatches of a step, held-out pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..data.batch import Batch
from ..data.budget import cut
from ..data.chat import load_tokenizer
from ..data.preference import Pairs, load_pairs
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..workloads import PairConfig
from . import setup
from .runs import Run
from .setup import together

Prepare = Callable[[Sequence[Batch]], list[Batch]]  # adds what the objective reads


def load(config: PairConfig, tokenizer: Any, data: str | None = None) -> Pairs:
    """The run's pairs, or those of another file."""
    return load_pairs(
        data or config.data, tokenizer, config.length, share=config.share_prompt, over_long=config.over_long
    )


def card(config: PairConfig, objective: Any) -> dict[str, Any]:
    """What the run card says of objective and batch."""
    batch = {"pairs of a step": config.batch_pairs, "length": config.length, "share_prompt": config.share_prompt,
             "over_long": config.over_long}  # fmt: skip
    return {"objective": {k: v for k, v in vars(objective).items() if k != "name"}, "batch": batch}


def microbatches(pairs: Pairs, chosen: np.ndarray, config: PairConfig, layout: Forward) -> list[Batch]:
    """This data-parallel rank's microbatches: pairs by their combined lengths, whatever number fits, one at least."""
    mine = np.array_split(chosen, layout.mesh.dp.size)[layout.mesh.dp.rank]
    sizes = [pairs.size(int(i)) for i in mine]
    return [pairs.batch(mine[part]).trim() for part in cut(sizes, max(sizes + [config.microbatch_tokens]))]


@dataclass
class HeldOut:
    """Pairs that are not trained on, and when they are looked at."""

    run: Run
    pairs: Pairs | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> HeldOut:
        """Those that the config names."""
        pairs = None
        with together(run.waits):
            if run.config.eval_data is not None:
                pairs = load(run.config, load_tokenizer(setup.tokenizer_folder(run.config)), run.config.eval_data)
                pairs = replace(pairs, labels=run.data.labels)
        return cls(run, pairs)

    def due(self, step: int) -> bool:
        """Whether they are scored after this step."""
        every = self.run.config.eval_every
        return step + 1 == self.run.config.steps or (every is not None and (step + 1) % every == 0)

    def metrics(self, learner: Learner, prepare: Prepare) -> dict[str, float]:
        """Loss and the objective's metrics, a mean over pairs. A collective."""
        if self.pairs is None:
            return {}
        batches = prepare(microbatches(self.pairs, np.arange(len(self.pairs)), self.run.config, learner))
        told = learner.evaluate(batches)
        learner.scored.reset()  # no work of a step
        self.scores |= {"before": told} if not self.scores else {"after": told}
        return told
