"""The rollout side of a step: answers and their rewards, held-out scores, the engine's weights, and what is recorded.

Every rank samples and judges its share of the prompts with an engine and a pool of its own. With `staleness=1` the
answers of a step are sampled while the step before trains: they are of the weights that this one began with. The first
step of a run, also of one that goes on from a checkpoint, has none that wait for it, and samples with its own weights.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from ..data.batch import Batch
from ..data.chat import load_tokenizer
from ..data.stream import RowStream
from ..errors import EngineError
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..learner.mesh import World
from ..measure.files import append, write_atomic
from ..rollout.engine import Rollout, Sampling
from ..rollout.engine_process import TRIES
from ..rollout.rewards import summary
from ..rollout.stats import NAMES
from ..rollout.vllm_engine import VLLMEngine
from ..workloads import RLConfig
from . import rl, setup
from .placement import MOVED, engine_of
from .rl import Experience, Prompts
from .runs import Run
from .setup import together

LOGGED = 8  # answers of a step in samples.jsonl
SERVING = (*(f"engine/{name}" for name in (*NAMES, "occupancy")), "probe/")  # of the engine's metrics, in every step


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
        self.first: dict[str, float] = {}  # held-out scores of the start, for the first step's record
        self.taken: dict[str, Any] = {}  # where the prompts are after this step
        self.next: tuple[np.ndarray, dict[str, Any], Callable[[], list[Rollout]]] | None = None  # of the step to come
        self.began, self.busy = time.perf_counter(), 0.0  # of this step; seconds that the engine worked in it
        self.version = learner.updates  # as the step began
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
        self.beside = ThreadPoolExecutor(1, "moekit-rollout") if self.config.staleness else None
        with together(run.waits):  # a layout's plan is made by all ranks, or refused by all
            self.engine, self.weights = engine_of(learner, self.config, run.waits)
        self.transfer()
        with together(run.waits):
            self.engine.capabilities.need(routes=self.config.replay)
        self.watch = Stopwatch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        getattr(self.engine, "close", lambda: None)()  # which ends what is being sampled, too
        if self.beside is not None:
            self.beside.shutdown()

    def begin(self, start: int, scores: dict[str, dict[str, float]]) -> None:
        """Before the first step of this process: answers of steps to be taken again are no more in `samples.jsonl`, and
        a new run answers the held-out prompts. A collective."""
        self.scores = scores
        if self.world.rank == 0:
            old_samples(self.folder, start)
        self.first = self.held_out() if start == 0 else {}

    # ------------------------------------------------------------------ a step
    def rollout(self, stream: RowStream, step: int) -> tuple[np.ndarray, Experience]:
        """The prompts of a step, answers to them and their rewards, of all ranks on every rank. A collective.

        Raises EngineError: answers of weights that are older than `staleness` allows."""
        self.began, self.busy, self.version = time.perf_counter(), 0.0, self.learner.updates
        chosen, self.taken, found = self.next or self._asked(stream, step)
        experience = self._answer(self.prompts, chosen, found, self.watch)
        versions = [int(a.version.min()) for a in experience.answers if a.ids]
        oldest = self.version - self.config.staleness * self.config.updates
        if (version := min(versions, default=oldest)) < oldest:
            raise EngineError(
                f"answers of weights {version} came for step {step}, whose policy has had {self.version} updates; "
                f"staleness={self.config.staleness} allows {oldest} and newer"
            )
        ahead = self.config.staleness and step + 1 < self.config.steps
        self.next = self._asked(stream, step + 1) if ahead else None
        return chosen, experience

    def _asked(self, stream: RowStream, step: int) -> tuple[np.ndarray, dict[str, Any], Callable[[], list[Rollout]]]:
        """The prompts of a step, the place behind them, and what waits for their answers, which may begin at once."""
        chosen, how = stream.take(), replace(self.how, seed=self.config.seed * 1_000_003 + step)
        sample = partial(self._sample, self.prompts, chosen, how)
        ways = [sample] if self.beside is None else [sample, self.beside.submit(sample).result]
        return chosen, stream.state(), lambda: (ways.pop() if len(ways) > 1 else sample)()

    def _mine(self, chosen: np.ndarray) -> np.ndarray:
        return np.array_split(np.arange(len(chosen)), self.world.size)[self.world.rank]

    def _sample(self, prompts: Prompts, chosen: np.ndarray, how: Sampling) -> list[Rollout]:
        """This rank's answers."""
        mine, began = self._mine(chosen), time.perf_counter()
        found = self.engine.generate([prompts.ids[chosen[i]] for i in mine], how, prompt_ids=mine.tolist())
        self.busy += time.perf_counter() - began
        return found

    def _answer(
        self, prompts: Prompts, chosen: np.ndarray, sampled: Callable[[], list[Rollout]], watch: Stopwatch
    ) -> Experience:
        with watch.during("rollout"), watch.during("learner_idle"):
            found = self._collected(sampled)
        with watch.during("reward"), together(self.waits):
            texts = [self.tokenizer.decode(a.ids, skip_special_tokens=True) for r in found for a in r.answers]
            items = [prompts.items[chosen[i]] for i, r in zip(self._mine(chosen), found) for _ in r.answers]
            sequences = [[*r.prompt, *a.ids] for r in found for a in r.answers]
            rewards = self.pool.score(items, texts, sequences)
        everything = self.world.gather((found, rewards, texts))
        return Experience(*([x for part in column for x in part] for column in zip(*everything)))

    def _collected(self, sampled: Callable[[], list[Rollout]]) -> Any:
        """What `sampled` gives. Where a server is gone it is waited for, and asked again, for what is not here. A
        collective."""
        tries, found = TRIES if isinstance(self.engine, VLLMEngine) else 0, None
        while True:
            with together(self.waits):
                try:
                    found = sampled() if found is None else found
                except EngineError:
                    if not tries:
                        raise
            if not tries or not self.weights or not self.weights.recovered(self.engine, found is None):
                return found
            tries -= 1

    def scored(
        self, layout: Forward, batches: Sequence[Batch], experience: Experience, *, replay: bool = False
    ) -> list[Tensor]:
        """Log-probs at the sampling temperature, or values, of every answer's tokens. A collective."""
        routes = rl.replayed(batches, experience.rollouts) if replay else None
        found = layout.score(batches, temperature=self.config.temperature, replay=routes)
        return rl.by_answer(batches, found, layout, len(experience.answers))

    def transfer(self) -> None:
        """Bring the learner's weights to the engine, when the answers under way are there; nothing where it shares
        them. A collective."""
        if self.next is not None:
            with self.watch.during("learner_idle"):
                found = self._collected(self.next[2])
            self.next = (*self.next[:2], lambda: found)
        with self.watch.during("transfer"):
            if self.weights is not None:
                began = time.perf_counter()
                self.weights.give(self.engine, self.config.update_mode)
                self.busy += time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """What a checkpoint after this step remembers."""
        return self.taken | {"scores": self.scores}

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
            chosen = np.arange(len(self.held))
            found = self._answer(self.held, chosen, partial(self._sample, self.held, chosen, how), watch)
        points = [next(iter(r.parts.values())).score for r in found.rewards]
        exact = sum(p == 1.0 for p in points) / len(points)
        told = {"eval/score": sum(points) / len(points), "eval/exact": exact, "eval/items": float(len(points))}
        self.scores |= {"before": told} if not self.scores else {"after": told}
        if self.engine.counter is not None:
            self.engine.counter.reset()  # held-out answers are no work of a step
        self.engine.metrics()
        return told

    # ------------------------------------------------------------------ what is recorded
    def told(
        self, step: int, chosen: np.ndarray, experience: Experience, advantage_A: Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:  # fmt: skip
        """Metrics and arrays of a step that are not its updates': answers, engine, passes, held-out prompts; and its
        first answers are written. A collective."""
        self.log(step, chosen, experience, advantage_A)
        metrics, self.first = self.first | self.metrics(experience), {}
        passes, arrays = self.passes()
        if self.due(step):
            metrics |= self.held_out()
        return metrics | passes, arrays

    def metrics(self, experience: Experience) -> dict[str, float]:
        """Of the answers, their rewards, the seconds of the step's parts. A collective."""
        answers = experience.answers
        lengths = [float(len(a.ids)) for a in answers]
        versions = [int(a.version[-1]) for a in answers if a.ids]
        stats = self.engine.stats
        own = self.weights.engine_bytes if self.weights else 0
        wire, restarts = self.weights.wired if self.weights else 0, getattr(self.engine, "restarts", 0)
        held = self.world.sum_list([stats.cache_bytes, own, wire, restarts])
        (prefill,) = self.world.max_list([stats.prefill_seconds])
        self.watch.seconds["engine_idle"] = max(0.0, time.perf_counter() - self.began - self.busy)
        costs = _costs(self.world.gather(self.engine.metrics()))
        moved = self.weights.metrics() if self.weights else dict.fromkeys(MOVED, 0.0)
        return summary(experience.rewards) | moved | costs | self.watch.metrics(self.world) | {
            "rollout/answers": float(len(answers)),
            "rollout/tokens": sum(lengths),
            "rollout/length": sum(lengths) / max(1, len(answers)),
            "rollout/truncated": float(sum(a.finish == "length" for a in answers)),
            "rollout/empty": float(sum(not a.ids for a in answers)),
            "rollout/version": float(max(versions, default=self.engine.version)),
            "rollout/behind": float(self.version - min(versions, default=self.version)),
            "memory/engine_cache_bytes": held[0], "memory/engine_parameters_bytes": held[1],
            "wire/transfer_bytes": held[2], "engine/restarts": held[3], "time/prefill_s": prefill,
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


def _costs(told: Sequence[dict[str, float]]) -> dict[str, float]:
    """What serving cost, by pass (`moekit.rollout.stats`), of all ranks.

    Bytes are summed, of `_max` the most is taken, the rest is the mean over the ranks that ran such a pass."""
    found: dict[str, float] = {}
    for name in sorted({n for rank in told for n in rank if n.startswith(SERVING)}):
        values = [rank[name] for rank in told if name in rank]
        most, total = max(values), sum(values)
        found[name] = most if "_max_" in name else total if "_bytes_" in name else total / len(values)
    return found


def old_samples(folder: Path, start: int) -> None:
    """Take the answers of steps that will be taken again out of `samples.jsonl`."""
    path = folder / "samples.jsonl"
    if path.exists():
        # answers may hold other ends of lines; the last is cut
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        kept = [line for line in lines if json.loads(line)["step"] < start]
        write_atomic(path, "".join(f"{line}\n" for line in kept).encode())
