"""Runs of RL, DPO and reward models that are killed at any point go on as if nothing had happened."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moekit.errors import CheckpointError, ConfigError
from moekit.measure.record import open_run
from moekit.recipes import ppo
from moekit.workloads import DPOConfig, GRPOConfig, PPOConfig, RewardConfig

HERE = Path(__file__).parent / "killing.py"
REFERENCE = ("rows/reference", "positions/reference", "wire/reference")  # of a cache: spots, too
TIMES = (
    "time/",
    "rate/",
    "flops/mfu",
    "critic_time/",
    "critic_rate/",
    "critic_flops/mfu",
    "reward/letters_s",
    "memory/",
    "transfer/",
)
KILLED = {
    "quick": {"grpo": ["train"], "ppo": ["before the policy's save"]},
    "rl": {"grpo": ["rollout", "reward", "logged", "recorded", "before the policy's save", "in the policy's save"],
           "ppo": ["rollout", "reward", "train", "logged", "recorded", "in the policy's save", "cleaning"]},
    "pairs": {"dpo": ["building", "pairs", "recorded"], "resident": ["pairs", "in the policy's save"],
              "reward": ["pairs"]},
    "process": {"process": ["train", "recorded"]},  # the engine's process dies with its learner
}  # fmt: skip
POINTS = [pytest.param(group, kind, point, marks=pytest.mark.long if group != "quick" else ())
          for group, kinds in KILLED.items() for kind, points in kinds.items() for point in points]  # fmt: skip
LETTERS = '''
def letters(item, answer):
    """Something that a random model's answers differ in."""
    return len(answer) % 4 / 4
'''


def configs(kit, pairs: Path | str = "", module: str = "letters:letters"):
    base = kit.config(None)
    how = {"model": str(kit.model), "data": str(kit.data), "steps": 6, "learner": base.learner, "prompts": 4,
           "group": 3, "max_prompt": 32, "max_new_tokens": 8, "length": 48, "microbatch_tokens": 96, "save_every": 2,
           "keep_checkpoints": 1, "verifier": module, "eval_data": str(kit.data), "eval_every": 2,
           "eval_items": 3}  # fmt: skip
    preferred = {k: v for k, v in how.items() if k in ("model", "data", "steps", "learner", "length", "save_every")}
    preferred |= {"data": str(pairs), "eval_data": str(pairs).replace("pairs", "held"), "eval_every": 3,
                  "batch_pairs": 5, "microbatch_tokens": 96, "keep_checkpoints": 1}  # fmt: skip
    return {
        "dpo": DPOConfig(**preferred),
        "resident": DPOConfig(**preferred, reference="resident", update_every=2),
        "reward": RewardConfig(**preferred),
        "grpo": GRPOConfig(**how, minibatches=2, kl=0.05, importance_cap=2.0, replay=True),
        "process": GRPOConfig(**how, minibatches=2, importance_cap=2.0, engine="process"),
        "ppo": PPOConfig(**how, minibatches=2),
    }


def records(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in found]


def same_run(a: Path, b: Path) -> None:
    """Metrics, arrays, answers, checkpoints and export of two runs are bitwise equal."""
    one, two = records(a), records(b)
    cached = "loss/dpo" in one[0] and "rows/reference_score" not in one[1]
    if cached:
        one, two = ([{k: v for k, v in r.items() if not k.startswith(REFERENCE)} for r in run] for run in (one, two))
    assert [r["step"] for r in one] == [r["step"] for r in two] == list(range(6))
    for x, y in zip(one, two):
        assert x == y, {k: (x.get(k), y.get(k)) for k in x.keys() | y.keys() if x.get(k) != y.get(k)}
    for name in open_run(a).array_names:
        if cached and name.startswith("reference/"):
            continue
        x, y = open_run(a).arrays(name), open_run(b).arrays(name)
        assert (x.steps == y.steps).all() and (x.values == y.values).all(), name
    if (a / "samples.jsonl").exists():
        assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    for part in ("checkpoints", "critic"):
        assert (a / part).exists() == (b / part).exists()
        if (a / part).exists():
            state = [load_file(f / part / "step_6" / "rank_00000.safetensors") for f in (a, b)]
            assert state[0].keys() == state[1].keys()
            assert all(torch.equal(state[0][k], state[1][k]) for k in state[0]), part
    if (a / "export").exists():
        assert (a / "export" / "model.safetensors").read_bytes() == (b / "export" / "model.safetensors").read_bytes()
    results = [open_run(f).card.results for f in (a, b)]
    assert results[0]["before"] == results[1]["before"] and results[0]["after"] == results[1]["after"]


@pytest.fixture(scope="module")
def killed(kit, tmp_path_factory):
    """`killed(group)`: the folder, and how the runs of some points ended. A process for each kind forks them, one after
    the other; kinds run side by side."""

    @functools.cache
    def run(group: str):
        folder = tmp_path_factory.mktemp("killed")
        (folder / "letters.py").write_text(LETTERS)
        pairs = folder / "pairs.jsonl"
        words = ["red", "blue", "green", "seven", "cat", "dog", "sun"]
        made = [{"prompt": f"say {a}", "chosen": a, "rejected": f"{b} {a}"} for a in words for b in words[:2] if a != b]
        pairs.write_text("".join(json.dumps(pair) + "\n" for pair in made))
        (folder / "held.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in made[3:8]))
        both = {
            kind: [c.to_dict(), KILLED[group][kind]] for kind, c in configs(kit, pairs).items() if kind in KILLED[group]
        }
        (folder / "config.json").write_text(json.dumps(both))
        env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
        how: dict = {"env": env, "stdout": subprocess.PIPE, "text": True}
        started = [subprocess.Popen([sys.executable, HERE, folder, kind], **how) for kind in both]
        try:
            said = [process.communicate(timeout=280)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0] * len(both), said
        return folder, {name: end for text in said for name, end in json.loads(text.splitlines()[-1]).items()}

    return run


@pytest.mark.parametrize("group,kind,point", POINTS)
def test_a_killed_run_goes_on_as_the_unbroken_one(killed, group, kind, point):
    folder, told = killed(group)
    name = f"{kind} {point}"
    error = folder / f"{name}.error"
    assert told[f"{kind} unbroken"] == 0
    assert told[name][0] == -9 and told[name][2] == 0, (told[name], error.read_text() if error.exists() else "")
    assert (told[name][1] == []) == (point == "building"), told[name]
    same_run(folder / f"{kind} unbroken", folder / name)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_an_unbroken_run_leaves_what_it_says(killed, kind):
    folder = killed("quick")[0] / f"{kind} unbroken"
    found = records(folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    logged = [i for i, r in enumerate(found) for _ in range(min(8, int(r["rollout/answers"])))]
    assert [s["step"] for s in samples] == logged  # 8 answers of each step; an epoch's last one is short
    assert {len({s["reward"] for s in samples}) > 1, *(s["tokens"] <= 8 for s in samples)} == {True}
    assert all("eval/score" in found[i] for i in (0, 1, 3, 5)) and "eval/score" not in found[2]
    assert max(p.name for p in (folder / "checkpoints").glob("step_*")) == "step_6"
    assert (folder / "critic").exists() == (kind == "ppo")
    assert found[-1]["step/index"] == 12 and found[-1]["rollout/version"] == 10


def test_another_setting_does_not_resume(killed, kit, monkeypatch):
    monkeypatch.syspath_prepend(str(killed("quick")[0]))
    config = replace(configs(kit)["ppo"], out=str(killed("quick")[0] / "ppo unbroken"), resume=True, steps=7)
    for name, value in (("group", 4), ("lam", 0.9), ("temperature", 0.9), ("verifier", "task")):
        with pytest.raises(ConfigError, match=f"{name} was"):
            ppo.train(replace(config, **{name: value}))


def test_a_critic_that_is_missing_is_named_and_nothing_is_touched(killed, kit, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(killed("quick")[0]))
    shutil.copytree(killed("quick")[0] / "ppo unbroken", tmp_path / "run")
    config = replace(configs(kit)["ppo"], out=str(tmp_path / "run"), resume=True, steps=8)
    shutil.rmtree(tmp_path / "run" / "critic" / "step_6")
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(CheckpointError, match=r"critic.*step_6"):
        ppo.train(config)
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*")) == before
