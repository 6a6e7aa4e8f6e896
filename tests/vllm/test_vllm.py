"""vLLM 0.32 itself, on CPU, over HTTP and in process: `make test-vllm`.

Not tested here, for want of a GPU: its NCCL and IPC transfer, routed experts, tensor and expert parallelism.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moekit.errors import CapabilityError, ConfigError, EngineError
from moekit.model.transformer import Transformer
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import start_server
from moekit.rollout.vllm_probe import score

from .conftest import SHAPE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PROMPTS, IDS = [[5, 6, 7], [9] * 200, [40, 3, 2, 11, 300]], [3, 1, 7]


@pytest.fixture
def engine(server, models):
    """With the weights of A as version 1."""
    with VLLMEngine(server.link(), SHAPE, need_proof=False) as made:
        made.update_weights(models[0], 1)
        made.need_proof = True
        yield made


def gap(model, rollouts, sampling: Sampling) -> float:
    """The largest |engine - learner| of the log-probs of all sampled tokens."""
    own = EmbeddedEngine.of(model, lambda: 0)
    again = own.score([r.prompt for r in rollouts], [[a.ids for a in r.answers] for r in rollouts], sampling)
    pairs = [(a, b) for x, y in zip(rollouts, again) for a, b in zip(x.answers, y.answers)]
    assert all(len(a.ids) == len(a.logprobs) > 0 for a, _ in pairs)
    return max(float((a.logprobs - b.logprobs).abs().max()) for a, b in pairs)


# ------------------------------------------------------------------ sampling
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine, models, how):
    sampling = Sampling(n=3, max_new_tokens=12, seed=4, **how)
    found = engine.generate(PROMPTS, sampling, prompt_ids=IDS)
    assert gap(models[0], found, sampling) < 1e-4
    assert gap(models[1], found, Sampling()) > 0.1  # other weights are told apart
    for rollout, prompt in zip(found, PROMPTS):
        assert rollout.prompt == prompt and len({tuple(a.ids) for a in rollout.answers}) == 3
        for a in rollout.answers:
            assert a.finish == "length" and len(a.ids) == 12 and a.version.tolist() == [1] * 12 and a.experts is None


def test_an_answer_depends_on_seed_prompt_id_and_sample_only(engine):
    sampling = Sampling(n=2, max_new_tokens=8, seed=4)
    whole = engine.generate(PROMPTS, sampling, prompt_ids=IDS)
    (alone,) = engine.generate(PROMPTS[2:], sampling, prompt_ids=IDS[2:])
    assert [a.ids for a in alone.answers] == [a.ids for a in whole[2].answers]
    (other,) = engine.generate(PROMPTS[2:], sampling, prompt_ids=[8])
    assert [a.ids for a in other.answers] != [a.ids for a in alone.answers]


def test_more_prompt_tokens_than_one_step_takes(engine, models):
    """28 prompts of 150 tokens at once, where a step takes 2,048: none is split, which would end vLLM on a CPU, whose
    generators cannot be set back; and the one that waits is answered as it is alone."""
    prompts, sampling = [[n] * 150 for n in range(2, 30)], Sampling(max_new_tokens=4)
    found = engine.generate(prompts, sampling)
    (alone,) = engine.generate(prompts[-1:], sampling, prompt_ids=[27])
    assert len(found) == 28 and alone.answers[0].ids == found[-1].answers[0].ids
    assert gap(models[0], found, sampling) < 1e-4


def test_stop_ids_and_greedy(engine, models):
    (greedy,) = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_new_tokens=6))
    own = EmbeddedEngine.of(models[0], lambda: 0)
    (want,) = own.generate(PROMPTS[:1], Sampling(temperature=0.0, max_new_tokens=6))
    assert greedy.answers[0].ids == want.answers[0].ids
    last = greedy.answers[0].ids[3]
    (cut,) = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_new_tokens=6, stop_ids=(last,)))
    (same,) = own.generate(PROMPTS[:1], Sampling(temperature=0.0, max_new_tokens=6, stop_ids=(last,)))
    assert cut.answers[0].ids == same.answers[0].ids and cut.answers[0].finish == same.answers[0].finish == "stop"


def test_given_answers_are_scored(engine, models):
    answers = [[[1, 2, 3], [4]], [[300, 5]], [[7, 7]]]
    found = engine.score(PROMPTS, answers, Sampling())
    assert gap(models[0], found, Sampling()) < 1e-4
    with pytest.raises(CapabilityError, match="score with the learner"):
        engine.score(PROMPTS, answers, Sampling(temperature=0.5))


def test_what_vllm_cannot_is_refused(engine, models):
    for sampling, says in ((Sampling(stop_sequences=((1, 2),)), "stop_ids"), (Sampling(temperature=0.001), "0.01")):
        with pytest.raises(CapabilityError, match=says):
            engine.generate(PROMPTS, sampling)
    with pytest.raises(ConfigError, match="token outside"):
        engine.generate([[512]], Sampling())
    with pytest.raises(CapabilityError, match="atomic"):
        engine.update_weights(models[1], 2, mode="atomic")


# ------------------------------------------------------------------ weights
@pytest.mark.parametrize("naming", ["per_expert", "fused"])
@pytest.mark.parametrize("chunk_bytes", [1 << 28, 1 << 17])
def test_updates_there_and_back_are_proved(server, models, naming, chunk_bytes):
    """A, B, A: served as sent each time, with experts named either way, in one file and in many."""
    with VLLMEngine(server.link(), SHAPE, naming=naming, chunk_bytes=chunk_bytes, need_proof=False) as engine:
        engine.update_weights(models[0], 1)
        engine.need_proof = True
        sampling = Sampling(n=2, max_new_tokens=8)
        for version, (model, other) in ((2, (models[1], models[0])), (3, models)):
            sent = engine.update_weights(model, version)
            assert sent.bytes == sum(p.numel() * 4 for p in model.parameters()) and engine.gap < 1e-4
            found = engine.generate(PROMPTS, sampling)
            assert gap(model, found, sampling) < 1e-4
            assert gap(other, found, sampling) > 0.1
            assert {v for r in found for a in r.answers for v in a.version.tolist()} == {version}
        assert engine.update_weights(models[0], 3).bytes == 0  # it is there: nothing moves
        assert not list(Path(engine._folder).iterdir())


def test_the_probe_cannot_be_fooled(engine, models):
    """It fails with what other weights give, and says so where the new weights are the old ones."""
    wrong = EmbeddedEngine.of(models[0], lambda: 0)
    old = wrong.score([engine.probe_ids[:1]], [[engine.probe_ids[1:]]], Sampling())[0].answers[0].logprobs
    with pytest.raises(EngineError, match="does not serve the weights that it was sent"):
        engine.update_weights(models[1], 2, expected=old)
    assert engine.version == 1
    with pytest.raises(EngineError, match="cannot sample.*failed"):
        engine.generate(PROMPTS, Sampling())
    engine.update_weights(models[1], 3)
    with pytest.raises(EngineError, match="cannot tell the new weights from the old"):
        engine.update_weights(models[1], 4)
    assert engine.version == 3
    engine.update_weights(models[0], 5)
    engine.generate(PROMPTS, Sampling(max_new_tokens=2))


def test_bc_109_keys_of_old_weights_are_found_when_they_stay(engine, models, monkeypatch):
    """BC-109: where the prefix cache is not emptied, the probe reads old keys through it and the update is refused.

    The server's /pause empties it too, if it is not told to leave it."""
    own = engine.link.control

    def leaves_the_cache(what: str, **body):
        if what == "pause":
            return engine.link.call("POST", "/pause?mode=wait&clear_cache=false", {})
        return {"success": True} if what == "reset" else own(what, **body)

    monkeypatch.setattr(engine.link, "control", leaves_the_cache)
    with pytest.raises(EngineError, match="does not serve the weights.*through its prefix cache by [1-9]"):
        engine.update_weights(models[1], 2)
    with pytest.raises(EngineError, match="update the weights"):
        engine.generate(PROMPTS, Sampling())
    monkeypatch.undo()
    engine.update_weights(models[1], 3)
    assert engine.gap < 1e-4


def test_unpacked_experts_are_found(server, models):
    """vLLM's own reload on CPU leaves experts wrong without an error: what the probe is for."""
    with VLLMEngine(server.link(), SHAPE, need_proof=False) as engine:
        engine.update_weights(models[0], 1)
        reload = {"method": "reload_weights", "args": [], "kwargs": {}}
        try:
            engine.link.call("POST", "/collective_rpc", reload)
            found = engine.generate(PROMPTS, Sampling(n=2))
            assert gap(models[0], found, Sampling()) > 0.1
        finally:
            engine.update_weights(models[0], 2)
        assert engine.gap < 1e-4


def test_the_order_of_calls_and_the_folder_are_kept(server, models, tmp_path):
    """Refused by the server itself: an update that was not started, files outside the folder, half an update."""
    with VLLMEngine(server.link(), SHAPE, need_proof=False) as engine:
        engine.update_weights(models[0], 1)
        link = engine.link
        link.control("pause", mode="wait")
        with pytest.raises(EngineError, match="/update_weights with 500"):
            link.control("update", update_info={"file": "a", "bytes": 1, "tensors": 1})
        with pytest.raises(EngineError, match="/finish_weight_update with 500"):
            link.control("finish", weight_version="9")
        with pytest.raises(EngineError, match="not an absolute path of a folder"):
            link.control("init", init_info={"root": "no/folder"})
        link.control("init", init_info={"root": engine._folder})
        (tmp_path / "secret.safetensors").write_bytes(b"0123456789")
        (Path(engine._folder) / "link").symlink_to(tmp_path)
        for file in (str(tmp_path / "secret.safetensors"), "../../etc/passwd", "link/secret.safetensors"):
            link.control("start")
            with pytest.raises(EngineError, match="with 500.*folder only"):
                link.control("update", update_info={"file": file, "bytes": 10, "tensors": 1})
        with pytest.raises(EngineError):  # the session ended with its error
            link.control("finish", weight_version="9")
        one = Path(engine._folder) / "one.safetensors"
        save_file({"model.norm.weight": torch.ones(SHAPE.width)}, one)
        for size, says in (
            (1, "has [0-9]+ bytes, not 1"),
            (one.stat().st_size, "1 tensors were sent, 2 were announced"),
        ):
            link.control("start")
            with pytest.raises(EngineError, match=says):
                link.control("update", update_info={"file": one.name, "bytes": size, "tensors": 2})
                link.control("finish", weight_version="9")
        one.unlink()
        engine._stop("a test left an update half done")  # sampling now would end the server: parameters are gone
        engine.update_weights(models[1], 2)
        assert engine.gap < 1e-4


def begun(server) -> int:
    """Requests that the server's engine has begun, since its start: those that run, and those that have ended."""
    with urllib.request.urlopen(f"{server.url}/metrics") as told:
        text = told.read().decode()
    found = re.findall(r"^vllm:(?:num_requests_running|request_success_total){.*} (.+)$", text, re.MULTILINE)
    return sum(int(float(n)) for n in found)


def test_answers_under_way_at_an_update_are_of_one_version(engine, server, models):
    """Those of another client, which knows nothing of the update: the weights that began each of them finish it."""
    prompts, sampling, found = [p[:30] for p in PROMPTS], Sampling(n=4, max_new_tokens=450, seed=1), []
    with VLLMEngine(server.link(), SHAPE) as other:
        other.follow(1)
        for _ in range(8):  # a busy server may tell that all have begun when all have ended
            found.clear()
            before, end = begun(server), time.monotonic() + 60
            thread = threading.Thread(target=lambda: found.extend(other.generate(prompts, sampling)))
            thread.start()
            while begun(server) < before + 4 * len(prompts):  # one that had not begun would be of the new weights
                assert time.monotonic() < end
                time.sleep(0.02)
            if thread.is_alive():
                break
        assert thread.is_alive()
        engine.update_weights(models[1], 2)
        thread.join(60)
    assert {v for r in found for a in r.answers for v in a.version.tolist()} == {1}
    assert gap(models[0], found, sampling) < 1e-4


@pytest.mark.parametrize("how", ["paused", "half updated", "half updated, and sampled from"])
def test_a_server_that_somebody_left_in_a_state(server, models, how):
    """It would hold requests for ever, or end with the first: a new engine says so, and a whole update mends it."""
    with VLLMEngine(server.link(timeout=20), SHAPE, need_proof=False) as first:
        first.update_weights(models[0], 1)
        first.link.control("pause", mode="wait")
        if how != "paused":
            first.link.control("init", init_info={"root": first._folder})
            first.link.control("start")
        if "sampled" in how:
            first.link.control("resume")
    with VLLMEngine(server.link(timeout=20), SHAPE) as engine:
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(EngineError, match=f"cannot sample: .*{server.url} .*(paused|half an update)"):
                engine.generate(PROMPTS, Sampling())
        assert time.monotonic() - began < 5
        engine.update_weights(models[1], 2)
        assert engine.gap < 1e-4 and engine.unproved == 1
        assert gap(models[1], engine.generate(PROMPTS, Sampling(max_new_tokens=8)), Sampling()) < 1e-4
        assert not engine.capabilities.routes
        with pytest.raises(CapabilityError, match="routes=True.*replies have none"):
            engine.capabilities.need(routes=True)


def test_bfloat16_is_held_to_its_own_rounding(interpreter, folder, models, tmp_path):
    """There and back in bfloat16; refused where one expert of one layer is another model's."""
    with (
        start_server(folder, python=interpreter, dtype="bfloat16", log=tmp_path / "log") as server,
        VLLMEngine(server.link(), SHAPE, dtype="bfloat16") as engine,
    ):
        for version, model in ((1, models[1]), (2, models[0]), (3, models[1])):
            engine.update_weights(model, version)
            assert 1e-3 < engine.gap < engine.proof.limit < 0.5 and engine.unproved == 0
        whole = models[0].state_dict()
        name = next(n for n in whole if n.endswith("down"))
        wrong = Transformer(SHAPE, seed=None)
        wrong.load_state_dict(whole | {name: torch.cat((models[1].state_dict()[name][:1], whole[name][1:]))})
        asked = engine.probe_ids
        for model, refused in ((wrong, True), (models[0], False)):
            rounded = Transformer(SHAPE, dtype=torch.bfloat16, seed=None)
            rounded.load_state_dict(model.state_dict())
            wide = Transformer(SHAPE, seed=None)
            wide.load_state_dict(rounded.state_dict())
            given = score(wide, asked, [])
            if refused:
                with pytest.raises(EngineError, match="does not serve the weights that it was sent"):
                    engine.update_weights(models[0], 4, expected=given)
            else:
                engine.update_weights(models[0], 4, expected=given)
        found = engine.generate(PROMPTS, Sampling(n=4, max_new_tokens=24))
        print("bf16: probe", engine.proof, "sampled, largest", gap(engine.model, found, Sampling()))


def engine_process(server):
    """Its process that holds the weights; the one that answers over HTTP outlives it for a moment, and answers 500."""
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"EngineCore" in p.read_bytes() and os.getpgid(int(p.parent.name)) == server.process.pid:
                found.append(int(p.parent.name))
    (one,) = found
    return one


def test_a_server_that_dies_under_load_is_started_again(interpreter, folder, models, tmp_path):
    """Its requests fail with what to do; a new server is not used before it has the weights; answers are the same.
    All of it is killed, or its engine alone."""
    with start_server(folder, python=interpreter, log=tmp_path / "log") as server:
        with VLLMEngine(server.link(timeout=60), SHAPE) as engine:
            engine.update_weights(models[1], 4)
            sampling, errors = Sampling(n=2, max_new_tokens=8), []
            want = engine.generate(PROMPTS, sampling)

            def load():
                try:
                    engine.generate([[7] * 100] * 16, Sampling(n=4, max_new_tokens=300))
                except EngineError as error:
                    errors.append(str(error))

            for kill in (
                lambda: os.killpg(server.process.pid, signal.SIGKILL),
                lambda: os.kill(engine_process(server), signal.SIGKILL),
            ):
                errors.clear()
                thread = threading.Thread(target=load)
                thread.start()
                time.sleep(2)
                assert thread.is_alive() and not errors, errors
                kill()
                thread.join(90)
                print("under load:", errors)
                assert len(errors) == 1 and server.url in errors[0] and "update the weights" in errors[0]
                with pytest.raises(EngineError, match=server.url):
                    engine.generate(PROMPTS, sampling)
                server.restart()
                with pytest.raises(EngineError, match="was it started again"):
                    engine.generate(PROMPTS, sampling)
                engine.update_weights(models[1], 4)
                again = engine.generate(PROMPTS, sampling)
                assert [[a.ids for a in r.answers] for r in again] == [[a.ids for a in r.answers] for r in want]
        group = server.process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_server_that_cannot_start_says_why(interpreter, tmp_path):
    with pytest.raises(EngineError, match="vLLM did not start \\(exit [1-9]"):
        start_server(tmp_path / "nothing", python=interpreter, log=tmp_path / "log", patience=120)


# ------------------------------------------------------------------ in process
def test_in_process(interpreter, folder):
    """The same engine on a `vllm.LLM`: updates there and back, log-probs, seeds."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = Path(__file__).with_name("in_process.py")
    how = {"capture_output": True, "text": True, "env": environment, "timeout": 400}
    done = subprocess.run([interpreter, str(script), str(folder)], check=False, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["gaps"] and max(told["gaps"]) < 1e-4 and min(told["others"]) > 0.1
    assert "enable_chunked_prefill=False" in told["splits"]
    assert "does not serve the weights" in told["stale"]  # BC-109, without the reset
    assert told["versions"] == [[1], [2]] and told["routes"] is False
    assert torch.tensor(told["probe"]).max() < 1e-4
