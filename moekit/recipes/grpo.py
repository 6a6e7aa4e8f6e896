"""Group-relative policy optimization as one loop: sample, judge, compare within groups, step, hand the weights over.

    moekit.submit(train, GRPOConfig(model="runs/sft/export", data="chain_sum"), nproc=2)

The engine samples between steps, with the newest weights, or beside them, one step behind (`staleness`). A run that
was stopped, wherever in the loop, goes on with `resume=True` from its last checkpoint and takes the steps that it would
have taken: draws depend on seed, step, prompt and position alone (with `staleness=1` its first step samples anew).

Axis letters: A answers of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.report import Report
from ..data.stream import RowStream
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..objectives.advantage import GroupAdvantages, group_advantages, overlong_valid
from ..objectives.grpo import GRPO
from ..objectives.ratio import kl_estimate
from ..workloads import GRPOConfig
from . import rl, runs
from .rl import Experience
from .runs import Recorder
from .sampler import Sampler

SHOWN = {"reward": "reward/mean", "length": "rollout/length", "loss": "loss/grpo", "held out": "eval/score"}


def objective(config: GRPOConfig) -> GRPO:
    """The loss that the config names."""
    length = config.constant_length or config.max_new_tokens
    return GRPO(
        clip_low=config.clip_low, clip_high=config.clip_high, ratio=config.ratio, kl=config.kl_kind,
        beta=config.kl if config.kl_in == "loss" else 0.0, temperature=config.temperature,
        denominator=config.denominator, constant_length=length if config.denominator == "constant" else None,
    )  # fmt: skip


def advantages(experience: Experience, config: GRPOConfig, kl_A: Tensor | None = None) -> GroupAdvantages:
    """Of every answer; those that are masked, aborted, empty or without a number have no part in anything.

    `kl_A`: divergence of each answer from the reference, for ``kl_in="reward"``."""
    reward_A = experience.rewards_A(config.truncated_reward)
    if kl_A is not None:
        reward_A = reward_A - config.kl * kl_A.to(reward_A)
    valid_A = overlong_valid([a.finish for a in experience.answers], mask_length=config.mask_truncated)
    valid_A &= torch.tensor([len(a.ids) > 0 for a in experience.answers], dtype=torch.bool)
    return group_advantages(
        reward_A, experience.group_A, valid_A, scale=config.advantage, leave_one_out=config.leave_one_out
    )


def train(config: GRPOConfig) -> dict[str, Any]:
    """Train a policy on verified rewards. Every rank calls it.
    Args: `config`: see `moekit.workloads.GRPOConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, held-out scores before and after, tokens, rates.
    Raises: MoekitError: bad input, on all ranks, before anything is written."""
    run = rl.begin(config, "grpo")
    learner = Learner(run.model(), objective(config), config.learner, run.world)
    reference = Forward(run.model(), config.learner, run.world) if config.kl else None
    stream = RowStream(run.data, config.prompts, config.seed)
    start, state = runs.continued(run, learner)
    runs.restore_stream(run, stream, state)
    others = [reference] if reference is not None else []
    with (
        Sampler(run, learner, *others) as sampler,
        Recorder(run, learner, start, shown=SHOWN, others=others, **rl.card(config)) as record,
    ):
        sampler.begin(start, state.get("scores", {}))
        for step in range(start, config.steps):
            chosen, experience = sampler.rollout(stream, step)
            metrics, arrays, advantage_A = update(learner, reference, experience, sampler, step)
            sampler.transfer()
            told, more = sampler.told(step, chosen, experience, advantage_A)
            record.step(step, metrics | told, arrays | more, sampler.state())
    return record.finish(**sampler.scores)


def update(
    learner: Learner, reference: Forward | None, experience: Experience, sampler: Sampler, step: int
) -> tuple[dict[str, float], dict[str, Tensor], Tensor]:
    """The optimizer steps of one rollout: metrics and arrays of all of them together, and advantages. A collective.

    Log-probs of the policy that sampled are computed where something reads them: several updates, an importance weight,
    a penalty in the reward. With one update the ratio is 1 and needs none."""
    config: Any = sampler.config
    answers, report = experience.answers, Report()
    fields: list[dict[str, Tensor]] = [{} for _ in answers]

    def score(layout: Forward, name: str, part: str, replay: bool = False) -> None:
        with sampler.watch.during(part):
            batches = rl.microbatches(experience.samples([{} for _ in answers]), config, layout)
            for field, x in zip(fields, sampler.scored(layout, batches, experience, replay=replay)):
                field[name] = x

    if config.updates > 1 or config.importance_cap is not None or (config.kl and config.kl_in == "reward"):
        score(learner, "old_logprob", "score", config.replay)
    if reference is not None:
        score(reference, "ref_logprob", "reference")
    old = [f["old_logprob"] for f in fields if "old_logprob" in f]
    kl_A = None
    if config.kl and config.kl_in == "reward":
        each = [kl_estimate(f["old_logprob"], f["ref_logprob"], config.kl_kind).sum() for f in fields]
        kl_A = torch.stack(each)
    found, capped = advantages(experience, config, kl_A), 0
    for field, answer, advantage in zip(fields, answers, found.advantage_A.float()):
        field["advantage"] = advantage.expand(len(answer.ids))
        if config.importance_cap is not None:
            more, above = rl.corrected(field["old_logprob"], answer.logprobs, config)
            field |= more
            capped += above
    keep_A = found.learns_A if config.drop_equal_groups else found.valid_A
    updates = []
    for epoch in range(config.epochs):
        for part in rl.minibatches(len(experience.rollouts), config.minibatches, config.seed, step, epoch):
            batches = rl.microbatches(experience.samples(fields, keep_A, part), config, learner, report)
            replay = rl.replayed(batches, experience.rollouts) if config.replay else None
            with sampler.watch.during("train"):
                updates.append((learner.step(batches, replay=replay), learner.counter.arrays()))
    metrics, arrays = rl.merge(updates)
    metrics |= {
        "group/equal": float(found.equal), "group/single": float(found.single), "group/empty": float(found.empty),
        "rollout/masked": float(found.masked), "reward/not_finite": float(found.not_finite),
        "rollout/weight_capped": float(capped), "rows/saved_positions": report.counts.get("shared", 0) / config.epochs,
    }  # fmt: skip
    if old:
        metrics["rollout/logprob_gap"] = rl.logprob_gap(old, answers)
    return metrics, arrays, found.advantage_A
