"""What the tests of GRPO's and PPO's updates run in every process: hand-made answers, on many layouts.

Imported by spawned processes, so it is a module beside the tests and not a test itself.
"""

import math
import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.learner.forward import Forward
from moekit.learner.learner import Learner
from moekit.learner.mesh import World
from moekit.model.transformer import Transformer
from moekit.objectives.ppo import PPO, ValueLoss
from moekit.recipes import grpo, ppo, rl
from moekit.recipes.sampler import Sampler, Stopwatch
from moekit.rollout.engine import Answer, Rollout
from moekit.rollout.rewards import Reward, Score
from moekit.workloads import GRPOConfig, PPOConfig

MODEL = ModelConfig(
    vocab=31, width=16, layers=4, heads=4, kv_heads=2, experts=8, top_k=2, expert_width=12, dense_layers=(1,),
    dense_width=20, shared_width=8, qk_norm="head", selection_bias=True, init_std=0.3,
)  # fmt: skip
LEARNER = LearnerConfig(
    lr=0.01, weight_decay=0.1, clip_norm=0.5, router=RouterLossConfig(balance=0.05, z=0.01), bias_rate=0.01
)
NAN = float("nan")
# tokens of the prompt, then for each answer: tokens, how it ended, reward
GROUPS = [
    (5, [(4, "stop", 1.0), (9, "length", 0.0), (1, "stop", 0.0), (6, "stop", 1.0)]),
    (1, [(7, "stop", 1.0)]),  # a group of one, and a prompt that has nothing to share
    (8, [(3, "stop", 0.5), (5, "stop", 0.5), (2, "length", 0.5)]),  # equal rewards
    (3, [(9, "length", 0.0), (9, "length", 1.0), (9, "length", 0.25)]),  # all cut
    (6, [(0, "stop", 1.0), (5, "stop", NAN), (2, "abort", 0.5), (8, "stop", 0.25), (3, "stop", 0.75)]),
    (4, [(0, "stop", 0.0), (2, "stop", NAN)]),  # nothing valid
    (7, [(6, "stop", 1.0), (8, "length", 0.0), (9, "stop", 0.0), (7, "stop", 1.0)]),  # more than a row holds
]


def experience(groups=None, seed: int = 3) -> rl.Experience:
    """Answers with log-probs, routes and rewards, drawn from the seed."""
    g = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(1, MODEL.vocab, (n,), generator=g).tolist()
    layers = len(MODEL.moe_layers)

    def experts(n: int) -> torch.Tensor:
        first = torch.randint(0, 8, (n, layers, 1), generator=g)
        return torch.cat((first, (first + torch.randint(1, 8, (n, layers, 1), generator=g)) % 8), -1).to(torch.int16)

    rollouts, rewards = [], []
    for prompt, answers in GROUPS if groups is None else groups:
        made = []
        for n, finish, score in answers:
            routes = experts(n)
            routes[-1:] = -1
            told = -3.4 + 0.5 * torch.randn(n, generator=g)
            made.append(Answer(ids(n), told, routes, torch.zeros(n, dtype=torch.int64), finish))
            bad = math.isnan(score)
            rewards.append(
                Reward(0.0 if bad else score, {"task": Score(0.0 if bad else score, "nan" if bad else "ok", 0)})
            )
        rollouts.append(Rollout(ids(prompt), experts(prompt), made))
    return rl.Experience(rollouts, rewards, [""] * len(rewards))


def seeded(dtype=torch.float64, value_head: bool = False, seed: int = 1) -> Transformer:
    """Expert 0 gets more than half of the positions in every layer, the last expert none."""
    model = Transformer(replace(MODEL, value_head=value_head), dtype=dtype, seed=seed)
    for block in model.layers:
        if block.routes:
            block.moe.router.selection_bias.copy_(torch.tensor([0.4, *[0.0] * 6, -10.0]))
    return model


def sampler(config) -> Any:
    """A sampler that never samples: only what an update asks of it."""
    made = object.__new__(Sampler)
    made.config, made.watch = config, Stopwatch()
    return made


def do_grpo(config: GRPOConfig, world: World, told=None, steps: int = 1, dtype=torch.float64) -> dict[str, Any]:
    """One rollout's updates; what every rank must agree on."""
    told = experience() if told is None else told
    learner = Learner(seeded(dtype), grpo.objective(config), config.learner, world)
    reference = Forward(seeded(dtype, seed=2), config.learner, world) if config.kl else None
    for step in range(steps):
        metrics, arrays, advantage_A = grpo.update(learner, reference, told, sampler(config), step)
    passes = learner.collect()[0] | (reference.collect()[0] if reference else {})
    return {"metrics": metrics | passes, "advantage": advantage_A, "gradient": learner.gradient(),
            "parameters": learner.gathered("parameter"), "arrays": arrays}  # fmt: skip


def do_ppo(config: PPOConfig, world: World, told=None, steps: int = 1, dtype=torch.float64) -> dict[str, Any]:
    """One rollout's updates of policy and critic."""
    told = experience() if told is None else told
    loss = PPO(temperature=config.temperature, kl=config.kl_kind, denominator=config.denominator)
    learner = Learner(seeded(dtype), loss, config.learner, world)
    layout = config.critic_learner or config.learner
    critic = Learner(seeded(dtype, True), ValueLoss(config.value_clip), layout, world, component="critic")
    reference = Forward(seeded(dtype, seed=2), config.learner, world) if config.kl else None
    for step in range(steps):
        metrics, arrays = ppo.update(learner, critic, reference, told, sampler(config), step)
    passes = learner.collect()[0] | critic.collect()[0] | (reference.collect()[0] if reference else {})
    both = lambda what: {f"{name}.{n}": x for name, one in (("policy", learner), ("critic", critic))
                         for n, x in getattr(one, what[0])(*what[1:]).items()}  # fmt: skip
    return {"metrics": metrics | passes, "gradient": both(("gradient",)), "parameters": both(("gathered", "parameter")),
            "arrays": arrays}  # fmt: skip


def do_by_answer(config: GRPOConfig, world: World) -> dict[str, Any]:
    """Values that name answer and token, put in rows, taken out by `by_answer`, for shared and for separate prompts."""
    told, layout = experience(), Forward(seeded(), config.learner, world)
    fields = [{"value": 100.0 * a + torch.arange(len(x.ids))} for a, x in enumerate(told.answers)]
    found = {}
    for share in (True, False):
        batches = rl.microbatches(told.samples(fields), replace(config, share_prompt=share), layout)
        scores = [b.flat.at_labels("value") if b.rows else torch.zeros(0) for b in batches]
        found[share] = rl.by_answer(batches, scores, layout, len(told.answers))
    return found


@dataclass(frozen=True)
class Case:
    """One kind of update on a layout of `world` ranks."""

    world: int
    kind: str
    layout: dict[str, Any] = field(default_factory=dict)
    critic: dict[str, Any] | None = None  # layout of its own
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> "Case":
        """The same on one process, and in one microbatch."""
        return Case(1, self.kind, config=self.config | {"microbatch_tokens": 4800})

    def run(self, world: World) -> dict[str, Any]:
        """Every rank of the world calls it."""
        torch.set_num_threads(1)
        cls, do = {"grpo": (GRPOConfig, do_grpo), "ppo": (PPOConfig, do_ppo), "by_answer": (GRPOConfig, do_by_answer)}[
            self.kind
        ]
        how = {"max_prompt": 8, "max_new_tokens": 9, "length": 24, "microbatch_tokens": 48, "prompts": len(GROUPS)}
        if self.critic is not None:
            how["critic_learner"] = replace(LEARNER, **self.critic)
        return do(cls("", "", learner=replace(LEARNER, **self.layout), **(how | self.config)), world)


SHM = {"ep": 2, "dispatch": "rowwise", "transport": "shared_memory", "capacity": 0.7}
MANY = {"epochs": 2, "minibatches": 3, "kl": 0.1, "importance_cap": 1.1, "mask_truncated": True}
SEQUENCE = {"kl": 0.1, "kl_in": "reward", "kl_kind": "k1", "replay": True, "ratio": "sequence",
            "denominator": "sequence_mean", "share_prompt": False, "temperature": 0.7}  # fmt: skip
EQUAL = {
    "drop_equal_groups": True,
    "denominator": "constant",
    "constant_length": 9,
    "advantage": "none",
    "replay": True,
}
PPOS = {"epochs": 2, "minibatches": 2, "importance_cap": 1.1, "replay": True}
CASES = {
    "1, grpo": Case(1, "grpo"),
    "1, grpo, many": Case(1, "grpo", config=MANY),
    "1, ppo": Case(1, "ppo"),
    "2, dp2, grpo": Case(2, "grpo"),
    "2, dp2, grpo, sequence": Case(2, "grpo", config=SEQUENCE),
    "2, ep2, grpo, many": Case(2, "grpo", SHM, config=MANY),
    "2, ep2, grpo, sequence": Case(2, "grpo", {"ep": 2, "recompute": "moe"}, config=SEQUENCE),
    "2, pp2, grpo, many": Case(2, "grpo", {"pp": 2}, config=MANY),
    "2, pp2, grpo, equal": Case(2, "grpo", {"pp": 2, "pipeline": "zbv", "stages_per_rank": 2}, config=EQUAL),
    "2, dp2, ppo, loss": Case(2, "ppo", config={"kl_in": "loss", "whiten": False, "mask_truncated": True}),
    "2, ep2, ppo, many": Case(2, "ppo", {"ep": 2}, config=PPOS),
    "2, pp2 and ep2, ppo": Case(2, "ppo", {"pp": 2}, {"ep": 2, **SHM}, config=PPOS),
    "2, dp2, by answer": Case(2, "by_answer"),
    "2, pp2, by answer": Case(2, "by_answer", {"pp": 2}),
    "4, pp2 ep2, grpo, many": Case(4, "grpo", {"pp": 2, "ep": 2, "recompute": "block"}, config=MANY),
    "4, ep2, grpo, equal": Case(4, "grpo", SHM, config=EQUAL),
    "4, dp4, grpo, sequence": Case(4, "grpo", {"zero": 1}, config=SEQUENCE),
    "4, pp2 ep2 and ep4, ppo": Case(4, "ppo", {"pp": 2, "ep": 2}, {"ep": 4}, config=PPOS),
    "4, ep2, by answer": Case(4, "by_answer", {"ep": 2}),
}


def main(rank: int, size: int, folder: str) -> None:
    """One rank of a gloo world: run all cases of its size, leave the results in a file."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {name: case.run(World.current()) for name, case in CASES.items() if case.world == size}
    Path(folder, f"rank_{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
