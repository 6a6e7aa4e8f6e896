"""Runs whose answers a vLLM server samples: which weights it has, on how many ranks, and when it dies.

The server is `tests/rollout/vllm_fake.py`; the same with vLLM itself is in tests/vllm."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

import moekit
from moekit.errors import CapabilityError, ConfigError, EngineError
from moekit.learner.weights import export
from moekit.model.transformer import Transformer
from moekit.recipes import grpo, placement, ppo
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.workloads import GRPOConfig, PPOConfig

from .test_placement import config, records, same_run, samples, verifier  # noqa: F401 (a fixture)

sys.path.append(str(Path(__file__).parent.parent / "rollout"))
from vllm_fake import Fake  # pyright: ignore[reportMissingImports]

OWN = (
    "probe/",
    "engine/",
    "transfer/",
    "rows/engine",
    "positions/engine",
    "memory/",
    "wire/transfer",
    "time/",
    "rate/",
)
OWN += ("flops/mfu", "reward/letters_s")


@pytest.fixture
def served(kit, tmp_path):
    """Servers on other weights than the learner's: what they were started with is never right."""
    export(Transformer(kit.shape, seed=9), tmp_path / "other", kit.tokenizer)
    made: list[Fake] = []

    def start(**how) -> Fake:
        made.append(Fake(kit.shape, tmp_path / "other", **how))
        return made[-1]

    start.made = made  # pyright: ignore[reportFunctionMemberAccess]
    yield start
    made[-1].kill()


def run(kit, url: str, out: Path | None = None, **changes) -> GRPOConfig:
    how = {"dtype": "float32", "engine": "vllm", "engine_url": url, "update_mode": "in_place", "steps": 3, "slots": 2,
           "importance_cap": 2.0, "eval_items": 1}  # fmt: skip
    return config(kit, out, **how | changes)


def close(folder: Path, behind: int = 0) -> None:
    """Engine and learner agree on each token; answers are of the weights of the step before, or of this one."""
    for step, r in enumerate(records(folder)):
        assert r["rollout/version"] == max(0, step - behind)
        assert 0 < r["rollout/logprob_gap"] and (r["rollout/logprob_gap"] < 1e-4 or behind and step)
        assert r["probe/gap"] < r["probe/limit"] == 1e-4


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"ep": 2}, {"pp": 2}], ids=str)
def test_one_server_for_two_ranks_that_hold_parts(kit, served, tmp_path, layout):
    """Rank 0 brings all weights, once; both ranks sample from them, and the answers are those of one process."""
    grpo.train(run(kit, served().url, tmp_path / "whole"))
    one = run(kit, served().url, learner=replace(kit.config(None).learner, **layout))
    job = moekit.submit(grpo.train, one, nproc=2, name="run", runs=tmp_path, threads=1)
    job.result(timeout=120)
    close(tmp_path / "run")
    found = records(tmp_path / "run")
    size = sum(p.numel() * 4 for p in Transformer(kit.shape, seed=None).parameters())
    assert {r["transfer/bytes"] for r in found} == {size}
    assert {r["memory/engine_parameters_bytes"] for r in found} == {size}  # no copy on rank 1
    assert [s["answer"] for s in samples(tmp_path / "run")] == [s["answer"] for s in samples(tmp_path / "whole")]


def test_an_answer_may_take_as_long_as_the_config_says(kit, tmp_path, monkeypatch):
    """A long one is no sign of a server that is gone."""
    made = []

    def link(url, **how):
        made.append(how)
        raise EngineError("enough")

    monkeypatch.setattr(placement, "HTTPLink", link)
    with pytest.raises(EngineError, match="enough"):
        grpo.train(run(kit, "http://127.0.0.1:9", tmp_path / "run", engine_seconds=3600.0))
    assert made == [{"timeout": 3600.0, "connections": 2}]


@pytest.mark.long
def test_ppo_says_the_gap(kit, served, tmp_path):
    own = run(kit, served().url, tmp_path / "run")
    settings = {f.name: getattr(own, f.name) for f in fields(PPOConfig) if hasattr(own, f.name)}
    ppo.train(PPOConfig(**settings | {"kl": 0.0, "kl_in": "loss", "kl_kind": "k3"}))
    close(tmp_path / "run")


def comes_back(first: Fake, served) -> threading.Thread:
    """A new server at its address, soon after it is gone."""

    def again() -> None:
        while first.server.socket.fileno() >= 0:
            time.sleep(0.01)
        time.sleep(0.3)
        served(port=first.port)

    thread = threading.Thread(target=again)
    thread.start()
    return thread


@pytest.mark.long
def test_ranks_that_have_their_answers_do_not_ask_again(kit, served, tmp_path):
    """The server ends before the last of twelve answers of two ranks: that one is asked for, and what was under way."""
    whole = served()
    grpo.train(run(kit, whole.url, tmp_path / "whole"))
    first, probe, held_out = served(stop_after=4 + 1 + 11), 4, 1
    thread = comes_back(first, served)
    one = run(kit, first.url, learner=replace(kit.config(None).learner, ep=2), engine_seconds=60.0)
    moekit.submit(grpo.train, one, nproc=2, name="run", runs=tmp_path, threads=1).result(timeout=200)
    thread.join()
    close(tmp_path / "run")
    assert records(tmp_path / "run")[-1]["engine/restarts"] == 1
    assert first.answered == probe + held_out + 11
    second = served.made[-1].answered
    assert 0 <= first.answered + second - (whole.answered + probe) <= 2
    assert [s["answer"] for s in samples(tmp_path / "run")] == [s["answer"] for s in samples(tmp_path / "whole")]


@pytest.mark.parametrize(("staleness", "lingers"), [pytest.param(0, 0.0, marks=pytest.mark.long), (1, 0.0), (0, 0.5)])
def test_a_server_that_dies_and_comes_back(kit, served, tmp_path, monkeypatch, staleness, lingers):
    """It has other weights then, under no number: it is waited for, gets those of the version that it had, and is asked
    for what is missing. The run is as without; also where its engine ends before it does, and it says 500 until then.
    """
    grpo.train(run(kit, served().url, tmp_path / "whole", staleness=staleness))
    asked = []
    ask = VLLMEngine._read
    monkeypatch.setattr(VLLMEngine, "_read", lambda *a: asked.append(1) or ask(*a))
    first = served(stop_after=22, lingers=lingers)  # between the answers of a step
    thread = comes_back(first, served)
    grpo.train(run(kit, first.url, tmp_path / "broken", staleness=staleness, engine_seconds=20.0))
    thread.join()
    found = records(tmp_path / "broken")
    assert found[-1]["engine/restarts"] == 1
    close(tmp_path / "broken", staleness)
    same_run(tmp_path / "whole", tmp_path / "broken", (*OWN, "rollout/logprob_gap"))
    every = sum(r["rollout/answers"] + r.get("eval/items", 0) for r in found)
    assert len(asked) == every  # each answer was read once


@pytest.mark.long
def test_a_server_that_stays_away(kit, served, tmp_path):
    """One error with its address, how long it was waited for and what to do; and that is done."""
    whole = run(kit, served().url, tmp_path / "whole", save_every=1, steps=3)
    grpo.train(whole)
    gone = served(stop_after=33)
    broken = replace(whole, engine_url=gone.url, out=str(tmp_path / "broken"), engine_seconds=0.4)
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"{gone.url} did not come back within 0.4 s.*resume=True.*checkpoint"):
        grpo.train(broken)
    assert time.monotonic() - began < 10
    done = len(records(tmp_path / "broken"))
    assert 0 < done < 3
    grpo.train(replace(broken, engine_url=served().url, resume=True))
    same_run(tmp_path / "whole", tmp_path / "broken", (*OWN, "rollout/logprob_gap"))


@pytest.mark.long
def test_a_server_that_was_left_half_updated(kit, served, tmp_path):
    """It is brought to a clean state by a whole update, and nothing is sampled from it before."""
    left = served()
    left.torn = left.paused = True
    grpo.train(run(kit, left.url, tmp_path / "run"))
    close(tmp_path / "run")
    assert records(tmp_path / "run")[-1]["probe/unproved"] >= 1


def test_routes_are_asked_for_before_the_first_step(kit, served, tmp_path):
    with pytest.raises(CapabilityError, match="routes=True.*replies have none.*--enable-return-routed-experts"):
        grpo.train(run(kit, served().url, tmp_path / "run", replay=True))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_experts_served_at_another_degree_than_trained(kit, tmp_path):
    """Two ranks that train with whole models, or with parts, and serve with parts, or whole: one run."""
    for name, serves in (("whole", None), ("parts", 2)):
        one = config(kit, steps=2, serve_ep=serves, eval_items=1)
        moekit.submit(grpo.train, one, nproc=2, name=name, runs=tmp_path, threads=1).result(timeout=120)
    size = sum(p.numel() * 8 for p in Transformer(kit.shape, seed=None).parameters())
    experts = 2 * 4 * 3 * 12 * 16 * 8  # layers, experts, matrices of [12, 16], bytes
    held = {n: {r["memory/engine_parameters_bytes"] for r in records(tmp_path / n)} for n in ("whole", "parts")}
    assert held == {"whole": {0}, "parts": {2 * size - experts}}  # the one stands on the learner's own
    assert {r["wire/transfer_bytes"] for r in records(tmp_path / "parts")} == {0}  # all that a rank serves is there
    same_run(tmp_path / "whole", tmp_path / "parts", (*OWN, "wire/", "rows/", "positions/"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"serve_ep": 3}, "serve_ep=3: 4 experts cannot be split over ep=3"), ({"serve_ep": 2}, "serve_ep=2: 1 ranks"),
     ({"serve_ep": 0}, "at least 1"), ({"serve_ep": 1, "engine": "process"}, "engine='process' has all"),
     ({"engine_seconds": -1.0}, "at least 0")],
)  # fmt: skip
def test_settings_are_checked_before_any_work(kit, tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        grpo.train(config(kit, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
