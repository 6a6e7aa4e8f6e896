"""What GRPO and PPO train on: prompts and their verifier, a step's answers, and the rows that these become.

All ranks hold all answers of a step, and each builds the same rows and takes its part. What is known of an answer's
tokens (log-probs, values) travels as one tensor for each answer, so that policy, reference and critic may stand on
different layouts.

Axis letters: A answers of a step, M labelled positions, N flat positions, L layers that route, K experts.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import LearnerConfig, ModelConfig, RunConfig
from ..data.batch import Batch
from ..data.families import Sample, family_rows
from ..data.report import Report
from ..data.source import load_examples
from ..data.stream import epoch_order, share
from ..data.tasks import make_task, score
from ..errors import ConfigError, DataError
from ..launch.worker import Here
from ..learner.forward import Forward
from ..learner.mesh import check_layout
from ..measure.card import hash_data
from ..objectives.ratio import importance_weights
from ..rollout.engine import Answer, Rollout
from ..rollout.rewards import Reward, RewardPool, Verifier, math_verifier
from ..workloads import RLConfig
from . import runs
from .runs import Run

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
        """Hash of all prompts and their right answers."""
        told = json.dumps([self.ids, [item.get("answer") for item in self.items]])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


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


def card(config: RLConfig) -> dict[str, Any]:
    """What the run card says of objective and batch."""
    every = config.to_dict()
    batch = ("prompts", "group", "max_prompt", "max_new_tokens", "temperature", "top_k", "top_p", "rollout_dtype",
             "truncated_reward", "length", "share_prompt", "epochs", "minibatches", "verifier", "reward_scale",
             "mask_truncated", "replay", "engine", "staleness", "update_mode", "serve_ep")  # fmt: skip
    skip = {*batch, *(f.name for f in fields(RunConfig)), "slots", "reward_seconds", "reward_workers", "critic_learner",
            "engine_url", "engine_seconds"}  # fmt: skip
    told = {k: every[k] for k in batch} | {"verifier_sha256": verifier_hash(config)}
    return {"objective": {k: v for k, v in every.items() if k not in skip}, "batch": told}


def verifier_hash(config: RLConfig) -> str | None:
    """Hash of the file that a verifier of the user's own stands in (not of what it imports); None for ours, and for one
    that stands in no file."""
    module, own, _ = config.verifier.partition(":")
    file = Path(getattr(importlib.import_module(module), "__file__", None) or "") if own else Path()
    return hash_data(file) if file.is_file() else None


def begin(config: RLConfig, name: str) -> Run:
    """A run on prompts. Raises ConfigError: ranks or experts that `serve_ep` does not divide; nothing was read yet."""

    def check(shape: ModelConfig, here: Here) -> None:
        try:
            check_layout(LearnerConfig(ep=config.serve_ep or 1), shape, here.world)
        except ConfigError as problem:
            raise ConfigError(f"serve_ep={config.serve_ep}: {problem}") from None

    return runs.begin(config, name, lambda tokenizer, _: load_data(config, tokenizer), task=True, check=check)


def load_data(config: RLConfig, tokenizer: Any) -> Prompts:
    """The run's training prompts. Raises DataError: one without the answer that the verifier compares with."""
    found = load_prompts(config.data, tokenizer, config)
    if config.verifier in ("task", "math") and (some := [i for i, x in enumerate(found.items) if x["answer"] is None]):
        how = "end each chat with the right answer, or give verifier= a function of your own"
        raise DataError(f"{config.data}: {len(some)} of {len(found)} prompts have no answer to compare with; {how}")
    return found


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

    @property
    def answers(self) -> list[Answer]:
        """All answers, group by group."""
        return [answer for rollout in self.rollouts for answer in rollout.answers]

    @property
    def group_A(self) -> Tensor:
        """[A] int64: the prompt of each answer."""
        return torch.repeat_interleave(torch.tensor([len(r.answers) for r in self.rollouts]))

    def rewards_A(self, truncated: float | None = None) -> Tensor:
        """[A] float64: rewards; NaN where a verifier gave none, `truncated` where the answer was cut."""
        out = [r.reward if r.valid else float("nan") for r in self.rewards]
        if truncated is not None:
            out = [x if a.terminated else truncated for x, a in zip(out, self.answers)]
        return torch.tensor(out, dtype=torch.float64)

    def samples(
        self, fields: Sequence[dict[str, Tensor]], keep_A: Tensor | None = None, families: set[int] | None = None
    ) -> list[Sample]:
        """One family for each prompt, with `fields` of each answer. What is not in `keep_A` or not in `families` is
        there as an empty answer, so that answers keep their numbers."""
        kept, at, out = [True] * len(fields) if keep_A is None else keep_A.tolist(), 0, []
        for i, rollout in enumerate(self.rollouts):
            some = range(at, at := at + len(rollout.answers))
            here = [kept[n] and (families is None or i in families) for n in some]
            ids = [a.ids if yes else [] for yes, a in zip(here, rollout.answers)]
            own = [{k: v if yes else v[:0] for k, v in fields[n].items()} for n, yes in zip(some, here)]
            out.append(Sample(rollout.prompt, ids, own, "prompt", i))
        return out


def microbatches(
    samples: Sequence[Sample], config: RLConfig, layout: Forward, report: Report | None = None,
    cut_A: Tensor | None = None,
) -> list[Batch]:  # fmt: skip
    """This data-parallel rank's microbatches of a step's families: rows of at most `config.length`, best fit.

    `cut_A` [A] bool: these answers get a label at their last token too, where a critic values what follows."""
    rows = family_rows(samples, config.length, config.share_prompt, report=Report() if report is None else report)
    if cut_A is not None:
        answer = rows.extra["answer"]
        last = answer != torch.nn.functional.pad(answer, (0, 1), value=-1)[:, 1:]
        rows = replace(rows, labels=rows.labels.masked_fill(last & (answer >= 0) & cut_A[answer], 0))
    each, dp = max(1, config.microbatch_tokens // config.length), layout.mesh.dp
    return [rows.take(part.tolist()).trim() for part in share(np.arange(rows.rows), dp.rank, dp.size, each)]


def minibatches(families: int, parts: int, seed: int, step: int, epoch: int) -> list[set[int]]:
    """Which families each optimizer step of an epoch takes: shuffled, as even as possible, the same on every rank.

    >>> sorted(len(part) for part in minibatches(5, 2, seed=0, step=0, epoch=0))
    [2, 3]
    """
    order = epoch_order(families, seed * 1_000_003 + step, epoch)
    return [set(part.tolist()) for part in np.array_split(order, parts)]


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
        parts = score_M.cpu().split(sizes.tolist())
        mine |= {name: part.clone() for name, part in zip(names.tolist(), parts)}  # a view is sent with all it views
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


def corrected(old_M: Tensor, engine_M: Tensor, config: RLConfig) -> tuple[dict[str, Tensor], int]:
    """What the loss reads of tokens that an engine sampled: old_logprob, perhaps weight; how many tokens were capped.

    Sampled with the weights that train: r = policy / learner, times the weight min(learner / engine, cap), which is for
    another arithmetic. Sampled with older ones: r = policy / engine, at the learner's weights at most `cap`, so that
    the clip sees all that the policy has moved since (recomputed with the learner's weights, r would begin at 1).

    Args:
        old_M: log-probs of the learner as the step begins.
        engine_M: log-probs that the tokens were sampled with.

    >>> stale = RLConfig("", "", engine="process", staleness=1, importance_cap=2.0)
    >>> told, capped = corrected(torch.tensor([0.3, 0.9]).log(), torch.tensor([0.2, 0.2]).log(), stale)
    >>> [round(r, 4) for r in (torch.tensor([0.3, 0.9]) / told["old_logprob"].exp()).tolist()], capped
    ([1.5, 2.0], 1)
    """
    cap = config.importance_cap
    if cap is None:
        return {"old_logprob": old_M}, 0
    found = importance_weights(old_M, engine_M, high=cap)
    if not config.staleness:
        return {"old_logprob": old_M, "weight": found.weight_M}, found.above
    return {"old_logprob": torch.maximum(old_M - math.log(cap), engine_M.to(old_M))}, found.above


def logprob_gap(old: Sequence[Tensor], answers: Sequence[Answer]) -> float:
    """Of learner and engine, the largest of a token: their arithmetic, and with staleness=1 a policy's step too.

    Args:
        old: log-probs of each answer's tokens, of the learner as the step begins.
    """
    gaps = [(x[: len(a.ids)] - a.logprobs).abs().max() for x, a in zip(old, answers) if a.ids]
    return float(torch.stack(gaps).max()) if gaps else 0.0


def prefixed(metrics: dict[str, float], component: str) -> dict[str, float]:
    """A second learner's metrics beside the policy's: ``grad/norm`` becomes ``critic_grad/norm``."""
    own = (f"{component}/", f"{component}_", f"loss/{component}")
    return {name if name.startswith(own) else f"{component}_{name}": value for name, value in metrics.items()}


def merge(told: Sequence[tuple[dict[str, float], dict[str, Tensor]]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One record of a step's updates: work is added up, losses are averaged, the state is the last one's.

    Updates that had nothing to learn from are in no average, unless none had."""
    metrics: dict[str, float] = {}
    some = [m for m, _ in told if m.get("tokens/supervised") or m.get("critic_tokens/supervised")]
    for name in dict.fromkeys(n for m, _ in told for n in m):
        values = [m[name] for m, _ in told if name in m]
        plain = name.split("_", 1)[1] if name.startswith("critic_") else name
        if plain.startswith(SUMMED):
            metrics[name] = sum(values)
        else:
            means = [m[name] for m in some if name in m] or values
            metrics[name] = values[-1] if plain.startswith(LAST) else sum(means) / len(means)
    arrays: dict[str, Tensor] = {}
    for _, found in told:
        for name, x in found.items():
            arrays[name] = x if name not in arrays or name.endswith("/layers") else arrays[name] + x
    return metrics, arrays
