"""Options of the commands that train, made from the fields of their configs: type, choices and default are the field's.

A command is a config, its groups of options, and the recipe that takes it."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..config import Config, DataConfig, FilterConfig, LearnerConfig, RouterLossConfig, RunConfig, SFTConfig
from ..errors import ConfigError
from ..workloads import PUBLISHED, DPOConfig, GRPOConfig, PPOConfig, RewardConfig, RLConfig

C = TypeVar("C", bound=Config)
Groups = dict[str, dict[str, str]]

TRAINING = {
    "steps": "optimizer steps",
    "lr": "peak learning rate",
    "schedule": "of the learning rate",
    "warmup_steps": "linear warm-up",
    "weight_decay": "of matrices",
    "clip_norm": "largest gradient norm; 0 = no limit",
    "dtype": "of the weights",
    "seed": "of the order of the data, of samples, and of a preset's weights",
}
ROUTER = {
    "balance": "coefficient of the load-balance loss",
    "granularity": "over what the balance loss pools its statistics",
    "elide": "expert rows that are skipped because they cannot reach the loss",
}
LAYOUT = {
    "ep": "expert-parallel processes: experts are split over them",
    "pp": "pipeline processes: layers are split over them",
    "pipeline": "the pipeline's schedule",
    "stages_per_rank": "pipeline stages of a process, with --pipeline interleaved or zbv",
    "zero": "0: optimizer state on every process; 1: sharded; 2: sharded, gradients reduce-scattered",
    "reduce": "with --zero 2: reduce gradients once a step, or after every microbatch to save memory",
    "dispatch": "how rows reach experts of other processes",
    "transport": "of --dispatch rowwise",
    "capacity": "rows of a rowwise buffer, as a multiple of its balanced share",
    "on_overflow": "when a rowwise buffer is too small: run the step again synchronized, drop rows, or stop",
    "recompute": "activations computed again in the backward to save memory",
    "precision": "of the routed experts' matmuls",
}
ENDS: Groups = {
    "layout (see `moekit layouts`)": LAYOUT,
    "checkpoints": {
        "save_every": "steps between checkpoints (default: only the last)",
        "keep_checkpoints": "how many stay",
    },
}
SFT: Groups = {
    "training": {
        **TRAINING,
        "batch_rows": "rows of one step, over all processes",
        "microbatch_rows": "rows of one forward pass",
    },
    "rows": {
        "rows": "how conversations become rows",
        "length": "tokens of a row",
        "over_long": "what happens to conversations longer than a row",
    },
    "loss": {
        "supervise": "learn the assistant's turns only, or every token",
        "denominator": "what the sum of token losses is divided by; global_tokens is exact for any cut",
        "constant_length": "tokens of a sequence, for --denominator constant",
        **ROUTER,
    },
}
ROWS = {
    "length": "tokens of a row",
    "share_prompt": "compute a prompt once for all answers to it",
    "microbatch_tokens": "positions of one forward pass of a process",
}
PAIRS = {
    "batch_pairs": "pairs of one step, over all processes",
    **ROWS,
    "over_long": "what happens to a pair that does not fit in a row",
    "eval_data": "held-out pairs",
    "eval_every": "steps between looks at them (default: before and after)",
}
DPO: Groups = {
    "training": TRAINING,
    "pairs": PAIRS,
    "loss": {
        "beta": "strength of the tie to the reference",
        "kind": "of loss",
        "label_smoothing": "share of pairs taken to be the wrong way round",
        "length_normalised": "means over an answer's tokens for sums",
        "reference": "a second model in memory, or its log-probs computed once",
        "cache": "folder of those log-probs (default: in the run)",
        "update_every": "steps after which a resident reference becomes a copy of the policy",
        **ROUTER,
    },
}
REWARD: Groups = {
    "training": TRAINING,
    "pairs": PAIRS,
    "loss": {"center": "coefficient of the squared sum of a pair's two rewards", **ROUTER},
}
ROLLOUTS: Groups = {
    "training": {**TRAINING, "steps": "rollouts; each is followed by epochs x minibatches optimizer steps"},
    "rollouts": {
        "prompts": "of one rollout, over all processes",
        "group": "answers to each",
        "items": "of a task, when --data names one",
        "max_prompt": "tokens; longer prompts are left out",
        "max_new_tokens": "the most tokens of an answer",
        "temperature": "of sampling, and of all log-probs",
        "top_k": "sample from so many most likely tokens; 0 = all",
        "top_p": "sample from the most likely tokens with this much probability",
        "rollout_dtype": "of the engine's weights (default: the learner's)",
        "slots": "answers that an engine decodes together",
        "replay": "train with the experts that the engine chose",
    },
    "rewards": {
        "verifier": "task (its own scorer), math (math-verify), or package.module:function",
        "reward_scale": "times the score",
        "truncated_reward": "of answers cut at --max-new-tokens (default: their own)",
        "reward_seconds": "limit of one verification",
        "reward_workers": "processes that verify, for each rank",
        "mask_truncated": "answers cut at --max-new-tokens teach nothing",
        "eval_data": "held-out prompts (default: held-out items of the task)",
        "eval_every": "steps between greedy answers to them (default: before and after)",
        "eval_items": "how many",
    },
    "rows": ROWS,
    "loss": {
        "epochs": "over one rollout",
        "minibatches": "optimizer steps of an epoch",
        "clip_low": "the ratio is clipped at 1 less this",
        "clip_high": "and at 1 plus this",
        "kl": "coefficient of the divergence from the reference; 0 = no reference",
        "kl_kind": "its estimator",
        "kl_in": "where it is taken off",
        "importance_cap": "truncates the weight learner / engine of each token (default: no weights)",
        "denominator": "what the sum of token losses is divided by",
        **ROUTER,
    },
}
GRPO: Groups = {
    **ROLLOUTS,
    "groups": {
        "advantage": "divide by the group's standard deviation, or not",
        "leave_one_out": "the baseline is the mean of the other answers",
        "ratio": "of each token, or one for an answer (GSPO)",
        "constant_length": "tokens of a sequence, for --denominator constant",
        "drop_equal_groups": "groups with equal rewards leave the denominators too",
    },
}
PPO: Groups = {
    **ROLLOUTS,
    "critic": {
        "critic": "a Hugging Face folder, a preset, or a reward model's checkpoint (default: the policy's backbone)",
        "gamma": "discount",
        "lam": "mixing of estimates",
        "value_clip": "how far a value may move from what it was; 0 = no limit",
        "whiten": "advantages get zero mean and unit variance",
        "critic_warmup": "rollouts on which only the critic learns",
    },
}


@dataclass(frozen=True)
class Command:
    """One command that trains."""

    name: str
    short: str
    config: type[RunConfig]
    groups: Groups
    recipe: str  # module under moekit.recipes, with a function `train`
    data: str

    @property
    def train(self) -> Callable[[Any], dict[str, Any]]:
        """The recipe."""
        return importlib.import_module(f"..{self.recipe}", __name__).train


_PAIRS = "preference pairs: a .jsonl or .parquet file, or a folder of `datasets`, with prompt, chosen, rejected"
_PROMPTS = "prompts: chats, as for `moekit sft`, or the name of a reasoning-gym task"
COMMANDS = {
    c.name: c
    for c in (
        Command("sft", "fine-tune a model on chats, on one process or many", SFTConfig, SFT, "sft",
                "chats: a .jsonl or .parquet file, or a folder of `datasets`"),
        Command("dpo", "learn from preference pairs", DPOConfig, DPO, "dpo", _PAIRS),
        Command("reward-model", "fit a reward model to preference pairs", RewardConfig, REWARD, "reward_model", _PAIRS),
        Command("grpo", "learn from verified rewards, by comparing answers to one prompt", GRPOConfig, GRPO, "grpo",
                _PROMPTS),
        Command("ppo", "learn from verified rewards, with a critic", PPOConfig, PPO, "ppo", _PROMPTS),
    )
}  # fmt: skip


def add_options(p: argparse.ArgumentParser, command: Command) -> None:
    """All options of a command that trains."""
    g = p.add_argument_group("model and data")
    g.add_argument("--model", required=True, help="a Hugging Face folder (OLMoE, Qwen3-MoE, Mixtral), or a preset")
    g.add_argument("--data", required=True, help=command.data)
    g.add_argument("--tokenizer", help="a tokenizer folder with a chat template (default: the model's)")
    g = p.add_argument_group("run")
    g.add_argument("--out", help="run folder (default: a new one under runs/)")
    g.add_argument("--nproc", type=int, default=1, help="processes, one GPU each where there are GPUs")
    g.add_argument("--backend", choices=("local", "torchrun", "slurm"), default="local",
                   help="who starts the processes: moekit on this machine, you on each machine, or Slurm")  # fmt: skip
    g.add_argument("--nodes", type=int, default=1, help="machines with --nproc processes each, for the other backends")
    g.add_argument("--slurm", action="append", default=[], metavar="KEY=VALUE",
                   help="an option of sbatch, as partition=gpu or exclusive; may be given several times")  # fmt: skip
    g.add_argument("--threads", type=int, help="CPU threads of a process (default: cores / nproc)")
    g.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    g.add_argument("--detach", action="store_true", help="start and return; the job outlives this shell")
    g.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    g.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    if issubclass(command.config, RLConfig):
        names = [name for name, p in PUBLISHED.items() if p.config is command.config]
        g.add_argument(
            "--published", choices=names, help="settings of a published recipe, where no option says otherwise"
        )
    own = command.config("", "")
    configs = ([DataConfig()] if command.name == "sft" else []) + [RouterLossConfig(), LearnerConfig(), own]
    if command.name != "sft":
        configs = [own, *configs[:-1]]
    for title, options in (command.groups | ENDS).items():
        g = p.add_argument_group(title)
        for name, text in options.items():
            _add(g, next(c for c in configs if hasattr(c, name)), name, text)
        if title == "rows" and command.name == "sft":
            says = "remove instances in which a short pattern repeats on and on"
            g.add_argument("--filter", action="store_true", help=says)
        if title == "loss":
            g.add_argument("--z-loss", type=float, default=0.0, dest="z", help="coefficient of the router z-loss")
        if title == "checkpoints" and own.export:
            g.add_argument("--no-export", action="store_true", help="do not write a Hugging Face folder at the end")


def _add(g: Any, config: Config, name: str, text: str) -> None:
    value, hint = getattr(config, name), get_type_hints(type(config))[name]
    if get_origin(hint) in (Union, UnionType):
        hint = next(a for a in get_args(hint) if a is not type(None))
    choices = get_args(hint) if get_origin(hint) is Literal else None
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        g.add_argument(flag, action=argparse.BooleanOptionalAction, default=value, help=text)
    else:
        kind = type(choices[0]) if choices else hint
        g.add_argument(flag, type=kind, default=value, choices=choices, help=text)


def read(cls: type[C], o: argparse.Namespace, **given: Any) -> C:
    """A config of the options that bear its fields' names, and of what is `given` instead."""
    return cls(**{name: getattr(o, name) for name in get_type_hints(cls) if hasattr(o, name)} | given)


def run_config(command: Command, o: argparse.Namespace) -> RunConfig:
    """The config that the options of a command make.

    Raises:
        ConfigError: a value that cannot be, or --resume without --out.
    """
    if o.resume and not o.out:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    updates = o.steps * getattr(o, "epochs", 1) * getattr(o, "minibatches", 1)
    learner = read(
        LearnerConfig, o, total_steps=updates if o.schedule != "constant" else None, clip_norm=o.clip_norm or None,
        router=read(RouterLossConfig, o),
    )  # fmt: skip
    given: dict[str, Any] = {"out": None, "learner": learner, "export": not getattr(o, "no_export", True)}
    if command.name == "sft":
        given["rows"] = read(DataConfig, o, filter=FilterConfig() if o.filter else None)
    if getattr(o, "published", None):
        p, own = PUBLISHED[o.published], command.config("", "")
        same = {k: v for k, v in p.settings.items() if getattr(o, k) == getattr(own, k)}
        vars(o).update(same)
        if o.lr == LearnerConfig().lr:
            given["learner"] = replace(
                learner, lr=p.lr, schedule=p.schedule, total_steps=o.steps * o.epochs * o.minibatches
            )
    if hasattr(o, "value_clip"):
        given["value_clip"] = o.value_clip or None
    return read(command.config, o, **given)
