"""Options of the commands that train, made from the fields of their configs: type, choices, default and help are the
field's, its help what the comment behind it in the source says.

A command is a config, its groups of options, and the recipe that takes it."""

import argparse
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..config import Config, DataConfig, FilterConfig, LearnerConfig, RouterLossConfig, RunConfig, SFTConfig
from ..errors import ConfigError
from ..workloads import PUBLISHED, DPOConfig, GRPOConfig, PPOConfig, RewardConfig, RLConfig

C = TypeVar("C", bound=Config)
Groups = dict[str, str]  # title -> fields of configs, each an option

# what options say where the field says nothing, or something else than the shell's form of it
SAYS = {
    "seed": "of the order of the data, of samples, and of a preset's weights",
    "denominator": "what the sum of token losses is divided by; global_tokens is exact for any cut",
    "clip_norm": "largest gradient norm; 0 = no limit",
    "beta": "strength of the tie to the reference",
    "kind": "of loss",
    "label_smoothing": "share of pairs taken to be the wrong way round",
    "length_normalised": "means over an answer's tokens for sums",
    "reference": "a second model in memory, or its log-probs computed once",
    "max_new_tokens": "the most tokens of an answer",
    "temperature": "of sampling, and of all log-probs",
    "top_k": "sample from so many most likely tokens; 0 = all",
    "top_p": "sample from the most likely tokens with this much probability",
    "share_prompt": "route and compute a prompt once for all answers to it",
    "clip_low": "the ratio is clipped at 1 less this",
    "clip_high": "and at 1 plus this",
    "kl_kind": "estimator of the divergence from the reference",
    "kl_in": "where the divergence is taken off",
    "eval_items": "how many held-out prompts",
    "leave_one_out": "the baseline is the mean of the other answers",
    "gamma": "discount",
    "lam": "mixing of estimates",
    "value_clip": "how far a value may move from what it was; 0 = no limit",
    "whiten": "advantages get zero mean and unit variance",
}
TRAINING = "steps lr schedule warmup_steps weight_decay clip_norm dtype seed"
ROUTER = "balance granularity elide"
ENDS: Groups = {
    "layout (see `moekit layouts`)": "ep pp pipeline stages_per_rank zero reduce dispatch transport capacity "
    "on_overflow recompute precision",
    "checkpoints": "save_every keep_checkpoints",
}
SFT: Groups = {
    "training": f"{TRAINING} batch_rows microbatch_rows",
    "rows": "rows length over_long",
    "loss": f"supervise denominator constant_length {ROUTER}",
}
PAIRS = "batch_pairs length share_prompt microbatch_tokens over_long eval_data eval_every"
DPO: Groups = {
    "training": TRAINING,
    "pairs": PAIRS,
    "loss": f"beta kind label_smoothing length_normalised reference cache update_every {ROUTER}",
}
REWARD: Groups = {"training": TRAINING, "pairs": PAIRS, "loss": f"center {ROUTER}"}
ROLLOUTS: Groups = {
    "training": TRAINING,
    "rollouts": "prompts group items max_prompt max_new_tokens temperature top_k top_p rollout_dtype slots replay "
    "engine engine_url staleness update_mode",
    "rewards": "verifier reward_scale truncated_reward reward_seconds reward_workers mask_truncated eval_data "
    "eval_every eval_items",
    "rows": "length share_prompt microbatch_tokens",
    "loss": "epochs minibatches clip_low clip_high kl kl_kind kl_in importance_cap denominator " + ROUTER,
}
GRPO = ROLLOUTS | {"groups": "advantage leave_one_out ratio constant_length drop_equal_groups"}
PPO = ROLLOUTS | {"critic": "critic gamma lam value_clip whiten critic_warmup"}


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
            "--published", choices=names, help="settings of a published recipe, where options have their defaults"
        )
    own = command.config("", "")
    configs = ([DataConfig()] if command.name == "sft" else []) + [RouterLossConfig(), LearnerConfig(), own]
    if command.name != "sft":
        configs = [own, *configs[:-1]]
    for title, options in (command.groups | ENDS).items():
        g = p.add_argument_group(title)
        for name in options.split():
            _add(g, next(c for c in configs if hasattr(c, name)), name)
        if title == "rows" and command.name == "sft":
            says = "remove instances in which a short pattern repeats on and on"
            g.add_argument("--filter", action="store_true", help=says)
        if title == "loss":
            g.add_argument("--z-loss", type=float, default=0.0, dest="z", help="coefficient of the router z-loss")
        if title == "checkpoints" and own.export:
            g.add_argument("--no-export", action="store_true", help="do not write a Hugging Face folder at the end")


@cache
def comments(cls: type) -> dict[str, str]:
    """What the source says behind each field of a config; a field of a base that says nothing itself is the base's."""
    found = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    return (comments(cls.__bases__[0]) if cls is not Config else {}) | found


def _add(g: Any, config: Config, name: str) -> None:
    text = SAYS.get(name) or comments(type(config))[name].replace("None = ", "default: ").replace("%", "%%")
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
