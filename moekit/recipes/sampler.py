"""The rollout side of a step: answers and their rewards, held-out scores, the engine's weights, and what is recorded.

Every rank samples and judges its share of the prompts with an engine and a pool of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from torch import Tensor

from ..data.batch import Batch
from ..data.chat import load_tokenizer
from ..errors import ConfigError
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..learner.mesh import World
from ..measure.files import append, write_atomic
from ..measure.memory import held_bytes
from ..measure.tokens import RowCounter
from ..model.transformer import Part
from ..rollout.embedded import EmbeddedEngine
from ..rollout.engine import Engine, Sampling
from ..rollout.rewards import summary
from ..rollout.stats import Stats
from ..workloads import RLConfig
from . import rl, setup
from .rl import Experience, Prompts
from .runs import Run
from .setup import together

LOGGED = 8  # answers of a step in samples.jsonl


class Stopwatch:
    """Seconds of the named parts of a step, the slowest rank's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count what happens inside under `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def metrics(self, world: World) -> dict[str, float]:
        """time/<part>_s. A collective, for the same parts on every rank; forgets what it told."""
        names = sorted(self.seconds)
        found = dict(zip((f"time/{name}_s" for name in names), world.max_list([self.seconds[n] for n in names])))
        self.seconds = {}
        return found


class Hosted(Engine, Protocol):
    """An `Engine` as a sampler keeps it; it may have a `model` here, and a `close()` for what it has started."""

    shared: bool  # its parameters are the learner's own: nothing is transferred
    stats: Stats  # since `metrics` was called

    @property
    def counter(self) -> RowCounter | None:
        """Rows and positions of its passes; None where they cannot be seen."""
        ...

    def metrics(self) -> dict[str, float]:
        """What was done since the last call."""
        ...


class Sampler:
    """Engine, verifier and prompts of a run; a context manager, which ends the verifier's processes.

    Args:
        run: of prompts.
        learner: whose weights sample.
        layouts: models beside the learner whose passes are counted and recorded.
    """

    def __init__(self, run: Run, learner: Learner, *layouts: Forward):
        self.config: RLConfig = run.config
        self.learner, self.world, self.waits, self.folder = learner, run.world, run.waits, run.folder
        self.layouts = (learner, *layouts)
        self.prompts: Prompts = run.data
        self.watch = Stopwatch()
        self.scores: dict[str, dict[str, float]] = {}
        self.transferred = 0  # bytes that this rank sent for the engines' weights
        with together(run.waits):
            self.tokenizer = load_tokenizer(setup.tokenizer_folder(self.config))
            ends = {self.tokenizer.eos_token_id, learner.model.config.eos_id} - {None}
            self.how = Sampling(
                max_new_tokens=self.config.max_new_tokens, n=self.config.group, temperature=self.config.temperature,
                top_k=self.config.top_k, top_p=self.config.top_p, stop_ids=tuple(sorted(ends)),
            )  # fmt: skip
            self.held: Prompts | None = None
            if self.config.eval_data or not Path(self.config.data).exists():
                self.held = rl.load_prompts(
                    self.config.eval_data or self.config.data, self.tokenizer, self.config, "heldout",
                    self.config.eval_items,
                )  # fmt: skip
            self.pool = rl.reward_pool(self.config)
        self.engine: Hosted = engine_of(learner, self.config)
        self.transfer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        getattr(self.engine, "close", lambda: None)()

    # ------------------------------------------------------------------ a step
    def rollout(self, chosen: np.ndarray, step: int) -> Experience:
        """Answers to the prompts `chosen`, and their rewards, of all ranks on every rank. A collective."""
        how = replace(self.how, seed=self.config.seed * 1_000_003 + step)
        return self._answer(self.prompts, chosen, how, self.watch)

    def _answer(self, prompts: Prompts, chosen: np.ndarray, how: Sampling, watch: Stopwatch) -> Experience:
        mine = np.array_split(np.arange(len(chosen)), self.world.size)[self.world.rank]
        with watch.during("rollout"), together(self.waits):
            ids = [prompts.ids[chosen[i]] for i in mine]
            found = self.engine.generate(ids, how, prompt_ids=mine.tolist()) if len(mine) else []
        with watch.during("reward"), together(self.waits):
            texts = [self.tokenizer.decode(a.ids, skip_special_tokens=True) for r in found for a in r.answers]
            items = [prompts.items[chosen[i]] for i, r in zip(mine, found) for _ in r.answers]
            sequences = [[*r.prompt, *a.ids] for r in found for a in r.answers]
            rewards = self.pool.score(items, texts, sequences)
        everything = self.world.gather((found, rewards, texts))
        return Experience(*([x for part in column for x in part] for column in zip(*everything)))

    def scored(
        self, layout: Forward, batches: Sequence[Batch], experience: Experience, *, replay: bool = False
    ) -> list[Tensor]:
        """Log-probs at the sampling temperature, or values, of every answer's tokens. A collective."""
        routes = rl.replayed(batches, experience.rollouts) if replay else None
        found = layout.score(batches, temperature=self.config.temperature, replay=routes)
        return rl.by_answer(batches, found, layout, len(experience.answers))

    def transfer(self) -> None:
        """Give the engine the learner's weights, gathered on every rank; nothing where it shares them. A collective."""
        if self.engine.shared:
            return
        before = self.world.wire.sent["gathered"]
        weights = self.learner.gathered("parameter")
        self.transferred += self.world.wire.sent["gathered"] - before
        for part in self.world.gather({n: b.cpu() for n, b in self.learner.model.named_buffers()}):
            weights |= part
        self.engine.update_weights(weights, self.learner.updates, self.config.update_mode)

    # ------------------------------------------------------------------ held-out prompts
    def due(self, step: int) -> bool:
        """Whether held-out prompts are answered after this step."""
        every = self.config.eval_every
        return step + 1 == self.config.steps or (every is not None and (step + 1) % every == 0)

    def held_out(self) -> dict[str, float]:
        """Greedy answers to the held-out prompts: mean score and share of right ones. A collective."""
        if self.held is None:
            return {}
        how, watch = replace(self.how, n=1, temperature=0.0, top_k=0, top_p=1.0), Stopwatch()
        with self.watch.during("evaluate"):
            found = self._answer(self.held, np.arange(len(self.held)), how, watch)
        points = [next(iter(r.parts.values())).score for r in found.rewards]
        exact = sum(p == 1.0 for p in points) / len(points)
        told = {"eval/score": sum(points) / len(points), "eval/exact": exact, "eval/items": float(len(points))}
        self.scores |= {"before": told} if not self.scores else {"after": told}
        if self.engine.counter is not None:
            self.engine.counter.reset()  # held-out answers are no work of a step
        self.engine.metrics()
        return told

    # ------------------------------------------------------------------ what is recorded
    def metrics(self, experience: Experience) -> dict[str, float]:
        """Of the answers, their rewards, the seconds of the step's parts. A collective."""
        answers = experience.answers
        lengths = [float(len(a.ids)) for a in answers]
        versions = [int(a.version[-1]) for a in answers if a.ids]
        stats = self.engine.stats
        model: Any = None if self.engine.shared else getattr(self.engine, "model", None)
        own = 0 if model is None else held_bytes({"all": model.parameters()})["all"]
        held = self.world.sum_list([stats.cache_bytes, own, self.transferred])
        (prefill,) = self.world.max_list([stats.prefill_seconds])
        self.engine.metrics()
        self.transferred = 0
        return summary(experience.rewards) | self.watch.metrics(self.world) | {
            "rollout/answers": float(len(answers)),
            "rollout/tokens": sum(lengths),
            "rollout/length": sum(lengths) / max(1, len(answers)),
            "rollout/truncated": float(sum(a.finish == "length" for a in answers)),
            "rollout/empty": float(sum(not a.ids for a in answers)),
            "rollout/version": float(max(versions, default=self.engine.version)),
            "memory/engine_cache_bytes": held[0], "memory/engine_parameters_bytes": held[1],
            "wire/transfer_bytes": held[2], "time/prefill_s": prefill,
        }  # fmt: skip

    def passes(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics and arrays of all passes that were no training: scores, prefill, decode. A collective."""
        metrics: dict[str, float] = {}
        arrays: dict[str, Tensor] = {}
        if (counter := self.engine.counter) is not None:
            counter.all_reduce(self.world.group, alone=self.world.size == 1)
            for (component, name), m in counter.host().items():
                metrics[f"rows/{component}_{name}"] = int(m.dispatched_LCE.sum())
                metrics[f"positions/{component}_{name}"] = int(m.positions_C.sum())
            arrays |= counter.arrays()
            counter.reset()
        for layout in self.layouts:
            told, found = layout.collect()
            metrics, arrays = metrics | told, arrays | found
        return metrics, arrays

    def log(self, step: int, chosen: np.ndarray, experience: Experience, advantage_A: Tensor | None = None) -> None:
        """Append the first answers of a step to `samples.jsonl`, on rank 0."""
        if self.world.rank:
            return
        path, lines = self.folder / "samples.jsonl", []
        for n, (answer, text, reward) in enumerate(zip(experience.answers, experience.texts, experience.rewards)):
            if n == LOGGED:
                break
            item = self.prompts.items[int(chosen[int(experience.group_A[n])])]
            line = {"step": step, "question": item["question"], "answer": text, "reward": reward.reward,
                    "finish": answer.finish, "tokens": len(answer.ids)}  # fmt: skip
            line |= {} if advantage_A is None else {"advantage": float(advantage_A[n])}
            lines.append(json.dumps(line, ensure_ascii=False))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            append(fd, path, "".join(f"{line}\n" for line in lines).encode())
        finally:
            os.close(fd)


def engine_of(learner: Learner, config: RLConfig) -> Hosted:
    """The engine that the config names. One in this process stands on the learner's own parameters where they are all
    here and of the engine's dtype, else it has a copy, which waits for its first transfer.

    Raises:
        ConfigError: an engine that this build does not have.
    """
    if config.engine != "embedded":
        raise ConfigError(f"engine={config.engine!r} is not here; take engine='embedded'")
    own = config.dtype if config.rollout_dtype is None else config.rollout_dtype
    if own == config.dtype and learner.model.part == Part.whole(learner.model.config):
        return EmbeddedEngine.of(learner.model, lambda: learner.updates, slots=config.slots)
    return EmbeddedEngine(learner.model.config, dtype=own, slots=config.slots, device=learner.model.device)


def old_samples(folder: Path, start: int) -> None:
    """Take the answers of steps that will be taken again out of `samples.jsonl`."""
    path = folder / "samples.jsonl"
    if path.exists():
        *lines, _ = path.read_text(encoding="utf-8").split(
            "\n"
        )  # answers may hold other ends of lines; the last is cut
        kept = [line for line in lines if json.loads(line)["step"] < start]
        write_atomic(path, "".join(f"{line}\n" for line in kept).encode())
