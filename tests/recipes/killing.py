"""Runs of recipes that are killed with SIGKILL at one point of the loop, and resumed; beside one that was not.

    python killing.py FOLDER KIND        FOLDER/config.json: {kind: [config, points]}

A script of its own, because it forks and the test process has threads. Prints how each process ended, as JSON.
"""

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from moekit.data.chat import load_tokenizer
from moekit.learner.learner import Learner
from moekit.recipes import dpo, grpo, ppo, reference_cache, reward_model, runs, setup
from moekit.recipes.sampler import Sampler
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.rewards import RewardPool
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig, RewardConfig


def kill() -> None:
    """Kill this process, when its first checkpoint is there: it is written behind the steps, and some take no time."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(Path(os.environ["MOEKIT_KILLED"], setup.CHECKPOINTS).glob("step_*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def at(kind: type, name: str, call: int, after: bool = False) -> None:
    """Kill this process in the `call`-th call (from 0) of a method, before or after its work."""
    real, calls = getattr(kind, name), []

    def watched(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == call + 1 and not after:
            kill()
        told = real(self, *args, **kwargs)
        if len(calls) == call + 1:
            kill()
        return told

    setattr(kind, name, watched)


def kill_policy_save(call: int, after: bool) -> None:
    """Of the `call`-th save of a policy; the critic's of the same step is done."""
    real, calls = Learner.save, []

    def watched(self, folder, *args, **kwargs):
        mine = Path(folder).parent.name == setup.CHECKPOINTS
        calls.extend([1] * mine)
        if mine and len(calls) == call + 1 and not after:
            kill()
        told = real(self, folder, *args, **kwargs)
        if mine and len(calls) == call + 1:
            kill()
        return told

    Learner.save = watched


KINDS = {
    "grpo": (GRPOConfig, grpo.train), "process": (GRPOConfig, grpo.train),
    "ppo": (PPOConfig, ppo.train), "dpo": (DPOConfig, dpo.train),
    "resident": (DPOConfig, dpo.train), "reward": (RewardConfig, reward_model.train),
}  # fmt: skip


def kill_shard(call: int) -> None:
    """In the `call`-th write of a reference's scores."""
    real, calls = reference_cache.store.write_shard, []

    def watched(*args):
        calls.append(1)
        if len(calls) == call + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)

    reference_cache.store.write_shard = watched


# held-out prompts are answered before step 0 and after steps 1, 3 and 5; checkpoints are made after the same steps
POINTS = {
    "rollout": lambda: at(EmbeddedEngine, "generate", 7),  # in step 4
    "reward": lambda: at(RewardPool, "score", 7),
    "train": lambda: at(Learner, "step", 9),  # in one of the updates of step 2 (PPO: of 4 each) or 4 (of 2)
    "logged": lambda: at(Sampler, "log", 5, after=True),  # answers of step 5 are there, its metrics not
    "recorded": lambda: at(runs.RunWriter, "write", 4, after=True),  # metrics of step 4, no checkpoint of it
    "before the policy's save": lambda: kill_policy_save(1, False),  # PPO: the critic's step 4 is there
    "in the policy's save": lambda: kill_policy_save(1, True),  # it is written behind the next step
    "pairs": lambda: at(Learner, "step", 3),  # of DPO and reward model, in step 3
    "building": lambda: kill_shard(1),  # of the held-out pairs; those to train on are there
    "cleaning": lambda: at_retain(3),  # the critic's, in the second save
}


def at_retain(call: int) -> None:
    real, calls = setup.retain, []

    def watched(folder, keep):
        calls.append(1)
        if len(calls) == call + 1:
            kill()
        real(folder, keep)

    setup.retain = watched


def forked(config, train, how) -> int:
    """The exit code of a child that trains; -9 = it was killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(f"{config.out}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644), 1)
            os.environ["MOEKIT_KILLED"] = config.out
            if how is not None:
                how()
            train(config)
            code = 0
        except BaseException:  # noqa: BLE001
            with suppress(Exception):
                Path(f"{config.out}.error").write_text(traceback.format_exc())
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    (cls, train), (settings, points) = KINDS[kind], json.loads((folder / "config.json").read_text())[kind]
    config = cls.from_dict(settings)
    load_tokenizer(config.model)  # what takes a child seconds is done here
    told: dict = {f"{kind} unbroken": forked(replace(config, out=str(folder / f"{kind} unbroken")), train, None)}
    for point in points:
        mine = replace(config, out=str(folder / f"{kind} {point}"))
        killed = forked(mine, train, POINTS[point])
        there = sorted(p.name for p in Path(mine.out, "checkpoints").glob("step_*"))
        told[f"{kind} {point}"] = [killed, there, forked(replace(mine, resume=True), train, None)]
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
