"""Proximal policy optimization with a critic, as one loop: sample, judge, value, step both learners.

    moekit.submit(train, PPOConfig(model="runs/sft/export", data="chain_sum"), nproc=2)

The critic is a second learner with a layout of its own. It may start from the policy's backbone, from a smaller model
or from a reward model's checkpoint. Sampling and resuming are as in `moekit.recipes.grpo`.

Axis letters: A answers of a step, N tokens of all trained answers one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.save import MANIFEST
from ..data.report import Report
from ..data.stream import RowStream
from ..errors import ConfigError
from ..learner.forward import Forward
from ..learner.learner import Learner
from ..learner.mesh import check_layout, place
from ..learner.stages import part_of
from ..learner.weights import from_checkpoint
from ..model.heads import to_value_head
from ..objectives.advantage import gae, overlong_valid, token_rewards, whiten
from ..objectives.ppo import PPO, ValueLoss, explained_variance
from ..objectives.ratio import kl_estimate
from ..workloads import PPOConfig
from . import rl, runs, setup
from .rl import Experience
from .runs import Recorder, Run
from .sampler import Sampler

SHOWN = {"reward": "reward/mean", "length": "rollout/length", "value": "critic/explained", "held out": "eval/score"}


def make_critic(run: Run) -> Learner:
    """The critic that the config names, on its layout."""
    config: PPOConfig = run.config
    layout, name = config.critic_learner or config.learner, config.critic or config.model
    saved = (Path(name) / MANIFEST).exists()  # a checkpoint: a reward model, or another critic
    with setup.together(run.waits):
        shape = from_checkpoint(name, device="meta").config if saved else setup.model_shape(name)
        shape = replace(shape, value_head=True, tied_head=False)
        if shape.vocab < run.shape.vocab or shape.max_positions < config.length:
            raise ConfigError(
                f"critic={name!r} has {shape.vocab} tokens and {shape.max_positions} positions; it must read the "
                f"policy's {run.shape.vocab} tokens in rows of length={config.length}"
            )
        check_layout(layout, shape, run.place.world)
        part = part_of(layout, shape, *place(layout, run.place.rank, run.place.world))
        if saved:
            model = from_checkpoint(name, dtype=config.dtype, device=run.place.device, part=part)
        else:
            model = setup.make_model(config, shape, run.place, name, layout)
    return Learner(to_value_head(model), ValueLoss(config.value_clip), layout, run.world, component="critic")


def train(config: PPOConfig) -> dict[str, Any]:
    """Train a policy and its critic on verified rewards. Every rank calls it.
    Args: `config`: see `moekit.workloads.PPOConfig`. `out=None` takes the job's folder, or a new one under runs/.
    Returns: What came out, the same on every rank: run folder, steps, held-out scores before and after, tokens, rates.
    Raises: MoekitError: bad input, on all ranks, before anything is written."""
    run = rl.begin(config, "ppo")
    loss = PPO(
        clip_low=config.clip_low, clip_high=config.clip_high, temperature=config.temperature, kl=config.kl_kind,
        beta=config.kl if config.kl_in == "loss" else 0.0, denominator=config.denominator,
    )  # fmt: skip
    learner, critic = Learner(run.model(), loss, config.learner, run.world), make_critic(run)
    reference = Forward(run.model(), config.learner, run.world) if config.kl else None
    stream = RowStream(run.data, config.prompts, config.seed)
    start, state = runs.continued(run, learner, critic)
    runs.restore_stream(run, stream, state)
    others = [critic] if reference is None else [critic, reference]
    with (
        Sampler(run, learner, *others) as sampler,
        Recorder(run, learner, start, shown=SHOWN, critic=critic, others=others[1:], **rl.card(config)) as record,
    ):
        sampler.begin(start, state.get("scores", {}))
        for step in range(start, config.steps):
            chosen, experience = sampler.rollout(stream, step)
            metrics, arrays = update(learner, critic, reference, experience, sampler, step)
            sampler.transfer()
            told, more = sampler.told(step, chosen, experience)
            record.step(step, metrics | told, arrays | more, sampler.state())
    return record.finish(**sampler.scores)


def update(
    learner: Learner, critic: Learner, reference: Forward | None, experience: Experience, sampler: Sampler, step: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The optimizer steps of one rollout, of policy and critic: metrics and arrays of all together. A collective."""
    config: Any = sampler.config
    none, report = [{} for _ in experience.answers], Report()
    with sampler.watch.during("score"):
        batches = rl.microbatches(experience.samples(none), config, learner)
        old = sampler.scored(learner, batches, experience, replay=config.replay)
    theirs = old
    if reference is not None:
        with sampler.watch.during("reference"):
            batches = rl.microbatches(experience.samples(none), config, reference)
            theirs = sampler.scored(reference, batches, experience)
    with sampler.watch.during("critic_score"):
        cut_A = torch.tensor([not a.terminated for a in experience.answers])
        batches = rl.microbatches(experience.samples(none), config, critic, cut_A=cut_A)
        values = sampler.scored(critic, batches, experience)
    fields, keep_A, told = targets(experience, config, old, theirs, values)
    updates: list[tuple[dict[str, float], dict[str, Tensor]]] = []
    learns = step >= config.critic_warmup
    for epoch in range(config.epochs):
        for part in rl.minibatches(len(experience.rollouts), config.minibatches, config.seed, step, epoch):
            samples = experience.samples(fields, keep_A, part)
            with sampler.watch.during("critic_train"):
                metrics = critic.step(rl.microbatches(samples, config, critic))
                arrays = critic.counter.arrays()
            metrics = rl.prefixed(metrics, "critic")
            if learns:
                batches = rl.microbatches(samples, config, learner, report)
                replay = rl.replayed(batches, experience.rollouts) if config.replay else None
                with sampler.watch.during("train"):
                    metrics = learner.step(batches, replay=replay) | metrics
                    arrays = learner.counter.arrays() | arrays
            updates.append((metrics, arrays))
    metrics, arrays = rl.merge(updates)
    told["critic/explained"] = explained_variance(metrics)
    return metrics | told, arrays


def targets(
    experience: Experience, config: PPOConfig, old: list[Tensor], theirs: list[Tensor], values: list[Tensor]
) -> tuple[list[dict[str, Tensor]], Tensor, dict[str, float]]:
    """Advantages, returns and what else the two losses read of each answer; which answers are trained on; metrics.

    The score comes at the last token, less the divergence from the reference at every token. An answer that was cut is
    worth what the critic says of what follows; masked answers have no part in the whitening.

    Args:
        old, theirs: log-probs of each answer's tokens, of the policy that sampled and of the reference.
        values: of each answer's tokens, and of what follows where the answer was cut.
    """
    answers = experience.answers
    valid_A = overlong_valid([a.finish for a in answers], mask_length=config.mask_truncated)
    valid_A &= torch.tensor([len(a.ids) > 0 and r.valid for a, r in zip(answers, experience.rewards)])
    some = [i for i, valid in enumerate(valid_A.tolist()) if valid]
    sizes = [len(answers[i].ids) for i in some]
    flat = lambda parts: torch.cat([parts[i][:n] for i, n in zip(some, sizes)]) if some else torch.zeros(0)
    answer_N = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.long))
    kl_N = kl_estimate(flat(old), flat(theirs), config.kl_kind)
    score_A = experience.rewards_A(config.truncated_reward)[some].float()
    in_reward = bool(config.kl) and config.kl_in == "reward"
    reward_N = token_rewards(score_A, answer_N, kl_N=kl_N, beta=config.kl if in_reward else 0.0)
    ended_A = torch.tensor([answers[i].terminated for i in some], dtype=torch.bool)
    after_A = torch.stack([values[i][-1] for i in some]) if some else torch.zeros(0)
    advantage_N, return_N = gae(
        reward_N, flat(values).to(reward_N.dtype), answer_N, gamma=config.gamma, lam=config.lam,
        terminated_A=ended_A, bootstrap_A=after_A,
    )  # fmt: skip
    if config.whiten:
        advantage_N = whiten(advantage_N)
    sampled, capped = rl.corrected(flat(old), flat([a.logprobs for a in answers]), config)
    made: dict[str, Any] = {**sampled, "old_value": flat(values), "advantage": advantage_N,
                            "return": return_N}  # fmt: skip
    if config.kl and config.kl_in == "loss":
        made["ref_logprob"] = flat(theirs)
    columns = {name: x.split(sizes) for name, x in made.items()}
    fields: list[dict[str, Tensor]] = [{name: torch.zeros(0) for name in made} for _ in answers]
    for at, i in enumerate(some):
        fields[i] = {name: x[at] for name, x in columns.items()}
    n = max(1, len(answer_N))
    told = {
        "rollout/masked": float(len(answers) - len(some)), "rollout/weight_capped": float(capped),
        "ppo/kl_reference": float(kl_N.sum()) / n, "ppo/reward": float(reward_N.sum()) / max(1, len(some)),
        "rollout/logprob_gap": rl.logprob_gap(old, answers),
        "ppo/advantage": float(advantage_N.abs().sum()) / n, "ppo/value": float(flat(values).sum()) / n,
    }  # fmt: skip
    return fields, valid_A, told
