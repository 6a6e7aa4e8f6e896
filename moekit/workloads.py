"""Settings of the workloads beyond supervised fine-tuning: preferences, reward model, and reinforcement learning.

Defaults are for a small model on a CPU. `published` has recipes of others, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .config import Denominator, Dtype, LearnerConfig, RunConfig, Schedule, _need
from .errors import ConfigError


@dataclass(frozen=True)
class PairConfig(RunConfig):
    """What runs on preference pairs share."""

    batch_pairs: int = 16  # of one optimizer step, over all ranks
    length: int = 512  # T, positions of a row; a pair that does not fit is left out and reported
    share_prompt: bool = True  # route and compute the prompt of a pair once
    microbatch_tokens: int = 4096  # positions of one forward, on one rank
    over_long: Literal["drop", "truncate"] = "drop"  # what becomes of a pair that does not fit in a row
    eval_data: str | None = None  # held-out pairs
    eval_every: int | None = None  # steps; None = before and after

    def _check(self) -> None:
        super()._check()
        _need(self.batch_pairs >= 1, f"batch_pairs={self.batch_pairs} must be at least 1")
        _check_rows(self.length, self.microbatch_tokens)

    @property
    def row_length(self) -> int:
        """T, the most positions of a row."""
        return self.length


@dataclass(frozen=True)
class DPOConfig(PairConfig):
    """One DPO run: `moekit.recipes.dpo.train`."""

    beta: float = 0.1
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False
    reference: Literal["resident", "cached"] = "cached"
    cache: str | None = None  # folder of the reference cache; None = reference/ in the run folder
    update_every: int | None = None  # steps after which a resident reference becomes a copy of the policy

    def _check(self) -> None:
        super()._check()
        _need(
            not (self.update_every and self.save_every) or self.save_every % self.update_every == 0,
            f"save_every={self.save_every} must be a multiple of update_every={self.update_every}: a checkpoint holds "
            "the policy alone, so a run goes on where the reference is its copy",
        )


@dataclass(frozen=True)
class RewardConfig(PairConfig):
    """One reward-model run: `moekit.recipes.reward_model.train`. It has no export: no family holds a value head."""

    center: float = 0.0  # coefficient of the squared sum of a pair's two rewards
    export: bool = False

    def _check(self) -> None:
        super()._check()
        _need(not self.export, "a value head has no Hugging Face family; leave export=False and use the checkpoint")


@dataclass(frozen=True)
class RLConfig(RunConfig):
    """What GRPO and PPO share: rollouts, rewards, rows, reference. `data` holds prompts, or names a reasoning-gym task.

    A step: sample `group` answers to each of `prompts` prompts, score them, and take `epochs` x `minibatches`
    optimizer steps on them.
    """

    prompts: int = 8  # of one rollout, over all ranks
    group: int = 8  # answers to each
    items: int = 4096  # of a task, when `data` names one
    max_prompt: int = 256  # tokens; longer prompts are left out and reported
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    rollout_dtype: Dtype | None = None  # of the engine's weights; None = the learner's
    slots: int = 64  # sequences that an engine decodes together
    engine: Literal["embedded", "process", "vllm"] = "embedded"  # in the learner's process, in one of its own, or vLLM
    engine_url: str | None = None  # of a vLLM server: `moekit.rollout.vllm_http.start_server`, or one of yours
    staleness: int = 0  # 1: the answers of a step are sampled while the step before trains, one step behind
    engine_seconds: float = 300.0  # until a vLLM server that is gone is back at its address; of one answer, if over 120
    serve_ep: int | None = None  # ranks that share the experts of an embedded engine; None = each rank's has all
    update_mode: Literal["atomic", "in_place"] = "atomic"  # the old weights serve until all new ones are there, or not
    length: int = 512  # T, positions of a row
    share_prompt: bool = True
    microbatch_tokens: int = 4096  # positions of one forward, on one rank
    epochs: int = 1  # over one rollout
    minibatches: int = 1  # optimizer steps of an epoch
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0  # coefficient of the divergence from the reference; 0 = no reference is held
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    importance_cap: float | None = None  # truncates the weight learner / engine of each token; None = weights are 1
    replay: bool = False  # train with the experts that the engine chose
    mask_truncated: bool = False  # answers cut at max_new_tokens teach nothing
    verifier: str = "task"  # "task": its own scorer; "math": math-verify; or "package.module:function"
    reward_scale: float = 1.0  # times the score
    truncated_reward: float | None = None  # of answers cut at max_new_tokens, in place of their own
    reward_seconds: float = 10.0  # one verification may take
    reward_workers: int = 1  # processes on each rank
    eval_data: str | None = None  # held-out prompts; None = held-out items of the task
    eval_every: int | None = None  # steps; None = before and after
    eval_items: int = 200

    def _check(self) -> None:
        super()._check()
        for name in ("prompts", "group", "max_prompt", "max_new_tokens", "slots", "epochs", "minibatches"):
            _need(getattr(self, name) >= 1, f"{type(self).__name__}.{name}={getattr(self, name)} must be at least 1")
        _need(self.temperature > 0, f"temperature={self.temperature}: learning needs samples; set it above 0")
        _need(0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1")
        cut = self.top_k > 0 or self.top_p < 1
        _need(
            not cut or self.importance_cap is not None,
            f"top_k={self.top_k}, top_p={self.top_p} change the distribution that is sampled from, which the learner's "
            "log-probs do not; set importance_cap to correct for it, or sample from the whole distribution",
        )
        _need(self.kl >= 0, f"kl={self.kl} must be at least 0")
        self._check_placement()
        _need(
            self.max_prompt + self.max_new_tokens <= self.length,
            f"max_prompt={self.max_prompt} and max_new_tokens={self.max_new_tokens} do not fit in a row of "
            f"length={self.length}; make rows longer",
        )
        _need(
            self.minibatches <= self.prompts,
            f"minibatches={self.minibatches} cannot be more than prompts={self.prompts}: a group stays together",
        )
        _check_rows(self.length, self.microbatch_tokens)

    def _check_placement(self) -> None:
        """Where answers are sampled, and how old they may be."""
        old = self.staleness
        _need(old in (0, 1), f"staleness={old} is not 0 or 1: answers are at most one step old")
        _need(
            not old or self.importance_cap is not None,
            f"staleness={old} trains on answers of an older policy; set importance_cap (2.0, say), which corrects for "
            "it with the engine's log-probs, or staleness=0",
        )
        _need(
            not old or self.engine != "embedded",
            f"staleness={old} samples while the learner trains, which engine='embedded' cannot; take engine='process'",
        )
        ep = self.serve_ep
        _need(
            ep is None or (ep >= 1 and self.engine == "embedded"),
            f"serve_ep={ep} must be at least 1 rank, of engine='embedded'; engine={self.engine!r} has all of them",
        )
        _need(self.engine_seconds >= 0, f"engine_seconds={self.engine_seconds} must be at least 0")
        _need(
            self.engine_url is None or self.engine == "vllm",
            f"engine_url={self.engine_url!r} is a vLLM server's address; set engine='vllm', or leave it out",
        )
        _need(
            self.engine != "vllm" or bool(self.engine_url),
            "engine='vllm' needs the address of its server: set engine_url, as http://127.0.0.1:8000",
        )
        _need(
            self.engine != "vllm" or self.update_mode == "in_place",
            f"update_mode={self.update_mode!r} keeps the old weights, which vLLM cannot; set update_mode='in_place'",
        )

    @property
    def row_length(self) -> int:
        """T, the most positions of a row."""
        return self.length

    @property
    def updates(self) -> int:
        """Optimizer steps of one rollout."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class GRPOConfig(RLConfig):
    """One GRPO run: `moekit.recipes.grpo.train`."""

    advantage: Literal["std", "none"] = "std"  # divide by the group's standard deviation, or not (Dr. GRPO)
    leave_one_out: bool = False
    denominator: Denominator = "global_tokens"
    constant_length: int | None = None  # with denominator="constant"; None = max_new_tokens
    ratio: Literal["token", "sequence"] = "token"  # "sequence" is GSPO's
    drop_equal_groups: bool = False  # groups whose rewards are all equal leave the denominators too


@dataclass(frozen=True)
class PPOConfig(RLConfig):
    """One PPO run: `moekit.recipes.ppo.train`."""

    kl: float = 0.05
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    denominator: Denominator = "global_tokens"
    critic: str | None = None  # a Hugging Face folder, a preset, or a checkpoint (a reward model); None = the policy's
    critic_learner: LearnerConfig | None = None  # None = the policy's
    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float | None = 0.2
    whiten: bool = True
    critic_warmup: int = 0  # rollouts on which only the critic learns

    def _check(self) -> None:
        super()._check()
        _need(0 <= self.gamma <= 1 and 0 <= self.lam <= 1, f"gamma={self.gamma} and lam={self.lam} must be in 0..1")
        _need(
            self.critic_warmup < self.steps,
            f"critic_warmup={self.critic_warmup} leaves the policy none of steps={self.steps} to learn in; take fewer",
        )


def _check_rows(length: int, tokens: int) -> None:
    _need(length >= 2, f"length={length} must be at least 2")
    _need(
        tokens >= length,
        f"microbatch_tokens={tokens} does not hold one row of length={length}; raise it, or shorten rows",
    )


@dataclass(frozen=True)
class Published:
    """A published recipe: what differs from the defaults here, where it stands, and what is not the same."""

    config: type[RLConfig]
    settings: dict[str, Any]
    lr: float
    schedule: Schedule
    source: str
    departures: str


PUBLISHED = {
    "open-instruct-grpo": Published(
        GRPOConfig,
        {"prompts": 48, "group": 16, "minibatches": 2, "max_prompt": 2048, "max_new_tokens": 2048, "length": 4096,
         "kl": 0.01, "kl_kind": "k3", "reward_scale": 10.0, "truncated_reward": 0.0},
        5e-7, "constant",
        "github.com/allenai/open-instruct, scripts/train/tulu3/grpo_fast_8b.sh (Tulu 3.1 8B) and the defaults of its "
        "grpo_fast.py: verified reward 10, clip 0.2, advantages over the standard deviation, mean over tokens",
        "there the mean over tokens is one minibatch's on one rank, here it is over the whole optimizer step",
    ),
    "tulu3-rlvr-ppo": Published(
        PPOConfig,
        {"prompts": 224, "group": 1, "epochs": 4, "max_prompt": 2048, "max_new_tokens": 2048, "length": 4096,
         "kl": 0.05, "kl_kind": "k1", "kl_in": "reward", "reward_scale": 10.0, "truncated_reward": -10.0,
         "gamma": 1.0, "lam": 0.95, "value_clip": 0.2},
        3e-7, "linear",
        "Lambert et al. 2024 (arXiv 2411.15124), RLVR; github.com/allenai/open-instruct, "
        "scripts/train/tulu3/ppo_8b.sh; set critic= to a reward model's checkpoint, where the value model starts there",
        "the critic has an optimizer of its own, so its loss has no coefficient (there 0.1)",
    ),
}  # fmt: skip


def published(name: str, model: str, data: str, **given: Any) -> RLConfig:
    """The config of a published recipe, with what is `given` in place of its own settings.

    Raises:
        ConfigError: no such recipe.

    >>> config = published("tulu3-rlvr-ppo", "dpo/export", "questions.jsonl", critic="reward/checkpoints/step_9")
    >>> config.reward_scale, config.kl, config.learner.lr
    (10.0, 0.05, 3e-07)
    """
    if name not in PUBLISHED:
        raise ConfigError(f"no published recipe {name!r}; there are {', '.join(PUBLISHED)}")
    p = PUBLISHED[name]
    settings: dict[str, Any] = {**p.settings, "microbatch_tokens": 8192, **given}
    if "learner" not in settings:
        probe = p.config(model, data, **settings)
        total = probe.steps * probe.updates if p.schedule != "constant" else None
        settings["learner"] = LearnerConfig(lr=p.lr, schedule=p.schedule, total_steps=total)
    return p.config(model, data, **settings)
