"""What GRPO and PPO share: prompts, rollouts and their rewards, the rows that are trained on, what is recorded.

Every rank samples and judges its share of a step's prompts; then all ranks hold all answers, and each builds the same
rows and takes its part. What is known of an answer's tokens (log-probs, values) travels as one list for each answer, so
that policy, reference and critic may stand on different layouts.

Axis letters: A answers of a step, B rows, T positions in a row, M labelled positions, L layers that route, K experts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import LearnerConfig
from ..data.batch import Batch
from ..data.families import Sample, family_rows
from ..data.report import Report
from ..data.source import load_examples
from ..data.stream import share
from ..data.tasks import make_task, score
from ..errors import ConfigError, DataError
from ..learner.forward import Forward
from ..learner.mesh import World
from ..rollout.engine import Answer, Engine, Rollout, Sampling
from ..rollout.rewards import Reward, RewardPool, Verifier, math_verifier, summary
from ..workloads import RLConfig

SUMMED = ("rows/", "tokens/", "wire/", "flops/", "time/", "positions/")  # over the updates of a step; others: mean
LAST = ("lr", "step/", "rate/")


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts as ids, and what their answers are judged against; what `moekit.data.stream.RowStream` counts."""

    ids: list[list[int]]
    items: list[dict[str, Any]]
    report: Report

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Any) -> Batch:
        """Prompts make no rows before they are answered."""
        raise ConfigError("prompts have no rows; sample answers to them")

    @property
    def fingerprint(self) -> str:
        """Hash of all prompts."""
        return hashlib.blake2b(json.dumps(self.ids).encode(), digest_size=16).hexdigest()


def load_prompts(source: str, tokenizer: Any, config: RLConfig, split: Any = "train", size: int = 0) -> Prompts:
    """Conversations without their last answer, which is what verifiers are given as the right one.

    Args:
        source: a file of chats, or the name of a reasoning-gym task.
        split, size: of a task's items; `size` also limits a file's.
    Raises DataError: no such file or task, or no prompt that fits.
    """
    if Path(source).exists():
        items = [{**e.extra, "messages": e.messages} for e in load_examples(source)]
        items = items[:size] if size else items
    else:
        items = make_task(source, split, size or config.items, config.seed)
    report, ids, kept = Report(), list[list[int]](), list[dict[str, Any]]()
    for i, item in enumerate(items):
        messages = item["messages"]
        answered = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if answered else messages
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        if len(prompt) > config.max_prompt:
            report.add(source, i, "dropped", f"a prompt of {len(prompt)} tokens is longer than {config.max_prompt}")
            continue
        ids.append(list(prompt))
        kept.append({**item, "question": asked[-1]["content"], "answer": messages[-1]["content"] if answered else None})
    report.counts.update(examples=len(items), documents=len(ids))
    if not ids:
        raise DataError(f"{source}: none of {len(items)} prompts has at most max_prompt={config.max_prompt} tokens")
    return Prompts(ids, kept, report)


def judge(item: dict[str, Any], answer: str) -> float:
    """By the item's own task, where it has one; else 1 for exactly the right answer, white space around it aside."""
    return score(item, answer) if "entry" in item else float(answer.strip() == str(item["answer"]).strip())


def reward_pool(config: RLConfig) -> RewardPool:
    """The verifier that the config names, in processes of this rank.

    Raises:
        ConfigError: no such function.
    """
    how: dict[str, Any] = {"weight": config.reward_scale, "seconds": config.reward_seconds}
    if config.verifier == "task":
        verifier = Verifier("task", judge, modules=("reasoning_gym",) if not Path(config.data).exists() else (), **how)
    elif config.verifier == "math":
        verifier = math_verifier(**how)
    else:
        module, _, name = config.verifier.partition(":")
        try:
            verifier = Verifier(name, getattr(importlib.import_module(module), name), modules=(module,), **how)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigError(
                f"verifier={config.verifier!r} is neither 'task', 'math' nor package.module:function ({problem})"
            ) from None
    return RewardPool([verifier], workers=config.reward_workers)


@dataclass
class Experience:
    """A step's answers, over all ranks, in the order of the prompts."""

    rollouts: list[Rollout]
    rewards: list[Reward]  # of every answer, group by group
    texts: list[str]
    metrics: dict[str, float]

    @property
    def answers(self) -> list[Answer]:
        """All answers, group by group."""
        return [answer for rollout in self.rollouts for answer in rollout.answers]

    @property
    def group_A(self) -> Tensor:
        """[A] int64: the prompt of each answer."""
        return torch.repeat_interleave(torch.tensor([len(r.answers) for r in self.rollouts]))

    def samples(self, fields: Sequence[dict[str, Any]], keep_A: Tensor | None = None) -> list[Sample]:
        """One family for each prompt, with `fields` of each answer; left-out and empty answers are empty."""
        kept = [True] * len(fields) if keep_A is None else keep_A.tolist()
        out, at = [], 0
        for i, rollout in enumerate(self.rollouts):
            some = range(at, at + len(rollout.answers))
            ids = [a.ids if kept[n] else [] for n, a in zip(some, rollout.answers)]
            own = [{k: v if len(x) else v[:0] for k, v in fields[n].items()} for n, x in zip(some, ids)]
            out.append(Sample(rollout.prompt, ids, own, "prompt", i))
            at += len(rollout.answers)
        return out


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
        """time/<part>_s. A collective; forgets what it told."""
        names = sorted(self.seconds)
        found = dict(zip((f"time/{name}_s" for name in names), world.max_list([self.seconds[n] for n in names])))
        self.seconds = {}
        return found


def sampling(config: RLConfig, stop_ids: Sequence[int], step: int) -> Sampling:
    """How a step's answers are drawn."""
    return Sampling(
        max_new_tokens=config.max_new_tokens, n=config.group, temperature=config.temperature, top_k=config.top_k,
        top_p=config.top_p, stop_ids=tuple(stop_ids), seed=config.seed * 1_000_003 + step,
    )  # fmt: skip


def rollout(
    engine: Engine, pool: RewardPool, prompts: Prompts, chosen: np.ndarray, how: Sampling, tokenizer: Any,
    world: World, watch: Stopwatch,
) -> Experience:  # fmt: skip
    """Sample and judge answers to the prompts `chosen`; every rank does its share and gets everything. A collective."""
    mine = np.array_split(np.arange(len(chosen)), world.size)[world.rank]
    with watch.during("rollout"):
        ids = [prompts.ids[chosen[i]] for i in mine]
        found = engine.generate(ids, how, prompt_ids=mine.tolist()) if len(mine) else []
        world.barrier()
    with watch.during("reward"):
        texts = [tokenizer.decode(a.ids, skip_special_tokens=True) for r in found for a in r.answers]
        items = [prompts.items[chosen[i]] for i, r in zip(mine, found) for _ in r.answers]
        sequences = [[*r.prompt, *a.ids] for r in found for a in r.answers]
        rewards = pool.score(items, texts, sequences)
        everything = world.gather((found, rewards, texts))
    rollouts, rewards, texts = ([x for part in column for x in part] for column in zip(*everything))
    answers = [a for r in rollouts for a in r.answers]
    lengths = [float(len(a.ids)) for a in answers]
    told = summary(rewards) | {
        "rollout/answers": float(len(answers)),
        "rollout/tokens": sum(lengths),
        "rollout/length": sum(lengths) / max(1, len(answers)),
        "rollout/truncated": float(sum(a.finish == "length" for a in answers)),
        "rollout/empty": float(sum(not a.ids for a in answers)),
        "rollout/version": float(max((int(v) for a in answers for v in a.version[-1:]), default=engine.version)),
    }
    return Experience(rollouts, rewards, texts, told)


def microbatches(
    samples: Sequence[Sample], config: RLConfig, layout: Forward, *, whole: bool = False, pad_id: int = 0,
    report: Report | None = None,
) -> list[Batch]:  # fmt: skip
    """This data-parallel rank's microbatches of a step's families: rows of `config.length`, best fit, cut to what is
    used. `whole` keeps a family in one row."""
    rows = family_rows(samples, config.length, config.share_prompt, whole=whole, pad_id=pad_id, report=report)
    each, dp = max(1, config.microbatch_tokens // config.length), layout.mesh.dp
    return [rows.take(part.tolist()).trim() for part in share(np.arange(rows.rows), dp.rank, dp.size, each)]


def by_answer(batches: Sequence[Batch], scores: Sequence[Tensor], layout: Forward, answers: int) -> list[Tensor]:
    """What was scored at labels, as one tensor for each answer of the step; empty where it has no rows. A collective.

    Args:
        batches, scores: as given to, and by, `Forward.score`.
        answers: A.
    """
    mine: dict[int, Tensor] = {}
    for batch, score_M in zip(batches, scores):
        if not len(score_M):
            continue
        answer_M = batch.flat.at_labels("answer")
        names, sizes = torch.unique_consecutive(answer_M, return_counts=True)
        mine |= zip(names.tolist(), score_M.cpu().split(sizes.tolist()))
    found: dict[int, Tensor] = {}
    for part in layout.mesh.dp.gather(mine):
        found |= part
    return [found.get(i, torch.zeros(0)) for i in range(answers)]


def replayed(batches: Sequence[Batch], rollouts: Sequence[Rollout]) -> list[list[Tensor]]:
    """The experts that the engine chose, for `Learner.step(replay=...)`: by microbatch and layer, [N, K]; -1 where the
    engine chose none (an answer's last token, padding)."""
    answers = [a for r in rollouts for a in r.answers]
    family = [f for f, r in enumerate(rollouts) for _ in r.answers]
    out = []
    for batch in batches:
        first = rollouts[0].prompt_experts
        assert first is not None  # the engine was asked for routes
        flat = batch.flat
        chosen_NLK = torch.full((flat.positions, *first.shape[1:]), -1, dtype=torch.int64)
        where = torch.stack((flat.extra["family"], flat.extra["answer"]), 1)
        spans, sizes = torch.unique_consecutive(where, dim=0, return_counts=True)
        at = 0
        for (f, a), n in zip(spans.tolist(), sizes.tolist()):
            span, at = slice(at, at + n), at + n
            if f < 0:
                continue
            prompt = rollouts[family[a] if a >= 0 else f].prompt_experts
            assert prompt is not None
            known = [prompt, answers[a].experts] if a >= 0 else [prompt]
            chosen_NLK[span] = torch.cat([k for k in known if k is not None]).long()[flat.position_N[span]]
        out.append(list(chosen_NLK.unbind(1)))
    return out


def merge(told: Sequence[tuple[dict[str, float], dict[str, Tensor]]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One record of a step's updates: work is added up, losses are averaged, the state is the last one's."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(n for m, _ in told for n in m):
        values = [m[name] for m, _ in told if name in m]
        plain = name.split("_", 1)[1] if name.startswith("critic_") else name
        if plain.startswith(SUMMED):
            metrics[name] = sum(values)
        else:
            metrics[name] = values[-1] if plain.startswith(LAST) else sum(values) / len(values)
    arrays: dict[str, Tensor] = {}
    for _, found in told:
        for name, x in found.items():
            arrays[name] = x if name not in arrays or name.endswith("/layers") else arrays[name] + x
    return metrics, arrays


class Samples:
    """`samples.jsonl` in the run folder: some answers of every step, with their rewards."""

    def __init__(self, folder: Path, start: int, each: int = 8):
        self.path, self.each = folder / "samples.jsonl", each
        old = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in old if line.endswith("}") and json.loads(line)["step"] < start]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, step: int, experience: Experience, prompts: Prompts, chosen: np.ndarray, **told: Tensor) -> None:
        """Append the first answers of a step; `told` has one number for each answer."""
        lines = []
        for n, (answer, text, reward) in enumerate(zip(experience.answers, experience.texts, experience.rewards)):
            if n >= self.each:
                break
            item = prompts.items[int(chosen[int(experience.group_A[n])])]
            line = {"step": step, "question": item["question"], "answer": text, "reward": reward.reward,
                    "finish": answer.finish, "tokens": len(answer.ids)}  # fmt: skip
            lines.append(json.dumps(line | {name: float(x[n]) for name, x in told.items()}, ensure_ascii=False))
        with self.path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


def held_out(
    engine: Engine, pool: RewardPool, prompts: Prompts, config: RLConfig, stop_ids: Sequence[int], tokenizer: Any,
    world: World,
) -> dict[str, float]:  # fmt: skip
    """Greedy answers to held-out prompts: mean score and share of exact ones. A collective."""
    how = replace(sampling(config, stop_ids, 0), n=1, temperature=0.0, top_k=0, top_p=1.0)
    found = rollout(engine, pool, prompts, np.arange(len(prompts)), how, tokenizer, world, Stopwatch())
    points = [next(iter(r.parts.values())).score for r in found.rewards]
    exact = sum(p == 1.0 for p in points) / len(points)
    return {"eval/score": sum(points) / len(points), "eval/exact": exact, "eval/items": float(len(points))}


def same_layout(a: LearnerConfig, b: LearnerConfig) -> bool:
    """Whether two models of a run can share microbatches."""
    return (a.ep, a.pp, a.elide) == (b.ep, b.pp, b.elide)
