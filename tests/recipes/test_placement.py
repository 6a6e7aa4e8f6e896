"""GRPO and PPO with engines in the learner's process and beside it: the same run, or one step behind."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import moekit
from moekit.checkpoint.huggingface import load_into
from moekit.config import LearnerConfig, ModelConfig
from moekit.data.batch import Batch
from moekit.errors import ConfigError, TransferError
from moekit.learner.learner import Learner
from moekit.learner.weights import export
from moekit.model.transformer import Transformer
from moekit.objectives.grpo import GRPO
from moekit.objectives.sft import SFT
from moekit.recipes import grpo, ppo, rl, sampler
from moekit.recipes.placement import Weights
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine_process import EngineProcess
from moekit.rollout.weight_transfer import load
from moekit.workloads import GRPOConfig, PPOConfig, RLConfig

LETTERS = '''
def letters(item, answer):
    """Something that a random model's answers differ in."""
    return len(answer) % 4 / 4
'''
OTHER = ("time/", "rate/", "transfer/", "engine/", "memory/", "wire/transfer", "flops/mfu", "reward/letters_s")


@pytest.fixture(scope="module", autouse=True)
def verifier(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("verifier")
    (folder / "letters.py").write_text(LETTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        yield


def config(kit, out: Path | None = None, **changes) -> GRPOConfig:
    how = {"model": str(kit.model), "data": str(kit.data), "steps": 4, "learner": kit.config(None).learner,
           "prompts": 4, "group": 3, "max_prompt": 32, "max_new_tokens": 8, "length": 48, "microbatch_tokens": 96,
           "verifier": "letters:letters", "eval_data": str(kit.data), "eval_items": 2, "dtype": "float64",
           "export": False, "out": str(out) if out else None}  # fmt: skip
    return GRPOConfig(**how | changes)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def end(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(max((folder / "checkpoints").glob("step_*")).glob("*.safetensors"))
    return {f"{f.name} {n}": t for f in files for n, t in load_file(f).items()}


def same_run(a: Path, b: Path, skip: tuple[str, ...] = OTHER) -> None:
    """Rewards, answers, gradient norms and all else that a step is; and the state at the end."""
    one, two = ([{k: v for k, v in r.items() if not k.startswith(skip)} for r in records(f)] for f in (a, b))
    assert len(one) == len(two) > 0
    for x, y in zip(one, two):
        assert x.keys() == y.keys()
        for name in x:
            assert x[name] == pytest.approx(y[name], rel=1e-9, abs=1e-12), name
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    state, other = end(a), end(b)
    assert state.keys() == other.keys()
    for name, t in state.items():
        torch.testing.assert_close(t, other[name], rtol=1e-9, atol=1e-12)


def left_over() -> list[str]:
    """Engine processes of this process that live."""
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            command = (p / "cmdline").read_text()
            if "engine_server" in command and f"\0{os.getpid()}\0" in command and "Z" not in (p / "stat").read_text():
                found.append(p.name)
        except OSError:
            continue
    return found


@pytest.mark.long
def test_ppo_too(kit, tmp_path):
    settings = {f.name: getattr(config(kit), f.name) for f in fields(PPOConfig) if hasattr(config(kit), f.name)}
    base = PPOConfig(**settings | {"importance_cap": 2.0, "steps": 3, "kl": 0.0, "kl_in": "loss", "kl_kind": "k3"})
    for name, how in (
        ("embedded", {}),
        ("process", {"engine": "process"}),
        ("behind", {"engine": "process", "staleness": 1}),
    ):
        ppo.train(replace(base, out=str(tmp_path / name), **how))
    same_run(tmp_path / "embedded", tmp_path / "process", (*OTHER, "critic_time", "critic_rate", "critic_flops/mfu"))
    assert [r["rollout/behind"] for r in records(tmp_path / "behind")] == [0, 1, 1]
    assert [r["ppo/weight"] for r in records(tmp_path / "behind")] == [1, 1, 1]  # it is in the ratio


@pytest.mark.long
def test_an_engine_that_dies_while_the_learner_trains(kit, tmp_path):
    """It is given the weights that it had, not those that the learner has by now: the run is as without a crash."""
    behind = config(kit, tmp_path / "whole", engine="process", staleness=1, importance_cap=2.0)
    grpo.train(behind)
    ask, trained = EngineProcess.generate, Learner.step
    moved = threading.Event()

    def killed(self, prompts, sampling, **how):
        if sampling.seed % 1_000_003 == 2 and self.restarts == 0:
            os.kill(self.pid, signal.SIGKILL)
            assert moved.wait(30)
        return ask(self, prompts, sampling, **how)

    def step(self, *args, **how):
        found = trained(self, *args, **how)
        if self.updates == 2:
            moved.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineProcess, "generate", killed)
        patch.setattr(Learner, "step", step)
        grpo.train(replace(behind, out=str(tmp_path / "broken")))
    assert records(tmp_path / "broken")[-1]["engine/restarts"] == 1
    lost = ("rows/engine", "positions/engine")  # what a dead process did is not known
    same_run(tmp_path / "whole", tmp_path / "broken", OTHER + lost)


def grpo_loss(now_M: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of one token with the advantage 1."""
    at = {n: torch.stack((x[0], x[0] * 0))[None] for n, x in {**extra, "advantage": torch.ones(1)}.items()}
    batch = Batch.make(torch.tensor([[5, 6]]), labels=torch.tensor([[6, -100]]), extra=at)
    return GRPO()(batch.flat, SimpleNamespace(logprob_M=now_M)).loss_M.sum()


# ------------------------------------------------------------------ settings
def test_old_answers_need_a_correction():
    """BC-113: the run refuses to sample one step behind without one, and what it cannot place."""
    one = GRPOConfig("m", "d", engine="process", staleness=1, importance_cap=2.0)
    for changes, says in (
        ({"importance_cap": None}, "set importance_cap"),
        ({"staleness": 2}, "staleness=2 is not 0 or 1"),
        ({"engine": "embedded"}, "engine='embedded' cannot"),
        ({"engine_url": "http://localhost:8000"}, "set engine='vllm'"),
    ):
        with pytest.raises(ConfigError, match=says):
            replace(one, **changes)


def test_the_ratio_of_old_answers_is_to_what_sampled_them():
    """BC-113: sampled at ln .2, the learner has ln .3, A = 1, clip .2: ratio 1.5, loss -1.2, clipped, no gradient."""
    stale = GRPOConfig("m", "d", engine="process", staleness=1, importance_cap=2.0)
    for settings, ratio, want, slope in ((stale, 1.5, -1.2, 0.0), (replace(stale, staleness=0), 1.0, -1.5, -1.5)):
        now, sampled = torch.tensor([0.3], dtype=torch.float64).log().requires_grad_(), torch.tensor([0.2]).log()
        told, _ = rl.corrected(now.detach(), sampled, settings)
        assert (now.detach() - told["old_logprob"]).exp().item() == pytest.approx(ratio, rel=1e-6)
        loss = grpo_loss(now, told)
        assert loss.item() == pytest.approx(want, rel=1e-6)
        (found,) = torch.autograd.grad(loss, now)
        assert found.item() == pytest.approx(slope, rel=1e-6)
    capped, above = rl.corrected(torch.tensor([0.9]).log(), torch.tensor([0.2]).log(), stale)
    assert above == 1 and (math.log(0.9) - capped["old_logprob"]).exp().item() == pytest.approx(2.0, rel=1e-6)


# ------------------------------------------------------------------ runs
@pytest.fixture(scope="module")
def embedded(kit, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "run"
    grpo.train(config(kit, folder))
    return folder


def test_an_engine_beside_the_learner_gives_the_same_run(kit, embedded, tmp_path):
    grpo.train(config(kit, tmp_path / "run", engine="process"))
    same_run(embedded, tmp_path / "run")
    assert not left_over()
    for step, r in enumerate(records(tmp_path / "run")):
        assert r["engine/restarts"] == 0 and r["rollout/version"] == step and r["rollout/behind"] == 0
        assert r["transfer/bytes"] > 0 and r["wire/transfer_bytes"] == 0
        assert min(r[f"transfer/{p}_s"] for p in ("wire", "load", "floor")) > 0 == r["transfer/verify_s"]
        assert (r["transfer/plan_s"] > 0) == (step == 0)
        assert 0 < r["time/learner_idle_s"] and 0 < r["time/engine_idle_s"]
    none = records(embedded)[1]
    assert none["transfer/bytes"] == none["transfer/floor_s"] == 0 and none["time/learner_idle_s"] > 0


def test_one_step_behind(kit, embedded, tmp_path):
    """Tokens of step s are of version s - 1, those of the first step of version 0; a restart changes nothing."""
    behind = config(kit, tmp_path / "run", engine="process", staleness=1, importance_cap=2.0, save_every=2)
    seen, ask = [], EngineProcess.generate

    def watched(self, prompts, sampling, **how):
        found = ask(self, prompts, sampling, **how)
        seen.append((sampling.seed % 1_000_003, {int(v) for r in found for a in r.answers for v in a.version}))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineProcess, "generate", watched)
        grpo.train(behind)
    rollouts = seen[1:-1]  # between answers to held-out prompts
    assert rollouts == [(0, {0}), (1, {0}), (2, {1}), (3, {2})]
    found = records(tmp_path / "run")
    assert [r["rollout/version"] for r in found] == [0, 0, 1, 2] and [r["rollout/behind"] for r in found] == [
        0,
        1,
        1,
        1,
    ]
    assert found[0]["reward/mean"] == records(embedded)[0]["reward/mean"]
    grpo.train(replace(behind, resume=True, steps=6))
    more = records(tmp_path / "run")
    assert [r["rollout/version"] for r in more] == [0, 0, 1, 2, 4, 4]  # the first step after a resume samples anew
    assert not left_over()


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"ep": 2}, {"pp": 2}, {"pp": 2, "staleness": 1}], ids=str)
def test_engines_of_ranks_that_hold_parts(kit, embedded, tmp_path, layout):
    """Each rank's engine gets from the other rank what its own does not hold; answers are those of one process."""
    layout = dict(layout)
    stale = layout.pop("staleness", 0)
    how = {"learner": replace(kit.config(None).learner, **layout), "importance_cap": 2.0 if stale else None}
    runs = {}
    for engine in ("process",) if stale else ("embedded", "process"):
        one = config(kit, engine=engine, staleness=stale, **how)
        job = moekit.submit(grpo.train, one, nproc=2, name=engine, runs=tmp_path, threads=1)
        job.result(timeout=120)
        runs[engine] = tmp_path / engine
    found = records(runs["process"])
    whole = sum(t.nbytes for n, t in Transformer(kit.shape, dtype=torch.float64).named_parameters())
    experts = 2 * 4 * 3 * 12 * 16 * 8  # layers, experts, matrices of [12, 16], bytes: each crosses once
    assert {r["transfer/bytes"] for r in found} == {2 * whole}
    assert {r["wire/transfer_bytes"] for r in found} == {experts if "ep" in layout else whole}
    assert [r["rollout/behind"] for r in found] == [0, *[stale] * 3]
    if stale:
        grpo.train(config(kit, tmp_path / "one", engine="process", staleness=1, **how | {"learner": learner(kit)}))
        assert samples(tmp_path / "one") == samples(runs["process"])
        return
    same_run(runs["embedded"], runs["process"])
    assert samples(embedded) == samples(runs["process"])
    assert found[0]["wire/transfer_bytes"] == records(runs["embedded"])[0]["wire/transfer_bytes"]


def learner(kit):
    return kit.config(None).learner


def samples(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [s | {"advantage": round(s["advantage"], 9)} for s in found]


def marked(mark: str) -> list[str]:
    """Engine processes that have `mark` in their environment, and live."""
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if "engine_server" in (p / "cmdline").read_text() and mark in (p / "environ").read_text(errors="replace"):
                found.append(p.name)
        except OSError:
            continue
    return found


def refused_on_rank_1() -> tuple[list[str], list[float], int, int]:
    """What `give` raises on this rank, and after how many seconds, where rank 1's engine stops after a chunk; the bytes
    that come with the next try, and those of a model."""
    torch.set_num_threads(1)
    shape = ModelConfig(vocab=64, width=16, layers=2, heads=2, experts=4, top_k=2, expert_width=12)
    one, told, took = Learner(Transformer(shape, seed=1), SFT(), LearnerConfig(ep=2)), [], []
    for kind in ("embedded", "process"):
        engine = EmbeddedEngine(shape, dtype="float32")
        weights, began = Weights(one, RLConfig("", "", engine=kind)), time.perf_counter()
        write = engine.write

        def refuse(chunk, write=write):
            write(chunk)
            if one.world.rank:
                raise TransferError("no more")

        engine.write = refuse
        beside = SimpleNamespace(update=lambda source, version, mode, e=engine: load(e, version, mode, source))
        given = engine if kind == "embedded" else beside
        with pytest.raises(TransferError) as found:
            weights.give(given, "atomic")
        told.append(str(found.value))
        took.append(time.perf_counter() - began)
        engine.write = write
        weights.give(given, "atomic")
    return told, took, weights.moved.bytes, sum(p.numel() for p in Transformer(shape).parameters()) * 4


@pytest.mark.long
def test_an_update_that_one_rank_refuses_ends_on_all(tmp_path):
    """At once: nobody waits for chunks that it would have sent or taken; and the next one arrives whole."""
    found = moekit.submit(refused_on_rank_1, nproc=2, runs=tmp_path, threads=1).result(timeout=90)
    for rank, (told, took, size, whole) in enumerate(found):
        assert told == ["no more"] * 2 and max(took) < 20
        assert size == whole * rank  # rank 0 has this version


@pytest.mark.long
@pytest.mark.parametrize("how", ["stop", "kill a rank"])
def test_engines_end_with_their_job(kit, tmp_path, how):
    mark = f"MOEKIT_TEST_MARK={tmp_path.name}-{os.getpid()}"
    name, _, value = mark.partition("=")
    endless = config(kit, engine="process", staleness=1, importance_cap=2.0, steps=100_000)
    job = moekit.submit(grpo.train, endless, nproc=2, name="run", runs=tmp_path, threads=1, env={name: value})
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(records(tmp_path / "run")) > 2)
    assert len(marked(mark)) == 2
    if how == "stop":
        job.stop()
    else:
        parent = int(Path(f"/proc/{marked(mark)[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(Exception, match="rank"):
            job.result(timeout=60)
    until(lambda: not marked(mark), 10)


@pytest.mark.long
def test_a_hundred_updates_in_a_running_loop(kit, tmp_path, monkeypatch, capsys):
    """Direct intervals take less than a checkpoint that is saved and loaded by slices, and a small share of a step."""
    shape = replace(kit.shape, width=64, layers=4, experts=8, expert_width=64)
    export(Transformer(shape, seed=3), tmp_path / "model", kit.tokenizer)
    steps, direct, saved, laps, give = 110, [], [], [], Weights.give
    there = Transformer(shape, seed=None)  # what an engine would load the checkpoint into

    def timed(self, engine, mode):
        began = time.perf_counter()
        give(self, engine, mode)
        direct.append(time.perf_counter() - began)
        laps.append(began)
        began = time.perf_counter()
        export(self.learner.model, tmp_path / "route", kit.tokenizer, overwrite=True)
        load_into(there, tmp_path / "route")
        saved.append(time.perf_counter() - began)
        same = zip(there.parameters(), self.learner.model.parameters())
        assert len(saved) % 10 or all(torch.equal(a, b) for a, b in same)

    monkeypatch.setattr(Weights, "give", timed)
    grpo.train(config(kit, tmp_path / "run", model=str(tmp_path / "model"), engine="process", steps=steps,
                      dtype="float32", eval_data=None))  # fmt: skip
    found = records(tmp_path / "run")
    assert [r["rollout/version"] for r in found] == list(range(steps)) and found[-1]["engine/restarts"] == 0
    size = sum(t.nbytes for t in there.parameters())
    assert {r["transfer/bytes"] for r in found} == {size} and len(direct) == steps + 1
    lap = sorted(b - a - s for a, b, s in zip(laps[1:], laps[2:], saved[1:]))
    at = lambda times, q: sorted(times)[int(q * (len(times) - 1))]
    phases = {p: at([r[f"transfer/{p}_s"] for r in found], 0.5) for p in ("cast", "wire", "load", "floor")}
    with capsys.disabled():
        for name, times in (("direct intervals", direct[1:]), ("save, then load by slices", saved[1:])):
            half, most = at(times, 0.5), at(times, 0.95)
            share = half / (at(lap, 0.5) - at(direct, 0.5) + half)
            print(f"\n{name}: p50 {1e3 * half:.2f} ms, p95 {1e3 * most:.2f} ms, {share:.1%} of a step")
        print({p: f"{1e3 * s:.2f} ms" for p, s in phases.items()})
        print(f"{size / 1e6:.2f} MB, a step {1e3 * at(lap, 0.5):.1f} ms")
    assert at(direct[1:], 0.5) < at(saved[1:], 0.5)
    assert at(direct[1:], 0.5) < 0.5 * at(lap, 0.5)


def until(done, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_serving_costs_of_all_ranks():
    """A sum of bytes, the most rows of an expert, means over the ranks that ran such a pass; nothing else."""
    told = [
        {
            "engine/rows_per_expert_decode": 2.0,
            "engine/rows_per_expert_max_decode": 5.0,
            "engine/route_bytes_decode": 8.0,
        },
        {
            "engine/rows_per_expert_decode": 4.0,
            "engine/rows_per_expert_max_decode": 9.0,
            "engine/route_bytes_decode": 1.0,
        },
        {"engine/occupancy": 0.5, "engine/tokens_per_s": 100.0},
    ]
    assert sampler._costs(told) == {
        "engine/rows_per_expert_decode": 3.0, "engine/rows_per_expert_max_decode": 9.0,
        "engine/route_bytes_decode": 9.0, "engine/occupancy": 0.5,
    }  # fmt: skip
