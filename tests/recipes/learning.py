"""What the tests of learning run in processes of their own: a model of careless demonstrations, and runs from there.

It has learnt to spell words backward from 4,000 demonstrations of which 45 % are wrong, the word as it stands. So it
knows how, and does it or does not: what rewards that say which answer was right can change, in few steps.

Imported by the tests and by the processes that they start. One thread each, so that two run on two cores.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from moekit.config import DataConfig, LearnerConfig, RouterLossConfig, SFTConfig
from moekit.data import tasks
from moekit.data.chat import load_tokenizer
from moekit.data.tokenizer import train_tokenizer
from moekit.learner.weights import export
from moekit.model.presets import preset
from moekit.model.transformer import Transformer
from moekit.recipes import dpo, grpo, ppo, rl, sft
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig

TASK = {"name": "spell_backward", "min_word_len": 3, "max_word_len": 4}
PROMPTS, HELD_OUT, WRONG = 4000, 300, 45  # per cent
ROUTER = RouterLossConfig(balance=0.01)


def start(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Data, tokenizer and the model that all runs start from."""
    items = tasks.make_task(split="train", size=PROMPTS, **TASK)
    write(folder / "prompts.jsonl", items)
    write(folder / "demonstrations.jsonl", [careless(x) if n % 100 < WRONG else x for n, x in enumerate(items)])
    write(folder / "held_out.jsonl", tasks.make_task(split="heldout", size=HELD_OUT, seed=1, **TASK))
    for split, size in (("train", 1600), ("heldout", 200)):
        lines = tasks.make_pairs(split=split, size=size, **TASK)
        write(folder / f"pairs_{split}.jsonl", lines, ("prompt", "chosen", "rejected"))
    texts = [m["content"] for item in items for m in item["messages"]]
    train_tokenizer(texts, 512, folder / "tokenizer", min_frequency=len(items) // 5)
    tokenizer = load_tokenizer(folder / "tokenizer")
    shape = replace(preset("demo"), vocab=len(tokenizer), bos_id=tokenizer.bos_token_id,
                    eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)  # fmt: skip
    export(Transformer(shape, seed=seed), folder / "initial", folder / "tokenizer")
    steps = 200
    learner = LearnerConfig(lr=3e-3, schedule="cosine", total_steps=steps, warmup_steps=10, router=ROUTER)
    return sft.train(SFTConfig(
        model=str(folder / "initial"), data=str(folder / "demonstrations.jsonl"), out=str(folder / "sft"),
        rows=DataConfig(length=128), steps=steps, batch_rows=16, microbatch_rows=16, learner=learner,
    ))  # fmt: skip


def careless(item: dict[str, Any]) -> dict[str, Any]:
    """The item, answered with the word as it stands."""
    question, answer = item["messages"]
    return item | {"messages": [question, answer | {"content": answer["content"][::-1]}]}


def write(path: Path, items: Sequence[dict[str, Any]], keys: Sequence[str] = ("messages",)) -> None:
    """Chats without the task's own data: only the right answer, to the letter, scores."""
    path.write_text("".join(json.dumps({k: item[k] for k in keys}) + "\n" for item in items))


def rl_settings(folder: Path, out: str, seed: int, steps: int) -> dict[str, Any]:
    """What GRPO and PPO share."""
    return {
        "model": str(folder / "sft" / "export"), "data": str(folder / "prompts.jsonl"), "out": str(folder / out),
        "eval_data": str(folder / "held_out.jsonl"), "eval_items": HELD_OUT, "seed": seed, "steps": steps, "group": 8,
        "max_prompt": 64, "max_new_tokens": 12, "length": 256, "microbatch_tokens": 8192, "slots": 768,
        "export": False, "kl": KL, "kl_kind": "k3", "kl_in": "loss",
    }  # fmt: skip


def learner(lr: float) -> LearnerConfig:
    """A steady optimizer: rewards of 0 and 1 make noisy gradients."""
    return LearnerConfig(lr=lr, warmup_steps=10, betas=(0.9, 0.99), router=ROUTER)


def run_grpo(folder: Path, seed: int) -> dict[str, Any]:
    """Groups whose answers are all right or all wrong are left out: they would cost time and teach nothing."""
    return grpo.train(GRPOConfig(
        **rl_settings(folder, f"grpo_{seed}", seed, GRPO_STEPS), prompts=64, drop_equal_groups=True,
        learner=learner(LR),
    ))  # fmt: skip


def run_ppo(folder: Path, seed: int) -> dict[str, Any]:
    """With a critic that is smaller than the policy, and starts from nothing."""
    return ppo.train(PPOConfig(
        **rl_settings(folder, f"ppo_{seed}", seed, PPO_STEPS), prompts=64, learner=learner(LR),
        critic="tiny", critic_learner=learner(3e-3),
    ))  # fmt: skip


def run_dpo(folder: Path, seed: int) -> dict[str, Any]:
    """Right answers against those to other questions."""
    return dpo.train(DPOConfig(
        model=str(folder / "sft" / "export"), data=str(folder / "pairs_train.jsonl"), out=str(folder / f"dpo_{seed}"),
        eval_data=str(folder / "pairs_heldout.jsonl"), seed=seed, steps=DPO_STEPS, batch_pairs=32, length=128,
        reference="resident",
        learner=LearnerConfig(lr=5e-4, warmup_steps=5, router=ROUTER), export=False,
    ))  # fmt: skip


KL = 0.2  # holds a policy that learns nothing where it was: steps along noise would ruin it
GRPO_STEPS, PPO_STEPS, LR = 30, 24, 2e-4
DPO_STEPS = 60
RUNS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "start": start,
    "grpo": run_grpo,
    "ppo": run_ppo,
    "dpo": run_dpo,
}
CONTROL = 100  # seeds from here on are controls


def shuffle_rewards(seed: int, within_groups: bool) -> None:
    """From now on a step's rewards come to its answers in any order: as many are right, but not these. Within groups,
    as many of each group: the baseline of GRPO is the group's, that of PPO the step's."""
    own, generator = rl.Experience.rewards_A, torch.Generator().manual_seed(seed)

    def shuffled(self: rl.Experience, truncated: float | None = None) -> torch.Tensor:
        reward_A = own(self, truncated)
        order_A = torch.rand(len(reward_A), generator=generator, dtype=torch.float64)
        if not within_groups:
            return reward_A[order_A.argsort()]
        return reward_A[(self.group_A + order_A).argsort()]

    rl.Experience.rewards_A = shuffled


def one(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """A run to its end, in a process of its own."""
    torch.set_num_threads(1)
    if seed >= CONTROL:
        shuffle_rewards(seed, within_groups=name == "grpo")
    return RUNS[name](folder, seed)


def several(name: str, folder: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Runs with these seeds, two at a time, each in a new process."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(one, [name] * len(seeds), [folder] * len(seeds), seeds))
