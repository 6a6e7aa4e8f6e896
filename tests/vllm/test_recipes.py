"""GRPO and PPO whose answers a vLLM server samples: several ranks, one step behind, and a server that is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

import moekit
from moekit.config import LearnerConfig, ModelConfig, RouterLossConfig
from moekit.data.tokenizer import train_tokenizer
from moekit.learner.weights import export
from moekit.model.transformer import Transformer
from moekit.recipes import grpo, ppo
from moekit.rollout.vllm_http import HTTPLink, start_server
from moekit.workloads import GRPOConfig, PPOConfig

from ..recipes.conftest import chats, write_lines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LETTERS = '''
def letters(item, answer):
    """Something that a random model's answers differ in."""
    return len(answer) % 4 / 4
'''


@pytest.fixture(scope="module", autouse=True)
def base(interpreter, tmp_path_factory):
    """A server that was started on other weights than the runs', their settings, and how many parameters there are."""
    folder = tmp_path_factory.mktemp("recipes")
    data = write_lines(folder / "chats.jsonl", [c | {"messages": c["messages"][:2]} for c in chats(20)])
    tokenizer = train_tokenizer([data.read_text()], 300, folder / "tokenizer")
    shape = ModelConfig(
        vocab=len(tokenizer), width=32, layers=2, heads=2, head_dim=32, experts=4, top_k=2, expert_width=32,
        max_positions=512, qk_norm="head", normalize_gates=True, family="qwen3_moe", init_std=0.15,
        eos_id=tokenizer.eos_token_id, bos_id=tokenizer.bos_token_id, pad_id=tokenizer.pad_token_id,
    )  # fmt: skip
    export(Transformer(shape, seed=3), folder / "model", folder / "tokenizer")
    export(Transformer(shape, seed=4), folder / "other", folder / "tokenizer")
    (folder / "letters.py").write_text(LETTERS)
    learner = LearnerConfig(lr=1e-2, warmup_steps=2, router=RouterLossConfig(balance=0.02))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        with start_server(folder / "other", python=interpreter, log=folder / "server.log") as server:
            size = sum(p.numel() for p in Transformer(shape, device="meta", seed=None).parameters())
            config = GRPOConfig(
                model=str(folder / "model"), data=str(data), steps=3, learner=learner, prompts=4, group=3,
                max_prompt=64, max_new_tokens=8, length=80, microbatch_tokens=160, verifier="letters:letters",
                eval_data=str(data), eval_items=1, export=False, importance_cap=2.0, engine="vllm",
                engine_url=server.url, update_mode="in_place", slots=2,
            )  # fmt: skip
            yield server, config, size


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def close(folder: Path, behind: int = 0) -> list[dict]:
    """Engine and learner agree on each token of the weights that the step trains; versions are those of the steps."""
    found = records(folder)
    assert len(found) == 3
    for step, r in enumerate(found):
        assert r["rollout/version"] == max(0, step - behind) and r["rollout/behind"] == min(step, behind)
        assert r["probe/gap"] <= 1e-4 and r["probe/unproved"] == 0
        assert 0 < r["rollout/logprob_gap"] <= 1e-4 or (behind and step)
    print("gaps", [f"{r['rollout/logprob_gap']:.2g}" for r in found])
    return found


def answers(folder: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", [{"ep": 2}, {"pp": 2}], ids=str)
def test_two_ranks_that_hold_parts(base, tmp_path, layout):
    """Rank 0 brings what both hold to the server, and both sample from it."""
    _, one, _ = base
    one = replace(one, learner=replace(one.learner, **layout))
    moekit.submit(grpo.train, one, nproc=2, name="run", runs=tmp_path, threads=1).result(timeout=240)
    found = close(tmp_path / "run")
    assert all(r["transfer/bytes"] == 4 * base[2] and r["wire/transfer_bytes"] > 0 for r in found)


def test_ppo(base, tmp_path):
    _, one, _ = base
    settings = {f.name: getattr(one, f.name) for f in fields(PPOConfig) if hasattr(one, f.name)}
    ppo.train(PPOConfig(**settings | {"out": str(tmp_path / "run"), "kl": 0.0, "kl_in": "loss", "kl_kind": "k3"}))
    close(tmp_path / "run")


def test_one_step_behind(base, tmp_path):
    """Answers of step 1 are of version 0, and their ratio is to what sampled them: it differs from 1 by a step."""
    _, one, _ = base
    grpo.train(replace(one, staleness=1, out=str(tmp_path / "run")))
    found = close(tmp_path / "run", behind=1)
    assert min(r["rollout/logprob_gap"] for r in found[1:]) > 1e-3  # which a correction is for
    assert abs(found[0]["grpo/ratio"] - 1) < 1e-4 < min(abs(r["grpo/ratio"] - 1) for r in found[1:])


def test_a_server_that_is_killed_while_it_samples(base, tmp_path, monkeypatch):
    """SIGKILL between the answers of a step, and a new server at its address: the run is as without.

    The new one has the weights that it was started on and no number; it gets those of the version that the old one had.
    """
    server, one, _ = base
    grpo.train(replace(one, out=str(tmp_path / "whole")))
    ask, at, ready = HTTPLink.ask, {"answers": 0, "killed": 0.0, "ready": 0.0, "again": 0.0}, threading.Event()

    def restart():
        server.restart()
        at["ready"] = time.monotonic()
        ready.set()

    def dies(self, requests, done):
        def counted(i, reply):
            done(i, reply)
            at["answers"] += requests[i][1]["max_tokens"] == 8 and len(requests) > 1
            if at["answers"] == 15 and not at["killed"]:  # the third of 12 in the second step
                at["killed"] = time.monotonic()
                os.killpg(server.process.pid, signal.SIGKILL)
                threading.Thread(target=restart).start()
            elif ready.is_set() and len(requests) > 1 and not at["again"]:
                at["again"] = time.monotonic()

        ask(self, requests, counted)

    monkeypatch.setattr(HTTPLink, "ask", dies)
    grpo.train(replace(one, out=str(tmp_path / "broken"), engine_seconds=240.0))
    found = close(tmp_path / "broken")
    assert found[-1]["engine/restarts"] == 1 and at["again"] > at["ready"] > at["killed"] > 0
    assert answers(tmp_path / "broken") == answers(tmp_path / "whole")
    for a, b in zip(found, records(tmp_path / "whole")):
        assert a["reward/mean"] == b["reward/mean"] and a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-3)
    start, more = at["ready"] - at["killed"], at["again"] - at["ready"]
    print(f"from SIGKILL until the new server is healthy {start:.1f} s, from there to its first answer {more:.2f} s")
